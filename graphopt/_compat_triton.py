"""Calls of users' Triton kernels in torch's graphs, each with a contract test in tests/contracts.

Known to hold on torch 2.11 and 2.13.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx


class TritonCall(NamedTuple):
    """A functional kernel call: the kernel's name and module, and its arguments by name."""

    name: str
    module: str
    arguments: dict[str, Any]


def triton_call(node: fx.Node) -> TritonCall | None:
    """The kernel call a node is; None for any other node.

    Functional: what the kernel writes is cloned first, unless Inductor finds that nothing reads the original later.
    """
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional

    if node.target is not triton_kernel_wrapper_functional:
        return None
    kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    function = getattr(kernel, "fn", kernel)
    return TritonCall(function.__name__, function.__module__, dict(node.kwargs["kwargs"]))


def set_triton_argument(node: fx.Node, name: str, value: fx.Node) -> None:
    """Give a functional kernel call another tensor for one of its arguments."""
    node.update_kwarg("kwargs", {**node.kwargs["kwargs"], name: value})
