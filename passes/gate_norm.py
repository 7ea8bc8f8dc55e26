"""F2a: gate + residual + affine norm (Wan's norm2).

before                                             after
    h = residual + gate * branch                       h, y = gate_norm(residual, branch, gate, weight, bias)
    y = layer_norm(h, weight, bias)  (any casts)
"""

from __future__ import annotations

from torch.fx import Node

from graphopt.codegen.form import H, Y
from graphopt.passes import chain, norms
from graphopt.passes.record import Kind
from graphopt.passes.rewrite import Match, Replacement, Rule

PATTERN = norms.norm_of(chain.gated())


def candidate(match: Match) -> bool:
    """A gated sum in front of a norm with a weight."""
    return chain.is_gated(match) and chain.affine(match)["weight"] is not None


def check(match: Match) -> str | None:
    """A reason to leave the site alone, or None."""
    return (
        chain.norm_reason(match)
        or chain.dtype_reason(match, "residual", "branch", "gate")
        or chain.layout_reason(match["sum"])
        or chain.layout_reason(match.root)
    )


def replace(match: Match) -> Replacement:
    """One operator call; its first two results are h and y."""
    h = chain.settle_h(match)
    inputs = chain.operands(x=match["residual"], branch=match["branch"], gate=match["gate"], **chain.affine(match))
    attributes = chain.attributes(match, norm=chain.norm_name(match), h=h[0], y=match.root, outputs=[()])
    results = {**dict.fromkeys(h, H), match.root: Y}
    return Replacement("gate_norm", inputs, attributes, results, chain.layouts(results))


def sites(match: Match) -> list[tuple[Kind, Node]]:
    """The gate; an affine norm is no modulate."""
    return [("gate", match["sum"])]


RULE = Rule(
    "gate_norm", frozenset({"gate_residual"}), ("layer_norm", "rms_norm", "mul"), PATTERN, candidate, check, replace,
    sites,
)
