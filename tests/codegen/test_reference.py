"""The reference operators: the oracle of everything else, so checked against autograd in fp64 and by opcheck."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graphopt.codegen import operators
from graphopt.codegen.form import FUSIONS, decode_rounding, encode_rounding

NAMES = ("x", "branch", "gate", "scale", "shift", "weight", "bias")


def operands(fusion: str, dtype=torch.float64, layout=(2, 1, 7), bias: bool = True):
    f = FUSIONS[fusion]
    new = lambda *shape: torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()
    t = {n: None for n in NAMES} | {"x": new(2, 5, 7)}
    if f.gate:
        t |= {"branch": new(2, 5, 7), "gate": new(*layout)}
    if f.modulate:
        t |= {"scale": new(*layout), "shift": new(*layout)}
    if f.affine:
        t |= {"weight": new(7), "bias": new(7) if bias else None}
    return t


def attributes(fusion: str, dtype=torch.float64, offset=1.0, rounding=""):
    norm = "layer_norm" if FUSIONS[fusion].norm else "none"
    return norm, 1e-6, offset, dtype, dtype, rounding


def call(fusion: str, t: dict, *rest):
    h, y, _, _ = operators.operator(fusion, "reference")(*(t[n] for n in NAMES), *rest)
    return tuple(o for o in (h, y) if o.numel())


def chain(fusion: str, t: dict, offset=1.0):
    """The same in ordinary torch."""
    f = FUSIONS[fusion]
    h = t["x"] + t["gate"] * t["branch"] if f.gate else t["x"]
    out = (h,) if f.gate else ()
    if f.norm:
        n = F.layer_norm(h, (h.shape[-1],), t["weight"], t["bias"], 1e-6)
        out += (n * (offset + t["scale"]) + t["shift"] if f.modulate else n,)
    return out


@pytest.mark.parametrize("layout", [(7,), (1, 1, 7), (2, 1, 7), (2, 5, 7)], ids=str)
@pytest.mark.parametrize("fusion", list(FUSIONS))
def test_values_and_gradients_in_fp64(fusion: str, layout: tuple) -> None:
    t = operands(fusion, layout=layout)
    for a, b in zip(call(fusion, t, *attributes(fusion)), chain(fusion, t), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    leaves = {n: v for n, v in t.items() if v is not None}

    def f(*values):
        return call(fusion, t | dict(zip(leaves, values)), *attributes(fusion))

    assert torch.autograd.gradcheck(f, tuple(leaves.values()))


def test_affine_and_modulate_together() -> None:
    """CogVideoX: a norm with weight and bias, then scale and shift."""
    t = operands("norm_modulate") | {n: torch.randn(7, dtype=torch.float64, requires_grad=True) for n in ("weight", "bias")}
    want = F.layer_norm(t["x"], (7,), t["weight"], t["bias"], 1e-6) * (1 + t["scale"]) + t["shift"]
    torch.testing.assert_close(call("norm_modulate", t, *attributes("norm_modulate"))[0], want)
    leaves = {n: v for n, v in t.items() if v is not None}
    assert torch.autograd.gradcheck(
        lambda *v: call("norm_modulate", t | dict(zip(leaves, v)), *attributes("norm_modulate")), tuple(leaves.values()))


@pytest.mark.parametrize("parts", [("scale",), ("scale", "shift"), ("weight",), ("weight", "scale", "shift")], ids="+".join)
def test_rms_norm(parts: tuple[str, ...]) -> None:
    """RMS norm in every combination of parts, scale alone included."""
    t = operands("norm_modulate") | {"weight": torch.randn(7, dtype=torch.float64, requires_grad=True), "bias": None}
    t = {n: v if n == "x" or n in parts else None for n, v in t.items()}
    attributes_ = ("rms_norm", 1e-6, 1.0, torch.float64, torch.float64, "")
    want = F.rms_norm(t["x"], (7,), t["weight"], 1e-6)
    if t["scale"] is not None:
        want = want * (1 + t["scale"])
    if t["shift"] is not None:
        want = want + t["shift"]
    torch.testing.assert_close(call("norm_modulate", t, *attributes_)[0], want, rtol=1e-12, atol=1e-12)
    leaves = {n: v for n, v in t.items() if v is not None}
    assert torch.autograd.gradcheck(
        lambda *v: call("norm_modulate", t | dict(zip(leaves, v)), *attributes_), tuple(leaves.values()))


def test_plain_scale_and_weight_without_bias() -> None:
    t = operands("norm_modulate")
    got = call("norm_modulate", t, *attributes("norm_modulate", offset=0.0))[0]
    torch.testing.assert_close(got, chain("norm_modulate", t, offset=0.0)[0])
    t = operands("gate_norm", bias=False)
    for a, b in zip(call("gate_norm", t, *attributes("gate_norm")), chain("gate_norm", t)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("fusion", list(FUSIONS))
def test_opcheck(fusion: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        t = operands(fusion, dtype)
        torch.library.opcheck(operators.operator(fusion, "reference"),
                              (*(t[n] for n in NAMES), *attributes(fusion, dtype)))


@pytest.mark.parametrize("fusion", list(FUSIONS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_rounding_is_no_worse_than_eager(fusion: str, dtype: torch.dtype) -> None:
    """Five seeds, every output and gradient: error against fp64 at most 1.25x that of eager in the same dtype."""
    for seed in range(5):
        torch.manual_seed(seed)
        t = {n: None if v is None else v.detach() for n, v in operands(fusion, dtype).items()}
        t |= {n: torch.randn(2, 40, 7).to(dtype) for n in ("x", "branch") if t[n] is not None}
        results = []
        for how, high in ((call, False), (chain, False), (chain, True)):
            leaves = {n: None if v is None else (v.double() if high else v.clone()).requires_grad_() for n, v in t.items()}
            out = how(fusion, leaves, *attributes(fusion, dtype)) if how is call else how(fusion, leaves)
            torch.manual_seed(seed)
            sum((o.double() * torch.randn(o.shape, dtype=torch.float64)).sum() for o in out).backward()
            results.append([*(o.detach().double() for o in out), *(v.grad.double() for v in leaves.values() if v is not None)])
        for ours, eager, truth in zip(*results):
            assert (ours - truth).norm() <= 1.25 * (eager - truth).norm() + 1e-6 * truth.norm()


def test_eager_numerics_round_where_the_source_does() -> None:
    points = {p: torch.bfloat16 for p in ("gated", "residual", "norm", "gain", "product")}
    t = {n: None if v is None else v.detach() for n, v in operands("gate_norm_modulate", torch.bfloat16).items()}
    h, y = call("gate_norm_modulate", t, *attributes("gate_norm_modulate", torch.bfloat16, rounding=encode_rounding(points)))
    want_h, want_y = chain("gate_norm_modulate", t)
    assert torch.equal(h, want_h)
    ulp = (want_y.float().abs() * 2**-7).clamp_min(2**-20)
    assert ((y.float() - want_y.float()).abs() <= ulp).all()


def test_rounding_text_round_trips() -> None:
    points = {"product": torch.float16, "norm": torch.bfloat16}
    assert decode_rounding(encode_rounding(points)) == points
    assert encode_rounding({}) == ""
    with pytest.raises(ValueError, match="oops"):
        encode_rounding({"oops": torch.float32})


@pytest.mark.parametrize("S", [0, 1])
def test_empty_and_single_rows(S: int) -> None:
    x = torch.randn(2, S, 7, requires_grad=True)
    s, b = (torch.randn(2, 1, 7, requires_grad=True) for _ in range(2))
    t = dict.fromkeys(NAMES) | {"x": x, "scale": s, "shift": b}
    (y,) = call("norm_modulate", t, *attributes("norm_modulate", torch.float32)) or (torch.empty(2, S, 7),)
    assert y.shape == (2, S, 7)
    if S:
        y.sum().backward()
        assert b.grad.shape == b.shape


def test_gradients_are_bitwise_repeatable() -> None:
    t = operands("gate_norm_modulate", torch.float32)
    leaves = [v for v in t.values() if v is not None]
    runs = [torch.autograd.grad([o.sum() for o in call("gate_norm_modulate", t, *attributes("gate_norm_modulate", torch.float32))],
                                leaves) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs))
