"""F1: norm + modulate.

before                                             after
    n = layer_norm(x)                                  y = norm_modulate(x, scale, shift)[Y]
    y = n * (1 + scale) + shift      (any casts)
"""

from __future__ import annotations

from torch.fx import Node

from graphopt.codegen.form import Y
from graphopt.passes import chain, norms
from graphopt.passes.pattern import Var
from graphopt.passes.record import Kind
from graphopt.passes.rewrite import Match, Replacement, Rule

PATTERN = chain.modulated(norms.Slices(norms.norm_of(Var("x"))))


def candidate(match: Match) -> bool:
    """Scale and shift broadcast to x and do not come from it."""
    return chain.is_scale(match, match["x"]) and chain.is_shift(match, match["x"])


def check(match: Match) -> str | None:
    """A reason to leave the site alone, or None."""
    return (
        chain.norm_reason(match)
        or chain.shift_reason(match, match["x"])
        or chain.dtype_reason(match, "x", "scale", "shift")
        or chain.layout_reason(match.root)
    )


def replace(match: Match) -> Replacement:
    """One operator call; its second result is y."""
    inputs = chain.operands(x=match["x"], scale=match["scale"], shift=match.get("shift"), **chain.affine(match))
    attributes = chain.attributes(match, norm=chain.norm_name(match), h=None, y=match.root, outputs=[chain.parts(match)])
    results = {match.root: Y}
    return Replacement("norm_modulate", inputs, attributes, results, chain.layouts(results))


def sites(match: Match) -> list[tuple[Kind, Node]]:
    """One modulate."""
    return [("modulate", match.root)]


RULE = Rule("norm_modulate", frozenset({"norm_modulate"}), ("add", "mul"), PATTERN, candidate, check, replace, sites)
