"""One view of an attention, however a model spells it: a call of scaled_dot_product_attention, or written out.

    softmax(q @ k^T * scale + mask) @ v       matmul, bmm, baddbmm, einsum; the scale on q, on k or on the logits; casts
                                              and dropout anywhere between
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx import Node

from graphopt.passes import ops_view

aten = torch.ops.aten
SDPA = (F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default)
_SOFTMAX = {torch.softmax, F.softmax, aten._softmax.default, aten.softmax.int}
_MATMUL = {torch.matmul, torch.bmm, operator.matmul, aten.bmm.default, aten.matmul.default}
DROPOUT = {F.dropout, torch.dropout, aten.dropout.default}
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True)
class Attention:
    """An attention node: `node` yields what softmax(q k^T) v is; q, k, v are [.., tokens, D] nodes.

    scale: None for D ** -0.5.  mask: the node added to (or selecting) the logits.  spelling: "sdpa" or "written out".
    reason: what of the spelling forbids replacing it, if anything.
    """

    node: Node
    q: Node
    k: Node
    v: Node
    mask: Node | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    spelling: str = "sdpa"
    reason: str | None = None


def attentions(graph: fx.Graph) -> Iterator[Attention]:
    """Every attention of one graph, in its order."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in SDPA:
            yield _called(node)
        elif is_softmax(node):
            found = _written_out(node)
            if found is not None:
                yield found


def _called(node: Node) -> Attention:
    given = dict(zip(_NAMES, node.args)) | node.kwargs
    mask, scale = given.get("attn_mask"), given.get("scale")
    reason = None if scale is None or isinstance(scale, (int, float)) else "its scale is computed in the graph"
    return Attention(
        node, given["query"], given["key"], given["value"], mask if isinstance(mask, Node) else None,
        float(given.get("dropout_p") or 0.0), bool(given.get("is_causal", False)),
        float(scale) if isinstance(scale, (int, float)) else None, reason=reason)


def is_softmax(node: Node) -> bool:
    """A softmax over the last dimension of at least three."""
    called = node.op == "call_function" and node.target in _SOFTMAX
    if not called and not (node.op == "call_method" and node.target == "softmax"):
        return False
    v = ops_view.value(node)
    dim = ops_view.operand(node, 1, "dim")
    return v is not None and v.dim() >= 3 and dim in (-1, v.dim() - 1)


def is_matmul(node: object) -> bool:
    """A product of two tensors."""
    if not isinstance(node, Node):
        return False
    return (node.op == "call_function" and node.target in _MATMUL) or (
        node.op == "call_method" and node.target in ("matmul", "bmm", "__matmul__"))


def _written_out(soft: Node) -> Attention | None:
    """Up from the softmax to q @ k^T, down to the product with v."""
    logits, scale, mask = _logits(soft.args[0] if soft.args else soft.kwargs["input"])
    pair = _product(logits)
    down = _down(soft)
    if pair is None or down is None:
        return None
    root, v, dropout = down
    q, k, on_logits = pair
    q, on_q = _scaled(q)
    k, on_k = _scaled(k)
    factors = (scale, on_logits, on_q, on_k)
    reason = "its scale is computed in the graph" if None in factors else None
    total = 1.0
    for f in factors:
        total *= 1.0 if f is None else f
    values = [ops_view.value(n) for n in (q, k, v)]
    if any(x is None for x in values) or len({x.dim() for x in values if x is not None}) != 1:
        return None
    return Attention(root, q, k, v, mask, dropout, False, total, "written out", reason)


def _logits(node: Any) -> tuple[Any, float | None, Node | None]:
    """Behind casts, a scale and one added mask: (the product, scale or None if it is no number, mask)."""
    scale: float | None = 1.0
    mask = None
    while isinstance(node, Node):
        name = ops_view.canonical(node)
        if name == "cast":
            node = node.args[0]
        elif name in ("mul", "div"):
            a, b = ops_view.operands(node)
            if name == "mul" and isinstance(b, Node) and not isinstance(a, Node):
                a, b = b, a
            if isinstance(b, (int, float)):
                scale = None if scale is None else scale * (b if name == "mul" else 1 / b)
            elif _one_number(b):
                scale = None
            else:
                break
            node = a
        elif name == "add" and mask is None:
            a, b = ops_view.operands(node)
            if not isinstance(a, Node) or not isinstance(b, Node):
                break
            node, mask = (a, b) if _leads_to_product(a) else (b, a)
        elif node.op == "call_method" and node.target == "masked_fill" and mask is None:
            node, mask = node.args[0], node.args[1]
        else:
            break
    return node, scale, mask


def _leads_to_product(node: Any) -> bool:
    while isinstance(node, Node) and ops_view.canonical(node) in ("cast", "mul", "div"):
        node = node.args[0]
    return _product(node) is not None


def _one_number(node: Any) -> bool:
    """Is it a number that is computed in the graph?"""
    v = ops_view.value(node)
    return isinstance(node, Node) and (v is None or v.dim() == 0)


def _product(node: Any) -> tuple[Node, Node, float] | None:
    """(q, k, scale) of q @ k^T."""
    if not isinstance(node, Node):
        return None
    if is_matmul(node):
        q, kt = node.args[0], node.args[1]
        k = _transposed(kt)
        return None if k is None or not isinstance(q, Node) else (q, k, 1.0)
    if node.target is torch.baddbmm and node.kwargs.get("beta", 1) == 0:
        alpha = node.kwargs.get("alpha", 1)
        k = _transposed(node.args[2])
        if k is not None and isinstance(node.args[1], Node) and isinstance(alpha, (int, float)):
            return node.args[1], k, float(alpha)
    if node.target is torch.einsum and isinstance(node.args[0], str):
        terms = node.args[0].replace(" ", "").replace("->", ",").split(",")
        if len(terms) == 3 and len(node.args) == 3 and _scores(*terms):
            return node.args[1], node.args[2], 1.0  # type: ignore[return-value]
    return None


def _scores(q: str, k: str, out: str) -> bool:
    """Is `q,k->out` "bhid,bhjd->bhij" by any letters?"""
    return (len(q) >= 3 and q[:-2] == k[:-2] == out[:-2] and q[-1] == k[-1] and out[-2] == q[-2] and out[-1] == k[-2]
            and q[-2] != k[-2])


def _transposed(node: Any) -> Node | None:
    """k, if the node is k with its last two dimensions swapped (a cast or a scale may follow)."""
    if not isinstance(node, Node):
        return None
    v = ops_view.value(node)
    if v is None:
        return None
    swapped = False
    if node.op in ("call_method", "call_function") and node.target in ("transpose", "swapaxes", torch.transpose):
        dims = {d % v.dim() for d in node.args[1:3]}  # type: ignore[operator]
        swapped = dims == {v.dim() - 1, v.dim() - 2}
    elif node.op == "call_method" and node.target == "permute":
        order = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        swapped = [d % v.dim() for d in order] == [*range(v.dim() - 2), v.dim() - 1, v.dim() - 2]
    elif node.op == "call_function" and getattr(node.target, "__name__", "") == "getattr" and node.args[1] == "mT":
        swapped = True
    return node.args[0] if swapped else None  # type: ignore[return-value]


def _scaled(node: Node) -> tuple[Node, float | None]:
    """A factor on q or k itself."""
    if ops_view.canonical(node) in ("mul", "div"):
        a, b = ops_view.operands(node)
        if isinstance(a, Node) and isinstance(b, (int, float)):
            return a, b if ops_view.canonical(node) == "mul" else 1 / b
    return node, 1.0


def _down(soft: Node) -> tuple[Node, Node, float] | None:
    """(the product with v, v, dropout) below a softmax that nothing else reads."""
    node, dropout = soft, 0.0
    while len(node.users) == 1:
        user = next(iter(node.users))
        if is_matmul(user) and user.args[0] is node and isinstance(user.args[1], Node):
            return user, user.args[1], dropout
        if user.target is torch.einsum and isinstance(user.args[0], str) and user.args[1] is node:
            p, v, out = user.args[0].replace(" ", "").replace("->", ",").split(",")
            right = p[:-2] == v[:-2] == out[:-2] and p[-1] == v[-2] and out[-2] == p[-2] and out[-1] == v[-1]
            return (user, user.args[2], dropout) if right else None  # type: ignore[return-value]
        if user.op == "call_function" and user.target in DROPOUT:
            if ops_view.operand(user, 2, "training", True):
                dropout = float(ops_view.operand(user, 1, "p", 0.5))
        elif ops_view.canonical(user) != "cast":
            return None
        node = user
    return None
