"""numerics="eager": every op of the source may be one unit in the last place of its result off, and no more.

`Bound` runs the source op by op in its own dtype and carries, per element, how far a value may be from eager's when each
op before it was off by one ulp; sums, products and norms hand on the error of what they read.  Both sides compute an op
in fp32, a norm with weight and bias as one op: where `xhat * weight + bias` cancels, fp32's own error is counted too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from accuracy import moved
from operator_forms import (
    BRANCH_EPS,
    EPS,
    Form,
    _norm,
    attributes,
    call,
    chain,
    leaves,
    operands,
    plain,
    sized,
    with_leaves,
)
from torch import Tensor

from graphopt.codegen.form import FUSIONS, split_outputs

pytestmark = pytest.mark.kernel

POINTS = ("branch_norm", "activated", "gated", "residual", "norm", "gain", "product")
FORMS = [
    *(plain(name) for name in FUSIONS),
    *(replace(plain("norm_modulate"), norm=norm, affine=affine, outputs=outputs)
      for norm, affine, outputs in (("rms_norm", False, "scale"), ("rms_norm", False, "scale+shift"),
                                    ("layer_norm", True, "scale+shift"), ("rms_norm", True, "scale"))),
    replace(plain("gate_norm_modulate"), activation="tanh"), replace(plain("gate_residual"), activation="tanh"),
    replace(plain("branch_norm_gate"), activation="identity", affine=True),
    replace(plain("branch_norm_gate"), branch_norm="layer_norm", affine=True),
    replace(plain("gate_norm_modulate"), layout=(2, 6, 7)), replace(plain("norm_modulate"), offset=0.0),
]


def ulp(v: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place of values of a dtype."""
    exponent = torch.frexp(v.double().abs().clamp_min(torch.finfo(dtype).tiny)).exponent
    return torch.ldexp(torch.full_like(v, torch.finfo(dtype).eps / 2, dtype=torch.float64), exponent)


@dataclass
class Bound:
    """A value as eager has it, and how far ours may be from it."""

    value: Tensor
    off: Tensor

    @staticmethod
    def exact(v: Tensor) -> Bound:
        return Bound(v, torch.zeros_like(v, dtype=torch.float64))

    def rounded(self, result: Tensor, handed_on: Tensor, dtype: torch.dtype) -> Bound:
        """The result of an op: what its operands hand on, and an ulp of the larger value that it may have."""
        return Bound(result, handed_on + ulp(result.double().abs() + handed_on, dtype))


def norm(b: Bound, kind: str, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Bound:
    result = _norm(b.value, kind, weight, bias, eps)
    v = b.value.double()
    centred = v - v.mean(-1, keepdim=True) if kind == "layer_norm" else v
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    hat = centred * rstd
    mean = b.off.mean(-1, keepdim=True) if kind == "layer_norm" else 0.0
    # first order in the error, with 5 % for the rest
    handed_on = 1.05 * rstd * (b.off + mean + hat.abs() * (hat.abs() * b.off).mean(-1, keepdim=True))
    if weight is not None:
        handed_on = handed_on * weight.double().abs()
        inside = (hat * weight).abs() + (0.0 if bias is None else bias.double().abs())
        handed_on = handed_on + 8 * torch.finfo(torch.float32).eps * inside
        if kind == "rms_norm":  # written as two ops
            handed_on = handed_on + ulp(hat, dtype) * weight.double().abs()
    return b.rounded(result, handed_on, dtype)


def bounds(form: Form, t: dict, dtype: torch.dtype) -> list[Bound]:
    """What every output may be."""
    h, out = Bound.exact(t["x"]), []
    if t["branch"] is not None:
        b = Bound.exact(t["branch"])
        if form.branch_norm != "none":
            b = norm(b, form.branch_norm, t["branch_weight"], t["branch_bias"], BRANCH_EPS, dtype)
        if t["gate"] is not None:
            g = Bound.exact(t["gate"])
            if form.activation == "tanh":
                g = g.rounded(torch.tanh(g.value), g.off, dtype)
            handed_on = b.off * g.value.double().abs() + g.off * b.value.double().abs() + b.off * g.off
            product = b.value * g.value
            # a product of two values of the dtype is exact in fp32: it is rounded as eager rounds it
            b = Bound.exact(product) if not handed_on.any() else b.rounded(product, handed_on, dtype)
        total = h.value + b.value
        h = Bound.exact(total) if not b.off.any() else h.rounded(total, b.off, dtype)
        out = [h]
    if form.norm == "none":
        return out
    n = norm(h, form.norm, t["weight"], t["bias"], EPS, dtype)
    for parts in split_outputs(t["modulation"], form.outputs):
        y = n
        if "scale" in parts:
            gain = form.offset + parts["scale"]
            y = y.rounded(y.value * gain, y.off * gain.double().abs(), dtype)
        if "shift" in parts:
            y = y.rounded(y.value + parts["shift"], y.off, dtype)
        out.append(y)
    return out


def check(form: Form, dtype: torch.dtype, shape: tuple[int, int, int], device: str) -> None:
    rounding = " ".join(f"{p}={str(dtype).removeprefix('torch.')}" for p in POINTS)
    form = sized(form, shape)
    for seed in range(5):
        torch.manual_seed(seed)
        t = moved(operands(form, dtype, dtype, shape), device)
        with torch.no_grad():
            got = call(form, t, *attributes(form, dtype, rounding=rounding), engine="triton")
            want, allowed = chain(form, t), bounds(form, t, dtype)
        for i, (a, b, limit) in enumerate(zip(got, want, allowed, strict=True)):
            assert (a.dtype, b.dtype) == (dtype, dtype)
            assert torch.equal(b, limit.value)
            off = (a.double() - b.double()).abs()
            assert (off <= limit.off).all(), f"result {i}, seed {seed}: {(off / limit.off.clamp_min(1e-30)).max():.2f} of the bound"
            # almost all are equal; a weighted RMS norm is two roundings in `chain`, one in ours
            assert (a == b).double().mean() > (0.6 if form.affine and "rms_norm" in (form.norm, form.branch_norm) else 0.9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_one_ulp_per_op(form: Form, dtype: torch.dtype, device: str) -> None:
    """Five seeds; what is rounded from an exact value (x + gate * branch) is equal."""
    check(form, dtype, (2, 3, 40) if device == "cpu" else (2, 6, 96), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [1152, 3072, 20000])
@pytest.mark.parametrize("fusion", list(FUSIONS))
def test_one_ulp_per_op_in_other_configurations(fusion: str, D: int, dtype: torch.dtype, device: str) -> None:
    """One warp with a ring, several with sub-blocks, chunks."""
    if device == "cpu" and (dtype, fusion) != (torch.bfloat16, "gate_norm_modulate"):
        pytest.skip("on a GPU: a compiler's contractions depend on the width, the interpreter has none")
    check(plain(fusion), dtype, (2, 2, D), device)


def test_eager_numerics_do_not_contract(device: str) -> None:
    """x + g * b in fp32 with the product rounded first: an fma would keep the digits that the rounding drops."""
    form = plain("gate_residual")
    t = operands(form, torch.float32, torch.float32, (2, 6, 64))
    t = with_leaves(t, [v.detach().to(device) for v in leaves(t)])
    t["x"] = -(t["gate"] * t["branch"])
    (exact,) = call(form, t, *attributes(form, torch.float32, rounding="gated=float32 residual=float32"), engine="triton")
    assert (exact == 0).all()
