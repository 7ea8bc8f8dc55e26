"""FLOP formulas that torch's registry lacks, and which ops must have one.

Counting follows torch.utils.flop_counter: a multiply-add is two operations, elementwise work is not counted, and a
fused attention's backward counts five matrix products (one is recomputed), an unfused one four.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten

# Ops whose name says that they multiply matrices, convolve, attend or transform: without a formula they are an error.
COMPUTES = re.compile(
    r"(^|_)(mm|bmm|addmm|baddbmm|addbmm|matmul|mv|addmv|dot|vdot|ger|addr|linear|einsum|tensordot|inner|outer|"
    r"conv(?!ert)\w*|attention|attn|sdpa|lstm|gru|rnn|fft\w*|cdist|bilinear|linalg\w*|cholesky\w*|svd|"
    r"qr|inverse|lu|solve\w*|grid_sampler\w*|deform\w*)(_|$)|_mm|attention|convolution"
)
# What these namespaces hold besides is elementwise, reduction, view, index or random; other namespaces are unknown
# work.
KNOWN = {"aten", "prims", "prim", "_operator", "rngprims", "inductor_prims"}


def _attention(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> Any:
    """Fused attention forward, q [B, H, S, D], k and v [B, H, L, D]: two matrix products."""
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any
) -> Any:
    """Fused attention backward: five matrix products."""
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def _dot(a: Any, b: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> Any:
    """Vector product."""
    return 2 * a.shape[0]


def _mv(a: Any, b: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> Any:
    """Matrix times vector."""
    return 2 * a.shape[0] * a.shape[1]


def _addmv(c: Any, a: Any, b: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> Any:
    """Vector plus matrix times vector."""
    return _mv(a, b)


OURS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.dot: _dot,
    aten.vdot: _dot,
    aten.mv: _mv,
    aten.addmv: _addmv,
}


def formula(packet: Any, extra: dict[Any, Callable[..., Any]]) -> Callable[..., Any] | None:
    """The formula of an op: the user's, torch's, or ours.  It takes the op's arguments, and its result as `out_val`."""
    return extra.get(packet) or flop_registry.get(packet) or OURS.get(packet)


def is_attention(packet: Any) -> bool:
    """Is this a fused softmax attention?"""
    return "attention" in str(packet)


def computes(target: Any) -> bool:
    """Must this op have a formula?  True for named compute and for every op of a namespace that torch does not own."""
    namespace = getattr(target, "namespace", None) or getattr(target, "__module__", "") or ""
    name = getattr(target, "__name__", str(target)).split(".")[0]
    if namespace in KNOWN or namespace.startswith(("_operator", "math", "torch.utils._sympy", "builtins", "torch.sym")):
        return bool(COMPUTES.search(name))
    return not (callable(target) and namespace.startswith("torch") and name.startswith("sym_"))
