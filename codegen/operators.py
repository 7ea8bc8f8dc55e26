"""The operators a rewritten graph calls: two per fusion, with fake and autograd.

    graphopt::norm_modulate_<hash>          any device, plain torch (reference.py): CPU, meta, and the oracle
    graphopt::norm_modulate_triton_<hash>   CUDA tensors, generated kernels (kernels.py), inlined by Inductor

All fusions have one signature, that of `reference.forward`, and return one list of tensors (positions: form.py).

The rewrite picks by the device of the example value: one `triton_op` with a CPU kernel beside it fails under
aot_eager and Inductor on a machine without a driver.

The hash is over the sources of the forward, the backward, the fakes and the kernels.  AOTAutograd's cache keys a graph
by the names of its operators, so without the hash a changed backward formula would keep returning old gradients.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphopt.codegen import reference, store, tuned
from graphopt.codegen.form import FUSIONS, OPERANDS, Fusion, decode_outputs, decode_rounding, split_outputs

# every source that decides what an operator computes
SOURCES = (
    "form.py", "reference.py", "operators.py", "spec.py", "configure.py", "layout.py", "emit.py", "emit_base.py",
    "emit_forward.py", "emit_backward.py", "emit_sums.py", "kernels.py",
    "tuned.py", "data/configurations.json", "column_sums.py", "joint.py",
)

# arguments after the tensors: outputs .. rounding
ATTRIBUTES = ("outputs", "norm", "eps", "offset", "branch_norm", "branch_eps", "activation", "h_dtype", "y_dtype",
              "rounding")


@cache
def source_hash() -> str:
    """Twelve hex digits over the text of every file in SOURCES, and of the user's measured configurations."""
    return store.digest_of(Path(__file__).parent, SOURCES, tuned.user_text())


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
    x: Tensor, branch: Tensor | None, gate: Tensor | None, gate_table: Tensor | None, branch_weight: Tensor | None,
    branch_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None, modulation: Sequence[Tensor], outputs: str,
    norm: str, eps: float, offset: float, branch_norm: str, branch_eps: float, activation: str, h_dtype: torch.dtype,
    y_dtype: torch.dtype, rounding: str,
) -> list[Tensor]:
    """Shapes and dtypes of `reference.forward`: everything contiguous, absent parts empty."""
    decode_rounding(rounding)
    split_outputs(modulation, outputs)
    single = (x, branch, gate, gate_table, branch_weight, branch_bias, weight, bias)
    high = reference.compute_dtype(*single, *modulation)
    rows = math.prod(x.shape[:-1])

    def statistics(kind: str) -> list[Tensor]:
        return [x.new_empty((rows,), dtype=high) if kind in having else x.new_empty(0)
                for having in (("layer_norm",), ("layer_norm", "rms_norm"))]

    h = x.new_empty(0) if branch is None else x.new_empty(x.shape, dtype=h_dtype)
    ys = [] if norm == "none" else [x.new_empty(x.shape, dtype=y_dtype) for _ in decode_outputs(outputs)]
    return [h, *statistics(norm), *statistics(branch_norm if branch is not None else "none"), *ys]


def fake_backward(
    dh: Tensor | None, dy: Sequence[Tensor | None], h: Tensor, branch: Tensor | None, gate: Tensor | None,
    gate_table: Tensor | None, branch_weight: Tensor | None, branch_bias: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, modulation: Sequence[Tensor], mean: Tensor, rstd: Tensor, branch_mean: Tensor,
    branch_rstd: Tensor, outputs: str, norm: str, offset: float, branch_norm: str, activation: str,
    x_dtype: torch.dtype,
) -> list[Tensor]:
    """Shapes and dtypes of `reference.backward`."""
    dx = h.new_empty(0) if norm == "none" else h.new_empty(h.shape, dtype=x_dtype)
    rest = (branch, gate, gate_table, branch_weight, branch_bias, weight, bias)
    return [dx, *(h.new_empty(0) if t is None else t.new_empty(t.shape) for t in rest),
            *(t.new_empty(t.shape) for t in modulation)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    single, modulation = inputs[:len(OPERANDS)], inputs[len(OPERANDS)]
    x, branch, gate = single[:3]
    a = dict(zip(ATTRIBUTES, inputs[len(OPERANDS) + 1:]))
    h, statistics = output[0], output[1:5]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*statistics, *([h] if branch is None else []))
    ctx.x_dtype, ctx.branch_dtype = x.dtype, None if branch is None else branch.dtype
    ctx.attributes = (a["outputs"], a["norm"], a["offset"], a["branch_norm"], a["activation"])
    # the gradient of a branch that is only added is that of x: nothing of it is saved
    ctx.added_only = branch is not None and gate is None and a["branch_norm"] == "none"
    kept = (None if ctx.added_only else branch, *single[2:])
    # h is saved where there is a branch (it lives on anyway), x itself where there is none
    normed = x.new_empty(0) if a["norm"] == "none" else x if branch is None else h
    ctx.save_for_backward(normed, *kept, *statistics, *modulation)


def _autograd(backward_op: Callable[[], Any]) -> Callable[..., tuple[Any, ...]]:
    """The formula: calls the backward operator of the same engine."""

    def formula(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        dh, dy = grads[0], list(grads[5:])
        normed, *rest = ctx.saved_tensors
        kept, statistics, modulation = rest[:7], rest[7:11], rest[11:]
        if dh is None and all(d is None for d in dy):
            return (*([None] * len(OPERANDS)), [None] * len(modulation), *([None] * len(ATTRIBUTES)))
        norm = ctx.attributes[1]
        if norm == "none":
            normed = kept[0]  # only its shape and device matter
        # the sum's gradient is rounded once for each of its summands
        dx_dtype = torch.promote_types(ctx.x_dtype, ctx.branch_dtype) if ctx.added_only else ctx.x_dtype
        dx, dbranch, *others = backward_op()(
            dh, dy, normed, *kept, list(modulation), *statistics, *ctx.attributes, dx_dtype
        )
        if norm == "none" and dh is not None:
            dx = dh
        if ctx.added_only:
            dbranch = dx.to(ctx.branch_dtype)
        single = [g if t is not None else None for t, g in zip(kept[1:], others)]
        dbranch = dbranch if kept[0] is not None or ctx.added_only else None
        return (dx.to(ctx.x_dtype), dbranch, *single, others[len(single):], *([None] * len(ATTRIBUTES)))

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
