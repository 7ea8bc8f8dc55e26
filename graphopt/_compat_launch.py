"""Launches of Triton kernels in the graphs Inductor lowers: which kernel, with which tensors, and another in its place.

Private APIs of torch (its higher-order operator and its table of kernels), with a contract test in tests/contracts.
Known to hold on torch 2.11 and 2.13.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from torch import fx


class Launch(NamedTuple):
    """One launch: the Triton function, and its tensor arguments (nodes) by name, those it only reads."""

    kernel: Any
    tensors: dict[str, fx.Node]


def launch_of(node: fx.Node) -> Launch | None:
    """The launch a node stands for; None for any other node."""
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    if node.op != "call_function" or node.target is not wrap.triton_kernel_wrapper_functional:
        return None
    kernel: Any = wrap.kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    written: Any = node.kwargs["tensors_to_clone"]
    arguments: Any = node.kwargs["kwargs"]
    read = {n: v for n, v in arguments.items() if isinstance(v, fx.Node) and n not in written}
    return Launch(kernel.fn if hasattr(kernel, "configs") else kernel, read)


def relaunch(node: fx.Node, kernel: Any, warps: int, tensors: dict[str, fx.Node]) -> None:
    """Make a launch call another Triton function with more tensors; grid and scalar arguments stay as they are."""
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    old: Any = wrap.kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    if hasattr(old, "configs"):  # num_warps travels as the one configuration of an autotuner
        import triton

        configs = copy.deepcopy(old.configs)
        for config in configs:
            config.num_warps = warps
        kernel = triton.autotune(configs=configs, key=[])(kernel)
    arguments: Any = node.kwargs["kwargs"]
    node.kwargs = {**node.kwargs, "kernel_idx": wrap.kernel_side_table.add_kernel(kernel),
                   "kwargs": {**arguments, **tensors}}


def launch(
    graph: fx.Graph, kernel: Any, warps: int, grid: tuple[int, ...], arguments: dict[str, Any], written: list[str]
) -> fx.Node:
    """A launch as a node where the graph inserts; it yields the tensors the kernel writes, by name.

    arguments: tensors (nodes) and numbers by the names of the kernel's parameters.
    """
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    if hasattr(kernel, "cache_key"):  # Triton's interpreter knows no warps
        import triton

        kernel = triton.autotune(configs=[triton.Config({}, num_warps=warps)], key=[])(kernel)
    return graph.call_function(wrap.triton_kernel_wrapper_functional, (), {
        "kernel_idx": wrap.kernel_side_table.add_kernel(kernel),
        "constant_args_idx": wrap.kernel_side_table.add_constant_args({}), "grid": [grid],
        "tma_descriptor_metadata": {}, "kwargs": arguments, "tensors_to_clone": written,
    })
