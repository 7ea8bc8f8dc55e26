"""F2a: gate + residual + norm without a modulation, usually an affine one (Wan's norm2).

before                                             after
    h = residual + gate * branch                       h, y = gate_norm(residual, branch, gate, weight, bias)
    y = layer_norm(h, weight, bias)  (any casts)
"""

from __future__ import annotations

from torch.fx import Node

from graphopt.codegen.form import H, Y
from graphopt.passes import call, chain, norms, questions
from graphopt.passes.record import Kind
from graphopt.passes.rule import Match, Replacement, Rule

PATTERN = norms.norm_of(chain.gated())


def candidate(match: Match) -> str | None:
    """A gated sum in front of a norm."""
    return questions.no_gate(match)


def check(match: Match) -> str | None:
    """A reason to leave the site alone, or None."""
    return (
        questions.norm_reason(match)
        or questions.dtype_reason(match, "residual", "branch", "gate")
        or questions.layout_reason(match["sum"])
        or questions.layout_reason(match.root)
    )


def replace(match: Match) -> Replacement:
    """One operator call; its results are h and y."""
    h = call.settle_h(match)
    inputs = call.operands(**call.front(match), **call.affine(match))
    results = {**dict.fromkeys(h, H), match.root: Y}
    attributes = call.attributes(match, h=h[0], y=match.root, outputs=[()])
    return Replacement("gate_norm", inputs, attributes, results, call.layouts(results))


def sites(match: Match) -> list[tuple[Kind, Node]]:
    """The gate; a norm alone is no modulate."""
    return [("gate", match["sum"])]


RULE = Rule("gate_norm", PATTERN, frozenset({"gate_residual"}), candidate, check, replace, sites=sites)
