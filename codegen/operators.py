"""The operators a rewritten graph calls: two per fusion, with fake and autograd.

    graphopt::norm_modulate_<hash>          any device, plain torch (reference.py): CPU, meta, and the oracle
    graphopt::norm_modulate_triton_<hash>   CUDA tensors, generated kernels (kernels.py), inlined by Inductor

The rewrite picks by the device of the example value: one `triton_op` with a CPU kernel beside it fails under
aot_eager and Inductor on a machine without a driver.

The hash is over the sources of the forward, the backward, the fakes and the kernels.  AOTAutograd's cache keys a graph
by the names of its operators, so without the hash a changed backward formula would keep returning old gradients.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphopt.codegen import reference
from graphopt.codegen.form import FUSIONS, Fusion, decode_rounding

# every source that decides what an operator computes
SOURCES = ("form.py", "reference.py", "operators.py", "spec.py", "emit.py", "kernels.py")

# positions in the tuple the forward returns
H, Y = 0, 1


@cache
def source_hash() -> str:
    """Twelve hex digits over the text of every file in SOURCES."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
    return digest.hexdigest()[:12]


def operator_name(fusion: str, engine: str) -> str:
    """Name without namespace; engine is "reference" or "triton"."""
    middle = "_triton" if engine == "triton" else ""
    return f"{fusion}{middle}_{source_hash()}"


def has_triton() -> bool:
    """Is Triton importable here?"""
    return importlib.util.find_spec("triton") is not None


def operator(fusion: str, engine: str) -> Any:
    """The operator overload of a fusion."""
    return getattr(torch.ops.graphopt, operator_name(fusion, engine)).default


def fake_forward(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, scale: Tensor | None, shift: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, norm: str, eps: float, offset: float, h_dtype: torch.dtype,
    y_dtype: torch.dtype, rounding: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shapes and dtypes of `reference.forward`: everything contiguous, absent parts empty."""
    decode_rounding(rounding)
    high = reference.compute_dtype(x, branch, gate, scale, shift, weight, bias)
    h = x.new_empty(x.shape, dtype=h_dtype) if branch is not None else x.new_empty(0)
    if norm == "none":
        return h, x.new_empty(0), x.new_empty(0), x.new_empty(0)
    rows = math.prod(x.shape[:-1])
    y = x.new_empty(x.shape, dtype=y_dtype)
    return h, y, x.new_empty((rows,), dtype=high), x.new_empty((rows,), dtype=high)


def fake_backward(
    dh: Tensor | None, dy: Tensor | None, h: Tensor, branch: Tensor | None, gate: Tensor | None, scale: Tensor | None,
    shift: Tensor | None, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, norm: str,
    offset: float, x_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Shapes and dtypes of `reference.backward`."""
    dx = h.new_empty(0) if norm == "none" else h.new_empty(h.shape, dtype=x_dtype)
    rest = (branch, gate, scale, shift, weight, bias)
    return (dx, *(h.new_empty(0) if t is None else t.new_empty(t.shape) for t in rest))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, branch, gate, scale, shift, weight, bias, norm, _eps, offset = inputs[:10]
    h, y, mean, rstd = output
    ctx.set_materialize_grads(False)
    absent = ([h] if branch is None else []) + ([y] if norm == "none" else [])
    ctx.mark_non_differentiable(mean, rstd, *absent)
    # h is saved where there is a gate (it lives on anyway), x itself where there is none
    normed = x if branch is None else (h if norm != "none" else x.new_empty(0))
    ctx.save_for_backward(normed, branch, gate, scale, shift, weight, bias, mean, rstd)
    ctx.norm, ctx.offset, ctx.x_dtype = norm, offset, x.dtype


def _autograd(backward_op: Callable[[], Any]) -> Callable[..., tuple[Any, ...]]:
    """The formula: calls the backward operator of the same engine."""

    def formula(ctx: Any, dh: Tensor | None, dy: Tensor | None, dmean: Any, drstd: Any) -> tuple[Any, ...]:
        if dh is None and dy is None:
            return (None,) * 13
        normed, branch, gate, scale, shift, weight, bias, mean, rstd = ctx.saved_tensors
        if branch is not None and ctx.norm == "none":
            normed = branch  # only its shape and device matter
        grads = backward_op()(
            dh, dy, normed, branch, gate, scale, shift, weight, bias, mean, rstd, ctx.norm, ctx.offset, ctx.x_dtype
        )
        dx = dh.to(ctx.x_dtype) if ctx.norm == "none" and dh is not None else grads[0]
        given = (branch, gate, scale, shift, weight, bias)
        return (dx, *(g if t is not None else None for t, g in zip(given, grads[1:])), *([None] * 6))

    return formula


def _register(fusion: Fusion, engine: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    name = operator_name(fusion.name, engine)
    if engine == "triton":
        make: Callable[..., Any] = torch.library.triton_op
    else:
        make = torch.library.custom_op
    forward_op = make(f"graphopt::{name}", forward, mutates_args=())
    backward_op = make(f"graphopt::{name}_backward", backward, mutates_args=())
    forward_op.register_fake(fake_forward)
    backward_op.register_fake(fake_backward)
    handle = getattr(torch.ops.graphopt, f"{name}_backward").default
    forward_op.register_autograd(_autograd(lambda: handle), setup_context=_setup_context)


def register_all() -> None:
    """Register every operator once; the rewrite and a warm cache both need them by name."""
    for fusion in FUSIONS.values():
        _register(fusion, "reference", reference.forward, reference.backward)
        if has_triton():
            from graphopt.codegen import kernels

            _register(fusion, "triton", kernels.forward, kernels.backward)


register_all()
