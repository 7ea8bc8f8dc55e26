"""Where the tokens of a tensor come from: the axes of the graph's inputs, followed through the graph.

    latent [B, C, T, H, W] -> conv3d -> flatten(2) -> transpose(1, 2) -> linear -> unflatten -> transpose
    the token dimension of q is then the axes (2, 3, 4) of `latent`, in raster order: a video's whole sequence, and
    their sizes behind the patch embedding are the grid

Each dimension is a list of factors (axis, size), slowest first; a concatenation is one factor whose axis is a `Join` of
its parts.  Only operators known to keep the order of tokens pass axes on: a shuffle, a sort or a gather by index ends
them, so that a grid is never claimed for tokens in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx import Node

from graphopt import _compat
from graphopt.passes import attention_view, ops_view
from graphopt.passes.axis_factors import (
    Axis,
    Dims,
    Factor,
    Size,
    Unknown,
    joined,
    leaves,
    regroup,
    size_of,
    sliced,
)
from graphopt.passes.facts import is_state

# values element by element, normalisations over the last dimension, linear layers over the last dimension, copies
_KEEPS = {
    "add", "sub", "mul", "truediv", "div", "neg", "pow", "silu", "gelu", "relu", "dropout", "layer_norm", "rms_norm",
    "linear", "sin", "cos", "tanh", "sigmoid", "exp", "rsqrt", "sqrt", "softmax", "masked_fill", "where", "clamp",
    "contiguous", "clone", "detach", "empty_like", "zeros_like", "ones_like", "to", "float", "half", "bfloat16",
    "double", "type_as", "type", "addcmul", "square", "addcdiv", "log", "abs", "lerp", "softplus",
    "native_layer_norm", "leaky_relu", "mish", "hardswish", "elu", "reciprocal", "erf",
}


class Axes:
    """The axes of every node of a graph and of the bodies of its checkpoints."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.of: dict[Node, Any] = {}
        self.bodies: list[fx.GraphModule] = []
        self.outputs: set[Axis] = set()
        self._run(gm, None)
        out = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
        for node in out.all_input_nodes:
            for dim in self.of.get(node) or []:
                self.outputs |= {a for f in dim for a in leaves(f.axis) if a is not None}

    def shape_of(self, name: str) -> tuple[Any, ...] | None:
        """The sizes of an input of the graph, by its name."""
        for node in self.of:
            if node.op == "placeholder" and node.name == name:
                v = ops_view.value(node)
                return None if v is None else tuple(v.shape)
        return None

    def witness(self, graph: fx.Graph, factor: Factor) -> tuple[Node, int] | None:
        """A node of a graph one of whose dimensions is just this factor: where its size can be read."""
        for node in graph.nodes:
            dims = self.of.get(node)
            if not isinstance(dims, list) or (dims and isinstance(dims[0], _Tuple)):
                continue
            for i, dim in enumerate(dims):
                if len(dim) == 1 and dim[0].axis == factor.axis and ops_view.same_size(dim[0].size, factor.size):
                    return node, i
        return None

    def _run(self, gm: fx.GraphModule, given: list[Any] | None) -> Any:
        """Follow one graph; the axes of its result."""
        self.bodies.append(gm)
        placeholders = iter(given or [])
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self.of[node] = self._input(node) if given is None else next(placeholders, None)
            elif node.op == "output":
                return _tree(node.args[0], self.of)
            elif node.op in ("call_function", "call_method"):
                try:
                    self.of[node] = self._step(gm, node)
                except Unknown:
                    self.of[node] = None
        return None

    def _input(self, node: Node) -> Dims | None:
        v = ops_view.value(node)
        if v is None or isinstance(v, torch.nn.Parameter) or is_state(node) or not v.is_floating_point():
            return None
        if v.dim() < 3:  # tables and vectors hold no sequence of tokens
            return None
        return [[Factor(Axis(node.name, i, v.dim()), n)] for i, n in enumerate(v.shape)]

    def _step(self, gm: fx.GraphModule, node: Node) -> Any:
        target = node.target
        if isinstance(target, _compat.HigherOrderOperator):
            return self._body(gm, node)
        name = str(target) if node.op == "call_method" else getattr(target, "__name__", "").split(".")[0]
        if name == "getitem":
            return self._getitem(node)
        handler: Callable[..., Any] | None = getattr(self, f"_{name}", None) if name in _SHAPED else None
        if handler is not None:
            return handler(node)
        if node.op == "call_function" and target in attention_view.SDPA:
            q = ops_view.operand(node, 0, "query")
            return self.of.get(q)
        if name in _KEEPS or name.startswith("video_attention_input"):
            return self._like(node)
        return None

    # -- operators ------------------------------------------------------------------------------------

    def _like(self, node: Node) -> Dims | None:
        """Aligned from the right: a dimension takes its axis from an operand of its size, a broadcast one last."""
        v = ops_view.value(node)
        if v is None:
            return None
        result: Dims = [[Factor(None, n)] for n in v.shape]
        known_dims = [d for d in map(self.of.get, node.all_input_nodes) if isinstance(d, list) and d]
        known_dims = [d for d in known_dims if not isinstance(d[0], _Tuple)]
        for dims in sorted(known_dims, key=_width, reverse=True):
            for i in range(1, min(len(dims), len(result)) + 1):
                known = any(f.axis is not None for f in dims[-i])
                if known and all(f.axis is None for f in result[-i]) and ops_view.same_size(
                        size_of(dims[-i]), v.shape[-i]):
                    result[-i] = dims[-i]
        if node.target in (F.linear,):
            result[-1] = [Factor(None, v.shape[-1])]
        return result

    def _reshape(self, node: Node) -> Dims | None:
        dims, v = self._first(node), ops_view.value(node)
        if v is None:
            raise Unknown
        return regroup(dims, list(v.shape))

    _view = _flatten = _unflatten = _unsqueeze = _squeeze = _reshape

    def _transpose(self, node: Node) -> Dims:
        dims = list(self._first(node))
        a, b = (ops_view.operand(node, 1, "dim0"), ops_view.operand(node, 2, "dim1"))
        if not isinstance(a, int) or not isinstance(b, int):
            raise Unknown
        dims[a], dims[b] = dims[b], dims[a]
        return dims

    _swapaxes = _transpose

    def _permute(self, node: Node) -> Dims:
        dims = self._first(node)
        order = node.args[1:]
        if len(order) == 1 and isinstance(order[0], (tuple, list)):
            order = tuple(order[0])
        if not order or not all(isinstance(d, int) for d in order):
            raise Unknown
        return [dims[d] for d in order]  # type: ignore[index]

    def _expand(self, node: Node) -> Dims | None:
        return self._like(node)

    def _repeat_interleave(self, node: Node) -> Dims:
        dims, v = self._first(node), ops_view.value(node)
        if v is None or v.dim() != len(dims) or not isinstance(ops_view.operand(node, 1, "repeats"), int):
            raise Unknown
        return [d if ops_view.same_size(size_of(d), n) else [Factor(None, n)] for d, n in zip(dims, v.shape)]

    def _conv(self, node: Node) -> Dims:
        dims, v = self._first(node), ops_view.value(node)
        if v is None or len(dims) != v.dim():
            raise Unknown
        out: Dims = [dims[0], [Factor(None, v.shape[1])]]
        for old, n in zip(dims[2:], v.shape[2:]):
            real = [f for f in old if not ops_view.same_size(f.size, 1)] or old[:1]
            out.append([Factor(real[0].axis if len(real) == 1 else None, n)])
        return out

    _conv1d = _conv2d = _conv3d = _conv

    def _cat(self, node: Node) -> Dims:
        parts = node.args[0] if node.args else node.kwargs["tensors"]
        dim = ops_view.operand(node, 1, "dim", 0)
        v = ops_view.value(node)
        known = [self.of.get(p) for p in parts]  # type: ignore[union-attr]
        if v is None or not isinstance(dim, int) or not any(isinstance(k, list) for k in known):
            raise Unknown
        dim %= v.dim()
        values = [ops_view.value(p) for p in parts]  # type: ignore[union-attr]
        result: Dims = []
        for i, n in enumerate(v.shape):
            each = [k[i] if isinstance(k, list) else [Factor(None, 1 if x is None else x.shape[i])]
                    for k, x in zip(known, values)]
            if i == dim:
                result.append(joined(each, n))
            else:
                result.append(next((d for d in each if any(f.axis is not None for f in d)), each[0]))
        return result

    _concat = _concatenate = _cat

    def _stack(self, node: Node) -> Dims:
        parts = node.args[0] if node.args else node.kwargs["tensors"]
        dim, v = ops_view.operand(node, 1, "dim", 0), ops_view.value(node)
        first = next((k for k in map(self.of.get, parts) if isinstance(k, list)), None)  # type: ignore[arg-type]
        if v is None or first is None or not isinstance(dim, int):
            raise Unknown
        out = list(first)
        out.insert(dim % v.dim(), [Factor(None, v.shape[dim])])
        return out

    def _chunk(self, node: Node) -> list[Any]:
        dims = self._first(node)
        out = node.meta.get("example_value")
        if not isinstance(out, (tuple, list)):
            raise Unknown
        if getattr(node.target, "__name__", node.target) == "unbind":
            dim = ops_view.operand(node, 1, "dim", 0)
            return [_Tuple([d for i, d in enumerate(dims) if i != dim % len(dims)]) for _ in out]
        results = []
        dim = ops_view.operand(node, 2, "dim", 0) % len(dims)
        start: Size = 0
        for v in out:
            part = list(dims)
            part[dim] = sliced(dims[dim], start, v.shape[dim])
            start = start + v.shape[dim]
            results.append(_Tuple(part))
        return results

    _split = _split_with_sizes = _unbind = _tensor_split = _chunk

    def _setitem(self, node: Node) -> None:
        return None

    def _getitem(self, node: Node) -> Any:
        base, index = node.args
        dims = self.of.get(base)  # type: ignore[arg-type]
        if isinstance(dims, list) and dims and isinstance(dims[0], _Tuple):
            return list(dims[index].dims) if isinstance(index, int) else None  # type: ignore[index]
        v, before = ops_view.value(node), ops_view.value(base)
        if not isinstance(dims, list) or v is None or before is None:
            return None
        entries = list(index) if isinstance(index, tuple) else [index]
        missing = before.dim() - sum(e is not None and e is not Ellipsis for e in entries)
        if Ellipsis in entries:
            at = entries.index(Ellipsis)
            entries[at : at + 1] = [slice(None)] * missing
        else:
            entries += [slice(None)] * missing
        out: Dims = []
        place = 0
        for e in entries:
            if e is None:
                out.append([Factor(None, 1)])
                continue
            if isinstance(e, slice):
                n = v.shape[len(out)]
                start = _number(e.start) or 0
                if _number(e.step) not in (None, 1):
                    out.append([Factor(None, n)])
                else:
                    whole = before.shape[place]
                    negative = isinstance(start, int) and start < 0
                    out.append(sliced(dims[place], whole + start if negative else start, n))
            elif not isinstance(e, int):
                return None  # an index that reorders
            place += 1
        return out

    def _body(self, gm: fx.GraphModule, node: Node) -> Any:
        """A checkpoint: its body is followed with what comes in."""
        first = node.args[0] if node.args else None
        body = getattr(gm, str(first.target), None) if isinstance(first, Node) and first.op == "get_attr" else None
        if not isinstance(body, fx.GraphModule) or "checkpoint" not in str(node.target):
            return None
        result = self._run(body, [self.of.get(a) if isinstance(a, Node) else None for a in node.args[1:]])
        if isinstance(result, (tuple, list)):
            return [_Tuple(r) if isinstance(r, list) else _Tuple([]) for r in result]
        return result

    def _first(self, node: Node) -> Dims:
        base = node.args[0] if node.args else node.kwargs.get("input")
        dims = self.of.get(base)  # type: ignore[arg-type]
        if not isinstance(dims, list) or (dims and isinstance(dims[0], _Tuple)):
            raise Unknown
        return dims


@dataclass
class _Tuple:
    """The axes of one member of a tuple."""

    dims: Dims


_SHAPED = {
    "reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze", "transpose", "swapaxes", "permute", "expand",
    "conv1d", "conv2d", "conv3d", "cat", "concat", "concatenate", "stack", "chunk", "split", "split_with_sizes",
    "tensor_split", "unbind", "setitem", "repeat_interleave",
}


def _tree(value: Any, of: dict[Node, Any]) -> Any:
    if isinstance(value, Node):
        return of.get(value)
    return tuple(_tree(v, of) for v in value) if isinstance(value, (tuple, list)) else None


def _width(dims: Dims) -> int:
    return sum(not ops_view.same_size(size_of(d), 1) for d in dims)


def _number(x: Any) -> Any:
    return x.meta.get("example_value") if isinstance(x, Node) else x
