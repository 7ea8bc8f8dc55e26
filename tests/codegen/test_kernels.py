"""The generated kernels against fp64, under Triton's interpreter or on a GPU.

Error rule (relative L2 against fp64): bf16 and fp16 results at most 1.25x the error of eager in that dtype, fp32 ones
at most 1e-5; gradients of factors the same.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphopt.codegen import emit, kernels, operators
from graphopt.codegen.form import FUSIONS, OPERANDS

pytestmark = pytest.mark.kernel

EPS = 1e-6
NAMED = ["norm_modulate", "gate_norm_modulate", "gate_norm", "gate_residual"]
WIDTHS = [1, 3, 17, 64, 1152, 2240, 5120]


def tensors(fusion: str, B: int, S: int, D: int, dtype: torch.dtype, mod: torch.dtype, device: str, mean: float = 0.0):
    """Random operands; factors are strided chunks of one buffer, as in a model."""
    f = FUSIONS[fusion]
    new = lambda *shape: torch.randn(*shape, device=device)
    x = (new(B, S, D) + mean).to(dtype)
    factors = (0.3 * new(B, 1, 4 * D)).to(mod).chunk(4, dim=-1)
    t = dict(x=x, branch=None, gate=None, scale=None, shift=None, weight=None, bias=None)
    if f.gate:
        t |= dict(branch=new(B, S, D).to(dtype), gate=factors[0])
    if f.modulate:
        t |= dict(scale=factors[1], shift=factors[2])
    if f.affine:
        t |= dict(weight=(1 + 0.2 * new(D)).to(mod), bias=(0.2 * new(D)).to(mod))
    return t


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer starts as NaN, so an element no kernel wrote shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(kernels.torch, "empty", poisoned)


def high(t: dict) -> dict:
    return {k: None if v is None else v.double() for k, v in t.items()}


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


def limit(dtype: torch.dtype, eager: float) -> float:
    return max(1e-5 if dtype == torch.float32 else 1e-6, 1.25 * eager)


def run(engine, t: dict, norm: str, dtype: torch.dtype, dh: Tensor | None, dy: Tensor | None):
    """Forward and backward of one engine."""
    if engine is operators:
        return run_reference(t, norm, dtype, dh, dy)
    h_dtype = dtype
    h, y, mean, rstd = engine.forward(**t, norm=norm, eps=EPS, offset=1.0, h_dtype=h_dtype, y_dtype=dtype, rounding="")
    rest = {k: v for k, v in t.items() if k != "x"}
    saved = t["x"] if t["branch"] is None else (h if norm != "none" else t["branch"])
    grads = engine.backward(dh, dy, saved, **rest, mean=mean, rstd=rstd, norm=norm, offset=1.0, x_dtype=t["x"].dtype)
    return (h, y), grads


def run_reference(t: dict, norm: str, dtype: torch.dtype, dh: Tensor | None, dy: Tensor | None):
    """The same by the reference operator."""
    leaves = {k: v.detach().clone().requires_grad_() for k, v in t.items() if v is not None}
    parts = [n for n in ("scale", "shift") if n in leaves]
    name = "gate_norm_modulate" if "branch" in leaves else "norm_modulate"
    h, _, _, _, _, *ys = operators.operator(name, "reference")(
        *(leaves.get(n) for n in OPERANDS), [leaves[n] for n in parts], "+".join(parts) or "plain", norm, EPS, 1.0,
        "none", 0.0, "identity", dtype, dtype, "")
    given = [(o, g) for o, g in ((h, dh), (ys[0], dy)) if g is not None]
    grads = torch.autograd.grad([o for o, _ in given], list(leaves.values()), [g for _, g in given])
    by = dict(zip(leaves, grads))
    return (h.detach(), ys[0].detach()), [by.get(n, t["x"].new_empty(0)) for n in NAMES]


def eager(t: dict, dh: Tensor | None, dy: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The chain in ordinary torch, with autograd, in the dtype of the operands (fp64 for the truth)."""
    leaves = {k: v.detach().clone().requires_grad_() for k, v in t.items() if v is not None}
    x = leaves["x"]
    h = (x + leaves["gate"] * leaves["branch"]).type_as(x) if "gate" in leaves else x
    out = {"h": h} if "gate" in leaves else {}
    if "scale" in leaves or "weight" in leaves:
        n = torch.nn.functional.layer_norm(
            h.to(_acc(h)), (h.shape[-1],), _cast(leaves.get("weight"), _acc(h)), _cast(leaves.get("bias"), _acc(h)), EPS
        ).to(h.dtype)
        out["y"] = n * (1 + leaves["scale"]) + leaves["shift"] if "scale" in leaves else n
    dtype = t["x"].dtype
    given = {k: g for k, g in (("h", dh), ("y", dy)) if g is not None and k in out}
    loss = sum((out[k].to(_acc(x)) * g.to(_acc(x))).sum() for k, g in given.items())
    loss.backward()
    return {k: v.detach().to(dtype) for k, v in out.items()}, {k: v.grad for k, v in leaves.items()}


def _acc(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _cast(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if t is None else t.to(dtype)


NAMES = ("x", "branch", "gate", "scale", "shift", "weight", "bias")


@pytest.mark.parametrize("fusion", NAMED)
@pytest.mark.parametrize("D", WIDTHS)
def test_bf16_against_fp64(fusion: str, D: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _compare(fusion, 2, 21 if D < 1000 else 9, D, torch.bfloat16, torch.float32, device, monkeypatch)


@pytest.mark.parametrize("fusion", NAMED)
@pytest.mark.parametrize(("dtype", "mod"), [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
])
@pytest.mark.parametrize(("B", "S"), [(1, 1), (3, 77)])
def test_dtypes(fusion, dtype, mod, B, S, device, monkeypatch) -> None:
    _compare(fusion, B, S, 96, dtype, mod, device, monkeypatch)


@pytest.mark.parametrize("fusion", ["norm_modulate", "gate_norm_modulate", "gate_norm"])
def test_large_mean(fusion, device, monkeypatch) -> None:
    """A variance from E[x^2] - E[x]^2, or padded lanes in it, would be off by far more."""
    _compare(fusion, 2, 33, 1152, torch.float32, torch.float32, device, monkeypatch, mean=1e3, tolerance=2e-4)


def _compare(fusion, B, S, D, dtype, mod, device, monkeypatch, mean=0.0, tolerance=0.0) -> None:
    f = FUSIONS[fusion]
    norm = "layer_norm" if f.norm else "none"
    t = tensors(fusion, B, S, D, dtype, mod, device, mean)
    dh = torch.randn(B, S, D, device=device).to(dtype) if f.gate else None
    dy = torch.randn(B, S, D, device=device).to(dtype) if f.norm else None
    truth, truth_grads = eager(high(t), None if dh is None else dh.double(), None if dy is None else dy.double())
    rough, rough_grads = eager(t, dh, dy)
    poison(monkeypatch)
    (h, y), grads = run(kernels, t, norm, dtype, dh, dy)
    for name, got in (("h", h), ("y", y)):
        if name in truth:
            assert got.dtype == dtype
            bound = max(limit(dtype, error(rough[name], truth[name])), tolerance)
            assert error(got, truth[name]) <= bound, name
    named = dict(zip(NAMES, grads))
    if norm == "none":
        assert named.pop("x").numel() == 0
    for name, got in named.items():
        if name not in truth_grads:
            assert got.numel() == 0, name
            continue
        assert got.shape == t[name].shape, name
        assert got.dtype == t[name].dtype, name
        if D == 1 and f.norm:  # a norm over one channel amplifies the rounding of dy * gain by 1 / sqrt(eps)
            assert torch.isfinite(got).all(), name
            continue
        bound = max(limit(t[name].dtype, error(rough_grads[name], truth_grads[name])), tolerance)
        assert error(got, truth_grads[name]) <= bound, (name, error(got, truth_grads[name]), bound)


def test_repeatable(device) -> None:
    t = tensors("gate_norm_modulate", 2, 61, 192, torch.bfloat16, torch.float32, device)
    dh, dy = (torch.randn(2, 61, 192, device=device).bfloat16() for _ in range(2))
    runs = [run(kernels, t, "layer_norm", torch.bfloat16, dh, dy)[1] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_absent_cotangents(device) -> None:
    """Only h or only y is used downstream: the other cotangent is None."""
    t = tensors("gate_norm_modulate", 2, 20, 64, torch.float32, torch.float32, device)
    g = torch.randn(2, 20, 64, device=device)
    for dh, dy in ((g, None), (None, g)):
        want = run(operators, t, "layer_norm", torch.float32, dh, dy)[1]
        got = run(kernels, t, "layer_norm", torch.float32, dh, dy)[1]
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_empty_and_non_contiguous(device) -> None:
    for S in (0, 5):
        t = tensors("norm_modulate", 2, S, 24, torch.float32, torch.float32, device)
        t["x"] = torch.randn(S, 2, 24, device=device).transpose(0, 1)
        dy = torch.randn(2, 24, S, device=device).transpose(1, 2)
        (_, got), grads = run(kernels, t, "layer_norm", torch.float32, None, dy)
        (_, want), wanted = run(operators, t, "layer_norm", torch.float32, None, dy)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for a, b in zip(grads, wanted):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_factor_layouts(device) -> None:
    """[D], [1, 1, D], [B, 1, D] with stride 0, [B, F, 1, D] against x [B, F, S, D]."""
    x = torch.randn(2, 3, 17, 40, device=device)
    dy = torch.randn_like(x)
    for shape in ((40,), (1, 1, 1, 40), (2, 1, 1, 40), (2, 3, 1, 40)):
        scale, shift = torch.randn(shape, device=device), torch.randn(shape, device=device)
        if shape == (2, 1, 1, 40):
            shift = torch.randn(40, device=device).expand(shape)
        t = dict(x=x, branch=None, gate=None, scale=scale, shift=shift, weight=None, bias=None)
        (_, got), grads = run(kernels, t, "layer_norm", torch.float32, None, dy)
        (_, want), wanted = run(operators, t, "layer_norm", torch.float32, None, dy)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for a, b in zip(grads, wanted):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_layout_that_no_kernel_has() -> None:
    with pytest.raises(ValueError, match="prefix"):
        kernels.groups_prefix(torch.empty(2, 3, 8), [torch.empty(1, 3, 8)])


def test_source_uses_only_tl_and_literals() -> None:
    """Inductor copies a kernel's source into a module of its own, where no other global exists."""
    import ast
    import builtins

    t = tensors("gate_norm_modulate", 1, 4, 2240, torch.bfloat16, torch.float32, "cpu")
    parts = [t[n] for n in ("branch", "gate", "scale", "shift", "weight", "bias")]
    specs = [
        kernels.forward_spec(t["x"], *parts, "layer_norm", EPS, 1.0, torch.bfloat16, torch.bfloat16),
        kernels.backward_spec(torch.bfloat16, torch.bfloat16, t["x"], *parts, "layer_norm", 1.0, torch.bfloat16),
    ]
    for source in [emit.emit(s, kernels.configure(s)) for s in specs] + [emit.SUM_PARTIALS]:
        function = ast.parse(source).body[-1]
        stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        stored |= {a.arg for a in function.args.args}
        loaded = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        assert loaded - stored - set(dir(builtins)) <= {"tl", "triton"}
