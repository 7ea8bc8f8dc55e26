"""A kernel writes dx, or the matrix it sums, over a gradient that nothing reads after it.

Runs on the graphs Inductor lowers, where a generated kernel is a `triton_kernel_wrapper_functional` whose results start
as `empty`.  A gradient [B, S, D] that arrives at a kernel mostly dies there, so its result needs no memory of its own:
the `empty` is replaced by the gradient, and Inductor's re-inplacing, which sees no later reader, lets the kernel write
there.

Safe for the one-pass kernels (emit_backward.py): a program reads the whole of a row, or of a chunk for the last time,
before it writes it, and no other program touches that row.  So does the kernel of column_sums.py with its tiles: an
element is read once, by the program that writes there.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from graphopt import _compat_triton
from graphopt._compat import statically_true
from graphopt.passes.freeing_order import VIEWS, base, last_readers

# results of a kernel, and the arguments whose memory they may take, the first that fits
RESULTS = ("DX", "DBRANCH", "OUT")


def reuse(graph: fx.Graph) -> int:
    """Rewrite in place; returns how many results took the memory of a gradient."""
    last, taken = last_readers(graph), 0
    for node in graph.nodes:
        call = _compat_triton.triton_call(node)
        if call is None or not call.module.startswith("graphopt_kernels."):
            continue
        if call.name == "column_sums":
            names_same_memory(node, call)
            call = _compat_triton.triton_call(node) or call
        elif not call.name.endswith("_backward"):
            continue
        arguments = dict(call.arguments)
        arrived = [n for name, n in arguments.items() if name.startswith(("DY", "DH", "IN"))]
        dying = [n for n in arrived if dies(n, node, last)]
        dying = [n for n in dying if sum(base(m) is base(n) for m in arguments.values() if isinstance(m, fx.Node)) == 1]
        for name in RESULTS:
            empty = arguments.get(name)
            if empty is None or empty.target is not torch.ops.aten.empty.memory_format or len(empty.users) != 1:
                continue
            place = next((n for n in dying if same_form(n, empty)), None)
            if place is not None:
                dying.remove(place)
                _compat_triton.set_triton_argument(node, name, place)
                graph.erase_node(empty)
                taken += 1
    return taken


def names_same_memory(node: fx.Node, call: _compat_triton.TritonCall) -> None:
    """Inputs that are views of a tensor in the form of the result become that tensor: a kernel sees only its memory."""
    empty = call.arguments.get("OUT")
    if not isinstance(empty, fx.Node):
        return
    for name, value in call.read.items():
        inner = value
        while inner.op == "call_function" and inner.target in VIEWS and not same_form(inner, empty):
            inner = inner.args[0]  # type: ignore[assignment]
        if inner is not value and same_form(inner, empty):
            _compat_triton.set_triton_argument(node, name, inner)


def dies(value: fx.Node, reader: fx.Node, last: dict[fx.Node, fx.Node]) -> bool:
    """Is `value` the whole of some memory that is no input of the graph, and that nothing reads after `reader`?"""
    memory = base(value)
    return fresh(memory) and last.get(memory) is reader and same_size(memory, value)


def fresh(node: fx.Node) -> bool:
    """Is a node's value memory that the node allocated?"""
    if node.op != "call_function":
        return False
    maker = node.args[0] if node.target is operator.getitem else node
    if _compat_triton.triton_call(maker) is not None:  # type: ignore[arg-type]
        return True
    schema = getattr(maker.target, "_schema", None)  # type: ignore[union-attr]
    return schema is not None and all(r.alias_info is None for r in schema.returns)


def same_size(a: fx.Node, b: fx.Node) -> bool:
    """Have two tensors the same dtype and number of elements, for certain?"""
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    return x.dtype == y.dtype and statically_true(x.numel() == y.numel())


def same_form(a: fx.Node, b: fx.Node) -> bool:
    """Have two tensors the same dtype, shape and strides, for certain?  Adds no guard when they are symbolic."""
    if not same_size(a, b):
        return False
    x, y = a.meta["val"], b.meta["val"]
    pairs = [*zip(x.shape, y.shape), *zip(x.stride(), y.stride())]
    return x.dim() == y.dim() and all(statically_true(p == q) for p, q in pairs)
