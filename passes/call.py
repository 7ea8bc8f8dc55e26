"""What a match calls its operator with: operands before casts, attributes, and the layout of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from graphopt.codegen.form import OPERANDS, OUTPUT_PARTS, encode_outputs, encode_rounding
from graphopt.passes import ops_view
from graphopt.passes.pattern import Attempt
from graphopt.passes.rule import Match


def kind_of_norm(match: Match | Attempt, prefix: str = "") -> str:
    """layer_norm, rms_norm, or written_out."""
    return "written_out" if match.get(prefix + "normed") is not None else ops_view.canonical(match[prefix + "norm"])


def norm_name(match: Match | Attempt, prefix: str = "") -> str:
    """The norm as operators name it."""
    kind: Any = match.get(prefix + "kind")
    return kind or ops_view.canonical(match[prefix + "norm"])


def affine(match: Match | Attempt, prefix: str = "") -> dict[str, Node | None]:
    """Weight and bias of the norm, before any cast that keeps their values."""
    norm, kind = match[prefix + "norm"], kind_of_norm(match, prefix)
    if kind == "written_out":
        weight, bias = match.get(prefix + "norm_weight"), match.get(prefix + "norm_bias")
    else:
        weight = _uncast(ops_view.operand(norm, 2, "weight"))
        bias = _uncast(ops_view.operand(norm, 3, "bias")) if kind == "layer_norm" else None
    return {prefix + "weight": weight, prefix + "bias": bias}


def _uncast(node: Node | None) -> Node | None:
    while node is not None and ops_view.canonical(node) == "cast":
        source, target = ops_view.dtype_of(node.args[0]), ops_view.dtype_of(node)
        if source is None or target is None or not ops_view.widens(source, target):
            break
        if ops_view.detaches(node):
            break
        node = node.args[0]  # type: ignore[assignment]
    return node


def epsilon(match: Match | Attempt, prefix: str = "") -> float:
    """The norm's eps (torch's default is 1e-5).  With dynamic=True it is symbolic; reading it adds a guard."""
    norm, kind = match[prefix + "norm"], kind_of_norm(match, prefix)
    if kind == "written_out":
        eps = match[prefix + "eps"]
    elif kind == "rms_norm":
        eps = ops_view.operand(norm, 3, "eps")
        if eps is None:  # torch takes that of the dtype it computes in, whatever its documentation says
            wide = ops_view.dtype_of(norm.args[0]) == torch.float64
            eps = torch.finfo(torch.float64 if wide else torch.float32).eps
    else:
        eps = ops_view.operand(norm, 4, "eps", 1e-5)
    return float(eps.meta["example_value"] if isinstance(eps, Node) else eps)


def settle_h(match: Match) -> list[Node]:
    """The nodes that stand for h: those of the narrowest dtype between the gated sum and the norm.

    The casts after them only widen h again, so they are left to whoever else reads them.  Of two dtypes equally wide
    (fp16 cast to bf16) the later one counts: it is what the norm reads.
    """
    chain = [match["sum"]]
    norm_input = match.get("normed") or match["norm"].args[0]
    while chain[-1] is not norm_input:
        following = next((n for n in match.core if ops_view.canonical(n) == "cast" and n.args[0] is chain[-1]), None)
        if following is None:
            break
        chain.append(following)
    width = min(_itemsize(n) for n in chain)
    last = next(n for n in reversed(chain) if _itemsize(n) == width)
    h = [n for n in chain if ops_view.dtype_of(n) == ops_view.dtype_of(last)]
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
    for point, name in (("branch_norm", "branch_result"), ("activated", "activated"), ("gated", "gated"),
                        ("residual", "sum"), ("norm", "norm"), ("gain", "gain"), ("product", "product")):
        node = match.get(name)  # one addcmul is a product and a sum: it binds the sum alone
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
    match: Match, *, h: Node | None = None, y: Node | None = None, outputs: Sequence[Sequence[str]] = ()
) -> dict[str, Any]:
    """The attributes every operator takes, fixed at match time; `outputs` are the parts of each output."""
    some = h if h is not None else y
    norm = norm_name(match) if outputs else "none"
    branch_norm = norm_name(match, "branch_") if match.get("branch_norm") is not None else "none"
    one_plus = match.get("gain") is not None or match.get("implied") is not None
    return {
        "outputs": encode_outputs(outputs),
        "norm": norm,
        "eps": epsilon(match) if norm != "none" else 0.0,
        "offset": 1.0 if one_plus else 0.0,
        "branch_norm": branch_norm,
        "branch_eps": epsilon(match, "branch_") if branch_norm != "none" else 0.0,
        "activation": "tanh" if match.get("activated") is not None else "identity",
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


def front(match: Match) -> dict[str, Node | None]:
    """The operands in front of the norm: x alone, or residual and branch with gate and the branch's norm."""
    if match.get("sum") is None:
        return {"x": match["x"]}
    normed = affine(match, "branch_") if match.get("branch_norm") is not None else {}
    return {"x": match["residual"], "branch": match["branch"], "gate": match.get("gate"), **normed}


def parts(match: Match) -> dict[str, Node | None]:
    """The tensors of one output: scale, and shift if there is one."""
    return {n: match[n] for n in OUTPUT_PARTS if match.get(n) is not None}


# -- the layout of results ---------------------------------------------------------------------------------------


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
