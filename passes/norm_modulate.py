"""F1: norm + modulate.

before                                             after
    n = layer_norm(x)                                  y = norm_modulate(x, [scale, shift])[Y]
    y = n * (1 + scale) + shift      (any casts)
"""

from __future__ import annotations

from torch.fx import Node

from graphopt.codegen.form import Y
from graphopt.passes import call, chain, norms, questions
from graphopt.passes.pattern import Var
from graphopt.passes.record import Kind
from graphopt.passes.rule import Match, Replacement, Rule

PATTERN = chain.modulated(norms.Slices(norms.norm_of(Var("x"))))


def candidate(match: Match) -> str | None:
    """Scale and shift broadcast to x and do not come from it."""
    return questions.no_modulate(match, match["x"])


def check(match: Match) -> str | None:
    """A reason to leave the site alone, or None."""
    return (
        questions.norm_reason(match)
        or questions.shift_reason(match, match["x"])
        or questions.numerics_reason(match)
        or questions.dtype_reason(match, "x", "scale", "shift")
        or questions.layout_reason(match.root)
    )


def replace(match: Match) -> Replacement:
    """One operator call; its result is y."""
    parts = call.parts(match)
    inputs = call.operands(**call.front(match), **call.affine(match), **parts)
    results = {match.root: Y}
    return Replacement(
        "norm_modulate", inputs, call.attributes(match, y=match.root, outputs=[tuple(parts)]), results,
        call.layouts(results),
    )


def sites(match: Match) -> list[tuple[Kind, Node]]:
    """One modulate."""
    return [("modulate", match.root)]


RULE = Rule("norm_modulate", PATTERN, frozenset({"norm_modulate"}), candidate, check, replace, sites=sites)
