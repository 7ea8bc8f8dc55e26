"""The one place that changes a graph: operator calls in, matched nodes out."""

from __future__ import annotations

import operator as op
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from graphopt import _compat
from graphopt.codegen.form import OPERANDS
from graphopt.errors import RewriteError
from graphopt.passes import ops_view
from graphopt.passes.rule import Match, Replacement


def apply(gm: fx.GraphModule, matches: list[Match], operator_of: Callable[[Match], Any]) -> dict[Node, Node]:
    """Put the replacements in and take the replaced nodes out; returns what stands for each replaced result.

    Raises RewriteError when the graph would not be what it was: another dtype or shape, or a node still in use.
    """
    became: dict[Node, Node] = {}
    owned = {n for m in matches for n in m.core}
    for match in matches:
        _put(gm.graph, match, operator_of(match), became, owned)
    for match in reversed(matches):  # not before: a later match may read a result that nothing else does
        for new in reversed(match.created):  # its getitem and copy go, the call itself stays
            if not new.users and new is not match.call:
                gm.graph.erase_node(new)
    gm.graph.lint()
    gm.recompile()
    return became


def _put(
    graph: fx.Graph, match: Match, operator: Any, became: dict[Node, Node], owned: set[Node]
) -> None:
    """Put one replacement in.

    `became` maps nodes already replaced to what stands for them now; `owned` are the nodes that matches replace.
    """
    replacement, anchor = match.replacement, match.anchor
    if replacement is None or anchor is None:
        raise RewriteError("a match was not accepted", where=match.root.name)
    last = anchor.prev
    with graph.inserting_before(anchor):
        inputs = {
            name: None if node is None else _replay(graph, became.get(node, node), replacement.views.get(name, []))
            for name, node in replacement.inputs.items()
        }
        put = replacement.put or put_operator
        parts = put(graph, replacement, inputs, operator)
        laid = {
            old: _laid_out(graph, parts[i], replacement.layouts[old]) if old in replacement.layouts else parts[i]
            for old, i in replacement.results.items()
        }
    created = []
    while last.next is not anchor:
        last = last.next
        created.append(last)
        for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
            if key in match.root.meta:
                last.meta.setdefault(key, match.root.meta[key])
    match.created = created
    match.call = next((n for n in created if n.target in (operator, _compat.graph_target(operator))), None)
    for old, new in laid.items():
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
        became[old] = new
    order = match.facts.index.__getitem__
    for node in sorted(match.core, key=order, reverse=True):
        if node.users:
            raise RewriteError(f"{node.name} is still read by {next(iter(node.users)).name}", where=match.root.name)
        graph.erase_node(node)
    for node in sorted(set(match.side), key=order, reverse=True):
        if not node.users and node.op != "placeholder" and node not in owned:
            graph.erase_node(node)


def put_operator(
    graph: fx.Graph, replacement: Replacement, inputs: dict[str, Node | None], operator: Any
) -> dict[int, Node]:
    """One call of one of our operators; the results asked for, by position."""
    single = {name: inputs[name] for name in OPERANDS}
    modulation = [t for name, t in inputs.items() if name not in single]
    kwargs = {**single, "modulation": modulation, **replacement.attributes}
    call = graph.create_node("call_function", operator, (), kwargs, name=replacement.fusion)
    return {i: graph.call_function(op.getitem, (call, i)) for i in dict.fromkeys(replacement.results.values())}


def _laid_out(graph: fx.Graph, node: Node, order: tuple[int, ...]) -> Node:
    """The same values in the memory order given (outermost dimension first)."""
    back = tuple(order.index(i) for i in range(len(order)))
    moved = graph.call_method("permute", (node, order))
    dense = graph.call_method("contiguous", (moved,))
    return graph.call_method("permute", (dense, back))


def _replay(graph: fx.Graph, node: Node, views: list[Node]) -> Node:
    """The views a pattern found between a factor and its use, applied to the factor itself (innermost first)."""
    for view in reversed(views):
        before = ops_view.value(node)
        args = (node, *view.args[1:])
        new = graph.create_node(view.op, view.target, args, dict(view.kwargs))
        new.meta = {k: v for k, v in view.meta.items() if k != "example_value"}
        if before is not None:
            with _compat.fake_mode_of([before]):
                new.meta["example_value"] = _run_view(view, before)
        node = new
    return node


def run_views(views: list[Node], value: torch.Tensor) -> torch.Tensor:
    """What `_replay` computes, on a value."""
    for view in reversed(views):
        value = _run_view(view, value)
    return value


def _run_view(view: Node, before: torch.Tensor) -> torch.Tensor:
    rest = fx.node.map_arg(view.args[1:], lambda n: n.meta["example_value"])
    kwargs = fx.node.map_arg(view.kwargs, lambda n: n.meta["example_value"])
    if view.op == "call_method":
        return getattr(before, str(view.target))(*rest, **kwargs)
    return view.target(before, *rest, **kwargs)  # type: ignore[operator]
