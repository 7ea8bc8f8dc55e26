"""The pass that leaves one spelling where there are several: `layer_norm(input=h)` becomes `layer_norm(h)`, and
in-place spellings are taken out where nobody can observe them, `h += y` becomes `h = h + y`.

    h = linear(x)                          h = linear(x)
    h.add_(y)                              h_1 = torch.add(h, y)
    z = layer_norm(h)                      z = layer_norm(h_1)

Rules then need no spelling of their own for it.  A write stays as it is when the tensor, or one that shares its memory,
is an input, a parameter or an output of the graph, or when a view made before the write is read after it.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx import Node

from graphopt import _compat
from graphopt.passes import ops_view
from graphopt.passes.facts import Facts, gather, storages_of
from graphopt.passes.pipeline import PassContext, nested
from graphopt.passes.record import PassRecord


class Canonicalize:
    """First operands stand in their place; in-place arithmetic takes its out-of-place form where none can tell."""

    name = "canonicalize"
    requires: frozenset[str] = frozenset()
    provides = frozenset({"canonical"})
    conflicts: frozenset[str] = frozenset()

    def run(self, gm: fx.GraphModule, context: PassContext) -> PassRecord:
        """See Pass."""
        graphs = nested(gm)
        record = PassRecord(self.name, sum(len(g.graph.nodes) for g in graphs))
        for g in graphs:
            if positional(g) + out_of_place(g):
                g.graph.lint()
                g.recompile()
        record.nodes_after = sum(len(g.graph.nodes) for g in graphs)
        return record


def positional(gm: fx.GraphModule) -> int:
    """Give the first operand of known functions by position in one graph; returns how often it was named."""
    done = 0
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.args or not ops_view.canonical(node):
            continue
        name = next((k for k in ("input", "self", "tensors", "tensor") if k in node.kwargs), None)
        if name is not None:
            node.args, node.kwargs = (node.kwargs[name],), {k: v for k, v in node.kwargs.items() if k != name}
            done += 1
    return done


def out_of_place(gm: fx.GraphModule) -> int:
    """Replace the unobservable in-place writes of one graph; returns how many."""
    graph = gm.graph
    writes = [n for n in graph.nodes if n.op in ("call_function", "call_method") and n.target in ops_view.IN_PLACE]
    if not writes:
        return 0
    facts = gather(gm)
    by_storage: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for storage in storages_of(node):
            by_storage.setdefault(storage, []).append(node)
    done = 0
    for write in writes:
        if _unobservable(write, facts, by_storage):
            last = _replace(graph, write, facts)
            for storage in storages_of(last):
                by_storage.setdefault(storage, []).append(last)
            done += 1
    return done


def _unobservable(write: Node, facts: Facts, by_storage: dict[int, list[Node]]) -> bool:
    target = write.args[0]
    v, result = ops_view.value(target), ops_view.value(write)
    if not isinstance(target, Node) or v is None or result is None or not v.is_floating_point():
        return False
    storages, order, now = storages_of(target), facts.index, facts.index[write]
    if len(storages) != 1 or facts.region[target] != facts.region[write]:  # under no_grad gradients pass the write by
        return False
    if not ops_view.same_size(v.untyped_storage().nbytes(), v.numel() * v.element_size()):
        return False  # a part of a tensor: the rest would have to be written back
    for alias in by_storage[next(iter(storages))]:
        if alias.op in ("placeholder", "get_attr"):
            return False
        if alias is not target and order.get(alias, now) < now and any(order.get(u, now) > now for u in alias.users):
            return False  # a view of the old tensor that shows the write
    return _values(write)[0].stride() == v.stride()


def _replace(graph: fx.Graph, write: Node, facts: Facts) -> Node:
    """The node that stands for the written tensor from here on.  In the facts new nodes take the place of the write."""
    target: Node = write.args[0]  # type: ignore[assignment]
    wide, kept = _values(write)
    with graph.inserting_before(write):
        new = graph.call_function(ops_view.IN_PLACE[write.target], write.args, dict(write.kwargs))  # type: ignore
        new.meta = {**write.meta, "example_value": wide}
        last = new
        if kept is not wide:  # an in-place result keeps the dtype
            last = graph.call_method("to", (new, kept.dtype))
        # the value of the write: what is derived from it later shares its (fake) storage
        last.meta = dict(write.meta)
    now = facts.index[write]
    for node in (new, last):
        facts.index[node], facts.region[node] = now, facts.region[write]
    for user in [u for u in target.users if facts.index[u] > now]:
        user.replace_input_with(target, last)
    write.replace_all_uses_with(last)
    graph.erase_node(write)
    return last


def _values(write: Node) -> tuple[torch.Tensor, torch.Tensor]:
    """What the out-of-place form yields: as computed, and in the dtype of the tensor written to."""
    args, kwargs = fx.node.map_arg((write.args, dict(write.kwargs)), lambda n: n.meta["example_value"])
    with _compat.fake_mode_of([args[0]]):
        wide = ops_view.IN_PLACE[write.target](*args, **kwargs)  # type: ignore[index]
        return wide, wide if wide.dtype == args[0].dtype else wide.to(args[0].dtype)
