"""F3: gate + residual alone, where no norm of this graph follows.

before                                             after
    h = residual + gate * branch     (any casts)       h = gate_residual(residual, branch, gate)[0]
"""

from __future__ import annotations

from torch.fx import Node

from graphopt.codegen.form import H
from graphopt.passes import chain
from graphopt.passes.record import Kind
from graphopt.passes.rewrite import Match, Replacement, Rule

PATTERN = chain.gated()


def candidate(match: Match) -> bool:
    """See chain.is_gated."""
    return chain.is_gated(match)


def check(match: Match) -> str | None:
    """A reason to leave the site alone, or None."""
    return chain.dtype_reason(match, "residual", "branch", "gate") or chain.layout_reason(match.root)


def replace(match: Match) -> Replacement:
    """One operator call; its first result is h."""
    inputs = chain.operands(x=match["residual"], branch=match["branch"], gate=match["gate"])
    results = {match.root: H}
    attributes = chain.attributes(match, norm="none", h=match.root, y=None)
    return Replacement("gate_residual", inputs, attributes, results, chain.layouts(results))


def sites(match: Match) -> list[tuple[Kind, Node]]:
    """One gate."""
    return [("gate", match.root)]


RULE = Rule("gate_residual", frozenset({"gate_residual"}), ("add",), PATTERN, candidate, check, replace, sites)
