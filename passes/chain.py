"""The parts fusions are made of, and the questions their rules ask about them.

    gated       residual + gate * branch
    norm        layer_norm(x), with or without weight and bias
    modulated   norm * (1 + scale) + shift, or norm * scale + shift
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from graphopt.codegen.form import OPERANDS, OUTPUT_PARTS, encode_outputs, encode_rounding
from graphopt.passes import ops_view
from graphopt.passes.norms import InnerCasts, slices_rows
from graphopt.passes.pattern import Const, Op, Pattern, Var
from graphopt.passes.rewrite import Match


def gated() -> Pattern:
    """residual + gate * branch, operands in any order, casts anywhere."""
    product = Op("mul", Var("branch").cast(), Var("gate").cast(), bind="gated")
    return Op("add", Var("residual").cast(), product.cast(), bind="sum")


def modulated(norm: Pattern) -> Pattern:
    """norm * gain (+ shift), where the gain is `1 + scale` (possibly viewed after the addition) or a plain scale."""
    one_plus = Op("add", Var("scale").cast(), Const(1), bind="gain", side=True)
    gain = one_plus.views("scale").cast() | Var("scale").cast()
    product = Op("mul", InnerCasts(norm), gain, bind="product")
    return Op("add", product.cast(), Var("shift").cast(), bind="shifted") | product


# -- questions ---------------------------------------------------------------------------------------


def is_factor(match: Match, factor: Node, full: Node) -> bool:
    """Can `factor` be a scale, shift or gate: channel-wide, broadcastable, and not made of parameters alone?"""
    return not match.facts.static[factor] and ops_view.broadcasts_to(ops_view.value(factor), ops_view.value(full))


def factor_shape(match: Match, name: str) -> torch.Tensor | None:
    """The value of a factor as it meets the chain: after the views found between `1 + scale` and the product."""
    views = match.attempt.views.get(name, [])
    return ops_view.value(views[0] if views else match[name])


def is_scale(match: Match, x: Node) -> bool:
    """Is `scale` a factor of x that does not come from x?  (`n * cos + rotate(n) * sin` and gated units are not.)"""
    value, full = factor_shape(match, "scale"), seen(match, x)
    if match.get("norm_weight") is not None and not match.facts.static[match["norm_weight"]]:
        return False
    if match.get("shift") is None and not ends_alone(match):
        return False
    return (
        not match.facts.static[match["scale"]]
        and ops_view.broadcasts_to(value, full)
        and not match.facts.depends(match["scale"], x)
    )


def is_shift(match: Match, x: Node) -> bool:
    """Is `shift` channel-wide, broadcastable and independent of x?"""
    shift = match.get("shift")
    if shift is None:
        return True
    return ops_view.broadcasts_to(ops_view.value(shift), seen(match, x)) and not match.facts.depends(shift, x)


def seen(match: Match, x: Node) -> torch.Tensor | None:
    """The value of the activation a modulate works on: x, or the slice of its norm."""
    slices = match.attempt.views.get("x")
    return ops_view.value(slices[0] if slices else x)


def ends_alone(match: Match) -> bool:
    """Is a product without a shift a scale-only modulate?

    Not when it is added to something (a gate on a normed branch, a refused site), nor when it is joined with another
    function of the norm (a rotary embedding).
    """
    todo, norm = [match["product"]], match["norm"]
    while todo:
        for user in todo.pop().users:
            name = ops_view.canonical(user)
            if name == "cast":
                todo.append(user)
                continue
            added = name == "add" and all(isinstance(a, Node) for a in ops_view.operands(user))
            joined = name in ("sub", "cat") and sum(match.facts.depends(a, norm) for a in user.all_input_nodes) > 1
            if added or joined:
                return False
    return True


def shift_reason(match: Match, x: Node) -> str | None:
    """A full-size addend is a shift only if it was cut from the same vector as the scale; else it is a residual."""
    shift = match.get("shift")
    if shift is None:
        return None
    if ops_view.same_shape(ops_view.value(shift), seen(match, x)) and origin(shift) is not origin(match["scale"]):
        return f"the full-size addend {shift.name} was not cut from the same tensor as the scale: it may be a residual"
    return None


def origin(node: Node) -> Node:
    """The tensor a piece was chunked, split or unbound from, looking through casts, views and `1 +`."""
    while isinstance(node, Node) and node.args:
        name = ops_view.canonical(node)
        up = node.args[0]
        if name == "add" and 1 in node.args:
            up = next((a for a in node.args if isinstance(a, Node)), None)
        elif name not in ops_view.VIEWS and name not in ops_view.PIECES and name != "cast":
            break
        if not isinstance(up, Node):
            break
        node = up
    return node


def is_gated(match: Match) -> bool:
    """Is it residual + gate * branch: both full-size, the branch computed from the residual, the gate not?

    After a graph break residual, gate and branch are graph inputs; then only a broadcast gate can be told apart.
    """
    residual, branch, gate, total = match["residual"], match["branch"], match["gate"], match["sum"]
    facts = match.facts
    full = ops_view.value(total)
    if not ops_view.same_shape(ops_view.value(residual), full) or not ops_view.same_shape(ops_view.value(branch), full):
        return False
    if not is_factor(match, gate, total) or facts.depends(gate, residual):
        return False
    if computed_from(match, branch, residual):
        return True
    from_input = residual.op == "placeholder" and not facts.static[residual]
    return from_input and not ops_view.same_shape(ops_view.value(gate), full)


def computed_from(match: Match, branch: Node, residual: Node, depth: int = 6) -> bool:
    """Was the branch computed from the residual, from what the residual was sliced off, or from a summand of it?"""
    if match.facts.depends(branch, residual):
        return True
    name = ops_view.canonical(residual)
    if depth and (name == "cast" or slices_rows(residual)):
        return computed_from(match, branch, residual.args[0], depth - 1)  # type: ignore[arg-type]
    if depth and name == "add":
        ups = [a for a in ops_view.operands(residual) if isinstance(a, Node)]
        return any(computed_from(match, branch, a, depth - 1) for a in ups)
    return False


def norm_reason(match: Match) -> str | None:
    """Why this norm cannot be fused, or None."""
    norm = match["norm"]
    if kind_of_norm(match) == "written_out":
        width = ops_view.value(norm)
        if width is None or not isinstance(width.shape[-1], int):
            return "the width is not known at compile time"
        if match.numerics == "eager":
            return "numerics='eager' has no rounding points for a norm that is written out"
        return None
    x = ops_view.value(norm.args[0] if norm.args else norm.kwargs.get("input"))
    shape = ops_view.operand(norm, 1, "normalized_shape")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if x is None or len(shape) != 1 or not ops_view.same_size(shape[0], x.shape[-1]):
        return f"{norm.name} normalises over {list(shape)}, not over the last dimension alone"
    if not isinstance(shape[0], int):
        return f"the width {shape[0]} is not known at compile time"
    return None


def dtype_reason(match: Match, *names: str) -> str | None:
    """Why the operands' dtypes cannot be fused, or None."""
    for name in names:
        node = match.get(name)
        dtype = ops_view.dtype_of(node)
        if dtype is not None and not dtype.is_floating_point:
            return f"{name} is {str(dtype).removeprefix('torch.')}"
    return None


def layout_reason(node: Node) -> str | None:
    """Why the layout of a result cannot be kept, or None: the operators write contiguous tensors, as eager does."""
    v = ops_view.value(node)
    if v is None:
        return f"{node.name} has no known shape"
    if memory_order(v) is None:
        return f"{node.name} is not dense in eager mode (strides {list(v.stride())})"
    return None


def memory_order(v: torch.Tensor) -> tuple[int, ...] | None:
    """The order of the dimensions in memory, outermost first, or None for a tensor that is not dense.

    Tried: the order as written, and the last two dimensions swapped (patch embeddings flatten and transpose).
    """
    straight = tuple(range(v.dim()))
    for order in (straight, (*straight[:-2], *straight[-2:][::-1])):
        expected: Any = 1
        for d in reversed(order):
            if not ops_view.same_size(v.shape[d], 1) and not ops_view.same_size(v.stride(d), expected):
                break
            expected = expected * v.shape[d]
        else:
            return order
    return None


def layouts(results: dict[Node, int]) -> dict[Node, tuple[int, ...]]:
    """The results whose memory order is not that of their dimensions."""
    orders = {}
    for node in results:
        v = ops_view.value(node)
        order = None if v is None else memory_order(v)
        if order is not None and order != tuple(range(len(order))):
            orders[node] = order
    return orders


def kind_of_norm(match: Match) -> str:
    """layer_norm, rms_norm, or written_out (an RMS norm)."""
    return ops_view.canonical(match["norm"]) if match.get("normed") is None else "written_out"


def norm_name(match: Match) -> str:
    """The norm as operators name it."""
    return "layer_norm" if kind_of_norm(match) == "layer_norm" else "rms_norm"


# -- what operators are called with ----------------------------------------------------------------------


def affine(match: Match) -> dict[str, Node | None]:
    """Weight and bias of the norm, before any cast that keeps their values."""
    norm, kind = match["norm"], kind_of_norm(match)
    if kind == "written_out":
        return {"weight": match.get("norm_weight"), "bias": None}
    if kind == "rms_norm":
        return {"weight": _uncast(ops_view.operand(norm, 2, "weight")), "bias": None}
    return {"weight": _uncast(ops_view.operand(norm, 2, "weight")), "bias": _uncast(ops_view.operand(norm, 3, "bias"))}


def _uncast(node: Node | None) -> Node | None:
    while node is not None and ops_view.canonical(node) == "cast":
        source, target = ops_view.dtype_of(node.args[0]), ops_view.dtype_of(node)
        if source is None or target is None or not ops_view.widens(source, target):
            break
        node = node.args[0]  # type: ignore[assignment]
    return node


def epsilon(match: Match) -> float:
    """The norm's eps (torch's default is 1e-5).  With dynamic=True it is symbolic; reading it adds a guard."""
    norm, kind = match["norm"], kind_of_norm(match)
    if kind == "written_out":
        eps = match["eps"]
    elif kind == "rms_norm":
        eps = ops_view.operand(norm, 3, "eps")
        if eps is None:
            dtype = ops_view.dtype_of(norm.args[0])
            eps = torch.finfo(torch.float32 if dtype is None else dtype).eps
    else:
        eps = ops_view.operand(norm, 4, "eps", 1e-5)
    return float(eps.meta["example_value"] if isinstance(eps, Node) else eps)


def settle_h(match: Match) -> list[Node]:
    """The nodes that stand for h: those of the narrowest dtype between the gated sum and the norm.

    The casts after them only widen h again, so they are left to whoever else reads them.
    """
    chain = [match["sum"]]
    norm_input = match.get("normed") or match["norm"].args[0]
    while chain[-1] is not norm_input:
        following = next((n for n in match.core if ops_view.canonical(n) == "cast" and n.args[0] is chain[-1]), None)
        if following is None:
            break
        chain.append(following)
    width = min(_itemsize(n) for n in chain)
    h = [n for n in chain if _itemsize(n) == width]
    later = chain[chain.index(h[-1]) + 1:]
    match.core[:] = [n for n in match.core if n not in later]
    match.side.extend(n for n in later if n not in match.side)
    return h


def _itemsize(node: Node) -> int:
    dtype = ops_view.dtype_of(node)
    return 8 if dtype is None else dtype.itemsize


def rounding(match: Match) -> str:
    """The rounding points of numerics="eager": the dtype each op of the source returned."""
    if match.numerics != "eager":
        return ""
    points: dict[str, torch.dtype] = {}
    for point, name in (("gated", "gated"), ("residual", "sum"), ("norm", "norm"), ("gain", "gain"),
                        ("product", "product")):
        node = match.get(name)
        if node is not None:
            points[point] = _narrowest(node, match)
    return encode_rounding(points)


def _narrowest(node: Node, match: Match) -> torch.dtype:
    """The narrowest dtype a value passes through before the next op of the chain reads it."""
    best = ops_view.dtype_of(node)
    while True:
        node = next((n for n in node.users if n in match.core and ops_view.canonical(n) == "cast"), None)  # type: ignore
        if node is None:
            break
        dtype = ops_view.dtype_of(node)
        if dtype is not None and best is not None and dtype.itemsize < best.itemsize:
            best = dtype
    if best is None:
        raise ValueError("a matched node without a dtype")
    return best


def attributes(
    match: Match, *, norm: str, h: Node | None, y: Node | None, outputs: Sequence[Sequence[str]] = ()
) -> dict[str, Any]:
    """The attributes every operator takes, fixed at match time; `outputs` are the parts of each output."""
    some = h if h is not None else y
    return {
        "outputs": encode_outputs(outputs),
        "norm": norm,
        "eps": epsilon(match) if norm != "none" else 0.0,
        "offset": 1.0 if match.get("gain") is not None else 0.0,
        "branch_norm": "none",
        "branch_eps": 0.0,
        "activation": "identity",
        "h_dtype": ops_view.dtype_of(h if h is not None else some),
        "y_dtype": ops_view.dtype_of(y if y is not None else some),
        "rounding": rounding(match),
    }


def operands(**given: Node | None) -> dict[str, Node | None]:
    """The tensor operands every operator takes, absent ones as None; then the parts of the outputs that are there."""
    unknown = {n.split(".")[0] for n in given} - {*OPERANDS, *OUTPUT_PARTS}
    if unknown:
        raise ValueError(f"unknown operands {sorted(unknown)}")
    single = {n: given.get(n) for n in OPERANDS}
    return single | {n: t for n, t in given.items() if t is not None and n not in OPERANDS}


def parts(match: Match) -> tuple[str, ...]:
    """The parts of a modulate: scale, and shift if there is one."""
    return tuple(n for n in OUTPUT_PARTS if match.get(n) is not None)
