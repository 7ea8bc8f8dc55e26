"""The generated kernels against fp64: every output, grids that divide no tile, borders, rough offsets, shared heads.

Under the interpreter the sizes are small; on a GPU the same cases run with the kernels' own head dimensions.
"""

from __future__ import annotations

import math

import pytest
import torch

from graphopt.codegen.dsa import kernels, portable, reference, spec
from graphopt.codegen.dsa import window as whole

pytestmark = pytest.mark.kernel


def relative(a, b) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-20)).item()


def attend_and_check(device, grid, window, heads=1, kv=None, groups=None, B=1, D=16, size=1.5, dtype=None, layout="bhnd",
                     offsets=None, with_offsets=True, limits=(3e-3, 4e-3), module=kernels, twice=True):
    """Forward and backward of the kernels against the fp64 definition on the same rounded inputs."""
    on_gpu = device == "cuda"
    dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
    D = max(D, 64) if on_gpu else D
    N, kv, groups = math.prod(grid), kv or heads, groups or heads
    window = reference.effective_window(window, grid)

    def make(h):
        if layout == "bnhd":
            return torch.randn(B, N, h, D, device=device, dtype=dtype).transpose(1, 2)
        return torch.randn(B, h, N, D, device=device, dtype=dtype)

    q, k, v, dy = make(heads), make(kv), make(kv), make(heads)
    if layout == "bnhd":
        v = v.contiguous()  # another token stride than k's
    if offsets is None:
        offsets = torch.randn(B, groups, N, 3, device=device) * size
    dlse = torch.randn(B, heads, N, device=device)
    scale = D**-0.5
    y, lse = module.forward(q, k, v, offsets, grid, window, scale)
    wide = [x.double() for x in (q, k, v)]
    Y, L = reference.forward(*wide, offsets, grid, window, scale)
    assert relative(y, Y) <= limits[0]
    assert (lse - L).abs().max() < 1e-4
    grads = module.backward(dy, dlse, q, k, v, offsets, y, lse, grid, window, scale, with_offsets)
    again = grads
    if on_gpu or twice:
        again = module.backward(dy, dlse, q, k, v, offsets, y, lse, grid, window, scale, with_offsets)
    want = list(reference.backward(dy.double(), dlse.double(), *wide, offsets, Y, L, grid, window, scale))
    for name, a, b, c in zip(("dq", "dk", "dv", "doffsets"), grads, want, again):
        if a is None:
            assert not with_offsets
            continue
        assert torch.equal(a, c), f"{name} differs between two runs"
        if name == "doffsets":
            a = a.view(B, groups, heads // groups, N, 3).sum(2)
        assert relative(a, b) <= limits[1], name
    return y, grads


@pytest.fixture(autouse=True)
def _poison(monkeypatch) -> None:
    """Fresh buffers hold NaN or a word that is NaN twice: what is read must have been written."""
    real = torch.empty

    def empty(*args, **kwargs):
        x = real(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() else x.fill_(0x7FFF7FFF) if x.dtype == torch.int32 else x

    monkeypatch.setattr(torch, "empty", empty)
    like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **k: like(x, **k).fill_(float("nan")))


CASES = {
    "odd grid": {"grid": (3, 4, 5), "window": (3, 3, 3)},
    "one frame": {"grid": (1, 4, 5), "window": (3, 3, 3)},
    "even window, global axis": {"grid": (2, 5, 9), "window": (4, 2, 4)},
    "several passes in w": {"grid": (2, 3, 17), "window": (2, 2, 14), "size": 1.0},
    "several chunks in t": {"grid": (7, 2, 3), "window": (5, 2, 2)},
    "far offsets": {"grid": (2, 4, 5), "window": (2, 3, 3), "size": 6.0},
    "shared heads, groups, batch": {"grid": (2, 3, 4), "window": (2, 2, 3), "heads": 4, "kv": 2, "groups": 2, "B": 1},
    "heads behind tokens": {"grid": (2, 3, 4), "window": (2, 2, 3), "B": 2, "layout": "bnhd"},
    "head dimension 12": {"grid": (2, 3, 5), "window": (2, 2, 3), "D": 12},
    "no gradient for offsets": {"grid": (2, 3, 5), "window": (2, 2, 3), "with_offsets": False},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_fp64(case, device) -> None:
    attend_and_check(device, **case, twice=case["grid"] == (3, 4, 5))


@pytest.mark.parametrize("case", ["odd grid", "shared heads, groups, batch"])
def test_portable_engine_against_fp64(case, device) -> None:
    attend_and_check(device, **CASES[case], module=portable, twice=False, limits=(4e-3, 5e-3))


WHOLE = {
    "odd grid": {"grid": (3, 5, 7), "window": (3, 3, 3)},
    "even window, batch, shared heads": {"grid": (2, 5, 6), "window": (4, 2, 4), "heads": 4, "kv": 2, "B": 2, "D": 12},
    "long in w": {"grid": (1, 4, 19), "window": (1, 3, 5)},
    "moved": {"grid": (3, 4, 6), "window": (2, 3, 3), "heads": 2, "moved": True},
    "one token": {"grid": (1, 1, 1), "window": (3, 3, 3)},
}


@pytest.mark.parametrize("case", WHOLE.values(), ids=WHOLE.keys())
def test_window_engine_against_fp64(case, device) -> None:
    case = {"heads": 1, "kv": None, "B": 1, "D": 16, "moved": False, **case}
    grid, heads, B, on_gpu = case["grid"], case["heads"], case["B"], device == "cuda"
    window, N, kv = reference.effective_window(case["window"], grid), math.prod(grid), case["kv"] or heads
    make = lambda h: torch.randn(B, h, N, 64 if on_gpu else case["D"], device=device,
                                 dtype=torch.bfloat16 if on_gpu else torch.float32)
    q, k, v, dy, dlse = make(heads), make(kv), make(kv), make(heads), torch.randn(B, heads, N, device=device)
    offsets = torch.randint(-4, 5, (B, 1, N, 3), device=device) if case["moved"] else None
    y, lse = whole.forward(q, k, v, offsets, grid, window, 0.3)
    wide = [t.double() for t in (q, k, v)]
    zero = torch.zeros(B, 1, N, 3, device=device, dtype=torch.float64)
    place = zero if offsets is None else offsets.double()
    Y, L = reference.forward(*wide, place, grid, window, 0.3)
    limit = 4e-3 if on_gpu else 1e-5
    assert relative(y, Y) < limit
    assert (lse - L).abs().max() < 1e-4
    got = whole.backward(dy, dlse, q, k, v, offsets, y, lse, grid, window, 0.3)
    want = reference.backward(dy.double(), dlse.double(), *wide, place, Y, L, grid, window, 0.3)
    for name, a, b in zip(("dq", "dk", "dv"), got, want):
        assert relative(a, b) < limit or b.norm() < 1e-9, name


@pytest.mark.parametrize("size", [1.0, 400.0])
def test_scores_far_from_the_fixed_reference(device, size) -> None:
    grid, window, N = (2, 4, 5), (2, 3, 3), 40
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 1, N, 64, device=device, dtype=dtype) for _ in range(3))
    q = q * size
    offsets = torch.randn(1, 1, N, 3, device=device)
    fast, slow = (kernels.forward(q, k, v, offsets, grid, window, 0.1, fixed=f) for f in (True, False))
    want, lse = reference.forward(q.double(), k.double(), v.double(), offsets, grid, window, 0.1)
    for y, got in (fast, slow):
        assert relative(y, want) < 4e-3
        assert ((got - lse) / lse.abs().clamp(min=1)).abs().max() < 1e-5


def test_zero_offsets_at_borders(device) -> None:
    grid = (3, 4, 5)
    attend_and_check(device, grid, (3, 3, 3), offsets=torch.zeros(1, 1, 60, 3, device=device))


def test_fp16(device) -> None:
    attend_and_check(device, (2, 3, 5), (2, 3, 3), dtype=torch.float16 if device == "cuda" else torch.float32)


def test_offsets_that_are_not_finite(device) -> None:
    offsets = torch.randn(1, 1, 30, 3, device=device)
    offsets[0, 0, 3, 0], offsets[0, 0, 4, 1], offsets[0, 0, 5, 2] = float("nan"), float("inf"), float("-inf")
    _, grads = attend_and_check(device, (2, 3, 5), (2, 2, 3), offsets=offsets)
    assert grads[3][0, 0, 3, 0] == 0
    assert grads[3][0, 0, 4, 1] == 0


def test_a_key_tile_that_no_query_reaches_has_an_empty_box(device) -> None:
    grid, window = (1, 8, 9), (1, 2, 2)
    offsets = torch.full((1, 1, 72, 3), -50.0, device=device)  # all look at the first corner
    _, grads = attend_and_check(device, grid, window, offsets=offsets, twice=False)
    dk = grads[1].view(8, 9, -1)
    assert dk[3:].count_nonzero() == 0
    assert dk[:2, :2].count_nonzero() > 0


def test_chunks_of_heads_do_not_change_gradients(device, monkeypatch) -> None:
    a = attend_and_check(device, (2, 3, 3), (2, 2, 2), heads=2, twice=False)
    monkeypatch.setattr(spec, "SCRATCH_BYTES", 1)
    torch.manual_seed(0)  # as the fixture did
    b = attend_and_check(device, (2, 3, 3), (2, 2, 2), heads=2, twice=False)
    for x, y in zip(a[1], b[1]):
        assert torch.equal(x, y)


def test_axes_beyond_the_packed_coordinates(device, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "PACKED_AXIS", 3)
    attend_and_check(device, (2, 4, 4), (2, 2, 3), twice=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "D"), [((3, 7, 7), 64), ((3, 3, 3), 96), ((5, 9, 9), 128), ((7, 15, 15), 128), ((3, 8, 6), 96)])
@pytest.mark.parametrize("module", [kernels, portable], ids=["fused", "portable"])
def test_every_window_and_head_dimension(window, D, module) -> None:
    limits = (3e-3, 4e-3) if module is kernels else (4e-3, 5e-3)
    attend_and_check("cuda", (9, 17, 19), window, heads=2, D=D, size=2.0, module=module, limits=limits)


def forms(*kernels_) -> dict[str, int]:
    """How many compiled forms each kernel has in this process."""
    return {k.__name__: sum(len(cache[0]) for cache in k.device_caches.values()) for k in kernels_}


@pytest.mark.gpu
def test_one_compile_for_all_grids() -> None:
    from graphopt.codegen.dsa import head, head_kernels, head_launch, lattice, window_kernels

    module = kernels.fused((3, 3, 3), False, True)
    own = (module.forward_fixed, module.taps, module.expand)
    shared = (lattice.row_sums, lattice.tile_reach, lattice.spread, lattice.query_boxes, lattice.gather,
              window_kernels.window_forward, window_kernels.window_backward_query, window_kernels.window_backward_key,
              head_kernels.head_narrow, head_kernels.head_add)
    of_head = (head_launch._walks("head_convolve", head_launch.FORWARD.strip), head_kernels.head_linear,
               head_launch._walks("head_backward_input", head_launch.BACKWARD.strip),
               head_launch._products("head_slope", 9))
    first: dict[str, int] = {}
    for grid in ((3, 5, 7), (4, 6, 8), (5, 16, 16), (9, 10, 11), (3, 64, 3), (16, 8, 32), (7, 7, 7), (13, 20, 36)):
        attend_and_check("cuda", grid, (3, 3, 3), heads=2, D=128)
        q = torch.randn(1, 2, math.prod(grid), 128, device="cuda", dtype=torch.bfloat16)
        y, lse = whole.forward(q, q, q, None, grid, (3, 3, 3), 0.1)
        whole.backward(q, None, q, q, q, None, y, lse, grid, (3, 3, 3), 0.1)
        make = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
        leaves = [t.requires_grad_() for t in (make(1, math.prod(grid), 64), make(64, 1, 3, 3, 3), make(64), make(9, 64), make(9))]
        head.offset_head(*leaves, grid).sum().backward()
        now = forms(*own, *shared, *of_head)
        first = first or now
        assert now == first, grid
    assert all(n > 0 for n in first.values())
