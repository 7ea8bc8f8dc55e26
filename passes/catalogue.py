"""The rules, in the order they are tried at one root: the larger fusion first."""

from __future__ import annotations

from collections.abc import Iterable

from graphopt.passes import (
    branch_norm_gate,
    gate_norm,
    gate_norm_modulate,
    gate_residual,
    gate_residual_joined,
    norm_modulate,
    norm_modulates,
    residual_norm_modulate,
    user_rules,
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
    gate_residual_joined.RULE,
    gate_residual.RULE,
)

# passes beside the sites; they are switched off like a rule
BESIDE = frozenset({
    "norm_rotate", "head_norm_rotate", "column_sums", "gradient_addends", "stack_gradients", "joint_launch",
})  # fmt: skip

# passes that do all they can only when asked for: by default joint_launch joins forwards alone
EXPERIMENTAL = frozenset({"joint_launch"})

# what is always done to the graphs Inductor lowers: no rules, but switched off like one
LATE = frozenset({"reuse_gradients"})


def every() -> tuple[Rule, ...]:
    """The rules users registered, then those of graphopt."""
    return user_rules.registered() + RULES


def names() -> frozenset[str]:
    """Every name `graphopt.rules` and GRAPHOPT_DISABLE accept: families and single rules."""
    return frozenset(r.name for r in every()) | frozenset(f for r in every() for f in r.families)


def register_rule(rule: Rule) -> None:
    """Add a rule of your own to every callable compiled from now on (docs/rules.md has a worked example).

    rule: a `graphopt.Rule` with a pattern and a function, which is called with the pattern's variables by name and
        returns one tensor of the shape and dtype of the last node matched.
    Raises ConfigError for a name that is taken, a rule without a function, or a pattern that fits every node.  While
    compiling: a rule that raises leaves its site alone, with one warning that names it; a function that returns another
    shape or dtype is a RuleError (a RewriteError) before the graph is changed.
    """
    user_rules.register(rule, names())


def unregister_rule(name: str) -> None:
    """Take a registered rule out again.  ConfigError for an unknown name."""
    user_rules.unregister(name)


def select(chosen: Iterable[str] | None, disabled: Iterable[str] = ()) -> tuple[Rule, ...]:
    """The rules that run.

    A rule runs when it is chosen by its own name, or when all its families are chosen (None: all are).  It does not run
    when it or one of its families is disabled.
    """
    on = names() if chosen is None else frozenset(chosen)
    off = frozenset(disabled)
    return tuple(
        r for r in every()
        if (r.name in on or (r.families and r.families <= on)) and r.name not in off and not r.families & off
    )
