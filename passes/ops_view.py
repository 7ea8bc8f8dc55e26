"""One name per operation, whatever way a model spells it.

A Dynamo graph calls `torch.add`, `operator.add`, `Tensor.add` or `aten.add.Tensor` for one and the same thing.
`SPELLINGS` is the only list of such spellings in the project; everything else asks `canonical(node)`.

    x + y            call_function operator.add   -> "add"
    x.float()        call_method   float          -> "cast"
    s[:, None]       call_function getitem        -> "index"   (the operand is a tensor)
    chunks[1]        call_function getitem        -> "pick"    (the operand is a tuple)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

aten = torch.ops.aten

# canonical name -> (functions, names of tensor methods)
SPELLINGS: dict[str, tuple[tuple[Callable[..., Any], ...], tuple[str, ...]]] = {
    "add": ((operator.add, torch.add, aten.add.Tensor, aten.add.Scalar), ("add", "__add__", "__radd__")),
    "sub": ((operator.sub, torch.sub, torch.subtract, aten.sub.Tensor), ("sub", "subtract")),
    "mul": (
        (operator.mul, torch.mul, torch.multiply, aten.mul.Tensor, aten.mul.Scalar),
        ("mul", "multiply", "__mul__", "__rmul__"),
    ),
    "addcmul": ((torch.addcmul, aten.addcmul.default), ("addcmul",)),  # a + value * b * c
    "div": ((operator.truediv, torch.div, torch.true_divide, aten.div.Tensor), ("div", "true_divide")),
    "layer_norm": ((F.layer_norm, torch.layer_norm, aten.layer_norm.default), ()),
    "rms_norm": ((F.rms_norm, torch.rms_norm, aten.rms_norm.default), ()),
    "tanh": ((torch.tanh, aten.tanh.default), ("tanh",)),
    "rsqrt": ((torch.rsqrt, aten.rsqrt.default), ("rsqrt",)),
    "sqrt": ((torch.sqrt, aten.sqrt.default), ("sqrt",)),
    "mean": ((torch.mean, aten.mean.dim), ("mean",)),
    "var": ((torch.var, aten.var.correction), ("var",)),
    "pow": ((operator.pow, torch.pow, aten.pow.Tensor_Scalar), ("pow", "__pow__")),
    "square": ((torch.square, aten.square.default), ("square",)),
    "cast": (
        (aten._to_copy.default, torch.ops.prims.convert_element_type.default),
        ("to", "float", "half", "bfloat16", "double", "type_as", "type"),
    ),
    "unsqueeze": ((torch.unsqueeze, aten.unsqueeze.default), ("unsqueeze",)),
    "squeeze": ((torch.squeeze, aten.squeeze.dim), ("squeeze",)),
    "view": ((torch.reshape, aten.view.default, aten.reshape.default), ("view", "reshape", "view_as", "reshape_as")),
    "flatten": ((torch.flatten, aten.flatten.using_ints), ("flatten",)),
    "unflatten": ((torch.unflatten, aten.unflatten.int), ("unflatten",)),
    "expand": ((aten.expand.default,), ("expand", "expand_as")),
    "repeat": ((torch.repeat_interleave, aten.repeat.default), ("repeat", "repeat_interleave")),
    "chunk": ((torch.chunk, aten.chunk.default), ("chunk",)),
    "split": ((torch.split, torch.functional.split), ("split",)),
    "unbind": ((torch.unbind, aten.unbind.int), ("unbind",)),
    "stack": ((torch.stack, aten.stack.default), ()),
    "neg": ((operator.neg, torch.neg, torch.negative, aten.neg.default), ("neg", "negative", "__neg__")),
    "cat": ((torch.cat, torch.concat, torch.concatenate, aten.cat.default), ()),
    "getitem": ((operator.getitem,), ("__getitem__",)),
    "setitem": ((operator.setitem,), ("__setitem__",)),
}

# in-place spelling -> the same out of place; canonical.py puts them in where nobody can observe the difference
IN_PLACE: dict[Callable[..., Any] | str, Callable[..., Any]] = {
    operator.iadd: torch.add, "add_": torch.add, "__iadd__": torch.add, aten.add_.Tensor: torch.add,
    operator.isub: torch.sub, "sub_": torch.sub,
    operator.imul: torch.mul, "mul_": torch.mul, "__imul__": torch.mul, aten.mul_.Tensor: torch.mul,
    operator.itruediv: torch.div, "div_": torch.div,
    "addcmul_": torch.addcmul, "tanh_": torch.tanh, torch.tanh_: torch.tanh, "rsqrt_": torch.rsqrt,
}

FUNCTION_NAMES = {fn: name for name, (functions, _) in SPELLINGS.items() for fn in functions}
METHOD_NAMES = {method: name for name, (_, methods) in SPELLINGS.items() for method in methods}

# views of a broadcast factor that commute with `1 +`: they move or repeat elements, and never mix or drop values
VIEWS = frozenset({"unsqueeze", "squeeze", "view", "flatten", "unflatten", "expand", "index"})
# ops of one value per element, which Inductor joins with what reads them
ELEMENTWISE = frozenset({"add", "sub", "mul", "div", "addcmul", "tanh", "pow", "square", "sqrt", "rsqrt"})
# methods whose second operand lends its dtype or its shape, and no values
LIKE = frozenset({"type_as", "view_as", "expand_as", "reshape_as"})
# where a piece of a modulation vector comes from
PIECES = frozenset({"chunk", "split", "unbind", "pick", "repeat"})

_CAST_METHODS = {"float", "half", "bfloat16", "double", "type_as"}


def value(node: object) -> torch.Tensor | None:
    """The fake tensor a node yields, or None when it yields something else."""
    if not isinstance(node, Node):
        return None
    v = node.meta.get("example_value", node.meta.get("val"))
    return v if isinstance(v, torch.Tensor) else None


_known: dict[Node, str] | None = None


@contextmanager
def remembered() -> Iterator[None]:
    """Names asked for inside are kept: the graph must not change meanwhile."""
    global _known
    outer, _known = _known, {} if _known is None else _known
    try:
        yield
    finally:
        _known = outer


def canonical(node: Node) -> str:
    """The name of what a node computes; "" for anything `SPELLINGS` does not list."""
    if _known is None:
        return _canonical(node)
    name = _known.get(node)
    if name is None:
        name = _known[node] = _canonical(node)
    return name


def _canonical(node: Node) -> str:
    if node.op == "call_function":
        name = FUNCTION_NAMES.get(node.target, "")  # type: ignore[arg-type]
    elif node.op == "call_method":
        name = METHOD_NAMES.get(node.target, "")  # type: ignore[arg-type]
    else:
        return ""
    if name == "getitem":
        return "index" if value(node.args[0]) is not None else "pick"
    if name == "cast" and not _is_cast(node):
        return ""
    return name


def _is_cast(node: Node) -> bool:
    """Does the node change the dtype at most?  (`to` may also move to another device or change the layout.)"""
    if node.op == "call_method" and node.target in _CAST_METHODS:
        return "memory_format" not in node.kwargs
    before, after = value(node.args[0] if node.args else None), value(node)
    if before is None or after is None or "memory_format" in node.kwargs:
        return False
    return before.device == after.device and before.is_floating_point() and after.is_floating_point()


def operand(node: Node, position: int, keyword: str, default: Any = None) -> Any:
    """An argument, given by position or by keyword."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(keyword, default)


def operands(node: Node) -> tuple[Any, Any]:
    """The two operands of a binary op, however they were passed."""
    args = node.args
    if len(args) > 1:
        return args[0], args[1]
    return operand(node, 0, "input", operand(node, 0, "self")), operand(node, 1, "other")


def has_alpha(node: Node) -> bool:
    """Does a sum scale an operand (`alpha`, `value`), or write somewhere (`out`)?"""
    scaled = node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("value", 1) != 1
    return scaled or node.kwargs.get("out") is not None


def dtype_of(node: object) -> torch.dtype | None:
    """The dtype a node yields; None for what is not a tensor."""
    v = value(node)
    return None if v is None else v.dtype


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Does a cast keep every value?"""
    return torch.promote_types(source, target) == target


def detaches(node: Node) -> bool:
    """Does a node stop gradients?  A cast, a view or `1 + s` made under no_grad does: it cannot be looked through."""
    v = value(node)
    before = [value(n) for n in node.all_input_nodes]
    stops = v is not None and not v.requires_grad and any(b is not None and b.requires_grad for b in before)
    return stops and not _makes_no_gradient(node.graph)


_without_gradients: WeakKeyDictionary[Graph, bool] = WeakKeyDictionary()


def _makes_no_gradient(graph: Graph) -> bool:
    """Is a whole graph traced under no_grad (validation, sampling)?  Then no operator in it passes a gradient on.

    Grad mode must be off here and now as well: torch calls a backend in the mode of the frame, and a graph of detached
    values alone has no gradients either, but would get some from an operator that reads what was detached.
    """
    if torch.is_grad_enabled():
        return False
    if graph not in _without_gradients:
        made = (value(n) for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
        _without_gradients[graph] = not any(v is not None and v.requires_grad for v in made)
    return _without_gradients[graph]


def same_size(a: Any, b: Any) -> bool:
    """Are two sizes equal for certain?  Asks without adding a guard when they are symbolic."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return _statically_true(a == b)


def _statically_true(condition: Any) -> bool:
    from graphopt._compat import statically_true

    return statically_true(condition)


def same_shape(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Have two tensors equal shapes for certain?"""
    return a is not None and b is not None and a.dim() == b.dim() and all(
        same_size(p, q) for p, q in zip(a.shape, b.shape)
    )


def broadcasts_to(factor: torch.Tensor | None, full: torch.Tensor | None) -> bool:
    """Is `factor` channel-wide (its last size is D) and broadcastable to `full` without growing it?"""
    if factor is None or full is None or factor.dim() == 0 or factor.dim() > full.dim():
        return False
    if not same_size(factor.shape[-1], full.shape[-1]):
        return False
    pairs = zip(reversed(factor.shape), reversed(full.shape))
    return all(same_size(p, q) or same_size(p, 1) for p, q in pairs)
