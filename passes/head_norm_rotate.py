"""An RMS norm per head and the rotary embedding behind it become one operator (queries, keys of HunyuanVideo, FLUX).

    n = rms_norm(x, (d,), weight)                    x [B, N, H, d]
    real, imaginary = n.reshape(B, N, H, -1, 2).unbind(-1)
    rotated = stack([-imaginary, real], -1).flatten(3)          ->   y = head_norm_rotate(x, weight, cos, sin)
    y = (n.float() * cos + rotated.float() * sin).to(n.dtype)

Text beside the image is part of it, so that nothing is copied for the `cat`:

    cat([rotate(n[:, :-t]), n[:, -t:]], 1)       one tensor, its last rows only normed (HunyuanVideo's single blocks)
    cat([rotate(norm(x)), norm(text)], 1)        two tensors, the second is only normed (its double blocks)
    rotate(cat([norm(text), norm(x)], 1))        two tensors (FLUX's double blocks)

The norm may be written out (diffusers' RMSNorm).  The compiler makes at least two kernels of it in each direction and
reads x again for the sums of the weight's gradient; the operator moves x and y once, and its backward dy, x and dx.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx
from torch.fx import Node

from graphopt.codegen import compiler, head_rotary_operators
from graphopt.codegen.head_rotary import MAX_D, MAX_HEAD, HeadRotary
from graphopt.codegen.head_rotary import unit as head_unit
from graphopt.passes import call, ops_view
from graphopt.passes.norms import norm_of
from graphopt.passes.pattern import Attempt, Var
from graphopt.passes.rotary_sites import DTYPES, Chain, RotaryPass, halves_of, only_user

NORM = norm_of(Var("x"))


class HeadNormRotate(RotaryPass):
    """RMS norm per head and rotary embedding in one kernel per direction."""

    name = "head_norm_rotate"

    def chains(self, graph: fx.Graph) -> Iterator[Chain]:
        """See RotaryPass."""
        for node in graph.nodes:
            if ops_view.canonical(node) != "stack":
                continue
            turn = embedding(node)
            chain = None if turn is None else joined(turn)
            if chain is not None:
                yield chain


@dataclass
class Embedding:
    """A rotary embedding: what it turns, its tables, its result, and its nodes."""

    source: Node
    cos: Node
    sin: Node
    result: Node
    core: list[Node]


@dataclass
class Normed:
    """An RMS norm per head: what it reads, and its nodes; casts in `side` may go with it."""

    result: Node
    norm: Node
    x: Node
    weight: Node | None
    eps: float
    core: list[Node]
    side: list[Node] = field(default_factory=list)


def embedding(stack: Node) -> Embedding | None:
    """The embedding around `stack([-imaginary, real], -1)`."""
    pieces = ops_view.operand(stack, 0, "tensors")
    if ops_view.operand(stack, 1, "dim", 0) not in (-1, 4) or not isinstance(pieces, (list, tuple)) or len(pieces) != 2:
        return None
    negative, real = pieces
    if not isinstance(negative, Node) or not isinstance(real, Node) or ops_view.canonical(negative) != "neg":
        return None
    imaginary = negative.args[0]
    unbound = real.args[0] if ops_view.canonical(real) == "pick" else None
    pairs = unbound.args[0] if isinstance(unbound, Node) else None
    if not isinstance(pairs, Node) or halves_of(pairs) != (real, imaginary):
        return None
    source = in_pairs(pairs)
    rotated = only_user(stack)
    if source is None or rotated is None or ops_view.canonical(rotated) not in ("flatten", "view"):
        return None
    if not ops_view.same_shape(ops_view.value(rotated), ops_view.value(source)):
        return None
    core = [pairs, unbound, real, imaginary, negative, stack, rotated]
    with_sin = product_behind(rotated, core)
    total = None if with_sin is None else only_user(with_sin)
    if total is None or ops_view.canonical(total) != "add" or ops_view.has_alpha(total):
        return None
    with_cos = next((n for n in ops_view.operands(total) if n is not with_sin), None)
    cos, sin = factor_of(with_cos, source, core), factor_of(with_sin, rotated, core)
    if cos is None or sin is None or not (is_table(cos, source) and is_table(sin, source)):
        return None
    core += [with_sin, with_cos, total]  # type: ignore[list-item]
    end = only_user(total)
    if end is not None and ops_view.canonical(end) == "cast":
        core.append(end)
        total = end
    return Embedding(source, cos, sin, total, core)  # type: ignore[arg-type]


def in_pairs(pairs: Node) -> Node | None:
    """What a view [B, N, H, d / 2, 2] is a view of: [B, N, H, d]."""
    source: Any = pairs.args[0]
    before, after = ops_view.value(source), ops_view.value(pairs)
    if ops_view.canonical(pairs) not in ("view", "unflatten") or before is None or after is None:
        return None
    if before.dim() != 4 or after.dim() != 5 or after.shape[-1] != 2:
        return None
    return source if all(ops_view.same_size(a, b) for a, b in zip(before.shape[:3], after.shape[:3])) else None


def product_behind(node: Node, core: list[Node]) -> Node | None:
    """The product that alone reads a node, casts aside."""
    user = only_user(node)
    while user is not None and ops_view.canonical(user) == "cast":
        core.append(user)
        user = only_user(user)
    return user if user is not None and ops_view.canonical(user) == "mul" else None


def factor_of(product: Any, turned: Node, core: list[Node]) -> Node | None:
    """The factor beside `turned` (casts aside) in a product; the casts are the embedding's."""
    if not isinstance(product, Node) or ops_view.canonical(product) != "mul":
        return None
    for value, factor in (ops_view.operands(product), ops_view.operands(product)[::-1]):
        casts = []
        while isinstance(value, Node) and value is not turned and ops_view.canonical(value) == "cast":
            casts.append(value)
            value = value.args[0]
        if value is turned and isinstance(factor, Node):
            core += [c for c in casts if c not in core]
            return factor
    return None


def is_table(table: Node, source: Node) -> bool:
    """Is it [1, N, 1, d] with a row per row of [B, N, H, d], and learns nothing?"""
    t, v = ops_view.value(table), ops_view.value(source)
    if t is None or v is None or t.dim() != 4 or t.requires_grad or t.dtype not in DTYPES:
        return False
    wanted = (1, v.shape[1], 1, v.shape[3])
    return all(ops_view.same_size(a, b) for a, b in zip(t.shape, wanted))


def normed(node: Any) -> Normed | None:
    """The RMS norm per head whose result a node is."""
    if not isinstance(node, Node):
        return None
    core, last = [], node
    while ops_view.canonical(last) == "cast" and isinstance(last.args[0], Node):
        core.append(last)
        last = last.args[0]
    attempt = Attempt()
    for _ in NORM.match(last, attempt):
        found = attempt.copy()
        if call.norm_name(found) != "rms_norm" or found.get("norm_bias") is not None:
            continue
        x, weight, norm = found["x"], call.affine(found)["weight"], found["norm"]
        value, width = ops_view.value(x), ops_view.value(weight)
        if value is None or value.dim() != 4 or not isinstance(value.shape[2], int):
            return None
        d = value.shape[3]
        if not isinstance(d, int) or d & (d - 1) or not 4 <= d <= MAX_HEAD or value.shape[2] * d > MAX_D:
            return None
        whole = ops_view.operand(norm, 1, "normalized_shape") if ops_view.canonical(norm) == "rms_norm" else (d,)
        if list(whole) != [d] or (weight is not None and (width is None or tuple(width.shape) != (d,))):
            return None
        return Normed(node, norm, x, weight, call.epsilon(found), [*core, *found.core], found.side)
    return None


def joined(turn: Embedding) -> Chain | None:
    """The embedding with the norms in front of it, and with the text beside it."""
    source, result, core = turn.source, turn.result, list(turn.core)
    parts = [normed(source)]
    if parts[0] is not None:
        behind = beside(turn.result)
        other = None if behind is None else normed(behind[1])
        if behind is not None and other is not None and alike(parts[0], other):
            parts.append(other)
            core.append(behind[0])
            result = behind[0]
    elif ops_view.canonical(source) == "index":
        whole, behind = source.args[0], beside(turn.result)
        parts = [normed(whole)]
        if behind is None or not cuts(whole, source, behind[1]):
            return None
        core += [source, behind[1], behind[0]]
        result = behind[0]
    elif (pieces := two_rows(source)) is not None:
        parts = [normed(p) for p in pieces]
        if None in parts or not alike(*parts):  # type: ignore[arg-type]
            return None
        core.append(source)
    known = [p for p in parts if p is not None]
    if len(known) != len(parts) or not stands_alone(core + [n for p in known for n in p.core], result):
        return None
    value = ops_view.value(result)
    if value is None or call.memory_order(value) != (0, 1, 2, 3):
        return None
    core += [n for p in known for n in p.core]
    core += dead_with([n for p in known for n in p.side], core)
    inputs = [t for p in known for t in (p.x, p.weight) if t is not None] + [turn.cos, turn.sin]
    given = (known, turn.cos, turn.sin, result)
    return Chain([p.norm for p in known], inputs, result, core, partial(units, *given), partial(operator_call, *given))


def beside(result: Node) -> tuple[Node, Any] | None:
    """The `cat` along the rows that alone reads a result, and what stands behind it there."""
    cat = only_user(result)
    pieces = None if cat is None else two_rows(cat)
    return (cat, pieces[1]) if cat is not None and pieces is not None and pieces[0] is result else None


def two_rows(cat: Node) -> tuple[Any, Any] | None:
    """What a `cat` of two tensors along the rows joins, if they have one dtype."""
    if ops_view.canonical(cat) != "cat" or ops_view.operand(cat, 1, "dim", 0) not in (1, -3):
        return None
    pieces = ops_view.operand(cat, 0, "tensors")
    if not isinstance(pieces, (list, tuple)) or len(pieces) != 2 or pieces[0] is pieces[1]:
        return None
    same = ops_view.dtype_of(pieces[0]) == ops_view.dtype_of(pieces[1])
    return (pieces[0], pieces[1]) if same and all(isinstance(p, Node) for p in pieces) else None


def cuts(whole: Any, head: Node, tail: Any) -> bool:
    """Are `head` and `tail` all rows of a norm's result, as two slices?  (Their fake tensors are views of its.)"""
    if not isinstance(tail, Node) or ops_view.canonical(tail) != "index" or tail.args[0] is not whole:
        return False
    w, a, b = (ops_view.value(n) for n in (whole, head, tail))
    if w is None or a is None or b is None or a.dim() != 4 or b.dim() != 4:
        return False
    same = all(ops_view.same_size(w.shape[i], v.shape[i]) for v in (a, b) for i in (0, 2, 3))
    strides = all(ops_view.same_size(w.stride(i), v.stride(i)) for v in (a, b) for i in range(4))
    starts = ops_view.same_size(a.storage_offset(), w.storage_offset()) and ops_view.same_size(
        b.storage_offset(), w.storage_offset() + a.shape[1] * w.stride(1))
    return same and strides and starts and ops_view.same_size(a.shape[1] + b.shape[1], w.shape[1])


def alike(one: Normed, other: Normed) -> bool:
    """Can one kernel norm both?"""
    a, b = ops_view.value(one.x), ops_view.value(other.x)
    if a is None or b is None or a.dtype != b.dtype or one.eps != other.eps:
        return False
    same = ops_view.dtype_of(one.weight) == ops_view.dtype_of(other.weight)
    return same and all(ops_view.same_size(a.shape[i], b.shape[i]) for i in (0, 2, 3))


def stands_alone(core: list[Node], result: Node) -> bool:
    """Does nothing outside read a value that goes?"""
    inside = set(core)
    return all(u in inside for n in core if n is not result for u in n.users)


def dead_with(side: list[Node], core: list[Node]) -> list[Node]:
    """The casts in front that nothing reads once the chain is gone."""
    gone = set(core)
    out = []
    for node in side:
        if node not in gone and all(u in gone for u in node.users):
            out.append(node)
            gone.add(node)
    return out


def operator_call(parts: list[Normed], cos: Node, sin: Node, result: Node, engine: str) -> tuple[Any, tuple[Any, ...]]:
    """The operator and its arguments."""
    given = [t for p in parts for t in (p.x, p.weight)]
    given += [None] * (4 - len(given))
    return head_rotary_operators.operator(engine), (*given, cos, sin, parts[0].eps, ops_view.dtype_of(result))


def units(parts: list[Normed], cos: Node, sin: Node, result: Node, target: str) -> list[compiler.Unit]:
    """The kernels of a site, for a compiler that need not run on its GPU."""
    x, y, table = (ops_view.value(n) for n in (parts[0].x, result, cos))
    if x is None or y is None or table is None:
        raise ValueError("a rotary embedding without known operands")
    weights = tuple(d for p in parts if (d := ops_view.dtype_of(p.weight)) is not None)
    specs = [HeadRotary(direction, x.shape[2], x.shape[3], len(parts), parts[0].eps, bool(weights), x.dtype, y.dtype,
                        target) for direction in (("forward", "backward") if y.requires_grad else ("forward",))]
    return [head_unit(s, table.dtype, weights) for s in specs]
