"""An RMS norm over all heads and the rotary embedding behind it become one operator (queries and keys of Wan's family).

    n = rms_norm(x, (H * d,), weight).unflatten(2, (H, -1))        y = norm_rotate(x, weight, cos, sin)
    even, odd = n.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[..., 0::2], sin[..., 1::2]                    ->
    y = empty_like(n)
    y[..., 0::2] = even * c - odd * s
    y[..., 1::2] = even * s + odd * c
    y = y.type_as(n)

The writes are into a tensor made here that nobody else sees.  The compiler turns them into selects that compute both
halves for every element; the operator moves x and y once, and its backward dy, x and dx.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from graphopt.codegen import compiler, rotary_operators
from graphopt.codegen.rotary import MAX_D, Rotary
from graphopt.codegen.rotary import unit as rotary_unit
from graphopt.passes import ops_view
from graphopt.passes.rotary_sites import DTYPES, Chain, RotaryPass, halves_of, only_user

EVEN, ODD = (Ellipsis, slice(0, None, 2)), (Ellipsis, slice(1, None, 2))


@dataclass
class Found:
    """One norm with its embedding: operands, and the nodes that go, in the graph's order."""

    norm: Node
    x: Node
    weight: Node | None
    cos: Node
    sin: Node
    result: Node
    core: list[Node]
    heads: int
    eps: float


class NormRotate(RotaryPass):
    """RMS norm and rotary embedding in one kernel per direction."""

    name = "norm_rotate"

    def chains(self, graph: fx.Graph) -> Iterator[Chain]:
        """See RotaryPass."""
        norms = [n for n in graph.nodes if ops_view.canonical(n) == "rms_norm"]
        if not norms or not any(ops_view.canonical(n) == "setitem" for n in graph.nodes):
            return
        for norm in norms:
            found = match(norm)
            if found is not None and fits(found):
                inputs = [n for n in (found.x, found.weight, found.cos, found.sin) if n is not None]
                yield Chain([norm], inputs, found.result, found.core, partial(units, found), partial(call, found), 0)


def call(found: Found, engine: str) -> tuple[Any, tuple[Any, ...]]:
    """The operator and its arguments."""
    return rotary_operators.operator(engine), (
        found.x, found.weight, found.cos, found.sin, found.heads, found.eps, ops_view.dtype_of(found.result))


def units(found: Found, target: str) -> list[compiler.Unit]:
    """The kernels of a site, for a compiler that need not run on its GPU."""
    x, y, cos = (ops_view.value(n) for n in (found.x, found.result, found.cos))
    weight = ops_view.value(found.weight)
    if x is None or y is None or cos is None:
        raise ValueError("a rotary embedding without known operands")
    specs = [Rotary(d, found.heads, x.shape[-1] // found.heads, found.eps, weight is not None, x.dtype, y.dtype, target)
             for d in (("forward", "backward") if y.requires_grad else ("forward",))]
    return [rotary_unit(s, cos.dtype, torch.float32 if weight is None else weight.dtype) for s in specs]


def match(norm: Node) -> Found | None:
    """The chain behind an RMS norm, or None."""
    x = norm.args[0] if norm.args else None
    value = ops_view.value(x)
    heads_node = only_user(norm)
    if value is None or value.dim() != 3 or heads_node is None or ops_view.canonical(heads_node) != "unflatten":
        return None
    split = ops_view.value(heads_node)
    D, weight = value.shape[-1], ops_view.operand(norm, 2, "weight")
    whole = list(ops_view.operand(norm, 1, "normalized_shape") or ()) == [D]
    if split is None or split.dim() != 4 or not isinstance(D, int) or D > MAX_D or not whole:
        return None
    heads, d = split.shape[2:]
    if d & (d - 1) or d < 4:
        return None
    made = {kind: [u for u in heads_node.users if is_kind(u, kind)] for kind in ("pairs", "empty", "cast")}
    if any(len(v) != 1 for v in made.values()) or len(heads_node.users) != 3:
        return None
    (pairs,), (out,), (result,) = made["pairs"], made["empty"], made["cast"]
    halves = halves_of(pairs)
    writes = {_key(w): w for w in out.users if ops_view.canonical(w) == "setitem" and w.args[0] is out}
    if halves is None or set(writes) != {0, 1} or len(out.users) != 3 or result.args[0] is not out:
        return None
    even = product_sum(writes[0].args[2], "sub", halves)
    odd = product_sum(writes[1].args[2], "add", halves[::-1])
    if even is None or odd is None or even["factors"] != odd["factors"]:
        return None
    angles = [table_of(even["factors"][0], EVEN), table_of(even["factors"][1], ODD)]
    if angles[0] is None or angles[1] is None:
        return None
    arithmetic = [*even["nodes"], *odd["nodes"], *writes.values()]
    core = [norm, heads_node, pairs, *pairs.users, *halves, out, *arithmetic, result]
    eps = ops_view.operand(norm, 3, "eps")
    if isinstance(eps, Node):  # with dynamic=True it is symbolic; reading it adds a guard
        eps = float(eps.meta["example_value"])
    if not isinstance(eps, float) or not isinstance(heads, int):
        return None
    return Found(norm, x, weight, angles[0], angles[1], result, core, heads, eps)  # type: ignore[arg-type]


def is_kind(node: Node, kind: str) -> bool:
    """Is a reader of the heads the view in pairs, the new tensor, or the cast at the end?"""
    if kind == "pairs":
        v = ops_view.value(node)
        return ops_view.canonical(node) == "unflatten" and v is not None and v.dim() == 5 and v.shape[-1] == 2
    if kind == "empty":
        return node.target is torch.empty_like and not node.kwargs
    return ops_view.canonical(node) == "cast" and node.target == "type_as"


def _key(write: Node) -> int | None:
    """0 for `[..., 0::2]`, 1 for `[..., 1::2]`."""
    return {str(EVEN): 0, str(ODD): 1}.get(str(write.args[1]))


def product_sum(total: Any, name: str, halves: tuple[Node, Node]) -> dict[str, Any] | None:
    """`halves[0] * a (- or +) halves[1] * b`, read by its write alone: the factors (a, b) and the nodes."""
    if not isinstance(total, Node) or ops_view.canonical(total) != name or len(total.users) != 1:
        return None
    if ops_view.has_alpha(total):
        return None
    products = list(ops_view.operands(total))
    if name == "add" and isinstance(products[0], Node) and halves[0] not in products[0].all_input_nodes:
        products.reverse()
    factors = []
    for product, half in zip(products, halves):
        if not isinstance(product, Node) or ops_view.canonical(product) != "mul" or len(product.users) != 1:
            return None
        a, b = ops_view.operands(product)
        if half not in (a, b):
            return None
        factors.append(b if a is half else a)
    return {"factors": factors, "nodes": [*products, total]}


def table_of(piece: Any, index: tuple[Any, ...]) -> Node | None:
    """The table whose even (or odd) columns a factor is: [1, N, 1, d], no gradient."""
    if not isinstance(piece, Node) or ops_view.canonical(piece) != "index" or str(piece.args[1]) != str(index):
        return None
    table: Any = piece.args[0]
    v = ops_view.value(table)
    if v is None or v.dim() != 4 or v.requires_grad or v.dtype not in DTYPES:
        return None
    return table if ops_view.same_size(v.shape[0], 1) and ops_view.same_size(v.shape[2], 1) else None


def fits(found: Found) -> bool:
    """Are the tables as long and as wide as the rows?"""
    x, result = ops_view.value(found.x), ops_view.value(found.result)
    tables = [ops_view.value(t) for t in (found.cos, found.sin)]
    if x is None or result is None:
        return False
    N, d = x.shape[1], result.shape[-1]
    same = ops_view.same_size
    return all(t is not None and same(t.shape[1], N) and same(t.shape[3], d) for t in tables)
