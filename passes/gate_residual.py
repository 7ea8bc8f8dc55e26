"""F3: gate + residual alone, where no norm of this graph follows.

before                                             after
    h = residual + gate * branch     (any casts)       h = gate_residual(residual, branch, gate)[H]
"""

from __future__ import annotations

from torch.fx import Node

from graphopt.codegen.form import H
from graphopt.passes import call, chain, questions
from graphopt.passes.record import Kind
from graphopt.passes.rule import Match, Replacement, Rule

PATTERN = chain.gated()


def candidate(match: Match) -> str | None:
    """See questions.no_gate."""
    return questions.no_gate(match)


def check(match: Match) -> str | None:
    """A reason to leave the site alone, or None."""
    return questions.dtype_reason(match, "residual", "branch", "gate") or questions.layout_reason(match.root)


def replace(match: Match) -> Replacement:
    """One operator call; its result is h."""
    results = {match.root: H}
    inputs = call.operands(**call.front(match))
    return Replacement("gate_residual", inputs, call.attributes(match, h=match.root), results, call.layouts(results))


def sites(match: Match) -> list[tuple[Kind, Node]]:
    """One gate."""
    return [("gate", match.root)]


RULE = Rule("gate_residual", PATTERN, frozenset({"gate_residual"}), candidate, check, replace, sites=sites)
