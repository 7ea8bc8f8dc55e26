"""Schedules: legal by proof and on a fake clock with random times, for every ring, order of calls and update order."""

from __future__ import annotations

import random

import pytest
from torch import fx

from graphopt.errors import StreamError
from graphopt.passes import stream_check
from graphopt.passes import stream_graph as g
from graphopt.schedule import stream_sim

ORDERS = {
    "plain": [0, 1, 2, 3, 4, 5, 6], "even": list(range(8)), "reused": [0, 1, 1, 2, 0, 3], "reordered": [3, 1, 2, 0],
    "one": [0], "twice": [0, 0],
}
UPDATES = ("deferred", "priority", "in_backward")


def calls(order, frozen=(), no_backward=()):
    return [g.Call(f"blocks.{i}", i not in frozen, i not in no_backward) for i in order]


def nodes(graph, target):
    return [n for n in graph.nodes if n.target is target]


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("order", ORDERS)
def test_legal_whatever_things_take(order: str, slots: int, update: str) -> None:
    graph = g.build(calls(ORDERS[order], frozen=(2,)), slots, update, steps=3)
    stream_check.check(graph)
    rng = random.Random(f"{order}{slots}{update}")
    for _ in range(10):
        timeline = stream_sim.simulate(g.tasks(graph, lambda n: rng.choice((0.0, 0.1, 1.0, 7.0)), lambda n: 0))
        assert timeline.overlaps() == []
    computed = [(n.kwargs["step"], n.kwargs["phase"], n.kwargs["call"]) for n in nodes(graph, g.compute)]
    n = len(ORDERS[order])
    assert computed == [(s, p, c) for s in range(3) for p, c in [("forward", c) for c in range(n)] + [("backward", c) for c in reversed(range(n))]]
    updated = [(n.kwargs["step"], n.kwargs["layer"]) for n in nodes(graph, g.optimizer)]
    assert sorted(updated) == sorted({(s, f"blocks.{i}") for s in range(3) for i in ORDERS[order] if i != 2})


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 9])
def test_the_turn_keeps_what_fits(slots: int) -> None:
    n = 7
    graph = g.build(calls(range(n)), slots, steps=1)
    kept = min(slots, n)
    assert len(nodes(graph, g.prefetch)) == 2 * n - kept
    first, second = g.phases(graph)
    assert sum(x.target is g.prefetch for x in first + second) == 2 * n - kept


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("stay", [(0, 1), (3,), (6,), (0, 3, 6)])
def test_resident_layers_have_no_slot(stay, slots, update) -> None:
    order = [g.Call(f"blocks.{i}", resident=i in stay) for i in range(7)]
    graph = g.build(order, slots, update, steps=3)
    stream_check.check(graph)
    rng = random.Random(slots)
    for _ in range(10):
        assert stream_sim.simulate(g.tasks(graph, lambda n: rng.choice((0.0, 0.1, 1.0, 7.0)), lambda n: 0)).overlaps() == []
    names = {f"blocks.{i}" for i in stay}
    for target in (g.prefetch, g.wait, g.release, g.grad_offload, g.optimizer):
        assert not names & {n.kwargs["layer"] for n in nodes(graph, target)}
    assert [n.kwargs["layer"] for n in nodes(graph, g.update_resident)] == [f"blocks.{i}" for i in stay] * 3
    first, second = g.phases(graph)
    assert [n.kwargs["call"] for n in first if n.target is g.compute] == list(range(7))
    assert next(n.kwargs["call"] for n in second if n.target is g.compute) == 6


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_micro_batches_layer_by_layer(slots, update) -> None:
    order = [g.Call(f"blocks.{i}", i != 3, resident=i == 0, gathered=k > 0) for i in range(5) for k in range(3)]
    graph = g.build(order, slots, update, steps=2)
    stream_check.check(graph)
    rng = random.Random(slots)
    for _ in range(10):
        assert stream_sim.simulate(g.tasks(graph, lambda n: rng.choice((0.0, 0.1, 1.0, 7.0)), lambda n: 0)).overlaps() == []
    alone = g.build([g.Call(f"blocks.{i}", i != 3, resident=i == 0) for i in range(5)], slots, update, steps=2)
    for target in (g.prefetch, g.grad_offload, g.optimizer):
        assert [n.kwargs["layer"] for n in nodes(graph, target)] == [n.kwargs["layer"] for n in nodes(alone, target)]
    assert len(nodes(graph, g.compute)) == 3 * len(nodes(alone, g.compute))


def test_forward_only() -> None:
    graph = g.build(calls(range(4)), 2, train=False, steps=2)
    stream_check.check(graph)
    assert not nodes(graph, g.optimizer)
    assert not nodes(graph, g.stash)


def test_frozen_layers_send_nothing_down() -> None:
    graph = g.build(calls(range(4), frozen=(1, 3)), 2)
    assert [n.kwargs["layer"] for n in nodes(graph, g.grad_offload)] == ["blocks.2", "blocks.0"]


def test_deferred_updates_come_in_forward_order_after_all_gradients() -> None:
    graph = g.build(calls(range(4)), 2)
    updates = nodes(graph, g.optimizer)
    assert [n.kwargs["layer"] for n in updates] == [f"blocks.{i}" for i in range(4)]
    assert all(len(n.args) == 4 for n in updates)
    backward = g.build(calls(range(4)), 2, "in_backward")
    assert [n.kwargs["layer"] for n in nodes(backward, g.optimizer)] == [f"blocks.{i}" for i in (3, 2, 1, 0)]


def test_it_is_printed() -> None:
    text = g.describe(g.build(calls(range(3)), 2))
    assert "upload    prefetch" in text
    assert "cpu       optimizer" in text
    assert len(text.splitlines()) == len([n for n in g.build(calls(range(3)), 2).nodes if n.op == "call_function"])


def test_its_picture() -> None:
    graph = g.build(calls(range(2)), 2)
    dot = g.to_dot(graph)
    assert all(f'label="{s}"' in dot for s in ("upload", "compute", "download", "cpu"))
    assert dot.count(" -> ") == sum(len(n.all_input_nodes) for n in graph.nodes if n.op == "call_function")
    assert 'label="prefetch blocks.0\\nslot 0"' in dot


def broken(change):
    graph = g.build(calls(range(5)), 2, steps=2)
    change(graph)
    return graph


def drop(target, which):
    """Take one kind of edge out of every node of one kind."""
    def change(graph: fx.Graph) -> None:
        for n in nodes(graph, target):
            n.args = tuple(a for a in n.args if a.target is not which)
    return change


@pytest.mark.parametrize(("target", "edge"), [
    (g.prefetch, g.release), (g.wait, g.prefetch), (g.prefetch, g.optimizer), (g.compute, g.grad_offload),
    (g.grad_offload, g.compute), (g.optimizer, g.grad_offload),
])
def test_a_missing_wait_is_found(target, edge) -> None:
    """The check finds it by proof; the clock finds it for some times."""
    with pytest.raises(StreamError, match="not legal"):
        stream_check.check(broken(drop(target, edge)))
    seen = False
    for seed in range(40):
        rng = random.Random(seed)
        graph = broken(drop(target, edge))
        seen = seen or bool(stream_sim.simulate(g.tasks(graph, lambda n: rng.choice((0.01, 1.0, 30.0)), lambda n: 0)).overlaps())
    assert seen


def test_a_wrong_layer_in_a_slot_is_found() -> None:
    def change(graph):
        first, second = nodes(graph, g.prefetch)[:2]
        first.kwargs, second.kwargs = {**first.kwargs, "layer": second.kwargs["layer"]}, {**second.kwargs, "layer": first.kwargs["layer"]}

    with pytest.raises(StreamError, match="finds blocks"):
        stream_check.check(broken(change))
