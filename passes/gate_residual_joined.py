"""F3 on slices that are joined by `cat` (HunyuanVideo i2v: the first frame has a gate of its own).

before                                             after
    a = branch[:, :n] * gate_a                         a = gate_residual(residual[:, :n], branch[:, :n], gate_a)[H]
    b = branch[:, n:] * gate_b                         b = gate_residual(residual[:, n:], branch[:, n:], gate_b)[H]
    h = residual + cat([a, b], 1)    (any casts)       h = cat([a, b], 1)
"""

from __future__ import annotations

import operator as op
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from graphopt.codegen.form import OPERANDS, H
from graphopt.passes import call, chain, ops_view, questions
from graphopt.passes.norms import slices_rows
from graphopt.passes.pattern import Attempt, Op, Pattern, Var
from graphopt.passes.record import Kind
from graphopt.passes.rule import Match, Replacement, Rule

PIECE = Op("mul", Var("branch").cast(), chain.gate(), bind="gated").cast()


class Joined(Pattern):
    """A `cat` whose every part fits `part`; the attempts are bound to `pieces`, the dimension to `dim`."""

    def __init__(self, part: Pattern) -> None:
        self.part = part

    def roots(self) -> list[Any]:
        """See Pattern."""
        return ["cat"]

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """See Pattern."""
        if not isinstance(x, Node) or ops_view.canonical(x) != "cat":
            attempt.fail(x, "expected gated slices joined by cat")
            return
        parts = ops_view.operand(x, 0, "tensors")
        pieces = [p for p in map(self.first, parts) if p is not None] if isinstance(parts, (list, tuple)) else []
        if not pieces or len(pieces) != len(parts):
            attempt.fail(x, f"{x.name} joins something that is not gated")
            return
        core = [x, *(n for p in pieces for n in p.core)]
        side = [n for p in pieces for n in p.side]
        attempt.core += core
        attempt.side += side
        attempt.env |= {"pieces": pieces, "dim": ops_view.operand(x, 1, "dim", 0)}
        yield
        del attempt.env["pieces"], attempt.env["dim"]
        del attempt.core[len(attempt.core) - len(core):]
        del attempt.side[len(attempt.side) - len(side):]

    def first(self, x: object) -> Attempt | None:
        """The first way a part fits whose branch is a slice."""
        attempt = Attempt()
        for _ in self.part.match(x, attempt):
            if slices_rows(attempt["branch"]):
                return attempt.copy()
        return None


PATTERN = Op("add", Var("residual").cast(), Joined(PIECE).cast(), bind="sum")


def candidate(match: Match) -> str | None:
    """Each piece is a gate on its slice, and the slices are the whole branch."""
    pieces: Any = match["pieces"]
    branch = pieces[0]["branch"].args[0]
    if len({p.get("activated") is None for p in pieces}) > 1:
        return "its gates have different activations"
    if not _whole([p["branch"] for p in pieces], match["dim"]):  # type: ignore[arg-type]
        return "the gated slices are not the whole branch, in order"
    for piece in pieces:
        env = {**match.attempt.env, "branch": branch, "gate": piece["gate"]}
        views = {"gate": piece.views.get("gate", [])}
        one = Match(match.rule, match.root, Attempt(env, views=views), match.facts, [], [])
        reason = questions.no_gate(one)
        if reason is not None:
            return reason
    return None


def _whole(slices: list[Node], dim: int) -> bool:
    """Are they all slices of one tensor along `dim`, each starting where the one before stops?"""
    end: Any = None
    for i, node in enumerate(slices):
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        v = ops_view.value(node)
        d = dim if dim >= 0 or v is None else dim + v.dim()
        if node.args[0] is not slices[0].args[0] or d != len(index) - 1:
            return False
        if any(s != slice(None) for s in index[:d]) or index[d].step is not None:  # type: ignore[union-attr]
            return False
        start, stop = index[d].start, index[d].stop  # type: ignore[union-attr]
        if ((start or None) is not (end or None) and start != end) or (stop is None) != (i == len(slices) - 1):
            return False
        end = stop
    return True


def check(match: Match) -> str | None:
    """A reason to leave the site alone, or None."""
    if match.numerics == "eager":
        return "numerics='eager' has no rounding points for joined slices"
    return questions.dtype_reason(match, "residual") or questions.layout_reason(match.root)


def replace(match: Match) -> Replacement:
    """One operator call per slice, and a cat."""
    pieces: Any = match["pieces"]
    inputs: dict[str, Node | None] = {}
    views: dict[str, list[Node]] = {}
    for i, piece in enumerate(pieces):
        inputs |= {f"x.{i}": match["residual"], f"branch.{i}": piece["branch"], f"gate.{i}": piece["gate"]}
        views |= {f"x.{i}": [piece["branch"]], f"gate.{i}": piece.views.get("gate", []), f"branch.{i}": []}
    results = {match.root: H}
    attributes = call.attributes(match, h=match.root)
    if pieces[0].get("activated") is not None:
        attributes["activation"] = "tanh"
    joined = partial(put, match["dim"])
    return Replacement("gate_residual", inputs, attributes, results, call.layouts(results), views, joined)


def put(
    dim: Any, graph: fx.Graph, replacement: Replacement, inputs: dict[str, Node | None], operator: Any
) -> dict[int, Node]:
    """The calls, one per slice, and the cat along `dim`."""
    parts = []
    for i in range(len(inputs) // 3):
        given = {n: inputs.get(f"{n}.{i}") for n in OPERANDS}
        one = graph.create_node("call_function", operator, (), {**given, "modulation": [], **replacement.attributes})
        parts.append(graph.call_function(op.getitem, (one, H)))
    return {H: graph.call_function(torch.cat, (parts, dim))}


def sites(match: Match) -> list[tuple[Kind, Node]]:
    """One gate."""
    return [("gate", match.root)]


RULE = Rule("gate_residual_joined", PATTERN, frozenset({"gate_residual"}), candidate, check, replace, sites=sites)
