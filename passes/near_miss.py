"""Why a norm is not modulated, and why a gated sum is no gate: one reason for each that no match covers.

Each is asked once, after matching: what was refused there, what made it a look-alike, or how far the pattern got.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx
from torch.fx import Node

from graphopt.passes import chain, gate_residual_joined, norm_modulate, norms, ops_view, source
from graphopt.passes.norm_modulates import ends, readers
from graphopt.passes.pattern import Attempt, Var, describe
from graphopt.passes.record import NearMiss
from graphopt.passes.rewrite import Found

_WRITTEN = norms.WrittenOut(Var("x").cast(), "")
_GATED = chain.gated() | gate_residual_joined.PATTERN


def explain(gm: fx.GraphModule, found: Found) -> list[NearMiss]:
    """The near misses of one graph, in its order; call it before the graph is changed."""
    with ops_view.remembered():
        covered = {n for m in found.matches for n in m.core}
        covered |= {n for m in found.matches for name in ("norm", "branch_norm") if (n := m.get(name)) is not None}
        rejected = {r.node: r.reason for r in found.rejects}
        misses = []
        for node in gm.graph.nodes:
            if node in covered:
                continue
            if _is_norm(node):
                misses.append(_miss("modulate", node, _why_no_modulate(node, found, rejected)))
            elif (product := _gated_product(node)) is not None and product not in covered:
                misses.append(_miss("gate", node, _why_no_gate(node, found, rejected)))
        return misses


def _miss(kind: str, node: Node, reason: str) -> NearMiss:
    return NearMiss(kind, source.fqn(node), node.name, reason, source.where(node))  # type: ignore[arg-type]


def _is_norm(node: Node) -> bool:
    name = ops_view.canonical(node)
    if name in ("layer_norm", "rms_norm"):
        return True
    if name not in ("mul", "div") or not any(_is_root(a) for a in node.all_input_nodes):
        return False
    return any(True for _ in _WRITTEN.match(node, Attempt()))


def _is_root(node: Node) -> bool:
    while ops_view.canonical(node) == "cast":
        node = node.args[0]  # type: ignore[assignment]
    return ops_view.canonical(node) in ("rsqrt", "sqrt", "pow")


def _gated_product(node: Node) -> Node | None:
    """The product of two tensors (or several joined by `cat`) that a sum adds, or None."""
    name = ops_view.canonical(node)
    if name == "addcmul":
        return node
    if name != "add":
        return None
    if not _tensors(node):
        return None
    for operand in ops_view.operands(node):
        while isinstance(operand, Node) and ops_view.canonical(operand) == "cast":
            operand = operand.args[0]
        if not isinstance(operand, Node):
            continue
        parts = [operand]
        if ops_view.canonical(operand) == "cat":
            parts = [p for p in operand.all_input_nodes if ops_view.canonical(p) == "mul"]
        if any(ops_view.canonical(p) == "mul" and _tensors(p) for p in parts):
            return operand
    return None


def _tensors(node: Node) -> bool:
    return all(ops_view.value(a) is not None for a in ops_view.operands(node))


def _why_no_modulate(norm: Node, found: Found, rejected: dict[str, str]) -> str:
    best, at = None, list(ends(norm))
    for node in at:
        reason = rejected.get(node.name) or found.look_alikes.get((node, "modulate"))
        if reason is not None:
            return reason
    if any(ops_view.canonical(node) == "add" and _adds_factor(node, norm, found) for node in readers(norm)):
        return "a shift without a scale is left to the compiler: fusing it alone saves nothing"
    for node in at:
        attempt = Attempt()
        for _ in norm_modulate.PATTERN.match(node, attempt):
            break
        if attempt.best is not None and (best is None or attempt.best.depth > best.depth):
            best = attempt.best
    if best is not None:
        return str(best)
    reading = ", ".join(dict.fromkeys(_named(readers(norm)))) or "nothing"
    return f"its result is read by {reading}: no scale multiplies it"


def _adds_factor(total: Node, norm: Node, found: Found) -> bool:
    """Is a sum that of a norm and a broadcast factor?"""
    full, facts = ops_view.value(total), found.facts
    for operand in ops_view.operands(total):
        v = ops_view.value(operand)
        if isinstance(operand, Node) and facts is not None and v is not None and not facts.depends(operand, norm):
            wide = ops_view.broadcasts_to(v, full) and not ops_view.same_shape(v, full)
            return wide and not facts.static[operand]
    return False


def _why_no_gate(node: Node, found: Found, rejected: dict[str, str]) -> str:
    reason = rejected.get(node.name) or found.look_alikes.get((node, "gate"))
    if reason is not None:
        return reason
    attempt = Attempt()
    for _ in _GATED.match(node, attempt):
        return "another rule took its place"
    return str(attempt.best) if attempt.best is not None else "it is no sum of a residual and a gated branch"


def _named(nodes: Iterator[Node]) -> Iterator[str]:
    for node in nodes:
        yield describe(node).split(" [")[0]
