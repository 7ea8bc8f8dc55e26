"""Rules, and the one place that changes a graph.

A rule is a pattern, a check that returns a reason or None, and a replacement: an operator call whose results stand for
nodes of the match.  `find` collects the matches of one graph from its end to its start, `apply` puts them in.

A match is refused, with the reason, when

- a value inside it is read outside (it would no longer exist),
- it crosses an autocast or grad-mode border, or runs under a transform of torch.func,
- an in-place write between its first and its last node may change one of its inputs,
- one of its results is read before all of its inputs exist,
- an operand is a DTensor or another tensor subclass.
"""

from __future__ import annotations

import logging
import operator as op
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from graphopt import _compat
from graphopt.errors import RewriteError
from graphopt.passes import ops_view, source
from graphopt.passes.facts import Facts, gather
from graphopt.passes.pattern import Attempt, Pattern
from graphopt.passes.record import Kind, Reject

log = logging.getLogger(__name__)


@dataclass
class Replacement:
    """An operator call for a match.

    `inputs` are its tensor operands by name (None for an absent one), `attributes` its other arguments, `results` maps
    a node of the match to the position of the result that stands for it.  `fusion` names the operator.  `layouts` maps
    a node whose memory order is not that of its dimensions to that order (outermost first): operators write contiguous
    tensors, so such a result is copied into the order eager mode has.
    """

    fusion: str
    inputs: dict[str, Node | None]
    attributes: dict[str, Any]
    results: dict[Node, int]
    layouts: dict[Node, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """One fusion.

    `roots` are the canonical ops a match can end in.  `families` are the names a user switches it on and off by.
    `candidate` tells a site from what merely has the same operators (a rotary embedding, a layer scale); what it
    refuses is not reported.  `check` returns a reason to leave a candidate alone, or None; `replace` builds the
    replacement; `sites` tells which nodes of the match end which kind of site.
    """

    name: str
    families: frozenset[str]
    roots: tuple[str, ...]
    pattern: Pattern
    candidate: Callable[[Match], bool]
    check: Callable[[Match], str | None]
    replace: Callable[[Match], Replacement]
    sites: Callable[[Match], list[tuple[Kind, Node]]]


@dataclass
class Match:
    """One structural match: what the pattern bound, and the facts of its graph."""

    rule: Rule
    root: Node
    attempt: Attempt
    facts: Facts
    core: list[Node]
    side: list[Node]
    numerics: str = "fp32"
    replacement: Replacement | None = None
    anchor: Node | None = None
    shared: bool = False  # the norm has readers outside, so it is computed again inside the operator

    def __getitem__(self, name: str) -> Node:
        return self.attempt.env[name]

    def get(self, name: str) -> Node | None:
        """What a name is bound to, or None."""
        return self.attempt.env.get(name)


@dataclass
class Found:
    """What `find` saw in one graph."""

    matches: list[Match] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)


def find(gm: fx.GraphModule, rules: Iterable[Rule], numerics: str = "fp32") -> Found:
    """All matches of one graph, from its last node to its first; a node belongs to one match at most.

    At one root the rules are tried in their order, so the larger fusion comes first.
    """
    facts = gather(gm)
    by_root: dict[str, list[Rule]] = {}
    for rule in rules:
        for name in rule.roots:
            by_root.setdefault(name, []).append(rule)
    found = Found()
    taken: set[Node] = set()
    failed: dict[Node, Reject] = {}
    for node in reversed(list(gm.graph.nodes)):
        for rule in by_root.get(ops_view.canonical(node), ()):
            if node in taken:
                break
            match, reject = _attempt(rule, node, facts, taken, numerics)
            if match is not None:
                found.matches.append(match)
                taken.update(match.core)
                break
            if reject is not None and node not in failed:
                failed[node] = reject
    found.rejects = [r for n, r in failed.items() if n not in taken]
    return found


def _attempt(
    rule: Rule, node: Node, facts: Facts, taken: set[Node], numerics: str
) -> tuple[Match | None, Reject | None]:
    """The first way a rule fits at a root and is safe; else the reason of a structural match that was refused."""
    attempt = Attempt()
    refused: Reject | None = None
    for _ in rule.pattern.match(node, attempt):
        # bindings are undone when the generator goes on, so a match keeps copies
        frozen = Attempt(dict(attempt.env), list(attempt.core), list(attempt.side),
                         {k: list(v) for k, v in attempt.views.items()})
        root, trailing = narrowing_tail(node)
        match = Match(rule, root, frozen, facts, frozen.core + trailing, frozen.side, numerics)
        if not rule.candidate(match):
            continue
        reason, culprit = _refuse(match, taken)
        if reason is None:
            return match, None
        where = culprit or node
        refused = refused or Reject(rule.name, source.fqn(where) or source.fqn(node), node.name, reason,
                                    source.where(node))
    return None, refused


def narrowing_tail(node: Node) -> tuple[Node, list[Node]]:
    """The cast that ends a site (`.type_as(x)`), if the only reader of its last value narrows it: new root, casts."""
    trailing: list[Node] = []
    while len(node.users) == 1:
        user = next(iter(node.users))
        before, after = ops_view.dtype_of(node), ops_view.dtype_of(user)
        if ops_view.canonical(user) != "cast" or user.args[0] is not node or before is None or after is None:
            break
        if not ops_view.widens(after, before):
            break
        trailing.append(user)
        node = user
    return node, trailing


def _refuse(match: Match, taken: set[Node]) -> tuple[str | None, Node | None]:
    """Why a structural match cannot be replaced, and the node to blame; (None, None) if it can."""
    facts = match.facts
    overlap = next((n for n in match.core if n in taken), None)
    if overlap is not None:
        return f"{overlap.name} belongs to another site", overlap
    reason = match.rule.check(match)
    if reason is not None:
        return reason, None
    regions = {facts.region[n] for n in match.core}
    if len(regions) > 1:
        return "crosses an autocast or grad-mode border", None
    transform = facts.transform(match.root) or _compat.forward_mode_ad()
    if transform is not None:
        return f"under {transform}, for which a fused operator has no rule: it keeps its own ops", None
    detached = next((n for n in match.side if _detaches(n)), None)
    if detached is not None:
        return f"{detached.name} cuts a gradient off (no_grad) that the operator would pass on", detached
    match.replacement = match.rule.replace(match)
    results = match.replacement.results
    share_norm(match)
    inside = set(match.core)
    for node in match.core:
        if node not in results:
            reader = next((u for u in node.users if u not in inside), None)
            if reader is not None:
                return f"its intermediate {node.name} is also read by {reader.name}", node
    inputs = [n for n in match.replacement.inputs.values() if n is not None]
    replayed = [m for vs in match.attempt.views.values() for v in vs for m in v.all_input_nodes if m is not v.args[0]]
    for n in inputs:
        v = ops_view.value(n)
        if v is not None and not _compat.is_fake(v):
            return f"{n.name} is a {type(v).__name__}: a fused operator has no sharding rule for it", n
    order = sorted(match.core, key=facts.index.__getitem__)
    latest = max(facts.index[n] for n in inputs + replayed)
    anchor = next((n for n in order if facts.index[n] > latest), None)
    if anchor is None:
        return "its inputs come after it", None
    gone = inside | _unread_side(match, inside)
    for node in results:
        early = next((u for u in node.users if u not in gone and facts.index[u] < facts.index[anchor]), None)
        if early is not None:
            return f"{node.name} is read by {early.name} before all inputs of the site exist", node
    everything = match.core + match.side
    first = min(facts.index[n] for n in everything)
    write = facts.write_between(first, facts.index[order[-1]], inputs + everything)
    if write is not None:
        return f"an in-place write ({write.name}) between its nodes may change its inputs", write
    match.anchor = anchor
    return None, None


def _detaches(node: Node) -> bool:
    """Does a node looked through in front of an input stop gradients?  (A cast or `1 + s` under no_grad does.)"""
    v = ops_view.value(node)
    before = [ops_view.value(n) for n in node.all_input_nodes]
    return v is not None and not v.requires_grad and any(b is not None and b.requires_grad for b in before)


def share_norm(match: Match) -> None:
    """A norm without a gate in front may have other readers: it then stays, and the operator computes its own."""
    norm = match.get("norm")
    if norm is None or match.get("sum") is not None:
        return
    chain = [n for n in (match.get("shifted"), match.get("product"), match.root) if n is not None]
    first = min(match.facts.index[n] for n in chain)
    inner = {n for n in match.core if match.facts.index[n] < first}
    inside = set(match.core)
    if any(u not in inside for n in inner for u in n.users):
        match.core[:] = [n for n in match.core if n not in inner]
        match.side.extend(n for n in inner if n not in match.side)
        match.shared = True


def _unread_side(match: Match, inside: set[Node]) -> set[Node]:
    """The side nodes that only the match itself reads: they disappear with it."""
    unread: set[Node] = set()
    for node in sorted(set(match.side), key=match.facts.index.__getitem__, reverse=True):
        if all(u in inside or u in unread for u in node.users):
            unread.add(node)
    return unread


def apply(gm: fx.GraphModule, matches: list[Match], operator_of: Callable[[Match], Any]) -> None:
    """Put the replacements in and take the replaced nodes out.

    Raises RewriteError when the graph would not be what it was: another dtype or shape, or a node still in use.
    """
    became: dict[Node, Node] = {}
    owned = {n for m in matches for n in m.core}
    for match in matches:
        _put(gm.graph, match, operator_of(match), became, owned)
    gm.graph.lint()
    gm.recompile()


def _put(
    graph: fx.Graph, match: Match, operator: Any, became: dict[Node, Node], owned: set[Node]
) -> None:
    """Put one replacement in.

    `became` maps nodes already replaced to what stands for them now; `owned` are the nodes that matches replace.
    """
    replacement, anchor = match.replacement, match.anchor
    if replacement is None or anchor is None:
        raise RewriteError("a match was not accepted", where=match.root.name)
    with graph.inserting_before(anchor):
        inputs = {
            name: None if node is None else _replay(graph, became.get(node, node), match.attempt.views.get(name, []))
            for name, node in replacement.inputs.items()
        }
        kwargs = {**{k: v for k, v in inputs.items()}, **replacement.attributes}
        call = graph.create_node("call_function", operator, (), kwargs, name=replacement.fusion)
        parts = {old: graph.call_function(op.getitem, (call, i)) for old, i in replacement.results.items()}
        laid = {
            old: _laid_out(graph, new, replacement.layouts[old]) if old in replacement.layouts else new
            for old, new in parts.items()
        }
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
        if key in match.root.meta:
            call.meta[key] = match.root.meta[key]
    for old, new in laid.items():
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
        became[old] = new
    order = match.facts.index.__getitem__
    for node in sorted(match.core, key=order, reverse=True):
        if node.users:
            raise RewriteError(f"{node.name} is still read by {next(iter(node.users)).name}", where=match.root.name)
        graph.erase_node(node)
    for new in laid.values():
        while not new.users and new is not call:  # nothing reads this result: its getitem and copy go
            above = new.all_input_nodes[0]
            graph.erase_node(new)
            new = above
    for node in sorted(set(match.side), key=order, reverse=True):
        if not node.users and node.op != "placeholder" and node not in owned:
            graph.erase_node(node)


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


def _run_view(view: Node, before: torch.Tensor) -> torch.Tensor:
    rest = fx.node.map_arg(view.args[1:], lambda n: n.meta["example_value"])
    kwargs = fx.node.map_arg(view.kwargs, lambda n: n.meta["example_value"])
    if view.op == "call_method":
        return getattr(before, str(view.target))(*rest, **kwargs)
    return view.target(before, *rest, **kwargs)  # type: ignore[operator]



