"""The addends of a gradient go into the backward kernel that reads their sum.

    dq = mm(..); dk = mm(..); dv = mm(..)                 dq = mm(..); dk = mm(..); dv = mm(..)
    dy = dq + dk + dv                            ->       backward kernel(dq, dk, dv, ..)
    backward kernel(dy, ..)

A modulated output feeds the projections to q, k and v (or attention and an MLP), so its gradient is a sum of matmul
results.  The compiler would write that sum and the kernel would read it again: 4 tensors moved that the kernel can do
without.  The kernel adds in fp32, so the sum is no longer rounded at each addition.

Runs on the graphs Inductor lowers, where generated kernels are nodes (`_compat_triton.triton_call`).  A sum is folded
when nothing else reads it and at least two of its addends are tensors in memory anyway; addends the compiler computes
stay a sum, which is one addend.  Kernels that need two passes over their rows are left alone.
"""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphopt import _compat, _compat_triton
from graphopt.codegen import kernels, readiness, tuned
from graphopt.codegen.configure import one_pass
from graphopt.codegen.spec import MAX_ADDENDS, KernelSpec, addend
from graphopt.errors import CodegenError
from graphopt.passes.freeing_order import MATMULS, VIEWS

log = logging.getLogger(__name__)
aten = torch.ops.aten


@dataclass(frozen=True)
class Fold:
    """One gradient of one launch that becomes several: `parts` are (the addend's tensor, its nodes in the graph)."""

    gradient: str
    parts: list[list[fx.Node]]


def fold(graph: fx.Graph) -> int:
    """Fold in place; returns how many sums disappeared."""
    folded = 0
    for node in list(graph.nodes):
        launch = _compat_triton.triton_call(node)
        spec = None if launch is None else kernels.spec_of(launch.kernel)
        if launch is None or spec is None or spec.direction != "backward" or spec.part != "whole":
            continue
        folds = [f for g in gradients(spec) if (f := plan(g, launch.read.get(g.upper()), spec)) is not None]
        wider = with_addends(spec, folds)
        if not folds or not one_pass(wider) or not compiles(wider, launch):
            continue
        rewrite(graph, node, wider, folds)
        folded += len(folds)
    if folded:
        log.info("graphopt: %d sums of gradients folded into the kernels that read them", folded)
        graph.eliminate_dead_code()
    return folded


def compiles(spec: KernelSpec, launch: _compat_triton.TritonCall) -> bool:
    """Does the wider kernel compile?  (Asked where there is a GPU; a warning says so if not.)"""
    device = next(iter(launch.read.values())).meta["val"].device
    if device.type != "cuda":
        return True
    try:
        readiness.compile_for(spec, spec.target)
    except CodegenError as error:
        log.warning("graphopt: a sum of gradients is left to Inductor: %s", error.what)
        return False
    return True


def gradients(spec: KernelSpec) -> list[str]:
    """The gradients that arrive at a backward kernel as one contiguous tensor."""
    arriving = [t for t in spec.streams if t.startswith(("dy", "dh"))]
    return [t for t in arriving if spec.layout(t) == "dense" and len(spec.addends(t)) == 1]


def plan(gradient: str, node: fx.Node | None, spec: KernelSpec) -> Fold | None:
    """The addends of a gradient, or None where folding gains nothing."""
    if node is None or len(node.users) != 1:
        return None
    parts = summands(node)
    in_memory = [p for p in parts if is_in_memory(p)]
    computed = [p for p in parts if not is_in_memory(p)]
    if len(in_memory) < 2:
        return None
    room = MAX_ADDENDS - bool(computed)
    if len(in_memory) > room:
        in_memory, computed = in_memory[:MAX_ADDENDS - 1], [*in_memory[MAX_ADDENDS - 1:], *computed]
    return Fold(gradient, [*([p] for p in in_memory), *([computed] if computed else [])])


def summands(node: fx.Node) -> list[fx.Node]:
    """What a value is the sum of, in order: the value itself where it is no sum of equal, contiguous tensors."""
    inner = node
    while inner.op == "call_function" and inner.target in VIEWS and len(inner.users) == 1 and dense(inner):
        inner = inner.args[0]  # type: ignore[assignment]
    is_sum = inner.op == "call_function" and inner.target is aten.add.Tensor and not inner.kwargs
    if not is_sum or len(inner.users) != 1 or not dense(inner):
        return [node]
    parts: list[fx.Node] = []
    for arg in inner.args:
        if not isinstance(arg, fx.Node) or not dense(arg) or not same_elements(arg, inner):
            return [node]
        parts += summands(arg)
    return parts


def is_in_memory(node: fx.Node) -> bool:
    """Is a value a tensor in memory whatever becomes of the sum: the result of a matmul or of a kernel, or an input?"""
    while node.op == "call_function" and node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "placeholder" or node.target in MATMULS or node.target is operator.getitem


def dense(node: fx.Node) -> bool:
    """Is a value a floating-point tensor, contiguous for certain?"""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or value.dtype.itemsize > 4:
        return False
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride())):
        if not _compat.statically_true(size == 1) and not _compat.statically_true(stride == expected):
            return False
        expected = expected * size
    return True


def same_elements(a: fx.Node, b: fx.Node) -> bool:
    """Have two tensors the same shape for certain?"""
    x, y = a.meta["val"].shape, b.meta["val"].shape
    return len(x) == len(y) and all(_compat.statically_true(p == q) for p, q in zip(x, y))


def with_addends(spec: KernelSpec, folds: list[Fold]) -> KernelSpec:
    """The spec of the kernel that reads the addends."""
    dtypes = dict(spec.dtypes)
    for f in folds:
        for k, nodes in enumerate(f.parts):
            values = [n.meta["val"].dtype for n in nodes]
            dtypes[addend(f.gradient, k)] = values[0] if len(values) == 1 else _promoted(values)
    return replace(spec, dtypes=tuple(dtypes.items()))


def _promoted(dtypes: list[torch.dtype]) -> torch.dtype:
    found = dtypes[0]
    for d in dtypes[1:]:
        found = torch.promote_types(found, d)
    return found


def rewrite(graph: fx.Graph, node: fx.Node, spec: KernelSpec, folds: list[Fold]) -> None:
    """Launch the kernel of `spec` instead; its grid stays, so the partial sums and the second stage do."""
    tensors: dict[str, fx.Node] = {}
    for f in folds:
        for k, parts in enumerate(f.parts):
            total = parts[0]
            with graph.inserting_before(node):
                for part in parts[1:]:
                    before = total
                    total = graph.call_function(aten.add.Tensor, (before, part))
                    total.meta["val"] = aten.add.Tensor(before.meta["val"], part.meta["val"])
            tensors[addend(f.gradient, k).upper()] = total
    kernel, config = kernels.kernel_of(spec)
    if config.programs_per_sm != tuned.configuration(spec.without_addends).programs_per_sm:
        raise ValueError(f"{spec.function}: addends must not change the grid")
    _compat_triton.replace_kernel(node, kernel, config.warps, tensors)
