"""A proof that a schedule is legal, whatever its copies and kernels take.

Every node reads and writes resources: slots, slabs, stashes, a layer's weights and gradients in host memory.  Two
accesses of one resource, at least one a write, must be ordered by the streams and the waits; every read must find what
it expects: a slot the layer it names, in the version of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.fx import Node

from graphopt.errors import StreamError
from graphopt.passes import stream_graph as g


def accesses(node: Node) -> tuple[list[Any], list[Any]]:
    """What a node reads and what it writes."""
    k: Any = node.kwargs
    if node.target is g.prefetch:
        return [("weights", k["layer"])], [("slot", k["slot"])]
    if node.target is g.compute:
        reads: list[Any] = [("weights", k["layer"]) if k["slot"] is None else ("slot", k["slot"])]
        writes: list[Any] = []
        if k["phase"] == "backward":
            reads.append(("stash", k["call"]))
            if k["slab"] is not None:
                writes.append(("slab", k["slab"]))
            elif k["slot"] is None:
                writes.append(("gradient", k["layer"], k["call"]))
        return reads, writes
    if node.target is g.stash:
        return [], [("stash", k["call"])]
    if node.target is g.grad_offload:
        return [("slab", k["slab"])], [("gradient", k["layer"], k["call"])]
    if node.target is g.optimizer:
        offloads = [("gradient", a.kwargs["layer"], a.kwargs["call"]) for a in node.all_input_nodes
                    if a.target is g.grad_offload and a.kwargs["layer"] == k["layer"]]
        return offloads, [("weights", k["layer"])]
    if node.target is g.update_resident:
        return [("gradient", k["layer"], a.kwargs["call"]) for a in node.all_input_nodes], [("weights", k["layer"])]
    return [], []


def check(graph: fx.Graph) -> None:
    """Raise StreamError at the first access that is not ordered, or reads what it should not."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    before = _ancestors(nodes)
    index = {n: i for i, n in enumerate(nodes)}
    writer: dict[Any, Node] = {}
    readers: dict[Any, list[Node]] = {}
    for node in nodes:
        reads, writes = accesses(node)
        for resource in reads:
            last = writer.get(resource)
            if last is None and resource[0] != "weights":
                _fail(node, f"reads {resource}, which nothing has written")
            if last is not None:
                _ordered(last, node, resource, before, index)
            readers.setdefault(resource, []).append(node)
        if node.target is g.compute and node.kwargs["slot"] is not None:
            _holds(node, writer[("slot", node.kwargs["slot"])], writer, index)
        for resource in writes:
            for other in (*readers.get(resource, ()), *([writer[resource]] if resource in writer else ())):
                if other is not node:
                    _ordered(other, node, resource, before, index)
            writer[resource], readers[resource] = node, []


def _holds(node: Node, filled: Node, writer: dict[Any, Node], index: dict[Node, int]) -> None:
    if filled.kwargs["layer"] != node.kwargs["layer"]:
        _fail(node, f"finds {filled.kwargs['layer']} in slot {node.kwargs['slot']}")
    update = writer.get(("weights", node.kwargs["layer"]))
    if update is not None and index[update] > index[filled]:
        _fail(node, f"finds weights in slot {node.kwargs['slot']} from before {update.name}")


def _ordered(first: Node, second: Node, resource: Any, before: list[int], index: dict[Node, int]) -> None:
    if not before[index[second]] >> index[first] & 1:
        _fail(second, f"is not ordered after {first.name}, and both use {resource}")


def _fail(node: Node, what: str) -> None:
    raise StreamError(f"the schedule is not legal: {node.name} {what}", where=str(dict(node.kwargs)),
                      remedy="this is an error of graphopt: please report it with print(report)")


def _ancestors(nodes: list[Node]) -> list[int]:
    """For each node the set of nodes that are over before it starts, as bits."""
    index = {n: i for i, n in enumerate(nodes)}
    before: list[int] = []
    last: dict[str, int] = {}
    for i, node in enumerate(nodes):
        mask = 0
        for a in _waits(node, index, last):
            mask |= before[a] | 1 << a
        before.append(mask)
        stream = g.STREAM[node.target]
        if stream != "cpu":  # the pool takes jobs in any order
            last[stream] = i
    return before


def _waits(node: Node, index: dict[Node, int], last: dict[str, int]) -> Iterator[int]:
    yield from (index[a] for a in node.all_input_nodes if a in index)
    stream = g.STREAM[node.target]
    if stream in last:
        yield last[stream]
