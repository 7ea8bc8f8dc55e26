"""The rules, in the order they are tried at one root: the larger fusion first."""

from __future__ import annotations

from collections.abc import Iterable

from graphopt.passes import (
    branch_norm_gate,
    gate_norm,
    gate_norm_modulate,
    gate_residual,
    norm_modulate,
    norm_modulates,
    residual_norm_modulate,
)
from graphopt.passes.rule import Rule

RULES: tuple[Rule, ...] = (
    *norm_modulates.RULES[:2],  # behind a gate or a residual
    branch_norm_gate.RULES[0],
    gate_norm_modulate.RULE,
    residual_norm_modulate.RULE,
    norm_modulates.RULES[2],
    norm_modulate.RULE,
    branch_norm_gate.RULES[1],
    gate_norm.RULE,
    branch_norm_gate.RULES[2],
    gate_residual.RULE,
)


def names() -> frozenset[str]:
    """Every name `graphopt.rules` and GRAPHOPT_DISABLE accept: families and single rules."""
    return frozenset(r.name for r in RULES) | frozenset(f for r in RULES for f in r.families)


def select(chosen: Iterable[str] | None, disabled: Iterable[str] = ()) -> tuple[Rule, ...]:
    """The rules that run.

    A rule runs when it is chosen by its own name, or when all its families are chosen (None: all are).  It does not run
    when it or one of its families is disabled.
    """
    on = names() if chosen is None else frozenset(chosen)
    off = frozenset(disabled)
    return tuple(
        r for r in RULES if (r.name in on or r.families <= on) and r.name not in off and not r.families & off
    )
