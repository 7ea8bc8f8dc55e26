"""What a rewrite must know about a graph beyond the pattern: order, regions, in-place writes, what depends on what.

Computed once per graph, in one pass over its nodes.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx import Node

from graphopt import _compat, _compat_tensors
from graphopt.passes import ops_view

_INPLACE_FUNCTIONS = {
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul", "setitem",
    "ilshift", "irshift", "delitem",
}
# what makes a dense result of its own, whatever the strides of its operands
_OWN_LAYOUT = {F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, operator.matmul}
_OWN_LAYOUT_METHODS = {"contiguous", "matmul", "mm", "bmm", "addmm", "baddbmm"}
# what reads the strides of its operand
_READS_STRIDES = {"view", "view_as", "as_strided", "stride", "is_contiguous"}
# transforms of torch.func that Dynamo traces into the graph, by the call that opens them
_TRANSFORMS = {
    "_grad_increment_nesting": "torch.func.grad",
    "_jvp_increment_nesting": "torch.func.jvp",
    "_enter_dual_level": "forward-mode AD",
    "_vmap_increment_nesting": "torch.func.vmap",
}


@dataclass
class Write:
    """One in-place write: its place in the order and the storages it may change (None: any)."""

    index: int
    node: Node
    storages: frozenset[int] | None


@dataclass
class Facts:
    """Order, regions, writes and dependence of one graph."""

    graph: fx.Graph
    index: dict[Node, int] = field(default_factory=dict)
    region: dict[Node, tuple[Any, ...]] = field(default_factory=dict)
    static: dict[Node, bool] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)

    def depends(self, node: object, on: Node) -> bool:
        """Do values of `on` reach `node` (or is it the same)?  Looks no further back than `on` stands in the order.

        A size or a dtype taken from `on` is no value of it: `embedding.type_as(x)` does not depend on x.
        """
        if not isinstance(node, Node):
            return False
        if node is on:
            return True
        first, seen, todo = self.index[on], {node}, [node]
        while todo:
            for up in values_read(todo.pop()):
                if up is on:
                    return True
                if self.index[up] > first and up not in seen:
                    seen.add(up)
                    todo.append(up)
        return False

    @cached_property
    def live(self) -> frozenset[Node]:
        """The nodes whose values something reads in the end: a result of the graph, a write, what returns no tensor."""
        return self._behind_what_is_read(lambda node: node.all_input_nodes)

    @cached_property
    def _differentiated(self) -> frozenset[Node]:
        """As `live`, but not back through what cuts gradients off (detach, no_grad, a size)."""

        def inputs(node: Node) -> list[Node]:
            v = ops_view.value(node)
            return values_read(node) if v is None or v.requires_grad else []

        return self._behind_what_is_read(inputs)

    def _behind_what_is_read(self, inputs: Callable[[Node], list[Node]]) -> frozenset[Node]:
        writes = {w.node for w in self.writes}
        todo = [n for n in self.graph.nodes if n in writes or n.op == "output" or not _is_value(n)]
        seen: set[Node] = set()
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += inputs(node)
        return frozenset(seen)

    def gets_gradient(self, node: Node) -> bool:
        """May a gradient arrive at a node?"""
        v = ops_view.value(node)
        return v is not None and v.requires_grad and node in self._differentiated

    @cached_property
    def strides_seen(self) -> frozenset[Node]:
        """The nodes whose order in memory something outside sees: the graph's results, and what reads strides.

        An element-wise op passes the order of its operand on, a linear layer does not.
        """
        todo: list[Node] = []
        for node in self.graph.nodes:
            name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
            if node.op == "output" or name in _READS_STRIDES:
                todo += node.all_input_nodes
        seen: set[Node] = set()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            own = _OWN_LAYOUT_METHODS if node.op == "call_method" else _OWN_LAYOUT
            if node.target not in own:
                todo += node.all_input_nodes
        return frozenset(seen)

    def transform(self, node: Node) -> str | None:
        """The innermost transform of torch.func a node runs under, such as "torch.func.grad"."""
        opened = (entry[0] for entry in reversed(self.region[node]) if isinstance(entry, tuple))
        return next((_TRANSFORMS[name] for name in opened if name in _TRANSFORMS), None)

    def write_between(self, first: int, last: int, inputs: list[Node]) -> Node | None:
        """The first in-place write in [first, last] that may change one of the tensors, or None."""
        start = bisect_left(self.writes, first, key=lambda w: w.index)
        storages: set[int] | None = None
        for write in self.writes[start:]:
            if write.index > last:
                break
            if storages is None:
                storages = set().union(*(storages_of(n) for n in inputs))
            if write.storages is None or write.storages & storages:
                return write.node
        return None

    def written_after(self, last: int, nodes: list[Node]) -> Node | None:
        """The first in-place write after `last` that is known to change one of the tensors, or None."""
        start = bisect_left(self.writes, last + 1, key=lambda w: w.index)
        late = [w for w in self.writes[start:] if w.storages]
        storages = frozenset().union(*(storages_of(n) for n in nodes)) if late else frozenset()
        return next((w.node for w in late if w.storages and w.storages & storages), None)


def values_read(node: Node) -> list[Node]:
    """The inputs whose values a node reads, as far as its kind tells."""
    if node.op == "call_method" and node.target in ops_view.LIKE:
        return [node.args[0]]  # type: ignore[list-item]
    v = node.meta.get("example_value")
    if isinstance(v, (int, torch.SymInt, torch.Size)) and not isinstance(v, bool):
        return []
    return node.all_input_nodes


def _is_value(node: Node) -> bool:
    """Does a node do nothing but compute tensors or sizes?"""
    if isinstance(node.target, _compat.HigherOrderOperator):
        return False
    v = node.meta.get("example_value", node.meta.get("val"))
    parts = v if isinstance(v, (tuple, list)) else (v,)
    return all(isinstance(t, (torch.Tensor, int, float, torch.SymInt, torch.SymFloat)) for t in parts)


def storages_of(node: object) -> frozenset[int]:
    """Identities of the storages behind a node's tensors; fake tensors share them exactly as real ones do."""
    if not isinstance(node, Node):
        return frozenset()
    v = node.meta.get("example_value", node.meta.get("val"))
    tensors = v if isinstance(v, (tuple, list)) else (v,)
    return frozenset(t.untyped_storage()._cdata for t in tensors if isinstance(t, torch.Tensor) and _has_storage(t))


def _has_storage(t: torch.Tensor) -> bool:
    return t.layout == torch.strided and not _compat_tensors.is_wrapped(t)


def written(node: Node, gm: fx.GraphModule) -> list[object] | None:
    """The operands a node writes in place; [] when it writes none."""
    if node.op == "call_method":
        name = str(node.target)
        if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__":
            return [node.args[0]]
    elif node.op == "call_function":
        target: Any = node.target
        name = getattr(target, "__name__", "")
        if isinstance(target, _compat.OpOverload):
            if not target._schema.is_mutable:
                return []
            given = dict(zip((s.name for s in target._schema.arguments), node.args)) | node.kwargs
            return [
                given[s.name] for s in target._schema.arguments
                if s.name in given and s.alias_info and s.alias_info.is_write
            ]
        if name in _INPLACE_FUNCTIONS or (name.endswith("_") and not name.endswith("__")):
            return [node.args[0]]
        if node.kwargs.get("out") is not None:
            return [node.kwargs["out"]]
        if node.kwargs.get("inplace") is True:
            return [node.args[0] if node.args else node.kwargs.get("input")]
        if isinstance(target, _compat.HigherOrderOperator):
            bodies = [getattr(gm, str(a.target), None) for a in node.all_input_nodes if a.op == "get_attr"]
            if any(isinstance(b, fx.GraphModule) and any(written(n, b) for n in b.graph.nodes) for b in bodies):
                return list(node.all_input_nodes)
    return []


def gather(gm: fx.GraphModule) -> Facts:
    """All facts of one graph (not of the graphs nested in it)."""
    facts = Facts(gm.graph)
    open_regions: list[tuple[str, str]] = []
    grad_mode: str = "outer"
    for i, node in enumerate(gm.graph.nodes):
        facts.index[node] = i
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name.startswith("_enter_") or name in _TRANSFORMS:
            open_regions.append((name, node.name))
        facts.region[node] = (*open_regions, grad_mode)
        if name.startswith("_exit_") or name.endswith("_decrement_nesting"):
            if open_regions:
                open_regions.pop()
        elif name == "_set_grad_enabled" or "inference_mode" in name:
            grad_mode = f"{name}{node.args}"
        if node.op == "placeholder":
            v = node.meta.get("example_value")
            facts.static[node] = isinstance(v, torch.nn.Parameter) or is_state(node)
        elif node.op == "get_attr":
            facts.static[node] = True
        else:
            inputs = node.all_input_nodes
            facts.static[node] = bool(inputs) and all(facts.static[n] for n in inputs)
        targets = written(node, gm)
        if targets:
            storages = frozenset().union(*(storages_of(t) for t in targets))
            facts.writes.append(Write(i, node, storages or None))
    return facts


def is_state(node: Node) -> bool:
    """Is a placeholder a parameter or a buffer of the model?"""
    return "_parameters_" in node.name or "_buffers_" in node.name
