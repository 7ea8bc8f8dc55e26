"""Rules that users register: kept by name, put to work through a function of theirs, and never trusted.

A rule that raises leaves its site alone.  What its function returns is computed on fake tensors first: another shape or
dtype is an error before the graph is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from graphopt import _compat
from graphopt.errors import ConfigError, RuleError
from graphopt.passes import ops_view, source
from graphopt.passes.apply import run_views
from graphopt.passes.rule import Match, Replacement, Rule

_registered: dict[str, Rule] = {}


def registered() -> tuple[Rule, ...]:
    """The registered rules, in the order they came."""
    return tuple(_registered.values())


def register(rule: Rule, taken: frozenset[str]) -> None:
    """Keep a rule.  ConfigError for a name that is taken, or a rule without a function or an end."""
    if not isinstance(rule, Rule):
        raise ConfigError(f"{rule!r} is no rule", remedy="register a graphopt.Rule")
    if rule.name in taken:
        raise ConfigError(
            f"a rule named {rule.name!r} exists already",
            remedy="choose another name (`graphopt.unregister_rule` takes a registered one out)",
        )
    if rule.function is None:
        remedy = "give function=, which computes what it replaces"
        raise ConfigError(f"rule {rule.name!r} has no function", remedy=remedy)
    if not rule.roots:
        raise ConfigError(f"the pattern of rule {rule.name!r} fits every node", remedy="let it end in an Op")
    _registered[rule.name] = rule


def unregister(name: str) -> None:
    """Take a registered rule out.  ConfigError for an unknown one."""
    if name not in _registered:
        known = ", ".join(map(repr, _registered)) or "none"
        raise ConfigError(f"no registered rule is named {name!r}", remedy=f"registered are: {known}")
    del _registered[name]


def replacement_of(match: Match) -> Replacement:
    """The call of the rule's function for a match, checked on fake tensors.

    Raises RuleError when it returns no tensor of the shape and dtype of the node it stands for.
    """
    names = [n for n in match.rule.pattern.variables() if match.get(n) is not None]
    inputs: dict[str, Node | None] = {n: match[n] for n in names}
    views = {n: match.views(n) for n in names}
    old, new = ops_view.value(match.root), _result(match, inputs, views)
    where = source.where(match.root) or match.root.name
    if not isinstance(new, torch.Tensor) or old is None:
        raise RuleError(f"rule {match.rule.name!r} returns {type(new).__name__}, not one tensor", where=where)
    if not ops_view.same_shape(new, old) or new.dtype != old.dtype:
        raise RuleError(
            f"rule {match.rule.name!r} replaces {old.dtype} {list(old.shape)} by {new.dtype} {list(new.shape)}",
            where=where,
            remedy="let its function return what the pattern computed",
        )
    return Replacement(match.rule.name, inputs, {}, {match.root: 0}, views=views, put=put)


def other_strides(match: Match) -> str | None:
    """Why the result could not stand for the node although shape and dtype agree."""
    if match.replacement is None:
        return None
    old, new = ops_view.value(match.root), _result(match, match.replacement.inputs, match.replacement.views)
    if old is None or new.stride() == old.stride():
        return None
    return f"its function returns strides {list(new.stride())} where eager has {list(old.stride())}"


def _result(match: Match, inputs: dict[str, Node | None], views: dict[str, list[Node]]) -> Any:
    function: Callable[..., Any] = match.rule.function  # type: ignore[assignment]
    values = {n: ops_view.value(node) for n, node in inputs.items()}
    with _compat.fake_mode_of([v for v in values.values() if v is not None]):
        return function(**{n: run_views(views[n], v) for n, v in values.items() if v is not None})


def put(graph: fx.Graph, replacement: Replacement, inputs: dict[str, Node | None], function: Any) -> dict[int, Node]:
    """One call of the function."""
    return {0: graph.call_function(_compat.graph_target(function), (), dict(inputs))}
