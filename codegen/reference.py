"""The chain in plain torch: the CPU implementation of every operator, and the oracle of every kernel.

Shapes: B batch, S tokens, D channels; a factor is anything that broadcasts to [B, S, D] with last size D.

Numerics: everything is computed in fp32 (fp64 when an input is fp64), the variance from centred values, so rows with a
large mean stay right.  h is rounded to its dtype before it is normed, as in the model; y is rounded once at the end.
With rounding points (numerics="eager") the value is also rounded after each op of the source.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphopt.codegen.form import decode_rounding


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 if any input is, else fp32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def _round(t: Tensor, point: str, points: dict[str, torch.dtype]) -> Tensor:
    return t.to(points[point]).to(t.dtype) if point in points else t


def forward(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: str,
    eps: float,
    offset: float,
    h_dtype: torch.dtype,
    y_dtype: torch.dtype,
    rounding: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h, y, mean, rstd of the chain (see form.py); a part that is absent yields an empty tensor.

    Shapes: x, branch, h, y [..., D]; gate, scale, shift broadcast to x; weight, bias [D]; mean, rstd [rows] in the
    compute dtype.  x is the residual where there is a gate.
    """
    points = decode_rounding(rounding)
    high = compute_dtype(x, branch, gate, scale, shift, weight, bias)
    if branch is not None and gate is not None:
        gated = _round(branch.to(high) * gate.to(high), "gated", points)
        h = _round(x.to(high) + gated, "residual", points).to(h_dtype)
    else:
        h = x
    h_out = h.contiguous() if branch is not None else x.new_empty(0)  # as the fakes say, whatever x is laid out like
    if norm == "none":
        return h_out, x.new_empty(0), x.new_empty(0), x.new_empty(0)
    hf = h.to(high)
    if norm == "rms_norm":  # a zero mean makes it the same chain
        mean = torch.zeros_like(hf[..., :1])
        centred = hf
    else:
        mean = hf.mean(-1, keepdim=True)
        rest = (hf - mean).mean(-1, keepdim=True)  # what summing large values in one go lost
        mean = mean + rest
        centred = hf - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    n = centred * rstd
    if weight is not None:
        n = n * weight.to(high)
    if bias is not None:
        n = n + bias.to(high)
    y = _round(n, "norm", points)
    if scale is not None:
        gain = _round(scale.to(high) + offset, "gain", points) if offset else scale.to(high)
        y = _round(y * gain, "product", points)
    if shift is not None:
        y = y + shift.to(high)
    y = y.to(y_dtype).contiguous()
    # never a view or an alias of an input
    return h_out, y, mean.reshape(-1).contiguous(), rstd.reshape(-1).contiguous()


def backward(
    dh: Tensor | None,
    dy: Tensor | None,
    h: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    norm: str,
    offset: float,
    x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dbranch, dgate, dscale, dshift, dweight, dbias; an absent input's gradient is an empty tensor.

    Without a norm dx is empty too: it would be dh unchanged.

    With w = dy * (offset + scale) * weight and xhat from h, mean and rstd (fp32):

        dh_total = dh + rstd * (w - mean_D(w) - xhat * mean_D(w * xhat))      (RMS norm: without mean_D(w))
        dscale = sum dy * n      dshift = sum dy      dgate = sum dh_total * branch      dbranch = dh_total * gate

    Sums run over the dimensions the factor was broadcast over, in fp32, and are rounded once.
    """
    high = compute_dtype(h, branch, gate, scale, weight, dy, dh)
    total: Tensor | None = None if dh is None else dh.to(high)
    dscale = dshift = dweight = dbias = None
    if norm != "none" and dy is not None:
        mean_col = mean.reshape(*h.shape[:-1], 1).to(high)
        rstd_col = rstd.reshape(*h.shape[:-1], 1).to(high)
        xhat = (h.to(high) - mean_col) * rstd_col
        n = xhat if weight is None else xhat * weight.to(high)
        if bias is not None:
            n = n + bias.to(high)
        dn = dy.to(high)
        if scale is not None:
            dscale = _sum_to(dn * n, scale)
        if shift is not None:
            dshift = _sum_to(dn, shift)
        if scale is not None:
            dn = dn * (scale.to(high) + offset)
        if weight is not None:
            dweight = _sum_to(dn * xhat, weight)
        if bias is not None:
            dbias = _sum_to(dn, bias)
        w = dn if weight is None else dn * weight.to(high)
        centred = w if norm == "rms_norm" else w - w.mean(-1, keepdim=True)
        through = (centred - xhat * (w * xhat).mean(-1, keepdim=True)) * rstd_col
        total = through if total is None else total + through
    elif norm != "none":
        dscale, dshift, dweight, dbias = (
            None if t is None else torch.zeros_like(t) for t in (scale, shift, weight, bias)
        )
    if total is None:  # neither cotangent arrived
        total = torch.zeros(h.shape, dtype=high, device=h.device)
    dx: Tensor | None = None
    dbranch: Tensor | None = None
    dgate: Tensor | None = None
    if branch is not None and gate is not None:
        dbranch = (total * gate.to(high)).to(branch.dtype).contiguous()
        dgate = _sum_to(total * branch.to(high), gate)
    if norm != "none":  # without a norm the residual's gradient is dh itself
        dx = total.to(x_dtype).contiguous()
        if dx is dh:
            dx = total.clone()
    return (
        _or_empty(dx, h), _or_empty(dbranch, h), _or_empty(dgate, h), _or_empty(dscale, h), _or_empty(dshift, h),
        _or_empty(dweight, h), _or_empty(dbias, h),
    )


def _or_empty(t: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if t is None else t


def _sum_to(t: Tensor, like: Tensor) -> Tensor:
    """Sum over what `like` was broadcast over, then its dtype; a fresh, contiguous tensor."""
    out = t.sum_to_size(like.shape).to(like.dtype).contiguous()
    return out.clone() if out is t else out
