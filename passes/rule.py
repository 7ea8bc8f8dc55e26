"""What a rule is: a pattern, questions that give a reason, and a replacement.

A rule of graphopt is one file with four parts in this order: the graphs before and after, the pattern, the check, the
rewrite.  A user's rule (`graphopt.register_rule`) needs a pattern and a function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.fx import Node

from graphopt.codegen.form import OUTPUT_PARTS
from graphopt.passes import ops_view
from graphopt.passes.facts import Facts
from graphopt.passes.pattern import Attempt, Pattern


@dataclass
class Replacement:
    """An operator call for a match.

    `inputs` are its tensor operands by name (None for an absent one), `attributes` its other arguments, `results` maps
    a node of the match to the position of the result that stands for it.  `fusion` names the operator.  `layouts` maps
    a node whose memory order is not that of its dimensions to that order (outermost first): operators write contiguous
    tensors, so such a result is copied into the order eager mode has.  `views` are replayed on an input (outermost
    first); `find` fills in those the pattern looked through.  `put` places the call when it is not one operator call:
    (graph, replacement, input nodes, operator) -> result nodes by position.
    """

    fusion: str
    inputs: dict[str, Node | None]
    attributes: dict[str, Any]
    results: dict[Node, int]
    layouts: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    views: dict[str, list[Node]] = field(default_factory=dict)
    put: Callable[[fx.Graph, Replacement, dict[str, Node | None], Any], dict[int, Node]] | None = None


def is_one(match: Match) -> None:
    """The `candidate` of a rule whose pattern says it all."""


@dataclass(frozen=True)
class Rule:
    """One rewrite.

    name: unique; what reports and `graphopt.rules` call it.
    pattern: what it matches, from the last node upwards.
    families: names it is switched on and off by, beside its own.
    candidate: None for a site, or why what has the same operators is none (a rotary embedding, a layer scale).
    check: None, or a reason to leave a site alone.
    replace: the replacement; a rule of graphopt calls one of its operators.
    function: what a user's rule calls instead, with the pattern's variables by name; it returns one tensor, which takes
        the place of the last node matched.
    sites: which nodes of the match end which kind of site.
    roots: the canonical ops a match can end in; taken from the pattern when not given.
    applies: can a graph hold any match at all?  Asked once per graph, to save attempts.
    """

    name: str
    pattern: Pattern
    families: frozenset[str] = frozenset()
    candidate: Callable[[Match], str | None] = is_one
    check: Callable[[Match], str | None] = is_one
    replace: Callable[[Match], Replacement] | None = None
    function: Callable[..., Any] | None = None
    sites: Callable[[Match], list[tuple[str, Node]]] | None = None
    roots: tuple[Any, ...] = ()
    applies: Callable[[fx.Graph], bool] | None = None

    def __post_init__(self) -> None:
        if not self.roots:
            object.__setattr__(self, "roots", tuple(dict.fromkeys(self.pattern.roots())))
        if self.sites is None:
            object.__setattr__(self, "sites", lambda match: [(match.rule.name, match.root)])


@dataclass
class Match:
    """One structural match: what the pattern bound, and the facts of its graph.

    core: nodes the rewrite replaces; side: cheap ones in front of an input, which stay for whoever else reads them.
    results: what was bound, per output, where several matches were joined into this one.
    """

    rule: Rule
    root: Node
    attempt: Attempt
    facts: Facts
    core: list[Node]
    side: list[Node]
    numerics: str = "fp32"
    replacement: Replacement | None = None
    anchor: Node | None = None
    call: Node | None = None  # the operator call, once it is in the graph, and all nodes that came with it
    created: list[Node] = field(default_factory=list)
    shared: bool = False  # the norm has readers outside, so it is computed again inside the operator
    joined: list[Match] = field(default_factory=list)

    def __getitem__(self, name: str) -> Node:
        return self.attempt.env[name]

    def get(self, name: str) -> Node | None:
        """What a name is bound to, or None."""
        return self.attempt.env.get(name)

    def views(self, name: str) -> list[Node]:
        """The views between an operand and its use, outermost first; "scale.1" is the scale of the second output."""
        part, _, i = name.partition(".")
        owner = self.joined[int(i or 0)] if self.joined and part in OUTPUT_PARTS else self
        return list(owner.attempt.views.get(part, []))


def narrowing_tail(node: Node) -> tuple[Node, list[Node]]:
    """The cast that ends a site (`.type_as(x)`), if the only reader of its last value narrows it: new root, casts.

    A cast to the same dtype ends nothing: sites behind it look through it, and would read a node that is gone.
    """
    trailing: list[Node] = []
    last = node
    while len(node.users) == 1:
        user = next(iter(node.users))
        before, after = ops_view.dtype_of(node), ops_view.dtype_of(user)
        if ops_view.canonical(user) != "cast" or user.args[0] is not node or before is None or after is None:
            break
        if not ops_view.widens(after, before):
            break
        trailing.append(user)
        node = user
        if before != after:
            last = node
    return last, trailing[: trailing.index(last) + 1] if last in trailing else []
