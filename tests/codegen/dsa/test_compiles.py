"""One compile per window, head dimension and dtype, whatever the grid: counted from what Triton keys a kernel by."""

from __future__ import annotations

import math

import pytest
import torch

from graphopt.codegen.dsa import engines, head, head_launch

GRIDS = [(3, 5, 7), (4, 6, 8), (5, 16, 16), (9, 10, 11), (3, 64, 3), (16, 8, 32), (7, 7, 7), (13, 20, 36)]


@pytest.fixture
def launches(monkeypatch):
    """Kernel name -> the specialisations that its launches ask for; nothing runs, so no GPU is needed."""
    from triton.runtime.jit import JITFunction

    seen: dict[str, set] = {}

    def record(kernel, *args, grid, warmup, **options):
        values = dict(zip(kernel.arg_names, args), **{k: v for k, v in options.items() if k in kernel.arg_names})
        key = []
        for p in kernel.params:
            v = values[p.name]
            if p.is_constexpr:
                key.append(v)
            elif isinstance(v, torch.Tensor):
                key.append((v.dtype, v.data_ptr() % 16 == 0))
            elif isinstance(v, int):
                wide = -(2**31) <= v < 2**31
                key.append((wide, None if p.do_not_specialize else (v == 1, v % 16 == 0)))
            else:
                key.append(type(v))
        rest = {k: v for k, v in options.items() if k not in kernel.arg_names}
        seen.setdefault(kernel.__name__, set()).add((*key, *sorted(rest.items())))

    monkeypatch.setattr(JITFunction, "run", record)
    return seen


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("target", ["sm90", "gfx942"])
@pytest.mark.parametrize("kind", ["shift", "none", "whole"])
def test_one_compile_for_eight_grids(kind, target, layout, launches, monkeypatch) -> None:
    chosen = {"shift": "fused" if target == "sm90" else "lattice"}.get(kind, "window")
    monkeypatch.setattr(engines, "engine_of", lambda *_a: chosen)
    for grid in GRIDS:
        N, window = math.prod(grid), (3, 3, 3)
        shape = (1, 4, N, 64) if layout == "bhnd" else (1, N, 4, 64)
        q, k, v, dy = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(4))
        if layout == "bnhd":
            q, k, v, dy = (x.transpose(1, 2) for x in (q, k, v, dy))
        offsets = None if kind == "none" else torch.zeros(1, 4, N, 3)
        if offsets is not None and layout == "bnhd":  # as a linear layer makes them
            offsets = torch.zeros(1, N, 4, 3).transpose(1, 2)
        if kind == "whole":
            offsets = offsets.int()
        y, lse = engines.forward(q, k, v, offsets, grid, window, 0.1)
        engines.backward(dy, None, q, k, v, offsets, y, lse, grid, window, 0.1, kind == "shift")
    assert len(launches) >= {"fused": 7, "lattice": 7, "window": 4}[chosen]
    # a kernel used in two ways (spread, soften) has one form for each
    forms = {"spread": 2, "soften": 2} if chosen == "lattice" else {}
    for name, keys in launches.items():
        assert len(keys) == forms.get(name, 1), name


@pytest.mark.parametrize("engine", ["mma", "dot"])
def test_one_compile_of_the_offset_head_for_eight_grids(engine, launches, monkeypatch) -> None:
    monkeypatch.setattr(head_launch, "engine_of", lambda *_a: engine)
    for grid in GRIDS:
        x = torch.empty(1, math.prod(grid), 128, dtype=torch.bfloat16)
        rest = [torch.empty(s, dtype=torch.bfloat16) for s in ((128, 1, 3, 3, 3), (128,), (6, 128), (6,))]
        y, u = head.triton_forward(x, *rest, *grid)
        head.triton_backward(y, x, u, *rest[:3], *grid)
    assert set(launches) == {"head_convolve", "head_backward_input", "head_linear", "head_narrow", "head_slope", "head_add"}
    for name, keys in launches.items():
        assert len(keys) == 1, name


def test_the_count_sees_a_specialisation(launches) -> None:
    """A head dimension is a form of its own, so the recorder does tell launches apart."""
    for D in (64, 128):
        q = torch.empty(1, 1, 105, D, dtype=torch.bfloat16)
        engines.forward(q, q, q, None, (3, 5, 7), (3, 3, 3), 0.1)
    assert len(launches["window_forward"]) == 2
