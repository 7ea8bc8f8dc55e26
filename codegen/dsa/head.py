"""The offset head: offsets = linear(gelu(depthwise 3x3x3 convolution(x))) over the tokens of a video, channels last.

    graphopt::offset_head_<hash>          plain torch, fp32 accumulation
    graphopt::offset_head_triton_<hash>   GPU tensors in bf16 or fp16

x is [B, N, C] with N = T * H * W in raster order; the result [B, N, out] is fp32, because offsets are.  The GELU is the
tanh form.  torch's depthwise Conv3d has no fast path (pytorch#37406), and it wants channels first.

The kernels keep u, the convolution's result, for the backward: 27 fmas an element to make again, one store to keep.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv3d, linear

from graphopt.codegen.dsa import head_launch
from graphopt.codegen.operators import has_triton

MAX_OUT = 128


def source_hash() -> str:
    """Twelve hex digits over this file and the kernels."""
    folder = Path(__file__).parent
    names = ("head.py", "head_launch.py", "head_emit.py", "head_products.py", "head_kernels.py", "head_mma_kernels.py",
             "device.py")
    text = b"".join((folder / name).read_bytes() for name in names)
    return hashlib.sha256(text).hexdigest()[:12]


def reference_forward(x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor, T: int, H: int,
                      W: int) -> tuple[Tensor, Tensor]:
    """(offsets, nothing kept): the definition, in fp32 or the inputs' higher precision."""
    high = torch.float64 if x.dtype == torch.float64 else torch.float32
    u = _convolve(x.to(high), weight.to(high), bias.to(high), T, H, W)
    return linear(_gelu(u), out_weight.to(high), out_bias.to(high)), x.new_empty(0)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, T: int, H: int, W: int) -> Tensor:
    B, _, C = x.shape
    volume = x.transpose(1, 2).reshape(B, C, T, H, W)
    return conv3d(volume, weight, bias, padding=1, groups=C).flatten(2).transpose(1, 2)


def _gelu(u: Tensor) -> Tensor:
    return torch.nn.functional.gelu(u, approximate="tanh")


def reference_backward(dy: Tensor, x: Tensor, kept: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, T: int,
                       H: int, W: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias, out_weight, out_bias."""
    high = torch.float64 if x.dtype == torch.float64 else torch.float32
    xx, ww, dd = x.to(high), weight.to(high), dy.to(high)
    u = _convolve(xx, ww, bias.to(high), T, H, W)
    inner = (u + 0.044715 * u**3) * math.sqrt(2 / math.pi)
    t = torch.tanh(inner)
    slope = 0.5 * (1 + t) + 0.5 * u * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * u * u)
    du = dd @ out_weight.to(high) * slope
    B, _, C = x.shape
    dx = _convolve(du, ww.flip(2, 3, 4), None, T, H, W)
    volume = torch.nn.functional.pad(xx.transpose(1, 2).reshape(B, C, T, H, W), (1, 1, 1, 1, 1, 1))
    of = du.transpose(1, 2).reshape(B, C, T, H, W)
    dweight = torch.stack([
        (volume[:, :, a : a + T, b : b + H, c : c + W] * of).sum((0, 2, 3, 4))
        for a in range(3) for b in range(3) for c in range(3)], 1).view(C, 1, 3, 3, 3)
    flat = lambda v: v.reshape(-1, v.shape[-1])  # noqa: E731
    return (dx.to(x.dtype).contiguous(), dweight.to(weight.dtype), flat(du).sum(0).to(bias.dtype),
            (flat(dd).T @ flat(_gelu(u))).to(out_weight.dtype), flat(dd).sum(0).to(dy.dtype))


def _in_words(x: Tensor) -> Tensor:
    """x, copied unless its tokens are whole 32-bit words."""
    whole = x.stride(-1) == 1 and all(s % 2 == 0 for s in (x.stride(0), x.stride(1), x.storage_offset()))
    return x if whole else x.contiguous()


def triton_forward(x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor, T: int, H: int,
                   W: int) -> tuple[Tensor, Tensor]:
    """(offsets, u): the convolution writes u, the linear layer reads it through GELU."""
    B, N, C = x.shape
    u = torch.empty((B, N, C), dtype=x.dtype, device=x.device)
    y = torch.empty((B, N, out_weight.shape[0]), dtype=torch.float32, device=x.device)
    if not B:  # nothing to launch
        return y, u
    head_launch.convolve(_in_words(x), weight, bias, u, (T, H, W))
    head_launch.linear(u, out_weight.to(x.dtype).contiguous(), out_bias.contiguous(), y)
    return y, u


def triton_backward(dy: Tensor, x: Tensor, u: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, T: int, H: int,
                    W: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """du from u and dy with the linear layer's gradients, then the transposed convolution with the weight gradient."""
    if not x.shape[0]:
        none = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (weight, bias, out_weight)]
        return x.new_empty(x.shape), *none, dy.new_zeros(out_weight.shape[0])
    engine = head_launch.engine_of(x, out_weight.shape[0])
    du, dx = torch.empty_like(u), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    low, of_rows = head_launch.narrow(dy, x.dtype, engine)
    of_slope = head_launch.slope(u, low, out_weight.to(x.dtype).contiguous(), du, engine)
    of_taps = head_launch.transposed(_in_words(x), du, weight, dx, (T, H, W))
    return (dx, *head_launch.add(of_taps, of_slope, of_rows, weight, bias, out_weight))


def fake_forward(x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor, T: int, H: int,
                 W: int) -> tuple[Tensor, Tensor]:
    """[B, N, out] in fp32, or fp64 for fp64 inputs; nothing is kept."""
    high = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty((x.shape[0], x.shape[1], out_weight.shape[0]), dtype=high), x.new_empty(0)


def fake_triton_forward(x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor, T: int, H: int,
                        W: int) -> tuple[Tensor, Tensor]:
    """[B, N, out] in fp32, and u like x."""
    return x.new_empty((x.shape[0], x.shape[1], out_weight.shape[0]), dtype=torch.float32), x.new_empty(x.shape)


def fake_backward(dy: Tensor, x: Tensor, kept: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, T: int, H: int,
                  W: int) -> tuple[Tensor, ...]:
    """Gradients like their tensors, contiguous."""
    rest = [t.new_empty(t.shape) for t in (weight, bias, out_weight)]
    return (x.new_empty(x.shape), *rest, dy.new_empty((out_weight.shape[0],)))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, out_weight, out_bias = inputs[:5]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1], weight, bias, out_weight)
    ctx.grid, ctx.out_dtype = inputs[5:], out_bias.dtype


_OPERATORS: dict[str, Any] = {}


def _register(engine: str, forward: Callable[..., Any], backward: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = f"offset_head{'_triton' if engine == 'triton' else ''}_{source_hash()}"
    forward_op = torch.library.custom_op(f"graphopt::{name}", forward, mutates_args=())
    backward_op = torch.library.custom_op(f"graphopt::{name}_backward", backward, mutates_args=())
    forward_op.register_fake(fake)
    backward_op.register_fake(fake_backward)
    handle = getattr(torch.ops.graphopt, f"{name}_backward").default

    def formula(ctx: Any, dy: Tensor | None, _kept: None) -> tuple[Any, ...]:
        if dy is None:
            return (None,) * 8
        *grads, last = handle(dy, *ctx.saved_tensors, *ctx.grid)
        return (*grads, last.to(ctx.out_dtype), None, None, None)

    forward_op.register_autograd(formula, setup_context=_setup_context)
    _OPERATORS[engine] = getattr(torch.ops.graphopt, name).default


_register("reference", reference_forward, reference_backward, fake_forward)
if has_triton():
    _register("triton", triton_forward, triton_backward, fake_triton_forward)


def operator(engine: str) -> Any:
    """The operator overload of an engine, "reference" or "triton"."""
    return _OPERATORS[engine]


def fits(x: Tensor, out: int) -> bool:
    """Have the kernels a form for this input?  bf16 and fp16, channels in pairs."""
    return x.dtype.itemsize == 2 and x.shape[-1] % 2 == 0 and out <= MAX_OUT


def pick(x: Tensor, out: int) -> str:
    """The engine for an input on its device."""
    return "triton" if x.device.type == "cuda" and fits(x, out) else "reference"


def offset_head(x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor,
                grid: tuple[int, int, int]) -> Tensor:
    """Offsets [B, N, out] in fp32 of tokens x [B, N, C].

    Args:
        x: [B, T*H*W, C], raster order.
        weight, bias: of the depthwise convolution, [C, 1, 3, 3, 3] and [C].
        out_weight, out_bias: of the linear layer, [out, C] and [out].
        grid: (T, H, W).
    """
    return operator(pick(x, out_weight.shape[0]))(x, weight, bias, out_weight, out_bias, *grid)[0]
