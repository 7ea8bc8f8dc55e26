"""The operators of rotary.py, as operators.py has those of AdaLN: generated kernels, and plain torch as the reference.

    graphopt::norm_rotate_<hash>          any device
    graphopt::norm_rotate_triton_<hash>   CUDA tensors

Both return [y, rstd].  cos and sin get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphopt.codegen import kernels, store
from graphopt.codegen.emit_sums import tile
from graphopt.codegen.operators import has_triton
from graphopt.codegen.rotary import Rotary, emit

SOURCES = ("rotary.py", "rotary_operators.py", "emit_heads.py", "emit_base.py", "emit_sums.py", "configure.py")


@cache
def source_hash() -> str:
    """Twelve hex digits over the files that decide what the operators compute."""
    return store.digest_of(Path(__file__).parent, SOURCES)


def operator(engine: str) -> Any:
    """The operator overload; engine is "reference" or "triton"."""
    return getattr(torch.ops.graphopt, _name(engine)).default


def _name(engine: str) -> str:
    return f"norm_rotate{'_triton' if engine == 'triton' else ''}_{source_hash()}"


@cache
def kernel_of(spec: Rotary) -> Any:
    """The compiled-on-first-use kernel."""
    return getattr(store.load(spec.function, emit(spec)), spec.function)


# -- plain torch -------------------------------------------------------------------------------------------------


def _high(*tensors: Tensor | None) -> torch.dtype:
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def rotated(t: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    """[B, N, H, d] turned pair by pair (or back); cos_2i and sin_2i+1 count."""
    even, odd = t[..., 0::2], t[..., 1::2]
    c, s = cos[..., 0::2].to(t.dtype), sin[..., 1::2].to(t.dtype)
    s = -s if back else s
    return torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2)


def reference_forward(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, heads: int, eps: float, y_dtype: torch.dtype
) -> list[Tensor]:
    """[y [B, N, H, d], rstd [B * N]] of x [B, N, H * d]."""
    high = _high(x, weight)
    wide = x.to(high)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    n = wide * rstd if weight is None else wide * rstd * weight.to(high)
    return [rotated(n.unflatten(-1, (heads, -1)), cos, sin).to(y_dtype), rstd.flatten()]


def reference_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, rstd: Tensor, heads: int, eps: float
) -> list[Tensor]:
    """[dx, dweight (empty without a weight)]."""
    high = _high(x, weight, dy)
    scale = rstd.to(high).reshape(*x.shape[:-1], 1)
    hat = x.to(high) * scale
    dn = rotated(dy.to(high), cos, sin, back=True).flatten(-2)
    w = dn if weight is None else dn * weight.to(high)
    dx = (w - hat * (w * hat).mean(-1, keepdim=True)) * scale
    dweight = x.new_empty(0) if weight is None else (dn * hat).sum((0, 1)).to(weight.dtype)
    return [dx.to(x.dtype).contiguous(), dweight]


# -- kernels -----------------------------------------------------------------------------------------------------


def _rows(x: Tensor) -> tuple[Tensor, Any]:
    """x with one stride from row to row, and that stride."""
    even = x.stride(-1) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    x = x if even else x.contiguous()
    return x, x.stride(1)


def _spec(direction: str, x: Tensor, weight: Tensor | None, heads: int, eps: float, y_dtype: torch.dtype) -> Rotary:
    return Rotary(direction, heads, int(x.shape[-1]) // heads, eps, weight is not None, x.dtype, y_dtype,
                  kernels.target_of(x.device))


def forward(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, heads: int, eps: float, y_dtype: torch.dtype
) -> list[Tensor]:
    """`reference_forward` in one kernel."""
    B, N, D = x.shape
    y = torch.empty((B, N, heads, D // heads), dtype=y_dtype, device=x.device)
    rstd = torch.empty((B * N,), dtype=torch.float32, device=x.device)
    if B * N != 0:
        spec = _spec("forward", x, weight, heads, eps, y_dtype)
        x, row = _rows(x)
        cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (cos, sin))
        given = [x] if weight is None else [x, weight.contiguous()]
        torch.library.wrap_triton(kernel_of(spec))[(B * N,)](
            *given, cos, sin, y, rstd, N, row, cos.stride(1), sin.stride(1), num_warps=spec.warps)
    return [y, rstd]


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, rstd: Tensor, heads: int, eps: float
) -> list[Tensor]:
    """`reference_backward` in one pass over the rows and a small second stage."""
    B, N, D = x.shape
    dx = torch.empty((B, N, D), dtype=x.dtype, device=x.device)
    dweight = x.new_empty(0) if weight is None else torch.empty_like(weight, memory_format=torch.contiguous_format)
    if B * N == 0:
        return [dx, dweight if weight is None else torch.zeros_like(dweight)]
    spec = _spec("backward", x, weight, heads, eps, dy.dtype)
    x, row = _rows(x)
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (cos, sin))
    P = torch.sym_max(1, torch.sym_min(kernels.multiprocessors(x.device) * spec.programs_per_sm, (B * N + 3) // 4))
    given, partial = [dy, x], []
    if weight is not None:
        given.append(weight.contiguous())
        partial = [torch.empty((P, D), dtype=torch.float32, device=x.device)]
    torch.library.wrap_triton(kernel_of(spec))[(P,)](
        *given, cos, sin, rstd, dx, *partial, B * N, N, P, row, dy.stride(0), dy.stride(1), dy.stride(2),
        cos.stride(1), sin.stride(1), num_warps=spec.warps)
    if partial:
        shape = tile(int(D), P)
        second = kernels.sum_kernel("norm_rotate_sums", int(D), int(D), (("dweight", 0, dweight.dtype),), shape)
        grid = (int(D) + shape.columns - 1) // shape.columns
        torch.library.wrap_triton(second)[(grid,)](partial[0], dweight, P, num_warps=shape.warps)
    return [dx, dweight]


# -- registration ------------------------------------------------------------------------------------------------


def _fake_forward(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, heads: int, eps: float, y_dtype: torch.dtype
) -> list[Tensor]:
    B, N, D = x.shape
    return [x.new_empty((B, N, heads, D // heads), dtype=y_dtype), x.new_empty((B * N,), dtype=_high(x, weight))]


def _fake_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, rstd: Tensor, heads: int, eps: float
) -> list[Tensor]:
    return [x.new_empty(x.shape), x.new_empty(0) if weight is None else weight.new_empty(weight.shape)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, cos, sin, ctx.heads, ctx.eps, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, cos, sin, output[1])


def _autograd(backward_op: Any) -> Callable[..., tuple[Any, ...]]:
    def formula(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        if grads[0] is None:
            return (None,) * 7
        x, weight, cos, sin, rstd = ctx.saved_tensors
        dx, dweight = backward_op(grads[0], x, weight, cos, sin, rstd, ctx.heads, ctx.eps)
        return dx, dweight if weight is not None else None, None, None, None, None, None

    return formula


def register_all() -> None:
    """Register every operator once."""
    engines = [("reference", reference_forward, reference_backward, torch.library.custom_op)]
    if has_triton():
        engines.append(("triton", forward, backward, torch.library.triton_op))  # type: ignore[arg-type]
    for engine, forwards, backwards, make in engines:
        name = f"graphopt::{_name(engine)}"
        forward_op = make(name, forwards, mutates_args=())  # type: ignore[operator]
        backward_op = make(f"{name}_backward", backwards, mutates_args=())  # type: ignore[operator]
        forward_op.register_fake(_fake_forward)
        backward_op.register_fake(_fake_backward)
        handle = getattr(torch.ops.graphopt, f"{_name(engine)}_backward").default
        forward_op.register_autograd(_autograd(handle), setup_context=_setup_context)


register_all()
