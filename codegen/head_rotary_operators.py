"""The operators of head_rotary.py, as rotary_operators.py has those of a norm over all heads.

    graphopt::head_norm_rotate_<hash>          any device
    graphopt::head_norm_rotate_triton_<hash>   CUDA tensors

Both take one tensor x0 [B, N0, H, d] or two, x0 and x1 [B, N1, H, d], and return y [B, N0 + N1, H, d].  cos and sin
[1, R, 1, d] turn the first R rows of y and get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphopt.codegen import kernels, store
from graphopt.codegen.emit_sums import tile
from graphopt.codegen.head_rotary import HeadRotary, emit
from graphopt.codegen.operators import has_triton

SOURCES = ("head_rotary.py", "head_rotary_operators.py", "emit_heads.py", "emit_base.py", "emit_sums.py",
           "configure.py")
Maybe: TypeAlias = Tensor | None


@cache
def source_hash() -> str:
    """Twelve hex digits over the files that decide what the operators compute."""
    return store.digest_of(Path(__file__).parent, SOURCES)


def operator(engine: str) -> Any:
    """The operator overload; engine is "reference" or "triton"."""
    return getattr(torch.ops.graphopt, _name(engine)).default


def _name(engine: str) -> str:
    return f"head_norm_rotate{'_triton' if engine == 'triton' else ''}_{source_hash()}"


@cache
def kernel_of(spec: HeadRotary) -> Any:
    """The compiled-on-first-use kernel."""
    return getattr(store.load(spec.function, emit(spec)), spec.function)


# -- plain torch -------------------------------------------------------------------------------------------------


def _turned(n: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """[B, N, H, d] with its first R rows turned pair by pair, or the gradient of that."""
    R = cos.shape[1]
    head, tail = n[:, :R], n[:, R:]
    cos, sin = cos.to(n.dtype), sin.to(n.dtype)
    if back:
        t = head * sin
        swapped = torch.stack([t[..., 1::2], -t[..., 0::2]], -1).flatten(-2)
        return torch.cat([head * cos + swapped, tail], 1)
    swapped = torch.stack([-head[..., 1::2], head[..., 0::2]], -1).flatten(-2)
    return torch.cat([head * cos + swapped * sin, tail], 1)


def _high(*tensors: Maybe) -> torch.dtype:
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def _normed(x: Tensor, high: torch.dtype, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(high)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * rstd, rstd


def reference_forward(
    x0: Tensor, weight0: Maybe, x1: Maybe, weight1: Maybe, cos: Tensor, sin: Tensor, eps: float,
    y_dtype: torch.dtype,
) -> Tensor:
    """y [B, N0 + N1, H, d]."""
    high = _high(x0, weight0)
    parts = []
    for x, weight in ((x0, weight0), (x1, weight1)):
        if x is not None:
            hat = _normed(x, high, eps)[0]
            parts.append(hat if weight is None else hat * weight.to(high))
    return _turned(torch.cat(parts, 1), cos, sin, back=False).to(y_dtype).contiguous()


def reference_backward(
    dy: Tensor, x0: Tensor, weight0: Maybe, x1: Maybe, weight1: Maybe, cos: Tensor, sin: Tensor, eps: float
) -> list[Tensor]:
    """[dx0, dweight0, dx1, dweight1]; what is not there is empty."""
    high = _high(x0, weight0, dy)
    dn = _turned(dy.to(high), cos, sin, back=True)
    out, start = [], 0
    for x, weight in ((x0, weight0), (x1, weight1)):
        if x is None:
            out += [x0.new_empty(0), x0.new_empty(0)]
            continue
        hat, rstd = _normed(x, high, eps)
        part, start = dn[:, start:start + x.shape[1]], start + x.shape[1]
        w = part if weight is None else part * weight.to(high)
        dx = (w - hat * (w * hat).mean(-1, keepdim=True)) * rstd
        dweight = x.new_empty(0) if weight is None else (part * hat).sum((0, 1, 2)).to(weight.dtype)
        out += [dx.to(x.dtype).contiguous(), dweight]
    return out


# -- kernels -----------------------------------------------------------------------------------------------------


def _spec(direction: str, xs: list[Tensor], weight: Maybe, eps: float, y_dtype: torch.dtype) -> HeadRotary:
    x = xs[0]
    return HeadRotary(direction, int(x.shape[2]), int(x.shape[3]), len(xs), eps, weight is not None, x.dtype, y_dtype,
                      kernels.target_of(x.device))


def _dense(t: Tensor) -> Tensor:
    """The tensor, or a copy of one whose channels lie apart."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _strides(xs: list[Tensor], cos: Tensor, sin: Tensor) -> list[Any]:
    return [x.stride(i) for x in xs for i in range(3)] + [cos.stride(1), sin.stride(1)]


def forward(
    x0: Tensor, weight0: Maybe, x1: Maybe, weight1: Maybe, cos: Tensor, sin: Tensor, eps: float,
    y_dtype: torch.dtype,
) -> Tensor:
    """`reference_forward` in one kernel."""
    xs = [_dense(x) for x in (x0, x1) if x is not None]
    B, _, H, d = x0.shape
    N = sum(x.shape[1] for x in xs)
    y = torch.empty((B, N, H, d), dtype=y_dtype, device=x0.device)
    if B * N != 0:
        spec = _spec("forward", xs, weight0, eps, y_dtype)
        cos, sin = _dense(cos), _dense(sin)
        weights = [w.contiguous() for w in (weight0, weight1) if w is not None]
        torch.library.wrap_triton(kernel_of(spec))[(B * N,)](
            *xs, *weights, cos, sin, y, N, *([xs[0].shape[1]] if len(xs) == 2 else []), cos.shape[1],
            *_strides(xs, cos, sin), num_warps=spec.warps)
    return y


def backward(
    dy: Tensor, x0: Tensor, weight0: Maybe, x1: Maybe, weight1: Maybe, cos: Tensor, sin: Tensor, eps: float
) -> list[Tensor]:
    """`reference_backward` in one pass over the rows and a small second stage."""
    xs = [_dense(x) for x in (x0, x1) if x is not None]
    weights = [w.contiguous() for w in (weight0, weight1) if w is not None]
    B, d = x0.shape[0], x0.shape[3]
    N = sum(x.shape[1] for x in xs)
    dxs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    if B * N == 0:
        return _slots(x0, dxs, [torch.zeros_like(w) for w in weights])
    dweights = [torch.empty_like(w) for w in weights]
    spec = _spec("backward", xs, weight0, eps, dy.dtype)
    dy, cos, sin = _dense(dy), _dense(cos), _dense(sin)
    M = B * N
    P = torch.sym_max(len(xs), torch.sym_min(kernels.multiprocessors(x0.device) * spec.programs_per_sm, (M + 3) // 4))
    sizes = [P, N] if len(xs) == 1 else [P, _share(P, xs[0].shape[1], N), N, xs[0].shape[1]]
    width = len(weights) * int(d)
    partial = [torch.empty((P, width), dtype=torch.float32, device=x0.device)] if weights else []
    torch.library.wrap_triton(kernel_of(spec))[(P,)](
        dy, *xs, *weights, cos, sin, *dxs, *partial, M, *sizes, cos.shape[1], dy.stride(0),
        dy.stride(1), dy.stride(2), *_strides(xs, cos, sin), num_warps=spec.warps)
    if partial:
        shape = tile(int(d), P)
        results = tuple((f"dweight{k}", k * int(d), w.dtype) for k, w in enumerate(weights))
        second = kernels.sum_kernel("head_norm_rotate_sums", int(d), width, results, shape)
        grid = (int(d) + shape.columns - 1) // shape.columns * len(weights)
        torch.library.wrap_triton(second)[(grid,)](partial[0], *dweights, P, num_warps=shape.warps)
    return _slots(x0, dxs, dweights)


def _share(P: Any, N0: Any, N: Any) -> Any:
    """How many of P programs walk N0 of N rows: their share, and one at least for either tensor."""
    return torch.sym_max(1, torch.sym_min(P - 1, (P * N0 + N // 2) // N))


def _slots(x0: Tensor, dxs: list[Tensor], dweights: list[Tensor]) -> list[Tensor]:
    """Both gradients of both tensors, empty ones where there is none."""
    out = []
    for k in range(2):
        out += [dxs[k] if k < len(dxs) else x0.new_empty(0), dweights[k] if k < len(dweights) else x0.new_empty(0)]
    return out


# -- registration ------------------------------------------------------------------------------------------------


def _fake_forward(
    x0: Tensor, weight0: Maybe, x1: Maybe, weight1: Maybe, cos: Tensor, sin: Tensor, eps: float,
    y_dtype: torch.dtype,
) -> Tensor:
    B, N, H, d = x0.shape
    return x0.new_empty((B, N if x1 is None else N + x1.shape[1], H, d), dtype=y_dtype)


def _fake_backward(
    dy: Tensor, x0: Tensor, weight0: Maybe, x1: Maybe, weight1: Maybe, cos: Tensor, sin: Tensor, eps: float
) -> list[Tensor]:
    given = (x0, weight0, x1, weight1)
    return [x0.new_empty(0) if t is None else t.new_empty(t.shape) for t in given]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _autograd(backward_op: Any) -> Callable[..., tuple[Any, ...]]:
    def formula(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        if dy is None:
            return (None,) * 8
        tensors = ctx.saved_tensors
        grads = backward_op(dy, *tensors, ctx.eps)
        return *(None if t is None else g for t, g in zip(tensors[:4], grads)), None, None, None, None

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
