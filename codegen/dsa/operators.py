"""The operators of video attention: two, with fake and autograd, named by a hash of everything they compute.

    graphopt::video_attention_<hash>          any device, plain torch (reference.py)
    graphopt::video_attention_triton_<hash>   GPU tensors, generated kernels

Both return (y, lse) and both are differentiable, so that a caller can merge y with attention over other keys.  The
kernels' operator is opaque to the compiler: how many heads a backward takes at once depends on the number of tokens,
and tracing that would make a graph per resolution.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphopt.codegen import store
from graphopt.codegen.dsa import engines, reference
from graphopt.codegen.operators import has_triton

SOURCES = ("device.py", "emit.py", "engines.py", "kernels.py", "lattice.py", "operators.py", "portable.py",
           "reference.py", "registers.py", "scores.py", "spec.py", "window.py", "window_kernels.py")


@cache
def source_hash() -> str:
    """Twelve hex digits over the text of every file in SOURCES."""
    return store.digest_of(Path(__file__).parent, SOURCES)


def operator_name(engine: str) -> str:
    """Name without namespace; engine is "reference" or "triton"."""
    return f"video_attention{'_triton' if engine == 'triton' else ''}_{source_hash()}"


def operator(engine: str) -> Any:
    """The operator overload of an engine.  A plain look-up: Dynamo traces through it."""
    return _OPERATORS[engine]


def fake_forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, T: int, H: int, W: int, kt: int, kh: int,
                 kw: int, scale: float, boundary: str) -> tuple[Tensor, Tensor]:
    """y like q; lse [B, heads, N] in fp32, or fp64 for fp64 inputs."""
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=reference.high_precision(q, k, v))


def fake_backward(dy: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, y: Tensor,
                  lse: Tensor, T: int, H: int, W: int, kt: int, kh: int, kw: int, scale: float, boundary: str,
                  with_offsets: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients like their tensors; an empty one where offsets need none."""
    given = offsets is not None and with_offsets
    return (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v),
            torch.empty_like(offsets) if given and offsets is not None else q.new_empty(0))


def _zero_offsets(q: Tensor) -> Tensor:
    return torch.zeros((q.shape[0], 1, q.shape[2], 3), dtype=reference.high_precision(q), device=q.device)


def _place(offsets: Tensor | None, q: Tensor) -> Tensor:
    if offsets is None:
        return _zero_offsets(q)
    return offsets if offsets.is_floating_point() else offsets.to(reference.high_precision(q))


def reference_forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, T: int, H: int, W: int, kt: int,
                      kh: int, kw: int, scale: float, boundary: str) -> tuple[Tensor, Tensor]:
    """The definition."""
    return reference.forward(q, k, v, _place(offsets, q), (T, H, W), (kt, kh, kw), scale, boundary)


def reference_backward(dy: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None,
                       y: Tensor, lse: Tensor, T: int, H: int, W: int, kt: int, kh: int, kw: int, scale: float,
                       boundary: str, with_offsets: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Its gradients."""
    *grads, doffsets = reference.backward(
        dy, dlse, q, k, v, _place(offsets, q), y, lse, (T, H, W), (kt, kh, kw), scale, boundary)
    return grads[0], grads[1], grads[2], doffsets if with_offsets and offsets is not None else q.new_empty(0)


def triton_forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, T: int, H: int, W: int, kt: int, kh: int,
                   kw: int, scale: float, boundary: str) -> tuple[Tensor, Tensor]:
    """The engine that `engines.choose` names."""
    return engines.forward(q, k, v, offsets, (T, H, W), (kt, kh, kw), scale)


def triton_backward(dy: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, y: Tensor,
                    lse: Tensor, T: int, H: int, W: int, kt: int, kh: int, kw: int, scale: float, boundary: str,
                    with_offsets: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Its gradients, by the same engine."""
    *grads, doffsets = engines.backward(
        dy, dlse, q, k, v, offsets, y, lse, (T, H, W), (kt, kh, kw), scale, with_offsets and offsets is not None)
    return grads[0], grads[1], grads[2], q.new_empty(0) if doffsets is None else doffsets


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, offsets = inputs[:4]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, offsets, *output)
    ctx.rest = inputs[4:]


def _autograd(backward_op: Callable[[], Any]) -> Callable[..., tuple[Any, ...]]:
    def formula(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, offsets, y, lse = ctx.saved_tensors
        if dy is None and dlse is None:
            return (None,) * 12
        if dy is None:
            dy = torch.zeros_like(y)
        wants = offsets is not None and offsets.is_floating_point() and ctx.needs_input_grad[3]
        dq, dk, dv, doffsets = backward_op()(dy, dlse, q, k, v, offsets, y, lse, *ctx.rest, wants)
        return (dq, dk, dv, doffsets if wants else None, *([None] * 8))

    return formula


_OPERATORS: dict[str, Any] = {}


def _register(engine: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    name = operator_name(engine)
    forward_op = torch.library.custom_op(f"graphopt::{name}", forward, mutates_args=())
    backward_op = torch.library.custom_op(f"graphopt::{name}_backward", backward, mutates_args=())
    forward_op.register_fake(fake_forward)
    backward_op.register_fake(fake_backward)
    handle = getattr(torch.ops.graphopt, f"{name}_backward").default
    forward_op.register_autograd(_autograd(lambda: handle), setup_context=_setup_context)
    _OPERATORS[engine] = getattr(torch.ops.graphopt, name).default


_register("reference", reference_forward, reference_backward)
if has_triton():
    _register("triton", triton_forward, triton_backward)
