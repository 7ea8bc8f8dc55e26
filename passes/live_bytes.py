"""How many bytes of tensors are alive at each node of a graph that Inductor lowers, and what moving some would do.

An estimate for comparing two forms of one graph: nodes run in order, a tensor lives from the node that makes it (an
`empty`: from the first that uses it) to the last that reads it, a kernel's result is the memory it was given, and
pointwise values that only pointwise ops and reductions read are never stored, as Inductor fuses them.  What the
forward was given (weights, tokens) has another owner and lives on; symbolic sizes count as they were traced.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from graphopt import _compat_triton
from graphopt.passes.freeing_order import VIEWS, nbytes

aten = torch.ops.aten
REDUCTIONS = {aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.amax.default}


class LiveBytes:
    """alive: bytes alive while each node runs, in the graph's order.  Raises nothing; a tensor without a size is 0."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.place = {n: i for i, n in enumerate(self.nodes)}
        self._memory: dict[fx.Node, fx.Node] = {}
        self._reads: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._first: dict[fx.Node, int] = {}
        self._last: dict[fx.Node, int] = {}
        for i, node in enumerate(self.nodes):
            for memory in self.reads(node):
                self._first.setdefault(memory, i)
                self._last[memory] = i
        change = [0] * (len(self.nodes) + 1)
        for node in self.nodes:
            start, end = self.span(node)
            size = self.size(node)
            change[start] += size
            change[end + 1] -= size
        self.alive: list[int] = []
        for step in change[:-1]:
            self.alive.append(step + (self.alive[-1] if self.alive else 0))

    def memory(self, node: fx.Node) -> fx.Node:
        """The node whose memory a view, or a result of a kernel, shows."""
        if node not in self._memory:
            at = node
            if node.op == "call_function" and node.target in VIEWS:
                at = self.memory(node.args[0])  # type: ignore[arg-type]
            elif node.target is operator.getitem and isinstance(node.args[0], fx.Node):
                call = _compat_triton.triton_call(node.args[0])
                given = None if call is None else call.arguments.get(str(node.args[1]))
                at = node if not isinstance(given, fx.Node) else self.memory(given)
            self._memory[node] = at
        return self._memory[node]

    def reads(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """What is in memory while a node runs because it reads it."""
        if node not in self._reads:
            found: dict[fx.Node, None] = {}
            for source in () if node.op == "call_function" and node.target in VIEWS else node.all_input_nodes:
                memory = self.memory(source)
                found |= dict.fromkeys(self.reads(memory) if fused(memory) else [memory])
            self._reads[node] = tuple(found)
        return self._reads[node]

    def size(self, node: fx.Node) -> int:
        """Bytes a node allocates."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or self.memory(node) is not node or fused(node):
            return 0
        return nbytes(node)

    def span(self, node: fx.Node) -> tuple[int, int]:
        """The places between which what a node allocates is alive."""
        place = self.place[node]
        if node.op == "placeholder" and node.name.startswith("primals"):
            return 0, len(self.nodes) - 1
        start = 0 if node.op == "placeholder" else place
        if node.target is aten.empty.memory_format:
            start = self._first.get(node, place)
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            start = self.place[node.args[0]]
        return start, max(self._last.get(node, place), start)

    def peak(self) -> int:
        """Most bytes alive at once."""
        return max(self.alive, default=0)

    def peak_if(self, gone: Iterable[fx.Node], size: int, start: fx.Node, end: fx.Node) -> int:
        """The peak between `start` and `end` without what `gone` allocate, and with `size` bytes more from `start` to
        just before `end`."""
        first, last = self.place[start], self.place[end]
        alive = self.alive[first:last + 1]
        for node in gone:
            a, b = self.span(node)
            for i in range(max(a, first), min(b, last) + 1):
                alive[i - first] -= self.size(node)
        return max(n + size * (first + i < last) for i, n in enumerate(alive))


def fused(node: fx.Node) -> bool:
    """Is a node's value one that Inductor keeps in registers?"""
    def inside(n: fx.Node) -> bool:
        return pointwise(n) or (n.op == "call_function" and n.target in REDUCTIONS)

    return pointwise(node) and bool(node.users) and all(inside(n) for n in node.users)


def pointwise(node: fx.Node) -> bool:
    """Does a node's op compute each element from those at its place?"""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())
