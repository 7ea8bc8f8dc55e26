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
    node.update_kwarg("kwargs", {**node.kwargs["kwargs"], name: value})  # type: ignore[dict-item]


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
    arguments: Any = node.kwargs["kwargs"]
    node.kwargs = {**node.kwargs, "kernel_idx": kernel_side_table.add_kernel(kernel),
                   "kwargs": {**arguments, **tensors}}


def add_triton_call(
    graph: fx.Graph, kernel: Any, warps: int, grid: tuple[int, ...], arguments: dict[str, Any], written: list[str]
) -> fx.Node:
    """A functional call as a node where the graph inserts; it yields the tensors the kernel writes, by name.

    arguments: tensors (nodes) and numbers by the names of the kernel's parameters.
    """
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional

    if hasattr(kernel, "cache_key"):  # Triton's interpreter knows no warps
        import triton

        kernel = triton.autotune(configs=[triton.Config({}, num_warps=warps)], key=[])(kernel)
    return graph.call_function(triton_kernel_wrapper_functional, (), {
        "kernel_idx": kernel_side_table.add_kernel(kernel),
        "constant_args_idx": kernel_side_table.add_constant_args({}), "grid": [grid],
        "tma_descriptor_metadata": {}, "kwargs": arguments, "tensors_to_clone": written,
    })
