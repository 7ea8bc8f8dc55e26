"""F4: one norm with several modulates (SD3.5's dual attention, LTX2), also behind a residual or a gate.

before                                             after
    n  = layer_norm(x)                                 y1, y2 = norm_modulates(x, [s1, b1, s2, b2])[Y:]
    y1 = n * (1 + s1) + b1
    y2 = n * (1 + s2) + b2           (any casts)

The pattern is that of the last modulate; the others are found from the norm downwards.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx
from torch.fx import Node

from graphopt.codegen.form import H, Y
from graphopt.passes import (
    call,
    chain,
    gate_norm_modulate,
    norm_modulate,
    norms,
    ops_view,
    questions,
    residual_norm_modulate,
)
from graphopt.passes.pattern import Again, Attempt, Pattern, Var
from graphopt.passes.record import Kind
from graphopt.passes.rule import Match, Replacement, Rule, narrowing_tail

PATTERN = chain.modulated(norms.norm_of(Var("x")))
OTHER = chain.modulated(Again("result"))
ONE = {
    "norm_modulates": norm_modulate,
    "residual_norm_modulates": residual_norm_modulate,
    "gate_norm_modulates": gate_norm_modulate,
}


def applies(graph: fx.Graph) -> bool:
    """Is there a norm that is read twice?"""
    for node in graph.nodes:
        name = ops_view.canonical(node)
        ends = list(readers(node)) if name == "rsqrt" else [node] if name in ("layer_norm", "rms_norm") else []
        if any(sum(1 for _ in readers(end)) > 1 for end in ends):
            return True
    return False


def candidate(match: Match) -> str | None:
    """A modulate whose norm has others; they join the match."""
    alone = "its norm has no other modulate"
    if sum(1 for _ in readers(match["result"])) < 2:
        return alone
    reason = ONE[match.rule.name].candidate(match)
    if reason is not None:
        return reason
    others = list(_others(match))
    if not others:
        return alone
    order = match.facts.index.__getitem__
    match.joined = sorted([match, *others], key=lambda m: order(m.root))
    for other in others:
        match.core += [n for n in other.core if n not in match.core]
        match.side += [n for n in other.side if n not in match.side]
    return None


def _others(match: Match) -> Iterator[Match]:
    """The other modulates of the same norm that one operator can compute with this one."""
    x, result = match.get("x") or match["sum"], match["result"]
    inherited = {n: match.attempt.env[n] for n in ("result", "norm", "kind", "normed", "x", "sum") if match.get(n)}
    taken, facts = set(match.core), match.facts
    alike = (match.root in facts.live, facts.gets_gradient(match.root))
    for root in ends(result):
        if root in taken or (root in facts.live, facts.gets_gradient(root)) != alike:
            continue
        attempt = Attempt(dict(inherited))
        for _ in OTHER.match(root, attempt):
            end, trailing = narrowing_tail(root)
            kept = attempt.copy()
            other = Match(match.rule, end, kept, match.facts, kept.core + trailing, kept.side, match.numerics)
            refused = questions.no_modulate(other, x) or questions.shift_reason(other, x)
            refused = refused or questions.dtype_reason(other, "scale", "shift") or questions.layout_reason(end)
            if not refused and questions.same_modulate(match, other):
                yield other
                taken.update(other.core)
                break


def readers(node: Node) -> Iterator[Node]:
    """What reads a value, casts looked through."""
    for user in node.users:
        if ops_view.canonical(user) == "cast":
            yield from readers(user)
        else:
            yield user


def ends(result: Node) -> Iterator[Node]:
    """Where a modulate of a norm can end: sums of products, then products."""
    products = [n for n in readers(result) if ops_view.canonical(n) in ("mul", "add", "addcmul")]
    for product in products:
        yield from (n for n in readers(product) if ops_view.canonical(n) == "add")
    yield from products


def check(match: Match) -> str | None:
    """A reason to leave the site alone, or None."""
    return ONE[match.rule.name].check(match)


def replace(match: Match) -> Replacement:
    """One operator call with one result per modulate, and h where something is in front of the norm."""
    behind = match.get("sum") is not None
    h = call.settle_h(match) if behind else []
    each = [call.parts(m) for m in match.joined]
    named = {name if i == 0 else f"{name}.{i}": node for i, parts in enumerate(each) for name, node in parts.items()}
    inputs = call.operands(**call.front(match), **call.affine(match), **named)
    results = {**dict.fromkeys(h, H), **{m.root: Y + i for i, m in enumerate(match.joined)}}
    attributes = call.attributes(match, h=h[0] if h else None, y=match.root, outputs=[tuple(p) for p in each])
    return Replacement(match.rule.name, inputs, attributes, results, call.layouts(results))


def sites(match: Match) -> list[tuple[Kind, Node]]:
    """Every modulate, and the gate in front."""
    gates: list[tuple[Kind, Node]] = [("gate", match["sum"])] if match.get("gate") is not None else []
    return gates + [("modulate", m.root) for m in match.joined]


def _rule(name: str, pattern: Pattern, families: set[str]) -> Rule:
    return Rule(name, pattern, frozenset(families), candidate, check, replace, sites=sites, applies=applies)


RULES = (
    _rule("gate_norm_modulates", gate_norm_modulate.PATTERN, {"norm_modulate", "gate_residual"}),
    _rule("residual_norm_modulates", residual_norm_modulate.PATTERN, {"norm_modulate"}),
    _rule("norm_modulates", PATTERN, {"norm_modulate"}),
)
