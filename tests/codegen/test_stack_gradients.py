"""Per-token gradients written where they are stacked: which ones, and the same values bit by bit (interpreter or GPU)."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from launch_graphs import LaunchGraph, launches
from torch import fx

from graphopt import _compat_triton
from graphopt.codegen import kernels
from graphopt.passes import stack_gradients

pytestmark = pytest.mark.kernel
aten = torch.ops.aten


class Builder(LaunchGraph):
    """A graph of backward kernels of F1 with factors per token."""

    def backward(self, B: int, N: int, D: int, dtype: torch.dtype = torch.float32) -> dict[str, fx.Node]:
        """DX, DSCALE and DSHIFT of F1, [B, N, D]."""
        new = lambda kind: torch.randn(B, N, D, device=self.device).to(kind)
        dy, x, scale, shift = new(torch.bfloat16), new(torch.bfloat16), new(dtype), new(dtype)
        statistics = {"mean": torch.randn(B * N, device=self.device), "rstd": torch.rand(B * N, device=self.device)}
        spec, plan, given = kernels.prepare_backward(
            None, [dy], x, *([None] * 7), [scale, shift], "scale+shift", "layer_norm", 1.0, "none", "identity", x.dtype)
        kernel, config = kernels.kernel_of(spec)
        P = max(1, min(3, -(-plan.N // 4)))
        arguments: dict[str, Any] = {t.upper(): self.tensor(given[t]) for t in (*spec.rows_in, *spec.factors)}
        for t in spec.rows_out:
            arguments[t.upper()] = self.call(aten.empty.memory_format, [B, N, D], dtype=spec.dtype(t),
                                             device=torch.device(self.device), pin_memory=False)
        arguments |= {t.upper(): self.tensor(statistics[t]) for t in spec.statistics}
        numbers = dict(zip((f"{t}_{i}" for t, i in spec.stride_arguments), kernels._strides(spec, plan)))
        written = [t.upper() for t in spec.rows_out]
        return self.launch(kernel, config.warps, plan.G * P, {**arguments, "N": plan.N, "P": P, **numbers}, written)

    def done(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        return fx.GraphModule(self.root, self.graph)


def same(gm: fx.GraphModule, count: int) -> None:
    """Stacks `count` times, and computes the same as before, bit by bit."""
    before = [t.clone() for t in gm()]
    assert stack_gradients.fold(gm.graph) == count
    gm.graph.lint()
    gm.recompile()
    for old, new in zip(before, gm(), strict=True):
        assert old.shape == new.shape
        assert old.is_contiguous() == new.is_contiguous()
        assert torch.equal(old, new)


@pytest.mark.parametrize("how", ["stacked", "joined"])
@pytest.mark.parametrize("D,dtype", [(96, torch.float32), (256, torch.bfloat16)])
def test_one_kernel(device: str, how: str, D: int, dtype: torch.dtype) -> None:
    b = Builder(device)
    made = b.backward(2, 5, D, dtype)
    pieces = [made["DSHIFT"], made["DSCALE"]]
    if how == "stacked":
        pieces = [b.call(aten.unsqueeze.default, p, 2) for p in pieces]
    gm = b.done(made["DX"], b.call(aten.cat.default, pieces, 2))
    same(gm, 1)
    assert launches(gm) == ["norm_modulate_backward_stacked"]
    assert not [n for n in gm.graph.nodes if n.target in (aten.cat.default, aten.unsqueeze.default)]


def test_kernels_that_share_a_stack(device: str) -> None:
    b = Builder(device)
    first, second = b.backward(1, 6, 64), b.backward(1, 6, 64)
    pieces = [b.call(aten.unsqueeze.default, m[n], 2) for m, n in (
        (second, "DSCALE"), (first, "DSHIFT"), (first, "DSCALE"), (second, "DSHIFT"))]
    stack = b.call(aten.cat.default, pieces, 2)
    gm = b.done(first["DX"], second["DX"], b.call(aten.sum.dim_IntList, stack, [0, 1]), stack)
    same(gm, 1)
    assert launches(gm) == ["norm_modulate_backward_stacked"] * 2


@pytest.mark.parametrize("why", ["read elsewhere", "no result of a kernel", "another dimension", "twice"])
def test_left_alone(device: str, why: str) -> None:
    b = Builder(device)
    made = b.backward(1, 4, 64)
    pieces = [made["DSCALE"], made["DSHIFT"]]
    more = [made["DX"]]
    if why == "read elsewhere":
        more.append(b.call(aten.sum.default, made["DSCALE"]))
    if why == "no result of a kernel":
        pieces[1] = b.call(aten.neg.default, pieces[1])
    if why == "twice":
        pieces[1] = pieces[0]
    dim = 1 if why == "another dimension" else 2
    gm = b.done(*more, b.call(aten.cat.default, [b.call(aten.unsqueeze.default, p, 2) for p in pieces], dim))
    same(gm, 0)
    assert launches(gm) == ["norm_modulate_backward"]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_left_alone_where_the_peak_would_rise(device: str, elsewhere: bool) -> None:
    """What dies between two kernels: a tensor as large as the stack, whose end makes room for it, or not (the peak is
    elsewhere then, and the stack may be there early)."""
    b = Builder(device)
    big = b.call(aten.mm.default, b.tensor(torch.zeros(96, 1)), b.tensor(torch.zeros(1, 64)))
    first = b.backward(1, 6, 64)
    used = b.call(aten.mm.default, b.tensor(torch.zeros(1, 96)), big)
    second = b.backward(1, 6, 64)
    pieces = [b.call(aten.unsqueeze.default, m[n], 2) for m, n in (
        (first, "DSHIFT"), (first, "DSCALE"), (second, "DSHIFT"), (second, "DSCALE"))]
    more = []
    if elsewhere:
        huge = b.call(aten.mm.default, b.tensor(torch.zeros(400, 1)), b.tensor(torch.zeros(1, 64)))
        more = [b.call(aten.mm.default, b.tensor(torch.zeros(1, 400)), huge)]
    stack = b.call(aten.cat.default, pieces, 2)
    sums = b.call(aten.mm.default, b.tensor(torch.zeros(1, 6)), b.call(aten.view.default, stack, [6, 256]))
    same(b.done(first["DX"], second["DX"], used, sums, *more), int(elsewhere))


def test_every_stage_of_a_stack_has_memory_of_its_own(device: str) -> None:
    """Inductor lets a kernel write in place where nothing that shares the argument's memory is read later: had the stages
    one value in common, it would clone the stack from the second kernel on (seen on an H200)."""
    b = Builder(device)
    made = [b.backward(1, 6, 64) for _ in range(3)]
    pieces = [b.call(aten.unsqueeze.default, m[n], 2) for m in made for n in ("DSHIFT", "DSCALE")]
    gm = b.done(*(m["DX"] for m in made), b.call(aten.cat.default, pieces, 2))
    assert stack_gradients.fold(gm.graph) == 1
    stages = [n for n in gm.graph.nodes if n.target is operator.getitem and n.args[1] == stack_gradients.STACK]
    first = next(c.arguments["STACK"] for n in gm.graph.nodes if (c := _compat_triton.triton_call(n)) is not None)
    assert len(stages) == 3
    assert len({n.meta["val"].untyped_storage().data_ptr() for n in (first, *stages)}) == 4


def test_text_that_does_not_say_where_it_stores() -> None:
    text = "@triton.jit\ndef k(DSCALE, X):\n    tl.store(DSCALE + place, x)\n"
    assert stack_gradients.emit(text, "k", (("DSCALE", 0),), 2, 64) is None
    both = "@triton.jit\ndef k(DSCALE, X, DSHIFT):\n    tl.store(DSHIFT + row * 64 + c_0, x)\n    tl.store(DSCALE + row[:, None] * 64 + c_0, x)\n"
    found = stack_gradients.emit(both, "k", (("DSCALE", 1), ("DSHIFT", 0)), 2, 64)
    assert found is not None
    assert "def k_stacked(STACK, X):" in found
    assert "tl.store(STACK + row * 128 + 0 + c_0, x)" in found
    assert "tl.store(STACK + row[:, None] * 128 + 64 + c_0, x)" in found
