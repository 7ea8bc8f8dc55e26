"""The chain in plain torch: the CPU implementation of every operator, and the oracle of every kernel.

Shapes: B batch, S tokens, D channels; a factor (gate, scale, shift, table) is anything that broadcasts to x [..., D]
with last size D.

Numerics: everything is computed in fp32 (fp64 when an input is fp64).  Means and sums accumulate in fp64: an oracle
should not add errors of its own.  The variance comes from centred values, so rows with a large mean stay right.  h is
rounded to its dtype before it is normed, as in the model; y is rounded once at the end.  With rounding points
(numerics="eager") the value is also rounded after each op of the source.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphopt.codegen.form import decode_rounding, split_outputs


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 if any input is, else fp32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def _round(t: Tensor, point: str, points: dict[str, torch.dtype]) -> Tensor:
    return t.to(points[point]).to(t.dtype) if point in points else t


def _total(factor: Tensor, table: Tensor | None, high: torch.dtype) -> Tensor:
    """factor + table in the compute dtype."""
    return factor.to(high) if table is None else factor.to(high) + table.to(high)


def _statistics(t: Tensor, norm: str, eps: float) -> tuple[Tensor, Tensor | None, Tensor]:
    """t - mean, mean (None for RMS norm) and rstd, over the last dimension."""
    mean = None
    if norm == "layer_norm":
        mean = _mean(t)
        t = t - mean
    return t, mean, torch.rsqrt(_mean(t.square()) + eps)


def _mean(t: Tensor) -> Tensor:
    """Mean over the last dimension, kept, in the dtype of t."""
    return t.mean(-1, keepdim=True, dtype=_accumulator(t)).to(t.dtype)


def _accumulator(t: Tensor) -> torch.dtype:
    return t.dtype if t.device.type == "mps" else torch.float64  # MPS has no fp64


def _affine(t: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    t = t if weight is None else t * weight.to(t.dtype)
    return t if bias is None else t + bias.to(t.dtype)


def _rows(t: Tensor | None, like: Tensor) -> Tensor:
    """A statistic as [rows]; empty when there is none."""
    return like.new_empty(0) if t is None else t.reshape(-1).contiguous()


def forward(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    gate_table: Tensor | None,
    branch_weight: Tensor | None,
    branch_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation: Sequence[Tensor],
    outputs: str,
    norm: str,
    eps: float,
    offset: float,
    branch_norm: str,
    branch_eps: float,
    activation: str,
    h_dtype: torch.dtype,
    y_dtype: torch.dtype,
    rounding: str,
) -> list[Tensor]:
    """[h, mean, rstd, branch_mean, branch_rstd, y_0, y_1, ...] of the chain (see form.py).

    Shapes: x, branch, h, y_i [..., D]; gate and modulation broadcast to x; weights and biases [D]; statistics [rows] in
    the compute dtype.  A part that is absent yields an empty tensor (an RMS norm has no mean).  x is the residual where
    there is a branch.  All results are contiguous and alias no input.
    """
    points = decode_rounding(rounding)
    each = split_outputs(modulation, outputs)
    high = compute_dtype(x, branch, gate, gate_table, branch_weight, branch_bias, weight, bias, *modulation)
    h, branch_mean, branch_rstd = x, None, None
    if branch is not None:
        added = branch.to(high)
        if branch_norm != "none":
            centred, branch_mean, branch_rstd = _statistics(added, branch_norm, branch_eps)
            added = _round(_affine(centred * branch_rstd, branch_weight, branch_bias), "branch_norm", points)
        if gate is not None:
            g = _total(gate, gate_table, high)
            g = _round(torch.tanh(g), "activated", points) if activation == "tanh" else g
            added = _round(added * g, "gated", points)
        h = _round(x.to(high) + added, "residual", points).to(h_dtype)
    result = [
        h.contiguous() if branch is not None else x.new_empty(0),  # as the fakes say, whatever x is laid out like
        x.new_empty(0), x.new_empty(0), _rows(branch_mean, x), _rows(branch_rstd, x),
    ]
    if norm == "none":
        return result
    centred, mean, rstd = _statistics(h.to(high), norm, eps)
    result[1:3] = _rows(mean, x), _rows(rstd, x)
    n = _round(_affine(centred * rstd, weight, bias), "norm", points)
    for factors in each:
        y = n
        if "scale" in factors:
            gain = _total(factors["scale"], factors.get("scale_table"), high)
            gain = _round(gain + offset, "gain", points) if offset else gain
            y = _round(y * gain, "product", points)
        if "shift" in factors:
            y = y + _total(factors["shift"], factors.get("shift_table"), high)
        y = y.to(y_dtype).contiguous()
        result.append(_fresh(y, n))
    return result


def backward(
    dh: Tensor | None,
    dy: Sequence[Tensor | None],
    h: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    gate_table: Tensor | None,
    branch_weight: Tensor | None,
    branch_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation: Sequence[Tensor],
    mean: Tensor,
    rstd: Tensor,
    branch_mean: Tensor,
    branch_rstd: Tensor,
    outputs: str,
    norm: str,
    offset: float,
    branch_norm: str,
    activation: str,
    x_dtype: torch.dtype,
) -> list[Tensor]:
    """[dx, dbranch, dgate, dgate_table, dbranch_weight, dbranch_bias, dweight, dbias, *dmodulation].

    dy has one entry per output; None where no gradient arrived.  h is what the forward normed (x itself where there is
    no branch); without a norm only its shape is used.  An absent input's gradient is an empty tensor.  Without a norm
    dx is empty too: it would be dh unchanged.  A branch without gate and norm is not passed: its gradient is dx.

    With dn = sum_i dy_i * (offset + scale_i), w = dn * weight and xhat from h, mean and rstd (fp32):

        total  = dh + rstd * (w - mean_D(w) - xhat * mean_D(w * xhat))      (RMS norm: without mean_D(w))
        dscale_i = sum dy_i * n     dshift_i = sum dy_i     dweight = sum dn * xhat     dbias = sum dn
        dgate  = sum total * b * activation'(g)             db = total * activation(g), through the branch's norm alike

    Sums run over the dimensions the factor was broadcast over, in fp32, and are rounded once.
    """
    each, dys = split_outputs(modulation, outputs), list(dy)
    high = compute_dtype(h, branch, gate, gate_table, branch_weight, branch_bias, weight, bias, dh, *modulation, *dys)
    total: Tensor | None = None if dh is None else dh.to(high)
    grads: dict[str, Tensor] = {}
    dmodulation: list[Tensor] = []
    if norm != "none":
        xhat = _normalised(h, mean, rstd, high)
        n = _affine(xhat, weight, bias)
        dn: Tensor | None = None
        for dy_i, factors in zip(dys, each, strict=True):
            if dy_i is None:
                dmodulation += [torch.zeros(f.shape, dtype=f.dtype, device=f.device) for f in factors.values()]
                continue
            through = dy_i.to(high)
            for part, f in factors.items():
                dmodulation.append(_sum_to(through * n if part.startswith("scale") else through, f))
            if "scale" in factors:
                through = through * (_total(factors["scale"], factors.get("scale_table"), high) + offset)
            dn = through if dn is None else dn + through
        if dn is not None:
            through, grads["weight"], grads["bias"] = _norm_backward(dn, xhat, rstd, weight, bias, norm)
            total = through if total is None else total + through
    if total is None:  # no cotangent arrived
        total = torch.zeros(h.shape, dtype=high, device=h.device)
    if branch is not None:
        added = branch.to(high)
        if branch_norm != "none":
            branch_hat = _normalised(branch, branch_mean, branch_rstd, high)
            added = _affine(branch_hat, branch_weight, branch_bias)
        through = total
        if gate is not None:
            g = _total(gate, gate_table, high)
            g = torch.tanh(g) if activation == "tanh" else g
            dg = total * added
            dg = dg * (1 - g * g) if activation == "tanh" else dg
            grads["gate"] = _sum_to(dg, gate)
            if gate_table is not None:
                grads["gate_table"] = _sum_to(dg, gate_table)
            through = total * g
        if branch_norm != "none":
            through, grads["branch_weight"], grads["branch_bias"] = _norm_backward(
                through, branch_hat, branch_rstd, branch_weight, branch_bias, branch_norm
            )
        grads["branch"] = _fresh(through.to(branch.dtype).contiguous(), through)
    dx = h.new_empty(0)
    if norm != "none":  # without a norm the residual's gradient is dh itself
        dx = total.to(x_dtype).contiguous()
        dx = dx.clone() if dh is not None and dx is dh else dx
    given = {"branch": branch, "gate": gate, "gate_table": gate_table, "branch_weight": branch_weight,
             "branch_bias": branch_bias, "weight": weight, "bias": bias}
    return [dx, *(_present(grads.get(name), t, h) for name, t in given.items()), *dmodulation]


def _normalised(t: Tensor, mean: Tensor, rstd: Tensor, high: torch.dtype) -> Tensor:
    """(t - mean) * rstd from saved statistics."""
    column = (*t.shape[:-1], 1)
    t = t.to(high) if mean.numel() == 0 and rstd.numel() else t.to(high) - mean.reshape(column).to(high)
    return t * rstd.reshape(column).to(high)


def _norm_backward(
    dn: Tensor, xhat: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what was normed, of the weight and of the bias (empty where absent) from that of the result."""
    w = dn if weight is None else dn * weight.to(dn.dtype)
    centred = w if norm == "rms_norm" else w - _mean(w)
    through = (centred - xhat * _mean(w * xhat)) * rstd.reshape(*xhat.shape[:-1], 1).to(dn.dtype)
    none = dn.new_empty(0)
    return (
        through, none if weight is None else _sum_to(dn * xhat, weight), none if bias is None else _sum_to(dn, bias)
    )


def _present(grad: Tensor | None, of: Tensor | None, like: Tensor) -> Tensor:
    """A gradient; zeros where none arrived, empty where there is no such input."""
    if of is None:
        return like.new_empty(0)
    return torch.zeros(of.shape, dtype=of.dtype, device=of.device) if grad is None else grad


def _fresh(t: Tensor, of: Tensor) -> Tensor:
    return t.clone() if t is of else t


def _sum_to(t: Tensor, like: Tensor) -> Tensor:
    """Sum over what `like` was broadcast over, then its dtype; a fresh, contiguous tensor."""
    lead = t.dim() - like.dim()
    over = [d for d in range(t.dim()) if d < lead or (like.shape[d - lead] == 1 and t.shape[d] != 1)]
    if not over:
        return _fresh(t.to(like.dtype).contiguous(), t)
    return t.sum(over, keepdim=True, dtype=_accumulator(t)).reshape(like.shape).to(like.dtype).contiguous()
