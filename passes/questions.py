"""What rules ask about a match.  Each question returns None, or the reason why the answer is no.

The first half tells a site from what merely has the same operators; the second finds why a site cannot be fused.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from graphopt.passes import ops_view, source
from graphopt.passes.call import memory_order
from graphopt.passes.norms import slices_rows
from graphopt.passes.rule import Match


class Misfit(str):
    """A reason that comes of operands in the wrong places: another order of them may give a better one."""


# -- is it a site? ----------------------------------------------------------------------------------------------------


def no_gate(match: Match) -> str | None:
    """Why it is not residual + gate * branch: both full-size, the branch computed from the residual, the gate not.

    After a graph break residual, gate and branch are graph inputs; then only a broadcast gate can be told apart.
    """
    residual, branch, gate, total = match["residual"], match["branch"], match["gate"], match["sum"]
    facts, full = match.facts, ops_view.value(total)
    for name, node in (("residual", residual), ("branch", branch)):
        if not ops_view.same_shape(ops_view.value(node), full):
            return Misfit(f"the {name} {node.name} has not the shape of the sum")
    reason = no_factor(match, "gate", full)
    if reason is not None:
        return reason
    if facts.depends(gate, residual):
        return f"{gate.name} is computed from {residual.name}: it gates a branch by the tokens themselves"
    if computed_from(match, branch, residual):
        return None
    from_input = residual.op == "placeholder" and not facts.static[residual]
    if from_input and not ops_view.same_shape(seen_factor(match, "gate"), full):
        return None
    return f"{branch.name} is not computed from {residual.name}, so {residual.name} is not its residual"


def no_residual(match: Match) -> str | None:
    """Why it is not a sum of two activations that is worth taking into the operator."""
    full = ops_view.value(match["sum"])
    for name in ("residual", "branch"):
        node = match[name]
        if not ops_view.same_shape(ops_view.value(node), full) or match.facts.static[node]:
            return f"the {name} {node.name} is no activation of the shape of the sum"
        if ops_view.canonical(node) in ops_view.ELEMENTWISE and len(node.users) == 1 and not _gated_sum(node):
            return f"{node.name} is elementwise: the compiler joins it with the sum"
    return None


def _gated_sum(node: Node) -> bool:
    """Does it look like a gate, which is a fused operator itself?"""
    operands = list(ops_view.operands(node)) if ops_view.canonical(node) == "add" else []
    for i, operand in enumerate(operands):
        while isinstance(operand, Node) and ops_view.canonical(operand) == "cast":
            operand = operand.args[0]
        operands[i] = operand
    return any(isinstance(n, Node) and ops_view.canonical(n) == "mul" for n in operands)


def no_modulate(match: Match, x: Node) -> str | None:
    """Why scale and shift are not those of a norm of x: channel-wide, broadcastable, and not made from x.

    (`n * cos + rotate(n) * sin` and gated units have the same operators.)
    """
    for name in ("norm_weight", "norm_bias"):
        weight = match.get(name)
        if weight is not None and not match.facts.static[weight]:
            return f"{source.named(weight)} is no parameter, so it is no weight of the norm"
    full, shift = seen(match, x), match.get("shift")
    reason = no_factor(match, "scale", full) or (depends_on(match, "scale", x))
    if reason is not None:
        return reason
    if shift is None:
        return ends_otherwise(match)
    if not ops_view.broadcasts_to(seen_factor(match, "shift"), full):
        return f"{shift.name} {list(ops_view.value(shift).shape)} does not broadcast to the norm"  # type: ignore[union-attr]
    return depends_on(match, "shift", x)


def no_factor(match: Match, name: str, full: torch.Tensor | None) -> str | None:
    """Why an operand is no factor: channel-wide, broadcastable, and not made of parameters alone."""
    node, v = match[name], seen_factor(match, name)
    if match.facts.static[node]:
        return f"{source.named(node)} is made of parameters alone: a layer scale, not a {name}"
    if not ops_view.broadcasts_to(v, full):
        size = "?" if v is None else list(v.shape)
        return Misfit(f"{node.name} {size} is not channel-wide or does not broadcast")
    return None


def depends_on(match: Match, name: str, x: Node) -> str | None:
    """Why a factor does not modulate x: it comes from x."""
    node = match[name]
    return f"{node.name} is computed from {x.name}, which it would modulate" if match.facts.depends(node, x) else None


def seen_factor(match: Match, name: str) -> torch.Tensor | None:
    """The value of a factor as it meets the chain: after the views found in front of the product."""
    views = match.attempt.views.get(name, [])
    return ops_view.value(views[0] if views else match[name])


def seen(match: Match, x: Node) -> torch.Tensor | None:
    """The value of the activation a modulate works on: x, or the slice of its norm."""
    slices = match.attempt.views.get("x")
    return ops_view.value(slices[0] if slices else x)


def computed_from(match: Match, branch: Node, residual: Node, depth: int = 6) -> bool:
    """Was the branch computed from the residual, from what the residual was sliced off, or from a summand of it?"""
    if match.facts.depends(branch, residual):
        return True
    name = ops_view.canonical(residual)
    if depth and (name == "cast" or slices_rows(residual)):
        return computed_from(match, branch, residual.args[0], depth - 1)  # type: ignore[arg-type]
    if depth and name in ("add", "addcmul"):
        ups = ops_view.operands(residual) if name == "add" else residual.args[:1]
        return any(computed_from(match, branch, a, depth - 1) for a in ups if isinstance(a, Node))
    return False


def ends_otherwise(match: Match) -> str | None:
    """Why a product without a shift is no scale-only modulate.

    It is none when it is added to something (a gate on a normed branch, a refused site), or joined with another
    function of the norm (a rotary embedding).
    """
    todo, norm = [match["product"]], match["norm"]
    while todo:
        for user in todo.pop().users:
            name = ops_view.canonical(user)
            if name == "cast":
                todo.append(user)
                continue
            added = name in ("add", "addcmul") and all(isinstance(a, Node) for a in user.args[:2])
            joined = name in ("sub", "cat") and sum(match.facts.depends(a, norm) for a in user.all_input_nodes) > 1
            if added or joined:
                how = "added to something that is no shift" if added else "joined with another function of the norm"
                return f"the product {match['product'].name} is {how} ({user.name})"
    return None


# -- can it be fused? -------------------------------------------------------------------------------------------------


def norm_reason(match: Match, prefix: str = "") -> str | None:
    """Why a norm cannot be fused, or None."""
    norm = match[prefix + "norm"]
    if match.get(prefix + "normed") is not None:
        written = "numerics='eager' has no rounding points for a norm that is written out"
        return written if match.numerics == "eager" else None
    x = ops_view.value(norm.args[0] if norm.args else norm.kwargs.get("input"))
    shape = ops_view.operand(norm, 1, "normalized_shape")
    shape = (shape,) if isinstance(shape, (int, torch.SymInt, Node)) else tuple(shape)
    sizes = [n.meta.get("example_value") if isinstance(n, Node) else n for n in shape]
    if x is None or len(sizes) != 1 or not ops_view.same_size(sizes[0], x.shape[-1]):
        return f"{norm.name} normalises over {list(sizes)}, not over the last dimension alone"
    return None


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


def dtype_reason(match: Match, *names: str) -> str | None:
    """Why the operands' dtypes cannot be fused, or None."""
    for name in names:
        dtype = ops_view.dtype_of(match.get(name))
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


def numerics_reason(match: Match) -> str | None:
    """What numerics="eager" has no rounding points for, or None."""
    if match.numerics == "eager" and match.get("implied") is not None:
        return "numerics='eager' has no rounding points for norm + norm * scale"
    return None


def same_modulate(a: Match, b: Match) -> bool:
    """Can two modulates of one norm be results of one operator: same dtype, both or neither with `1 +`?"""
    return _adds_one(a) == _adds_one(b) and ops_view.dtype_of(a.root) == ops_view.dtype_of(b.root)


def _adds_one(match: Match) -> bool:
    return match.get("gain") is not None or match.get("implied") is not None
