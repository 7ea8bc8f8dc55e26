"""F2r: residual + norm + modulate, without a gate (Wan's cross-attention, PixArt, LTX).

before                                             after
    h = residual + branch                              h, y = residual_norm_modulate(residual, branch, [scale, shift])
    n = layer_norm(h)
    y = n * (1 + scale) + shift      (any casts)
"""

from __future__ import annotations

from torch.fx import Node

from graphopt.codegen.form import H, Y
from graphopt.passes import call, chain, norms, questions
from graphopt.passes.record import Kind
from graphopt.passes.rule import Match, Replacement, Rule

PATTERN = chain.modulated(norms.norm_of(chain.added()))


def candidate(match: Match) -> str | None:
    """A sum of two activations, and scale and shift that broadcast to it and do not come from it."""
    return questions.no_residual(match) or questions.no_modulate(match, match["sum"])


def check(match: Match) -> str | None:
    """A reason to leave the site alone, or None."""
    return (
        questions.norm_reason(match)
        or questions.shift_reason(match, match["sum"])
        or questions.numerics_reason(match)
        or questions.dtype_reason(match, "residual", "branch", "scale", "shift")
        or questions.layout_reason(match["sum"])
        or questions.layout_reason(match.root)
    )


def replace(match: Match) -> Replacement:
    """One operator call; its results are h and y."""
    h, parts = call.settle_h(match), call.parts(match)
    inputs = call.operands(**call.front(match), **call.affine(match), **parts)
    results = {**dict.fromkeys(h, H), match.root: Y}
    return Replacement(
        "residual_norm_modulate", inputs, call.attributes(match, h=h[0], y=match.root, outputs=[tuple(parts)]), results,
        call.layouts(results),
    )


def sites(match: Match) -> list[tuple[Kind, Node]]:
    """One modulate: a residual without a gate is no site."""
    return [("modulate", match.root)]


RULE = Rule("residual_norm_modulate", PATTERN, frozenset({"norm_modulate"}), candidate, check, replace, sites=sites)
