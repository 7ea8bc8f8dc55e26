"""F2: gate + residual + norm + modulate.  Also across blocks: the gate that ends one, the norm that begins the next.

before                                             after
    h = residual + gate * branch                       h, y = gate_norm_modulate(residual, branch, gate,
    n = layer_norm(h)                                                            scale, shift
    y = n * (1 + scale) + shift      (any casts)
"""

from __future__ import annotations

from torch.fx import Node

from graphopt.codegen.form import H, Y
from graphopt.passes import chain, norms
from graphopt.passes.record import Kind
from graphopt.passes.rewrite import Match, Replacement, Rule

PATTERN = chain.modulated(norms.norm_of(chain.gated()))


def candidate(match: Match) -> bool:
    """A gated sum, and scale and shift that broadcast to it and do not come from it."""
    h = match["sum"]
    return chain.is_gated(match) and chain.is_scale(match, h) and chain.is_shift(match, h)


def check(match: Match) -> str | None:
    """A reason to leave the site alone, or None."""
    return (
        chain.norm_reason(match)
        or chain.shift_reason(match, match["sum"])
        or chain.dtype_reason(match, "residual", "branch", "gate", "scale", "shift")
        or chain.layout_reason(match["sum"])
        or chain.layout_reason(match.root)
    )


def replace(match: Match) -> Replacement:
    """One operator call; its first two results are h and y."""
    h = chain.settle_h(match)
    inputs = chain.operands(
        x=match["residual"], branch=match["branch"], gate=match["gate"], scale=match["scale"], shift=match.get("shift"),
        **chain.affine(match),
    )
    attributes = chain.attributes(
        match, norm=chain.norm_name(match), h=h[0], y=match.root, outputs=[chain.parts(match)]
    )
    results = {**dict.fromkeys(h, H), match.root: Y}
    return Replacement("gate_norm_modulate", inputs, attributes, results, chain.layouts(results))


def sites(match: Match) -> list[tuple[Kind, Node]]:
    """The gate and the modulate."""
    return [("gate", match["sum"]), ("modulate", match.root)]


RULE = Rule(
    "gate_norm_modulate", frozenset({"norm_modulate", "gate_residual"}), ("add", "mul"), PATTERN, candidate, check,
    replace, sites,
)
