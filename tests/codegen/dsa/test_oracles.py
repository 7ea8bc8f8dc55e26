"""The oracles of test_reference.py for the kernels: identities against attention over all tokens, or explicit sampling.

Under the interpreter in fp32 on small grids; on a GPU in bf16, head dimension 128 and on prime grids as well.
"""

from __future__ import annotations

import math

import dsa_oracle as oracle
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from graphopt.codegen.dsa import engines, kernels, reference
from graphopt.codegen.dsa import window as whole

pytestmark = pytest.mark.kernel
GPU = torch.cuda.is_available()
GRIDS = [(3, 4, 5), *([(1, 4, 6), (5, 11, 13), (7, 17, 19), (2, 23, 29)] if GPU else [])]
HEADS, D, DTYPE = (3, 128, torch.bfloat16) if GPU else (1, 16, torch.float32)
FORWARD = 3e-3 if GPU else 2e-5
BACKWARD = 4e-3  # words between the backward's kernels are 16 bits everywhere


def inputs(grid, device, heads=HEADS, B=1):
    make = lambda: torch.randn(B, heads, math.prod(grid), D, device=device, dtype=DTYPE)
    return make(), make(), make()


def offsets_of(grid, device, size=1.5, heads=HEADS, B=1):
    return torch.randn(B, heads, math.prod(grid), 3, device=device) * size


def attend(q, k, v, offsets, grid, window):
    """(y, lse) of the fused kernels, or the window ones without offsets."""
    cut = reference.effective_window(window, grid)
    if offsets is None or not offsets.is_floating_point():
        return whole.forward(q, k, v, offsets, grid, cut, D**-0.5)
    return kernels.forward(q, k, v, offsets, grid, cut, D**-0.5)


def gradients(dy, dlse, q, k, v, offsets, y, lse, grid, window):
    cut = reference.effective_window(window, grid)
    return kernels.backward(dy, dlse, q, k, v, offsets, y, lse, grid, cut, D**-0.5)


def wide(*tensors):
    """fp64 on the CPU, where the oracles are."""
    return [t.double().cpu() for t in tensors]


def close(a, b, limit) -> None:
    a, b = a.double().cpu(), b.double().cpu()
    assert a.isfinite().all()
    assert (a - b).norm() <= limit * b.norm() + 1e-12


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("window", [(3, 3, 3), (2, 4, 3)])
def test_zero_offsets_are_the_natten_window(grid, window, device) -> None:
    q, k, v = inputs(grid, device)
    want = scaled_dot_product_attention(*wide(q, k, v), attn_mask=oracle.natten_mask(grid, window))
    for offsets in (None, torch.zeros(1, 1, math.prod(grid), 3, device=device)):
        close(attend(q, k, v, offsets, grid, window)[0], want, FORWARD)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_window_as_large_as_the_grid_is_dense_for_any_offset(grid, device) -> None:
    q, k, v = inputs(grid, device)
    if any(n > m for n, m in zip(grid, (7, 15, 15))):
        pytest.skip("larger than the largest window")
    y, lse = attend(q, k, v, offsets_of(grid, device, size=5), grid, grid)
    Q, K, V = wide(q, k, v)
    close(y, scaled_dot_product_attention(Q, K, V), FORWARD)
    close(lse, (Q @ K.transpose(-1, -2) * D**-0.5).logsumexp(-1), 1e-5)


@pytest.mark.parametrize("grid", GRIDS)
def test_whole_offsets_are_a_moved_mask(grid, device) -> None:
    window, N = (3, 3, 3), math.prod(grid)
    q, k, v = inputs(grid, device, heads=1)
    moved = torch.randint(-3, 4, (N, 3))
    want = scaled_dot_product_attention(*wide(q, k, v), attn_mask=oracle.natten_mask(grid, window, moved))
    place = moved[None, None].to(device)
    for offsets in (place.float(), place.int()):
        close(attend(q, k, v, offsets, grid, window)[0], want, FORWARD)


@pytest.mark.parametrize("grid", GRIDS)
def test_eight_corners_and_autograd(grid, device) -> None:
    """Output, log-sum-exp and every gradient against autograd through explicit trilinear sampling."""
    window = (3, 3, 3)
    q, k, v = inputs(grid, device)
    offsets = offsets_of(grid, device)
    y, lse = attend(q, k, v, offsets, grid, window)
    leaves = [t.requires_grad_() for t in wide(q, k, v, offsets)]
    Y, L = oracle.shift(*leaves, grid, window)
    close(y, Y, FORWARD)
    close(lse, L, 1e-5)
    dy, dlse = torch.randn_like(y), torch.randn_like(lse)
    want = torch.autograd.grad([Y, L], leaves, wide(dy, dlse))
    got = gradients(dy, dlse, q, k, v, offsets, y, lse, grid, window)
    for a, b in zip(got, want):
        close(a, b, BACKWARD)
    size = torch.tensor(grid) - torch.tensor(oracle.cut(window, grid))
    free = torch.minimum((oracle.coordinates(grid) - 1).clamp(min=0), size) + offsets.cpu()
    clamped = (free < 0) | (free > size)
    assert clamped.any()
    assert got[3].cpu()[clamped].count_nonzero() == 0


def test_affine_values_are_sampled_exactly(device) -> None:
    grid, window = (3, 4, 5), (3, 3, 3)
    p = oracle.coordinates(grid).float()
    slope = torch.tensor([[1.0, 2, -1, 0], [0, 3, 1, 1], [1, -2, 0, 4]]).repeat(1, D // 4)
    v = (p @ slope + 1)[None, None].to(device, DTYPE)  # small whole numbers: exact in bf16
    q, k = torch.zeros_like(v), torch.randn_like(v)  # equal weights: the mean over taps
    offsets = offsets_of(grid, device, heads=1)
    centre = oracle.starts(offsets.double().cpu(), grid, window) + 1
    close(attend(q, k, v, offsets, grid, window)[0], centre @ slope.double() + 1, FORWARD)


def test_constant_values_come_out_constant(device) -> None:
    grid = (3, 4, 5)
    q, k, _ = inputs(grid, device)
    y, _ = attend(q, k, torch.full_like(k, 2.5), offsets_of(grid, device), grid, (3, 3, 2))
    close(y, torch.full_like(y, 2.5), FORWARD)


@pytest.mark.parametrize("grid", GRIDS[:3])
def test_the_gradient_of_values_is_the_transpose(grid, device) -> None:
    """y is linear in v, so <dy, y(v)> = <dv(dy), v>."""
    window = (2, 3, 3)
    q, k, v = inputs(grid, device)
    offsets = offsets_of(grid, device)
    y, lse = attend(q, k, v, offsets, grid, window)
    dy = torch.randn_like(y)
    dv = gradients(dy, None, q, k, v, offsets, y, lse, grid, window)[2]
    a, b = (dy.double() * y.double()).sum(), (dv.double() * v.double()).sum()
    assert (a - b).abs() <= 2 * BACKWARD * (dy.double() * y.double()).norm() * 2


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("grid", [(4, 5, 6), *([(5, 11, 13)] if GPU else [])])
def test_flipping_an_axis_flips_the_result(axis, grid, device) -> None:
    window = (3, 3, 3)
    q, k, v = inputs(grid, device)
    offsets = offsets_of(grid, device)
    flip = lambda x: x.unflatten(2, grid).flip(2 + axis).flatten(2, 4).contiguous()
    sign = torch.ones(3, device=device)
    sign[axis] = -1
    y, _ = attend(q, k, v, offsets, grid, window)
    z, _ = attend(flip(q), flip(k), flip(v), flip(offsets) * sign, grid, window)
    close(flip(z), y, FORWARD * 1.5)  # both sides are rounded


def test_equal_offsets_per_tap_are_a_shift_inside_and_differ_at_borders(device) -> None:
    grid, window = (5, 6, 7), (3, 3, 3)
    q, k, v = inputs(grid, device, heads=1)
    offsets = offsets_of(grid, device, heads=1).clamp(-0.9, 0.9)
    y, _ = attend(q, k, v, offsets, grid, window)
    taps = offsets[..., None, :].expand(1, 1, 210, 27, 3)
    z, _ = reference.forward(q.double(), k.double(), v.double(), taps, grid, window, D**-0.5, "border")
    p = oracle.coordinates(grid)
    inner = ((p >= 2) & (p < torch.tensor(grid) - 2)).all(-1).to(device)
    close(y[:, :, inner], z[:, :, inner], FORWARD)
    assert (z - y)[:, :, ~inner].abs().max() > 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["fused", "lattice", "window"])
def test_two_runs_are_bitwise_equal(engine, device, monkeypatch) -> None:
    grid, window = GRIDS[-1], (3, 3, 3)
    monkeypatch.setattr(engines, "engine_of", lambda *_a: engine)
    q, k, v = inputs(grid, device, B=2)
    offsets = None if engine == "window" else offsets_of(grid, device, B=2)
    results = []
    for _ in range(2):
        y, lse = engines.forward(q, k, v, offsets, grid, window, D**-0.5)
        dy = torch.cos(torch.arange(y.numel(), device=device)).view(y.shape).to(y.dtype)
        results.append([y, lse, *engines.backward(
            dy, None, q, k, v, offsets, y, lse, grid, window, D**-0.5, offsets is not None)])
    for a, b in zip(*results):
        assert (a is None and b is None) or torch.equal(a, b)
