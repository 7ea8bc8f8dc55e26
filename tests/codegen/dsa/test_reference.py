"""The oracles of video attention, in fp64: identities that any implementation must satisfy exactly."""

from __future__ import annotations

import math

import dsa_oracle as oracle
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from graphopt.codegen.dsa import operators, reference

WINDOWS = [(3, 3, 3), (2, 4, 3), (1, 5, 2), (3, 1, 4)]


@pytest.fixture(autouse=True)
def _device():
    """The identities hold wherever plain torch runs: on the GPU where there is one."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


def inputs(grid, heads=2, D=6, B=1, dtype=torch.float64):
    N = math.prod(grid)
    return [torch.randn(B, heads, N, D, dtype=dtype) for _ in range(3)]


def offsets_of(grid, heads=2, B=1, size=1.5, dtype=torch.float64):
    return torch.randn(B, heads, math.prod(grid), 3, dtype=dtype) * size


def attend(q, k, v, offsets, grid, window, boundary="inside"):
    return operators.operator("reference")(q, k, v, offsets, *grid, *window, q.shape[-1] ** -0.5, boundary)


@pytest.mark.parametrize("window", WINDOWS)
def test_zero_offsets_are_the_natten_window(window) -> None:
    grid = (4, 5, 6)
    q, k, v = inputs(grid)
    want = scaled_dot_product_attention(q, k, v, attn_mask=oracle.natten_mask(grid, window))
    for offsets in (None, torch.zeros(1, 1, 120, 3, dtype=torch.float64)):
        y, _ = attend(q, k, v, offsets, grid, window)
        torch.testing.assert_close(y, want, rtol=0, atol=1e-13)


def test_a_window_as_large_as_the_grid_is_dense_for_any_offset() -> None:
    grid = (3, 4, 5)
    q, k, v = inputs(grid)
    want = scaled_dot_product_attention(q, k, v)
    for window in (grid, (7, 15, 15)):
        y, _ = attend(q, k, v, offsets_of(grid, size=5), grid, window)
        torch.testing.assert_close(y, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("window", WINDOWS)
def test_whole_offsets_are_a_moved_mask(window) -> None:
    grid = (4, 5, 6)
    q, k, v = inputs(grid, heads=1)
    moved = torch.randint(-3, 4, (120, 3))
    want = scaled_dot_product_attention(q, k, v, attn_mask=oracle.natten_mask(grid, window, moved))
    for offsets in (moved[None, None].double(), moved[None, None].int()):
        y, _ = attend(q, k, v, offsets, grid, window)
        torch.testing.assert_close(y, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("grid", "window"), [((4, 5, 6), (3, 3, 3)), ((1, 7, 5), (3, 4, 3)), ((5, 3, 4), (2, 3, 2))])
def test_lattice_equals_eight_corners_with_gradients(grid, window) -> None:
    q, k, v = inputs(grid)
    offsets = offsets_of(grid)
    leaves = [x.requires_grad_() for x in (q, k, v, offsets)]
    y, lse = attend(*leaves, grid, window)
    Y, L = oracle.shift(*leaves, grid, window)
    torch.testing.assert_close(y, Y, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, L, rtol=0, atol=1e-13)
    dy, dl = torch.randn_like(y), torch.randn_like(lse)
    got = torch.autograd.grad((y * dy).sum() + (lse * dl).sum(), leaves)
    want = torch.autograd.grad((Y * dy).sum() + (L * dl).sum(), leaves)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_the_gradient_is_zero_where_the_start_is_clamped_and_right_handed_at_whole_positions() -> None:
    grid, window = (4, 5, 6), (3, 3, 3)
    q, k, v = inputs(grid, heads=1)
    far = torch.full((1, 1, 120, 3), 100.0, dtype=torch.float64, requires_grad=True)
    y, _ = attend(q, k, v, far, grid, window)
    y.sum().backward()
    assert far.grad.count_nonzero() == 0
    zero = torch.zeros((1, 1, 120, 3), dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1, 1, 120, 6, dtype=torch.float64)
    (attend(q, k, v, zero, grid, window)[0] * weight).sum().backward()
    token = (1 * 5 + 2) * 6 + 2  # its window can move either way
    for axis in range(3):
        step = torch.zeros_like(zero)
        step[0, 0, token, axis] = 1e-6
        with torch.no_grad():
            right = (attend(q, k, v, zero + step, grid, window)[0] * weight).sum()
            here = (attend(q, k, v, zero, grid, window)[0] * weight).sum()
        assert abs((right - here) / 1e-6 - zero.grad[0, 0, token, axis]) < 1e-4


def test_affine_keys_and_values_are_sampled_exactly() -> None:
    grid, window = (5, 6, 7), (3, 3, 3)
    p = oracle.coordinates(grid).double()
    v = p[None, None] @ torch.randn(3, 4, dtype=torch.float64) + 1
    offsets = offsets_of(grid, heads=1)
    q = torch.zeros(1, 1, 210, 4, dtype=torch.float64)  # equal weights: the mean over taps
    y, _ = attend(q, torch.randn_like(q), v, offsets, grid, window)
    centre = oracle.starts(offsets, grid, window) + 1.0
    want = (v[0, 0, 1] - v[0, 0, 0]) * centre[..., 2:] + (v[0, 0, 7] - v[0, 0, 0]) * centre[..., 1:2] + (
        v[0, 0, 42] - v[0, 0, 0]) * centre[..., :1] + v[0, 0, 0]
    torch.testing.assert_close(y, want, rtol=0, atol=1e-12)


def test_constant_values_come_out_constant_and_the_transpose_is_one() -> None:
    grid, window = (3, 5, 4), (3, 3, 2)
    q, k, _ = inputs(grid)
    y, _ = attend(q, k, torch.ones_like(k) * 2.5, offsets_of(grid), grid, window)
    torch.testing.assert_close(y, torch.full_like(y, 2.5), rtol=0, atol=1e-13)
    f = torch.rand(7, 3, dtype=torch.float64)
    x, p = torch.randn(7, 4, 4, 3, dtype=torch.float64), torch.randn(7, *window, dtype=torch.float64)
    torch.testing.assert_close((reference.lerp(x, f) * p).sum(), (x * reference.lerp_transposed(p, f)).sum())


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_flipping_an_axis_flips_the_result(axis) -> None:
    grid, window = (4, 5, 6), (3, 3, 3)
    q, k, v = inputs(grid)
    offsets = offsets_of(grid)
    flip = lambda x: x.unflatten(2, grid).flip(2 + axis).flatten(2, 4)
    sign = torch.ones(3, dtype=torch.float64)
    sign[axis] = -1
    y, _ = attend(q, k, v, offsets, grid, window)
    z, _ = attend(flip(q), flip(k), flip(v), flip(offsets) * sign, grid, window)
    torch.testing.assert_close(flip(z), y, rtol=0, atol=1e-13)


def test_equal_offsets_per_tap_are_a_shift_inside_and_differ_at_borders() -> None:
    grid, window = (5, 7, 8), (3, 3, 3)
    q, k, v = inputs(grid)
    offsets = offsets_of(grid).clamp(-0.9, 0.9)
    taps = offsets[..., None, :].expand(1, 2, 280, 27, 3)
    y, _ = attend(q, k, v, offsets, grid, window)
    z, _ = attend(q, k, v, taps, grid, window, "border")
    p = oracle.coordinates(grid)
    inner = ((p >= 2) & (p < torch.tensor(grid) - 2)).all(-1)
    torch.testing.assert_close(z[:, :, inner], y[:, :, inner], rtol=0, atol=1e-13)
    assert (z - y)[:, :, ~inner].abs().max() > 1e-3
    w, _ = attend(q, k, v, offsets, grid, window, "border")
    torch.testing.assert_close(w, z, rtol=0, atol=1e-13)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("boundary", ["inside", "border"])
def test_per_tap_offsets_against_explicit_sampling(boundary, few, monkeypatch) -> None:
    """By vectors of the taps, and by scores with all tokens; in several chunks of queries."""
    monkeypatch.setattr(reference, "few_tokens", lambda *sizes: few)
    monkeypatch.setattr(reference, "CHUNK", 40_000)
    grid, window = (3, 4, 5), (3, 2, 3)
    q, k, v = inputs(grid)
    taps = torch.randn(1, 2, 60, 18, 3, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, taps)]
    p = oracle.coordinates(grid) - torch.tensor(window) // 2
    if boundary == "inside":
        p = torch.minimum(p.clamp(min=0), torch.tensor(grid) - torch.tensor(window))
    at = (p[:, None] + oracle.coordinates(window)).double() + taps
    at = torch.minimum(at.clamp(min=0), torch.tensor(grid).double() - 1)
    Y, L = oracle.naive(q, k, v, at, grid, 6**-0.5)
    y, lse = attend(q, k, v, taps, grid, window, boundary)
    torch.testing.assert_close(y, Y, rtol=0, atol=1e-13)
    dy, dl = torch.randn_like(y), torch.randn_like(lse)
    got = torch.autograd.grad((y * dy).sum() + (lse * dl).sum(), leaves)
    for a, b in zip(got, torch.autograd.grad((Y * dy).sum() + (L * dl).sum(), leaves)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["shift", "tap"])
def test_gradcheck(mode) -> None:
    grid, window = (2, 3, 4), (2, 2, 3)
    leaves = [x.requires_grad_() for x in inputs(grid, heads=1, D=2)]
    shape = (1, 1, 24, 3) if mode == "shift" else (1, 1, 24, 12, 3)
    offsets = (torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()  # off the whole positions
    assert torch.autograd.gradcheck(
        lambda *x: attend(*x, grid, window, "inside" if mode == "shift" else "border"), (*leaves, offsets))


def test_shared_heads_batches_and_groups() -> None:
    grid, window = (3, 4, 5), (3, 3, 3)
    q = torch.randn(2, 6, 60, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, 60, 4, dtype=torch.float64), torch.randn(2, 2, 60, 4, dtype=torch.float64)
    offsets = offsets_of(grid, heads=3, B=2)
    leaves = [x.requires_grad_() for x in (q, k, v, offsets)]
    y, _ = attend(*leaves, grid, window)
    Y, _ = oracle.shift(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), offsets.repeat_interleave(2, 1), grid, window)
    torch.testing.assert_close(y, Y, rtol=0, atol=1e-13)
    for a, b in zip(torch.autograd.grad(y.sin().sum(), leaves), torch.autograd.grad(Y.sin().sum(), leaves)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_offsets_that_are_not_finite() -> None:
    grid, window = (3, 4, 5), (3, 3, 3)
    q, k, v = inputs(grid)
    offsets = offsets_of(grid)
    odd = offsets.clone()
    odd[0, 0, 7, 0], odd[0, 1, 9, 1], odd[0, 1, 11, 2] = math.nan, math.inf, -math.inf
    same = offsets.clone()
    same[0, 0, 7, 0], same[0, 1, 9, 1], same[0, 1, 11, 2] = 0, 50, -50
    odd.requires_grad_()
    y, _ = attend(q, k, v, odd, grid, window)
    torch.testing.assert_close(y, attend(q, k, v, same, grid, window)[0], rtol=0, atol=0)
    y.sum().backward()
    assert odd.grad.isfinite().all()
    assert odd.grad[0, 0, 7, 0] == 0


def test_chunks_do_not_change_the_result(monkeypatch) -> None:
    grid, window = (3, 4, 5), (3, 3, 3)
    leaves = [x.requires_grad_() for x in (*inputs(grid), offsets_of(grid))]
    whole = torch.autograd.grad(attend(*leaves, grid, window)[0].sin().sum(), leaves)
    monkeypatch.setattr(reference, "CHUNK", 7000)
    parts = torch.autograd.grad(attend(*leaves, grid, window)[0].sin().sum(), leaves)
    for a, b in zip(whole, parts):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
