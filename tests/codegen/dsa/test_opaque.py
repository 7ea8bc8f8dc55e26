"""Why the kernels' operator is a custom_op and not a triton_op, shown by what torch makes of its launches; no GPU needed."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from graphopt.codegen.dsa import kernels, lattice, spec

WINDOW = (2, 3, 3)


@pytest.fixture
def visible(monkeypatch):
    """Every launch of a backward goes through wrap_triton, for a GPU that only its description is there of."""
    import triton
    from triton.backends.compiler import GPUTarget

    gpu = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
    monkeypatch.setattr(triton.runtime.driver, "_active", gpu)
    wrap = torch.library.wrap_triton
    for name in ("row_sums", "tile_reach", "spread", "query_boxes", "gather"):
        monkeypatch.setattr(lattice, name, wrap(getattr(lattice, name)))
    module = kernels.fused(WINDOW, False, True)
    wrapped = SimpleNamespace(taps=wrap(module.taps), expand=wrap(module.expand))
    monkeypatch.setattr(kernels, "fused", lambda *_a: wrapped)


def launches(grid):
    """The names each launch of a traced backward would copy, because torch takes them for written."""
    N = math.prod(grid)
    with FakeTensorMode():
        q, k, v, dy = (torch.empty(1, 2, N, 64, dtype=torch.bfloat16) for _ in range(4))
        offsets, lse = torch.empty(1, 2, N, 3), torch.empty(1, 2, N)

        def call(dy, q, k, v, offsets, y, lse):
            return kernels.backward(dy, None, q, k, v, offsets, y, lse, grid, WINDOW, 0.1)[0]

        graph = make_fx(torch.func.functionalize(call))(dy, q, k, v, offsets, torch.empty_like(q), lse).graph
    nodes = [n for n in graph.nodes if "triton_kernel_wrapper" in str(n.target)]
    return [set(n.kwargs["tensors_to_clone"]) for n in nodes]


def test_inputs_of_the_tap_kernel_would_be_copied(visible) -> None:
    copied = launches((3, 4, 5))
    taps = [names for names in copied if "Q" in names]
    assert len(copied) == 7
    assert len(taps) == 1  # inline assembly is all that torch cannot read
    assert {"Q", "K", "V", "DY", "OFFSETS"} <= taps[0]
    outputs = {"DELTA", "REACH", "WORDS", "BASES", "OUT", "BOXES", "DK", "DV"}
    # torch 2.11 does not understand `spread` either, which reads X
    assert all(names <= outputs for names in copied if "Q" not in names and "X" not in names)


def test_a_larger_grid_would_be_another_graph(visible, monkeypatch) -> None:
    count = len(launches((3, 4, 5)))
    monkeypatch.setattr(spec, "SCRATCH_BYTES", 1)  # as a larger grid would: fewer heads at once
    assert len(launches((3, 4, 5))) > count
