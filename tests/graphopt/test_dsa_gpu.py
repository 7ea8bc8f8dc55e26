"""`graphopt.dsa.video_attention` on a GPU: what a user calls, in bf16 and fp16, against fp64."""

from __future__ import annotations

import math

import dsa_oracle as oracle
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt.codegen.dsa import head, operators, reference, text

pytestmark = pytest.mark.gpu
BF, HALF = torch.bfloat16, torch.float16


def make(*shape, dtype=BF):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def relative(a, b) -> float:
    return ((a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm()).item()


@pytest.mark.parametrize(("dtype", "D"), [(BF, 64), (BF, 96), (HALF, 64), (HALF, 96), (HALF, 128)])
@pytest.mark.parametrize(("grid", "window"), [((5, 11, 13), (3, 7, 7)), ((1, 17, 19), (3, 3, 3)), ((7, 9, 10), (2, 4, 6))])
def test_head_dimensions_dtypes_and_shared_heads(dtype, D, grid, window) -> None:
    N, B = math.prod(grid), 2
    q, dy = make(B, N, 4, D, dtype=dtype).transpose(1, 2), make(B, 4, N, D, dtype=dtype)
    k, v = (make(B, 2, N, D, dtype=dtype) for _ in range(2))
    offsets = make(B, 2, N, 3, dtype=torch.float32) * 1.5
    leaves = [x.requires_grad_() for x in (q, k, v, offsets)]
    assert graphopt.dsa.explain(q, offsets, grid=grid, window=window).engine in ("fused", "lattice")
    y = graphopt.dsa.video_attention(*leaves, grid=grid, window=window)
    got = torch.autograd.grad(y, leaves, dy)
    wide = [x.detach().double() for x in (q, k, v)]
    Y, L = reference.forward(*wide, offsets.detach(), grid, window, D**-0.5)
    want = reference.backward(dy.double(), None, *wide, offsets.detach(), Y, L, grid, window, D**-0.5)
    fine = 1 if dtype == BF else 0.25  # three more bits
    assert relative(y, Y) <= 3e-3 * fine
    for x, a, b in zip(leaves, got, want):
        assert relative(a, b) <= 4e-3 * fine
        assert (a.dtype, a.stride()) == (x.dtype, x.stride())


@pytest.mark.parametrize("first", [False, True])
def test_text_is_one_softmax_with_the_window(first) -> None:
    grid, window, words, N = (3, 7, 9), (3, 3, 3), 37, 189
    q, dy = make(2, 4, N + words, 64), make(2, 4, N + words, 64)
    k, v = make(2, 2, N + words, 64), make(2, 2, N + words, 64)
    mask = torch.ones(N + words, N + words, dtype=torch.bool)
    part = slice(words, None) if first else slice(N)
    mask[part, part] = oracle.natten_mask(grid, window)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y = graphopt.dsa.video_attention(*leaves, grid=grid, window=window, text=words, text_first=first)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    kk, vv = (x.repeat_interleave(2, 1) for x in wide[1:])
    Y = scaled_dot_product_attention(wide[0], kk, vv, attn_mask=mask.cuda())
    assert relative(y, Y) <= 4e-3
    for a, b in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(Y, wide, dy.double())):
        assert relative(a, b) <= 6e-3  # two roundings: of each part, and of their merge


def test_c13_limits() -> None:
    for grid in ((1, 1, 1), (1, 3, 5), (2, 7, 9), (3, 5, 7)):
        q, k, v = (make(1, 2, math.prod(grid), 64) for _ in range(3))
        for offsets in (None, torch.zeros(1, 2, math.prod(grid), 3, device="cuda")):
            call = lambda *x, w: graphopt.dsa.video_attention(*x, offsets, grid=grid, window=w)
            want = scaled_dot_product_attention(q.double(), k.double(), v.double())
            assert relative(call(q, k, v, w=tuple(2 * n - 1 for n in grid)), want) < 4e-3
            # one unit in the last place of bf16 is 2^-7 at most; at the far border a tap lies 2^-20 of a token short of
            # its key and takes as much of the one before: 2^-20 |a - b|, which is below 1e-5 for values up to 5
            torch.testing.assert_close(call(q, k, v, w=(1, 1, 1)), v, rtol=2**-7, atol=1e-5)
            one = torch.ones_like(v)
            torch.testing.assert_close(call(q * 0, k, one, w=(3, 3, 3)), one, rtol=0, atol=4e-3)


def test_offsets_per_tap() -> None:
    grid, window = (2, 4, 5), (2, 3, 3)
    q, k, v = (make(1, 2, 40, 64) for _ in range(3))
    taps = make(1, 2, 40, 18, 3, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v, taps)]
    assert graphopt.dsa.explain(q, taps, grid=grid, window=window).engine == "reference"
    y = graphopt.dsa.video_attention(*leaves, grid=grid, window=window)
    wide = [x.detach().double().cpu().requires_grad_() for x in leaves]
    p = oracle.coordinates(grid) - torch.tensor(window) // 2
    p = torch.minimum(p.clamp(min=0), torch.tensor(grid) - torch.tensor(window))
    at = (p[:, None] + oracle.coordinates(window)).double() + wide[3]
    at = torch.minimum(at.clamp(min=0), torch.tensor(grid).double() - 1)
    Y, _ = oracle.naive(*wide[:3], at, grid, 64**-0.5)
    assert relative(y, Y) < 4e-3
    dy = torch.randn_like(y)
    first, again = (torch.autograd.grad(y, leaves, dy, retain_graph=True) for _ in range(2))
    for a, b, c in zip(first, torch.autograd.grad(Y, wide, dy.double().cpu()), again):
        assert relative(a, b) < 4e-3
        assert torch.equal(a, c)


def test_opcheck() -> None:
    q, k, v = (make(1, 2, 60, 64).requires_grad_() for _ in range(3))
    offsets = make(1, 2, 60, 3, dtype=torch.float32).requires_grad_()
    rest = (3, 4, 5, 2, 3, 3, 0.125, "inside")
    torch.library.opcheck(operators.operator("triton"), (q, k, v, offsets, *rest))
    torch.library.opcheck(operators.operator("triton"), (q, k, v, None, *rest))
    torch.library.opcheck(text.operator("triton"), (q, k[:, :, :7], v[:, :, :7], 0.125))
    x, weight = make(1, 60, 32).requires_grad_(), make(32, 1, 3, 3, 3).requires_grad_()
    torch.library.opcheck(head.operator("triton"), (x, weight, make(32), make(6, 32), make(6), 3, 4, 5))


def step(x, offsets, grid):
    q, k, v = x.unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
    y = graphopt.dsa.video_attention(q, k, v, offsets, grid=grid, window=(2, 3, 3), text=3)
    return (y if y.dtype == torch.float64 else y.float()).sin().sum()


def test_compiles_whole_for_any_grid_with_inductor() -> None:
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for grid in ((3, 4, 5), (4, 4, 6), (3, 6, 5)):
        N = math.prod(grid)
        x, offsets = make(2, N + 3, 384).requires_grad_(), make(2, 2, N, 3, dtype=torch.float32).requires_grad_()
        got = torch.autograd.grad(compiled(x, offsets, grid), (x, offsets))
        wide = [x.detach().double().requires_grad_(), offsets.detach().requires_grad_()]
        want = torch.autograd.grad(step(*wide, grid), wide)
        for a, b, c in zip(got, torch.autograd.grad(step(x, offsets, grid), (x, offsets)), want):
            assert relative(a, c) < 4e-3  # 2.7e-3 at most in 18 runs
            # eager autograd rounds each part of a text key's gradient and then their sum, and these three keys that
            # every query sees are most of the norm: 4.6e-3 at most in 18 runs
            assert relative(b, c) < 5.5e-3


def test_checkpointing_and_autocast() -> None:
    grid, N = (3, 4, 5), 60
    x, offsets = make(1, N + 3, 384).requires_grad_(), make(1, 2, N, 3, dtype=torch.float32).requires_grad_()
    plain = torch.autograd.grad(step(x, offsets, grid), (x, offsets))
    again = torch.autograd.grad(checkpoint(step, x, offsets, grid, use_reentrant=False), (x, offsets))
    for a, b in zip(plain, again):
        assert torch.equal(a, b)
    linear = torch.nn.Linear(384, 384, device="cuda")
    with torch.autocast("cuda", BF):
        out = step(linear(x), offsets, grid)
    out.backward()
    assert linear.weight.grad.isfinite().all()
    assert linear.weight.grad.abs().sum() > 0
    assert offsets.grad.dtype == torch.float32


@pytest.mark.parametrize(("grid", "C"), [((5, 9, 11), 96), ((1, 8, 13), 320), ((3, 4, 4), 1536)])
def test_offset_head(grid, C) -> None:
    x, weight, bias = make(2, math.prod(grid), C), make(C, 1, 3, 3, 3) * 0.2, make(C) * 0.1
    leaves = [t.requires_grad_() for t in (x, weight, bias, make(36, C) * 0.05, make(36))]
    y = head.offset_head(*leaves, grid)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    Y = head.offset_head(*wide, grid)
    assert relative(y, Y) < 3e-3
    dy = torch.randn_like(y)
    first, again = (torch.autograd.grad(y, leaves, dy, retain_graph=True) for _ in range(2))
    for a, b, c in zip(first, torch.autograd.grad(Y, wide, dy.double()), again):
        assert relative(a, b) < 4e-3  # 3.6e-3 is the linear layer's weight: gelu(u), u and dy are rounded, tanh is 2^-11
        assert torch.equal(a, c)
