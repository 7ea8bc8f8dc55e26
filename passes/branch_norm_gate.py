"""F5: a gate on a normed branch, alone or in front of a norm or a modulate (Mochi, Lumina, Z-Image, Ideogram).

before                                             after
    b = rms_norm(branch)                               h, y = branch_norm_gate_norm_modulate(residual, branch, gate,
    h = residual + tanh(gate) * b                                                            [scale])
    y = rms_norm(h) * (1 + scale)    (any casts)

Mochi passes the gate as the scale of the norm behind the branch, which is the same graph.  The gate may be plain or
through tanh, the branch's norm any norm.
"""

from __future__ import annotations

from torch.fx import Node

from graphopt.codegen.form import H, Y
from graphopt.passes import call, chain, norms, questions
from graphopt.passes.record import Kind
from graphopt.passes.rule import Match, Replacement, Rule

GATED = chain.gated(chain.normed_branch())
PATTERN = chain.modulated(norms.norm_of(GATED))


def candidate(match: Match) -> str | None:
    """A gated sum, and scale and shift (where there are any) that broadcast to it and do not come from it."""
    weights = (match.get("branch_norm_weight"), match.get("branch_norm_bias"))
    if not all(w is None or match.facts.static[w] for w in weights):
        return "what multiplies the branch's norm is no parameter"
    modulated = match.get("scale") is not None
    return questions.no_gate(match) or (questions.no_modulate(match, match["sum"]) if modulated else None)


def check(match: Match) -> str | None:
    """A reason to leave the site alone, or None."""
    return (
        questions.norm_reason(match, "branch_")
        or (questions.norm_reason(match) if match.get("norm") is not None else None)
        or (questions.shift_reason(match, match["sum"]) if match.get("scale") is not None else None)
        or questions.numerics_reason(match)
        or questions.dtype_reason(match, "residual", "branch", "gate", "scale", "shift")
        or questions.layout_reason(match["sum"])
        or questions.layout_reason(match.root)
    )


def replace(match: Match) -> Replacement:
    """One operator call; its results are h, and y where a norm follows."""
    normed = match.get("norm") is not None
    h = call.settle_h(match) if normed else [match.root]
    parts = call.parts(match)
    inputs = call.operands(**call.front(match), **(call.affine(match) if normed else {}), **parts)
    results = {**dict.fromkeys(h, H), **({match.root: Y} if normed else {})}
    attributes = call.attributes(
        match, h=h[0], y=match.root if normed else None, outputs=[tuple(parts)] if normed else []
    )
    return Replacement(match.rule.name, inputs, attributes, results, call.layouts(results))


def sites(match: Match) -> list[tuple[Kind, Node]]:
    """The gate (on a normed branch it counts once), and the modulate if there is one."""
    modulate: list[tuple[Kind, Node]] = [("modulate", match.root)] if match.get("scale") is not None else []
    return [("gate", match["sum"] if match.get("norm") is not None else match.root), *modulate]


GATE, BOTH = frozenset({"gate_residual"}), frozenset({"norm_modulate", "gate_residual"})
RULES = (
    Rule("branch_norm_gate_norm_modulate", PATTERN, BOTH, candidate, check, replace, sites=sites),
    Rule("branch_norm_gate_norm", norms.norm_of(GATED), GATE, candidate, check, replace, sites=sites),
    Rule("branch_norm_gate", GATED, GATE, candidate, check, replace, sites=sites),
)
