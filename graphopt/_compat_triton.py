"""Calls of users' Triton kernels in torch's graphs, each with a contract test in tests/contracts.

Known to hold on torch 2.11 and 2.13.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from torch import fx


class TritonCall(NamedTuple):
    """A functional kernel call: the kernel's name and module, its arguments by name, the Triton function, and the names
    of the arguments it writes."""

    name: str
    module: str
    arguments: dict[str, Any]
    kernel: Any
    written: tuple[str, ...]

    @property
    def read(self) -> dict[str, fx.Node]:
        """The tensor arguments it only reads, by name."""
        return {n: v for n, v in self.arguments.items() if isinstance(v, fx.Node) and n not in self.written}


def triton_call(node: fx.Node) -> TritonCall | None:
    """The kernel call a node is; None for any other node.

    Functional: what the kernel writes is cloned first, unless Inductor finds that nothing reads the original later.
    """
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional

    if node.target is not triton_kernel_wrapper_functional:
        return None
    kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    kernel = kernel.fn if hasattr(kernel, "configs") else kernel
    function = getattr(kernel, "fn", kernel)
    arguments: Any = node.kwargs["kwargs"]
    written: Any = node.kwargs["tensors_to_clone"]
    return TritonCall(function.__name__, function.__module__, dict(arguments), kernel, tuple(written))


def set_triton_argument(node: fx.Node, name: str, value: fx.Node) -> None:
    """Give a functional kernel call another tensor for one of its arguments."""
    _set(node, {name: value})


def _set(node: fx.Node, tensors: dict[str, fx.Node], **settings: Any) -> None:
    """Give a call other tensors or settings; what torch remembers of its inputs follows (2.11 walks both together)."""
    arguments: Any = node.kwargs["kwargs"]
    node.kwargs = {**node.kwargs, **settings, "kwargs": {**arguments, **tensors}}
    if "eager_input_vals" in node.meta:
        args, kwargs = node.meta["eager_input_vals"]
        values = {**kwargs["kwargs"], **{n: t.meta["val"] for n, t in tensors.items()}}
        values = type(kwargs["kwargs"])({n: values[n] for n in node.kwargs["kwargs"]})  # type: ignore[union-attr]
        node.meta["eager_input_vals"] = (args, {**kwargs, **settings, "kwargs": values})


def replace_kernel(node: fx.Node, kernel: Any, warps: int, tensors: dict[str, fx.Node]) -> None:
    """Make a call launch another Triton function with more tensors; grid and scalar arguments stay as they are."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    old: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    if hasattr(old, "configs"):  # num_warps travels as the one configuration of an autotuner
        import triton

        configs = copy.deepcopy(old.configs)
        for config in configs:
            config.num_warps = warps
        kernel = triton.autotune(configs=configs, key=[])(kernel)
    _set(node, tensors, kernel_idx=kernel_side_table.add_kernel(kernel))


def add_triton_call(
    graph: fx.Graph, kernel: Any, warps: int | None, grid: tuple[int, ...], arguments: dict[str, Any],
    written: list[str],
) -> fx.Node:
    """A functional call as a node where the graph inserts; it yields the tensors the kernel writes, by name.

    arguments: tensors (nodes) and numbers by the names of the kernel's parameters.
    """
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional

    if hasattr(kernel, "cache_key"):  # Triton's interpreter knows no warps
        import triton

        kernel = triton.autotune(configs=[triton.Config({}, num_warps=warps)], key=[])(kernel)
    node = graph.call_function(triton_kernel_wrapper_functional, (), {
        "kernel_idx": kernel_side_table.add_kernel(kernel),
        "constant_args_idx": kernel_side_table.add_constant_args({}), "grid": [grid],
        "tma_descriptor_metadata": {}, "kwargs": arguments, "tensors_to_clone": written,
    })
    if all("val" in n.meta for n in node.all_input_nodes):  # then Inductor keeps to these strides exactly
        node.meta["eager_input_vals"] = fx.node.map_arg(((), dict(node.kwargs)), lambda n: n.meta["val"])
    return node


def triton_grid(node: fx.Node) -> tuple[Any, ...] | None:
    """The grid of a functional kernel call; None where it has several (one per configuration)."""
    grids: Any = node.kwargs["grid"]
    return tuple(grids[0]) if len(grids) == 1 else None


def triton_warps(node: fx.Node) -> int | None:
    """The warps of a functional kernel call; None where it names none (the interpreter)."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    return kernel.configs[0].num_warps if hasattr(kernel, "configs") else None


def equal_arguments(first: fx.Node, second: fx.Node) -> frozenset[str]:
    """The arguments that two calls of one kernel have in common and do not write."""
    a, b = triton_call(first), triton_call(second)
    if a is None or b is None:
        raise ValueError("not two kernel calls")
    same = {n for n, v in a.arguments.items() if v is b.arguments[n] or (isinstance(v, int) and v == b.arguments[n])}
    return frozenset(same) - set(a.written)


def join_calls(
    graph: fx.Graph, first: fx.Node, second: fx.Node, kernel: Any, shared: frozenset[str], suffix: str, count: str
) -> fx.Node:
    """One call for two of one kernel, where the graph inserts.

    kernel takes the arguments of the first, those of the second that are not shared under their names with `suffix`,
    and as `count` how many programs belong to the first.
    """
    a, b, grids = triton_call(first), triton_call(second), [triton_grid(first), triton_grid(second)]
    if a is None or b is None or grids[0] is None or grids[1] is None:
        raise ValueError("not two kernel calls with one grid each")
    more = {n + suffix: v for n, v in b.arguments.items() if n not in shared}
    written = [*a.written, *(n + suffix for n in b.written)]
    grid = (grids[0][0] + grids[1][0], 1, 1)
    arguments = {**a.arguments, **more, count: grids[0][0]}
    return add_triton_call(graph, kernel, triton_warps(first), grid, arguments, written)
