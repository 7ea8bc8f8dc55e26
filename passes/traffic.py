"""Bytes a chain moves when every op of it runs on its own, as in eager mode.

The forward reads every operand and writes every result once.  The backward of a product reads the cotangent and the
other operand and writes the gradient; of a sum it passes the cotangent on; a gradient that is broadcast is read
again to be summed; a norm reads the cotangent and its input and writes the gradient.  Views are free, and so is a
cast that changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch.fx import Node

from graphopt import _compat
from graphopt.passes import ops_view
from graphopt.passes.rule import Match


def op_by_op(core: Iterable[Node]) -> dict[str, int]:
    """Bytes of the nodes of a match: direction -> bytes."""
    nodes = [n for n in core if not _free(n)]
    return {"forward": sum(map(forward, nodes)), "backward": sum(map(backward, nodes))}


def fused(match: Match) -> dict[str, int]:
    """Bytes of the operator a match is replaced by: direction -> bytes."""
    replacement = match.replacement
    if replacement is None:
        raise ValueError("a match was not accepted")
    inputs = [(replacement.views.get(name) or [n])[0] for name, n in replacement.inputs.items() if n is not None]
    # two nodes may stand for one result (h before and after a cast that keeps its values)
    results = {position: size(node) for node, position in replacement.results.items()}
    into, out = sum(map(size, inputs)), sum(results.values())
    backward = out + 2 * into  # cotangents in, what was saved in, gradients out
    if replacement.attributes.get("norm") == "none" and (x := replacement.inputs.get("x")) is not None:
        backward -= 2 * size(x)  # the residual is not saved, and its gradient is the cotangent
    return {"forward": into + out, "backward": backward}


def forward(node: Node) -> int:
    """Operands once, result once."""
    return size(node) + sum(size(n) for n in node.all_input_nodes)


def backward(node: Node) -> int:
    """The gradients of all tensor operands of one op."""
    name, full = ops_view.canonical(node), size(node)
    total = 0
    for operand in node.all_input_nodes:
        mine = size(operand)
        if mine == 0:
            continue
        if name == "mul":
            others = sum(size(o) for o in node.all_input_nodes if o is not operand)
            total += full + others + full  # the cotangent, the other operand, the product
        elif name not in ("add", "sub"):
            total += full + mine + mine  # the cotangent, the operand, its gradient
        if name in ("add", "sub", "mul") and elements(operand) < elements(node):
            total += full + mine  # summed over the broadcast dimensions
    return total


def size(node: Node) -> int:
    """Bytes of what a node yields; 0 for what is not a tensor."""
    v = ops_view.value(node)
    return 0 if v is None else elements(node) * v.dtype.itemsize


def elements(node: Node) -> int:
    """Elements of a tensor; symbolic sizes count as they were traced."""
    v = ops_view.value(node)
    return 0 if v is None else prod(_compat.size_hint(s) for s in v.shape)


def _free(node: Node) -> bool:
    name: str = ops_view.canonical(node)
    if name in ops_view.VIEWS or name in ops_view.PIECES:
        return True
    source: Any = node.args[0] if node.args else None
    before, after = ops_view.dtype_of(source), ops_view.dtype_of(node)
    return name == "cast" and isinstance(before, torch.dtype) and before == after
