"""The gradient of a bias is summed where its matrix is made.

    g = gelu'(pre) * dh                       (elementwise)      g, partial = column_sums kernel(dh, pre)
    dW = mm(g.t(), x); dx = mm(g, W)                        ->   dW = mm(g.t(), x); dx = mm(g, W)
    dbias = g.sum(0)                                             dbias = second stage(partial)

The compiler does not sum over rows in the kernel that makes the rows: it reads the matrix again, or computes it twice.
A matrix that a kernel or a matmul made is summed by the same kernel, without the elementwise part, in one pass.

Runs on the graphs Inductor lowers.  A sum is taken when its matrix has static sizes, is large (SMALLEST), contiguous,
read by a matmul, and made by operators that EXPRESSIONS knows from tensors in memory; anything else stays as it is.
"""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphopt import _compat_triton
from graphopt.codegen import column_sums, compiler, kernels
from graphopt.codegen.column_sums import ColumnSums
from graphopt.codegen.emit_base import TL
from graphopt.codegen.emit_sums import tile
from graphopt.errors import CodegenError
from graphopt.passes.freeing_order import MATMULS, VIEWS
from graphopt.passes.gradient_addends import dense, is_in_memory

log = logging.getLogger(__name__)
aten, prims = torch.ops.aten, torch.ops.prims

SMALLEST = 16 << 20  # bytes of a matrix worth a kernel of its own
MOST_OPS = 64
# sigmoid and tanh through one exponential: absolute error 1e-7, and the tails keep their digits
EXPRESSIONS = {
    aten.mul.Tensor: "{0} * {1}", aten.add.Tensor: "{0} + {1}", aten.sub.Tensor: "{0} - {1}",
    aten.div.Tensor: "{0} / {1}", aten.neg.default: "-{0}", aten.exp.default: "tl.exp({0})",
    aten.sigmoid.default: "1.0 / (1.0 + tl.exp(-{0}))", aten.tanh.default: "2.0 / (1.0 + tl.exp(-2.0 * {0})) - 1.0",
    aten.erf.default: "tl.erf({0})", aten.reciprocal.default: "1.0 / {0}",
}


@dataclass
class Program:
    """Straight-line code for one matrix: its lines, and the tensors it reads."""

    rows: int
    N: int
    lines: list[str] = field(default_factory=list)
    inputs: list[tuple[str, fx.Node]] = field(default_factory=list)
    names: dict[fx.Node, str] = field(default_factory=dict)

    def name(self, node: Any) -> str | None:
        """The variable of a node, its line written if need be; None for what cannot be expressed."""
        if isinstance(node, bool) or not isinstance(node, (int, float, fx.Node)):
            return None
        if not isinstance(node, fx.Node):
            return repr(float(node))
        if node in self.names:
            return self.names[node]
        if len(self.names) > MOST_OPS:
            return None
        name = self._leaf(node) if is_in_memory(node) else self._made(node)
        if name is not None:
            self.names[node] = name
        return name

    def _leaf(self, node: fx.Node) -> str | None:
        value = node.meta.get("val")
        if not dense(node) or value.dtype not in TL:
            return None
        full = value.numel() == self.rows * self.N
        if not full and not (value.numel() == self.N and value.shape[-1] == self.N):
            return None
        self.inputs.append(("full" if full else "vector", node))
        return f"in{len(self.inputs) - 1}"

    def _made(self, node: fx.Node) -> str | None:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
            return None
        if node.target in VIEWS:
            return self.name(node.args[0]) if dense(node) and dense(node.args[0]) else None  # type: ignore[arg-type]
        if node.target is prims.convert_element_type.default:
            inner, dtype = self.name(node.args[0]), value.dtype
            if inner is None or dtype not in TL:
                return None
            return inner if dtype == torch.float32 else self._line(f"{inner}.to({TL[dtype]}).to(tl.float32)")
        if node.target not in EXPRESSIONS or node.kwargs:
            return None
        arguments = [self.name(a) for a in node.args]
        if any(a is None for a in arguments):
            return None
        return self._line(EXPRESSIONS[node.target].format(*arguments))

    def _line(self, expression: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return name


def fold(graph: fx.Graph, multiprocessors: int | None = None, smallest: int = SMALLEST) -> int:
    """Replace in place; returns how many sums were taken.  multiprocessors: of the GPU, asked where not given."""
    taken = 0
    for node in list(graph.nodes):
        found = plan(node, smallest)
        if found is None:
            continue
        device = node.meta["val"].device
        sms = multiprocessors or kernels.multiprocessors(device)
        if device.type == "cuda":
            try:
                compiler.compiled(column_sums.unit(found[1]), kernels.target_of(device))
            except CodegenError as error:
                log.warning("graphopt: a gradient of a bias is left to Inductor: %s", error.what)
                continue
        rewrite(graph, node, *found, sms)
        taken += 1
    if taken:
        log.info("graphopt: %d gradients of biases are summed where their matrix is made", taken)
        graph.eliminate_dead_code()
    return taken


def plan(node: fx.Node, smallest: int) -> tuple[fx.Node, ColumnSums, list[fx.Node]] | None:
    """The matrix a node sums over its rows, the kernel and its inputs; None where the node is left alone."""
    if node.op != "call_function" or node.target is not aten.sum.dim_IntList or node.kwargs:
        return None
    matrix, dims = node.args[0], node.args[1]
    if not isinstance(matrix, fx.Node) or list(dims) != [0] or not dense(matrix):  # type: ignore[call-overload]
        return None
    value, result = matrix.meta["val"], node.meta.get("val")
    if value.dim() != 2 or not all(isinstance(s, int) for s in value.shape) or value.dtype not in TL:
        return None
    if value.numel() * value.element_size() < smallest or not isinstance(result, torch.Tensor):
        return None
    if result.dtype not in TL or not any(u.target in MATMULS for u in readers(matrix)):
        return None
    M, N = value.shape
    program = Program(M, N)
    name = program.name(matrix)
    makes = bool(program.lines)
    if name is None or not any(kind == "full" for kind, _ in program.inputs):  # not ours to make: it is in memory
        program, name, makes = Program(M, N, inputs=[("full", matrix)]), "in0", False
    inputs = tuple((kind, n.meta["val"].dtype) for kind, n in program.inputs)
    spec = ColumnSums(N, inputs, tuple(program.lines), name, value.dtype, makes)
    return matrix, spec, [n for _, n in program.inputs]


def readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a value, views looked through."""
    found: list[fx.Node] = []
    for user in node.users:
        found += readers(user) if user.op == "call_function" and user.target in VIEWS else [user]
    return found


def rewrite(
    graph: fx.Graph, node: fx.Node, matrix: fx.Node, spec: ColumnSums, inputs: list[fx.Node], multiprocessors: int
) -> None:
    """Put the two kernels in; the matrix and its sum are replaced."""
    like, M = matrix.meta["val"], matrix.meta["val"].shape[0]
    P = spec.parts(M, multiprocessors)
    with graph.inserting_before(matrix.next):
        new = _Builder(graph, like)
        buffers = {"PARTIAL": new.empty((P, spec.N), torch.float32)}
        if spec.makes:
            buffers["OUT"] = new.empty((M, spec.N), spec.dtype)
        read = {f"IN{i}": n for i, n in enumerate(inputs)}
        written = new.launch(column_sums.kernel_of(spec), column_sums.WARPS, spec.tiles * P, {**read, **buffers},
                             {"M": M, "P": P}, list(buffers))
        total = new.empty((spec.N,), node.meta["val"].dtype)
        results = (("dbias", 0, node.meta["val"].dtype),)
        shape = tile(spec.N, P)
        second = kernels.sum_kernel("column_sums_sums", spec.N, spec.N, results, shape)
        grid = (spec.N + shape.columns - 1) // shape.columns
        partial = {"PARTIAL": written["PARTIAL"], "DBIAS": total}
        sums = new.launch(second, shape.warps, grid, partial, {"P": P}, ["DBIAS"])
        summed = new.call(aten.reshape.default, sums["DBIAS"], list(node.meta["val"].shape))
    node.replace_all_uses_with(summed)
    if spec.makes:
        made = written["OUT"]
        matrix.replace_all_uses_with(made)


class _Builder:
    """New nodes with their values, where the graph inserts."""

    def __init__(self, graph: fx.Graph, like: torch.Tensor) -> None:
        self.graph, self.like = graph, like

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of an operator."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return node

    def empty(self, size: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        """A new tensor."""
        node = self.graph.call_function(
            aten.empty.memory_format, (list(size),),
            {"dtype": dtype, "device": self.like.device, "pin_memory": False},
        )
        node.meta["val"] = self.like.new_empty(size, dtype=dtype)
        return node

    def launch(
        self, kernel: Any, warps: int, grid: int, tensors: dict[str, fx.Node], scalars: dict[str, int],
        written: list[str],
    ) -> dict[str, fx.Node]:
        """A launch; the tensors it writes, by name."""
        node = _compat_triton.add_triton_call(self.graph, kernel, warps, (grid, 1, 1), {**tensors, **scalars}, written)
        node.meta["val"] = {name: tensors[name].meta["val"] for name in written}
        out = {}
        for name in written:
            out[name] = self.graph.call_function(operator.getitem, (node, name))
            out[name].meta["val"] = tensors[name].meta["val"]
        return out
