"""Bytes alive at each node of a graph, counted by hand."""

from __future__ import annotations

import torch
from launch_graphs import LaunchGraph

from graphopt.passes.live_bytes import LiveBytes

aten = torch.ops.aten
K = 4 * 64 * 64  # bytes of a square


def square(g: LaunchGraph, name: str):
    node = g.graph.placeholder(name)
    node.meta["val"] = torch.zeros(64, 64)
    return node


def test_matmuls_and_what_is_given() -> None:
    """Saved activations die with their last reader; what the forward was given lives on."""
    g = LaunchGraph("cpu")
    weight, saved = square(g, "primals_1"), square(g, "mm_3")
    a = g.call(aten.mm.default, saved, weight)
    view = g.call(aten.view.default, a, [4096])
    b = g.call(aten.mm.default, a, weight)
    c = g.call(aten.mm.default, b, g.call(aten.view.default, view, [64, 64]))
    g.graph.output((c,))
    live = LiveBytes(g.graph)
    at = dict(zip(live.nodes, live.alive))
    assert at[a] == 3 * K  # weight, saved, a
    assert at[b] == 3 * K  # weight, a, b
    assert at[c] == 4 * K  # weight, a through its view, b, c
    assert live.peak() == 4 * K
    assert live.peak_if([b], 2 * K, b, c) == 4 * K  # at b: weight, a, 2; at c: weight, a, c
    assert live.peak_if([], 2 * K, a, c) == 5 * K


def test_pointwise_values_in_registers() -> None:
    """A chain of pointwise ops stores its last value only, and keeps what it reads until then."""
    g = LaunchGraph("cpu")
    x = square(g, "mm_1")
    y = g.call(aten.mul.Tensor, g.call(aten.sin.default, x), x)
    z = g.call(aten.mm.default, y, y)
    total = g.call(aten.sum.default, g.call(aten.cos.default, z))
    g.graph.output((total,))
    live = LiveBytes(g.graph)
    at = dict(zip(live.nodes, live.alive))
    assert at[y] == 2 * K
    assert at[z] == 2 * K
    assert at[total] == K + 4


def test_a_symbolic_size_counts_as_it_was_traced() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    g = LaunchGraph("cpu")
    x = g.graph.placeholder("mm_1")
    x.meta["val"] = mode.from_tensor(torch.zeros(64, 64))
    assert not isinstance(x.meta["val"].shape[0], int)
    y = g.graph.call_function(aten.mm.default, (x, x))
    y.meta["val"] = x.meta["val"] @ x.meta["val"]
    g.graph.output((y,))
    assert LiveBytes(g.graph).peak() == 2 * K
