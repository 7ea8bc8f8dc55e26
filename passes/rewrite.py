"""Finding the matches of a graph, and what makes one unsafe.

A match is refused, with the reason, when

- a value inside it is read outside (it would no longer exist),
- it crosses an autocast or grad-mode border, or runs under a transform of torch.func,
- an in-place write between its first and its last node may change one of its inputs,
- one of its results is read before all of its inputs exist,
- gradients arrive at one of its results and not at another (what only the latter depends on has none in eager),
- torch.autograd.grad differentiates a value that would no longer be on the way,
- an operand is a DTensor or another tensor subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx import Node

from graphopt import _compat
from graphopt.errors import RuleError
from graphopt.passes import ops_view, source, user_rules
from graphopt.passes.apply import apply
from graphopt.passes.facts import Facts, gather
from graphopt.passes.pattern import Attempt
from graphopt.passes.questions import Misfit
from graphopt.passes.record import Reject
from graphopt.passes.rule import Match, Replacement, Rule, narrowing_tail

__all__ = ["Found", "Match", "Replacement", "Rule", "apply", "find"]

# the rules that ask nothing but whether something is a site of a kind
SMALLEST = {"modulate": ("norm_modulate",), "gate": ("gate_residual", "gate_residual_joined")}


@dataclass
class Found:
    """What `find` saw in one graph.  `look_alikes` says why a structural match at a node is no site of a kind."""

    matches: list[Match] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    look_alikes: dict[tuple[Node, str], str] = field(default_factory=dict)
    facts: Facts | None = None


OnRaise = Callable[[Rule, Node, Exception], None]


def find(
    gm: fx.GraphModule, rules: Iterable[Rule], numerics: str = "fp32", on_raise: OnRaise | None = None
) -> Found:
    """All matches of one graph, from its last node to its first; a node belongs to one match at most.

    At one root the rules are tried in their order, so the larger fusion comes first.  `on_raise` is told of a user's
    rule that raises; its site is left alone.
    """
    with ops_view.remembered():
        return _find(gm, rules, numerics, on_raise)


def _find(gm: fx.GraphModule, rules: Iterable[Rule], numerics: str, on_raise: OnRaise | None) -> Found:
    facts = gather(gm)
    by_root: dict[object, list[Rule]] = {}
    for rule in rules:
        if rule.applies is not None and not rule.applies(gm.graph):
            continue
        for name in rule.roots:
            by_root.setdefault(name, []).append(rule)
    found = Found(facts=facts)
    taken: dict[Node, Match] = {}
    failed: dict[Node, Reject] = {}
    for node in reversed(list(gm.graph.nodes)):
        name = ops_view.canonical(node)
        for rule in by_root.get(name or node.target, ()) if node.op.startswith("call") else ():
            if node in taken:
                break
            try:
                match = _attempt(rule, node, taken, numerics, found, failed)
            except Exception as error:
                if rule.function is None or on_raise is None or isinstance(error, RuleError):
                    raise
                on_raise(rule, node, error)
                match = None
            if match is not None:
                found.matches.append(match)
                taken.update(dict.fromkeys(match.core, match))
                break
    found.rejects = [r for n, r in failed.items() if n not in taken]
    return found


def _attempt(
    rule: Rule, node: Node, taken: dict[Node, Match], numerics: str, found: Found, failed: dict[Node, Reject]
) -> Match | None:
    """The first way a rule fits at a root and is safe; else the reasons of the ways that were refused are kept."""
    attempt, facts = Attempt(), found.facts
    if facts is None:
        raise ValueError("a graph without facts")
    for _ in rule.pattern.match(node, attempt):
        kept = attempt.copy()
        root, trailing = narrowing_tail(node)
        match = Match(rule, root, kept, facts, kept.core + trailing, kept.side, numerics)
        reason = rule.candidate(match)
        if reason is not None:
            _remember(found, node, rule, reason)
            continue
        reason, culprit = _refuse(match, taken)
        if reason is None:
            return match
        if node not in failed:
            where = culprit or node
            fqn = source.fqn(where) or source.fqn(node)
            failed[node] = Reject(rule.name, fqn, node.name, reason, source.where(node))
    return None


def _remember(found: Found, node: Node, rule: Rule, reason: str) -> None:
    """Keep one reason for each node and kind: of the smallest fusion, with its operands in their places if possible."""
    for kind, smallest in SMALLEST.items():
        key = (node, kind)
        if rule.name in smallest and (key not in found.look_alikes or isinstance(found.look_alikes[key], Misfit)):
            found.look_alikes[key] = reason


def _refuse(match: Match, taken: dict[Node, Match]) -> tuple[str | None, Node | None]:
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
    detached = next((n for n in match.side if ops_view.detaches(n)), None)
    if detached is not None:
        return f"{detached.name} cuts a gradient off (no_grad) that the operator would pass on", detached
    match.replacement = _replacement(match)
    results = match.replacement.results
    wanted = {position for n, position in results.items() if facts.gets_gradient(n)}
    without = next((n for n, position in results.items() if position not in wanted and _needs_grad(n)), None)
    if wanted and without is not None:
        return f"no gradient arrives at {without.name}, and it may depend on what gets none otherwise", None
    # inside a graph nobody sees the order in memory, and rows are what the next site reads
    seen = {n: order for n, order in match.replacement.layouts.items() if n in facts.strides_seen}
    match.replacement.layouts = seen
    share_norm(match)
    differentiated = next((n for n in match.side if any(map(_differentiates, n.users))), None)
    if differentiated is not None:
        reason = f"torch.autograd.grad differentiates {differentiated.name}, which the operator would pass by"
        return reason, differentiated
    inside = set(match.core)
    if match.root.users and not _has_reader(match.root, inside | taken.keys(), taken):
        return f"nothing but sites that compute it themselves read {match.root.name}", None
    for node in match.core:
        if node not in results:
            reader = next((u for u in node.users if u not in inside), None)
            if reader is not None:
                return f"its intermediate {node.name} is also read by {reader.name}", node
    inputs = [n for n in match.replacement.inputs.values() if n is not None]
    views = match.replacement.views.values()
    replayed = [m for vs in views for v in vs for m in v.all_input_nodes if m is not v.args[0]]
    for n in inputs:
        v = ops_view.value(n)
        if v is not None and not _compat.is_fake(v):
            return f"{n.name} is a {type(v).__name__}: a fused operator has no sharding rule for it", n
    if match.rule.function is not None and (reason := user_rules.other_strides(match)) is not None:
        return reason, None
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
    everything = [*match.core, *match.side]
    first = min(facts.index[n] for n in everything)
    write = facts.write_between(first, facts.index[order[-1]], inputs + everything)
    if write is not None:
        return f"an in-place write ({write.name}) between its nodes may change its inputs", write
    late = facts.written_after(facts.index[order[-1]], [*inputs, *results])
    if late is not None and any(_needs_grad(n) for n in results):
        return f"{late.name} writes in place into a value that the operator saves for its backward", late
    match.anchor = anchor
    return None, None


def _differentiates(node: Node) -> bool:
    """Does a node take gradients, or run a backward?  (torch._dynamo.config.trace_autograd_ops)"""
    return node.target in (torch.autograd.grad, torch.autograd.backward)


def _needs_grad(node: Node) -> bool:
    v = ops_view.value(node)
    return v is not None and v.requires_grad


def _replacement(match: Match) -> Replacement:
    if match.rule.replace is None:
        return user_rules.replacement_of(match)
    replacement = match.rule.replace(match)
    replacement.views = {name: match.views(name) for name in replacement.inputs} | replacement.views
    return replacement


def _has_reader(node: Node, replaced: set[Node], taken: dict[Node, Match]) -> bool:
    """Will anything read a value (casts looked through) once the nodes of all matches are gone?"""
    for user in node.users:
        if user not in replaced:
            if ops_view.canonical(user) != "cast" or _has_reader(user, replaced, taken):
                return True
        elif user in taken:
            replacement = taken[user].replacement
            if replacement is not None and node in replacement.inputs.values():
                return True
    return False


def share_norm(match: Match) -> None:
    """A norm without a gate in front may have other readers: it then stays, and the operator computes its own."""
    norm = match.get("norm")
    if norm is None or match.get("sum") is not None:
        return
    result = match["result"]
    inner = {n for n in match.core if match.facts.index[n] <= match.facts.index[result]}
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
