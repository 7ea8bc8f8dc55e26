"""The reference operators: the oracle of everything else, so checked against autograd in fp64 and by opcheck."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from operator_forms import FORMS, D, Form, attributes, call, chain, leaves, operands, plain, with_leaves

from graphopt.codegen import operators
from graphopt.codegen.form import (
    FUSIONS,
    OPERANDS,
    decode_outputs,
    decode_rounding,
    encode_outputs,
    encode_rounding,
    split_outputs,
)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_values_and_gradients_in_fp64(form: Form) -> None:
    t = operands(form)
    for a, b in zip(call(form, t, *attributes(form)), chain(form, t), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(
        lambda *v: tuple(call(form, with_leaves(t, list(v)), *attributes(form))), tuple(leaves(t)))


@pytest.mark.parametrize("form", [plain(f) for f in FUSIONS] + FORMS[-4:], ids=str)
def test_opcheck(form: Form) -> None:
    t = operands(form, torch.bfloat16)
    torch.library.opcheck(operators.operator(form.fusion, "reference"),
                          (*(t[n] for n in OPERANDS), t["modulation"], *attributes(form, torch.bfloat16)))


@pytest.mark.parametrize("form", [plain(f) for f in FUSIONS] + FORMS[-4:-1], ids=str)
@pytest.mark.parametrize(("dtype", "factors"), [
    (torch.bfloat16, None), pytest.param(torch.float16, None, marks=pytest.mark.nightly), (torch.bfloat16, torch.float32),
    pytest.param(torch.float32, None, marks=pytest.mark.nightly)])
def test_one_rounding_is_no_worse_than_eager(form: Form, dtype: torch.dtype, factors: torch.dtype | None) -> None:
    """Five seeds, every output and gradient: error against fp64 at most 1.25x that of eager (1e-5 in fp32)."""
    floor = 1e-5 if dtype == torch.float32 else 1e-6
    for seed in range(5):
        torch.manual_seed(seed)
        t = operands(form, dtype, factors, shape=(2, 40, 96) if form.layout[1:-1] != (6,) else (2, 6, 96))
        made = []
        for how, high in ((call, False), (chain, False), (chain, True)):
            values = [(v.detach().double() if high else v.detach().clone()).requires_grad_() for v in leaves(t)]
            given = with_leaves(t, values)
            if how is chain and not high and factors is not None:
                out = [o.to(dtype) for o in chain(form, given)]
            else:
                out = call(form, given, *attributes(form, dtype)) if how is call else chain(form, given)
            torch.manual_seed(seed)
            sum((o.double() * torch.randn(o.shape, dtype=torch.float64)).sum() for o in out).backward()
            made.append([*(o.detach().double() for o in out), *(v.grad.double() for v in values)])
        for ours, eager, truth in zip(*made, strict=True):
            assert (ours - truth).norm() <= max(1.25 * (eager - truth).norm(), floor * truth.norm())


def test_gradient_dtypes_shapes_and_strides_are_those_of_the_leaves() -> None:
    for form in FORMS:
        t = operands(form, torch.bfloat16, torch.float32)
        sum(o.float().sum() for o in call(form, t, *attributes(form, torch.bfloat16))).backward()
        for v in leaves(t):
            assert (v.grad.dtype, v.grad.shape) == (v.dtype, v.shape)
            assert v.grad.is_contiguous()


def test_strided_operands() -> None:
    """Chunks of one buffer, a stride-0 factor, a transposed activation: as their contiguous copies."""
    form = plain("gate_norm_modulate")
    x, branch = (torch.randn(2, D, 6, dtype=torch.float64).transpose(1, 2) for _ in range(2))
    g, s, b = torch.randn(2, 1, 3 * D, dtype=torch.float64).chunk(3, -1)
    b = b[:1].expand(2, 6, D)
    t = dict.fromkeys(OPERANDS) | {"x": x, "branch": branch, "gate": g, "modulation": [s, b]}
    got = call(form, t, *attributes(form))
    dense = {n: v.contiguous() if isinstance(v, torch.Tensor) else v for n, v in t.items()}
    want = call(form, dense | {"modulation": [s.contiguous(), b.contiguous()]}, *attributes(form))
    for p, q in zip(got, want, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
        assert p.is_contiguous()


def test_outputs_that_nobody_reads() -> None:
    """Gradients arrive for some outputs only; those of the others' factors are zero."""
    form = plain("gate_norm_modulates")
    t = operands(form)
    h, y0, y1 = call(form, t, *attributes(form))
    wanted = leaves(t)
    got = torch.autograd.grad(y1.square().sum(), wanted, retain_graph=True)
    want = torch.autograd.grad(chain(form, t)[2].square().sum(), wanted, allow_unused=True)
    for p, q in zip(got, want, strict=True):
        torch.testing.assert_close(p, torch.zeros_like(p) if q is None else q)
    assert all(g is not None for g in torch.autograd.grad(h.sum(), [t["x"], t["branch"], t["gate"]]))


@pytest.mark.parametrize(("x_dtype", "branch_dtype"), [
    (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
def test_a_branch_that_is_only_added_is_not_saved(x_dtype: torch.dtype, branch_dtype: torch.dtype) -> None:
    form = plain("residual_norm_modulate")
    t = operands(form)
    t["x"], t["branch"] = (t[n].detach().to(d).requires_grad_() for n, d in (("x", x_dtype), ("branch", branch_dtype)))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        out = call(form, t, *attributes(form, torch.float32))
    assert not any(s.data_ptr() == t["branch"].data_ptr() for s in saved)
    got = torch.autograd.grad(sum(o.square().sum() for o in out), [t["x"], t["branch"]])
    high = {n: v.detach().double().requires_grad_() if isinstance(v, torch.Tensor) else v for n, v in t.items()}
    want = torch.autograd.grad(sum(o.square().sum() for o in chain(form, high)), [high["x"], high["branch"]])
    for g, w, dtype in zip(got, want, (x_dtype, branch_dtype)):
        assert g.dtype == dtype
        assert (g.double() - w).norm() <= (4e-3 if dtype == torch.bfloat16 else 1e-5) * w.norm()


def test_eager_numerics_round_where_the_source_does() -> None:
    bf16 = torch.bfloat16
    points = {p: bf16 for p in ("branch_norm", "activated", "gated", "residual", "norm", "gain", "product")}
    for form in (plain("gate_norm_modulate"), plain("branch_norm_gate_norm_modulate"), plain("gate_norm_modulates")):
        t = operands(form, bf16)
        h, *ys = call(form, t, *attributes(form, bf16, rounding=encode_rounding(points)))
        want_h, *want_ys = chain(form, t)
        assert torch.equal(h, want_h)
        for y, want in zip(ys, want_ys, strict=True):
            ulp = (want.float().abs() * 2**-7).clamp_min(2**-20)
            assert ((y.float() - want.float()).abs() <= ulp).all()


def test_texts_round_trip() -> None:
    points = {"product": torch.float16, "norm": torch.bfloat16}
    assert decode_rounding(encode_rounding(points)) == points
    assert encode_rounding({}) == ""
    assert encode_outputs([("shift", "scale"), (), ("scale",)]) == "scale+shift plain scale"
    assert decode_outputs("scale+shift plain scale") == [("scale", "shift"), (), ("scale",)]
    assert split_outputs([1, 2, 3], "scale+shift plain scale") == [{"scale": 1, "shift": 2}, {}, {"scale": 3}]
    for wrong in (lambda: encode_rounding({"oops": torch.float32}), lambda: encode_outputs([("oops",)])):
        with pytest.raises(ValueError, match="oops"):
            wrong()
    with pytest.raises(ValueError, match="2 modulation tensors"):
        split_outputs([1, 2], "scale")


@pytest.mark.parametrize("S", [0, 1])
@pytest.mark.parametrize("fusion", ["norm_modulate", "branch_norm_gate_norm_modulate", "residual_norm_modulates"])
def test_empty_and_single_rows(fusion: str, S: int) -> None:
    form = plain(fusion)
    t = operands(form, torch.float32, shape=(2, S, D))
    out = call(form, t, *attributes(form, torch.float32))
    assert all(o.shape == (2, S, D) for o in out)
    sum(o.sum() for o in out).backward()
    assert all(v.grad.shape == v.shape for v in leaves(t))


def test_large_means() -> None:
    """A one-pass variance would be off by tens of percent."""
    form = replace(plain("residual_norm_modulate"), affine=True)
    t = operands(form, torch.float32, shape=(2, 6, 96))
    t["x"] = (t["x"] + 1000).detach()
    high = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in t.items()}
    high["modulation"] = [m.double() for m in t["modulation"]]
    h, y = call(form, t, *attributes(form, torch.float32))
    assert (y.double() - chain(form, high)[1]).abs().max() <= 2e-3


def test_gradients_are_bitwise_repeatable() -> None:
    for name in ("gate_norm_modulate", "branch_norm_gate_norm_modulate", "norm_modulates"):
        form = plain(name)
        t = operands(form, torch.float32)
        runs = [torch.autograd.grad([o.sum() for o in call(form, t, *attributes(form, torch.float32))], leaves(t))
                for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*runs))
