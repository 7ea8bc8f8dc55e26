"""The kernels of an RMS norm with a rotary embedding against fp64, through operators and autograd (interpreter or GPU)."""

from __future__ import annotations

import pytest
import torch

from graphopt.codegen import rotary_operators
from graphopt.codegen.rotary import Rotary, emit

pytestmark = pytest.mark.kernel

# heads, channels per head: one sub-block, several, one that overhangs, Wan 1.3B's and 14B's
SHAPES = [(2, 8), (3, 16), (12, 128), (5, 64), (40, 128)]


def operands(device: str, heads: int, d: int, dtype: torch.dtype, table: torch.dtype, B: int = 2, N: int = 5) -> dict:
    new = lambda *shape: torch.randn(*shape, device=device)
    angle = new(1, N, 1, d // 2).repeat_interleave(2, -1)
    return dict(x=new(B, N, heads * d).to(dtype).requires_grad_(), weight=(1 + 0.1 * new(heads * d)).requires_grad_(),
                cos=angle.cos().to(table), sin=angle.sin().to(table))


def plain(x, weight, cos, sin, heads: int):
    """As models write it."""
    n = torch.nn.functional.rms_norm(x, (x.shape[-1],), None if weight is None else weight.to(x.dtype), 1e-6)
    n = n.unflatten(2, (heads, -1))
    even, odd = n.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[..., 0::2], sin[..., 1::2]
    return torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2).type_as(n)


def gradients(f, t: dict, cotangent: torch.Tensor) -> list[torch.Tensor]:
    leaves = [v for v in (t["x"], t["weight"]) if v is not None]
    y = f(t)
    return [y.detach(), *torch.autograd.grad(y, leaves, cotangent.to(y.dtype))]


@pytest.mark.parametrize("heads,d", SHAPES)
@pytest.mark.parametrize("dtype,table", [
    (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)])
@pytest.mark.parametrize("weighted", [True, False])
def test_values(device: str, heads: int, d: int, dtype: torch.dtype, table: torch.dtype, weighted: bool) -> None:
    if device == "cpu" and heads == 40 and (dtype == torch.float32 or not weighted):
        pytest.skip("slow under the interpreter")
    t = operands(device, heads, d, dtype, table)
    t["weight"] = t["weight"] if weighted else None
    call = rotary_operators.operator("triton")
    cotangent = torch.randn(2, 5, heads, d, device=device)
    ours = lambda t: call(t["x"], t["weight"], t["cos"], t["sin"], heads, 1e-6, t["x"].dtype)[0]
    eager = lambda t: plain(t["x"], t["weight"], t["cos"], t["sin"], heads)
    wide = {k: None if v is None else v.detach().double().requires_grad_(v.requires_grad) for k, v in t.items()}
    got, old, want = gradients(ours, t, cotangent), gradients(eager, t, cotangent), gradients(
        eager, wide, cotangent.to(dtype))
    for g, e, w in zip(got, old, want):
        assert g.shape == w.shape
        assert g.dtype == e.dtype
        error = lambda v: ((v.double() - w).norm() / w.norm()).item()
        assert error(g) <= max(1e-5, 1.25 * error(e))
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(ours, t, cotangent)))


def test_strides(device: str) -> None:
    """x a slice of a fused projection, dy as attention returns it, tables cut from longer ones."""
    heads, d, N = 4, 16, 6
    t = operands(device, heads, d, torch.float32, torch.float32, N=N)
    wide = torch.randn(2, N, 3 * heads * d, device=device)
    tables = {k: torch.cat([t[k], t[k]], 1)[:, :N] for k in ("cos", "sin")}
    call = rotary_operators.operator("triton")
    cotangent = torch.randn(2, heads, N, d, device=device).transpose(1, 2)
    results = []
    for x in (wide[..., :heads * d], wide[..., :heads * d].contiguous()):
        x = x.detach().requires_grad_()
        y = call(x, t["weight"], tables["cos"], tables["sin"], heads, 1e-6, torch.float32)[0]
        results.append([y, *torch.autograd.grad(y, [x, t["weight"]], cotangent if len(results) == 0 else
                                                cotangent.contiguous())])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_reference_is_what_the_kernel_is(device: str) -> None:
    t = operands(device, 3, 8, torch.float32, torch.float32)
    arguments = (t["x"], t["weight"], t["cos"], t["sin"], 3, 1e-6, torch.float32)
    both = [rotary_operators.operator(e)(*arguments) for e in ("reference", "triton")]
    for a, b in zip(*both):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert [v.shape for v in rotary_operators._fake_forward(*arguments)] == [v.shape for v in both[0]]


def test_empty(device: str) -> None:
    t = operands(device, 2, 8, torch.float32, torch.float32, B=0)
    y = rotary_operators.operator("triton")(t["x"], t["weight"], t["cos"], t["sin"], 2, 1e-6, torch.float32)[0]
    dx, dw = torch.autograd.grad(y, [t["x"], t["weight"]], torch.zeros_like(y))
    assert y.shape == (0, 5, 2, 8)
    assert dx.shape == t["x"].shape
    assert torch.equal(dw, torch.zeros_like(dw))


def test_no_ring_where_a_target_forms_none() -> None:
    here, there = (Rotary("backward", 12, 128, 1e-6, True, torch.bfloat16, torch.bfloat16, t) for t in ("sm90", "gfx942"))
    assert "num_stages" in emit(here)
    assert "num_stages" not in emit(there)
