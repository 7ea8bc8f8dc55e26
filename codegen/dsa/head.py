"""The offset head: offsets = linear(gelu(depthwise 3x3x3 convolution(x))) over the tokens of a video, channels last.

    graphopt::offset_head_<hash>          plain torch, fp32 accumulation
    graphopt::offset_head_triton_<hash>   GPU tensors in bf16 or fp16

x is [B, N, C] with N = T * H * W in raster order; the result [B, N, out] is fp32, because offsets are.  The GELU is the
tanh form.  torch's depthwise Conv3d has no fast path (pytorch#37406), and it wants channels first.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv3d, linear

from graphopt.codegen import store
from graphopt.codegen.operators import has_triton

# tokens of a plane, channels and warps of one program: two channels a thread, so that the weights stay in registers
TILE = (4, 64, 4)
PROGRAMS = 24  # programs a plane is spread over; each walks along t for several groups of tokens
MAX_OUT = 128


def source_hash() -> str:
    """Twelve hex digits over this file and the kernels."""
    folder = Path(__file__).parent
    text = b"".join((folder / name).read_bytes() for name in ("head.py", "head_kernels.py"))
    return hashlib.sha256(text).hexdigest()[:12]


def reference_forward(x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor, T: int, H: int,
                      W: int) -> Tensor:
    """The definition, in fp32 or the inputs' higher precision."""
    high = torch.float64 if x.dtype == torch.float64 else torch.float32
    u = _convolve(x.to(high), weight.to(high), bias.to(high), T, H, W)
    return linear(_gelu(u), out_weight.to(high), out_bias.to(high))


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, T: int, H: int, W: int) -> Tensor:
    B, _, C = x.shape
    volume = x.transpose(1, 2).reshape(B, C, T, H, W)
    return conv3d(volume, weight, bias, padding=1, groups=C).flatten(2).transpose(1, 2)


def _gelu(u: Tensor) -> Tensor:
    return torch.nn.functional.gelu(u, approximate="tanh")


def reference_backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, T: int, H: int,
                       W: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
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
    return (torch.empty_like(x).copy_(dx), dweight.to(weight.dtype), flat(du).sum(0).to(bias.dtype),
            (flat(dd).T @ flat(_gelu(u))).to(out_weight.dtype), flat(dd).sum(0).to(dy.dtype))


@cache
def _kernel(name: str) -> Any:
    from graphopt.codegen.dsa import head_kernels

    make = head_kernels.convolution_source if name == "head_convolve" else head_kernels.backward_input_source
    return getattr(store.load(name, make()), name)


def _operands(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weights as the kernels read them: taps [27, C] and bias in fp32."""
    return weight.reshape(x.shape[-1], 27).T.float().contiguous(), bias.float()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32: offsets in bf16 would be off by a part of a token."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _launch(H: int, W: int, C: int) -> tuple[int, int, int]:
    """(programs over a plane, programs over channels, groups of tokens per program)."""
    rows, columns, _ = TILE
    groups = -(-H * W // rows)
    steps = -(-groups // PROGRAMS)
    return -(-groups // steps), -(-C // columns), steps


def triton_forward(x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor, T: int, H: int,
                   W: int) -> Tensor:
    """Convolution and GELU in one pass over x; the linear layer is a matrix product with an fp32 result."""
    B, N, C = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    z = torch.empty((B, N, C), dtype=x.dtype, device=x.device)
    rows, columns, steps = _launch(H, W, C)
    _kernel("head_convolve")[(rows, columns, B)](
        x, *_operands(x, weight, bias), z, z, z, T, H, W, C, steps, x.stride(0), x.stride(1), *TILE[:2], False,
        num_warps=TILE[2], num_stages=1)
    y = _product(z.view(B * N, C), out_weight.to(x.dtype).T)
    return y.view(B, N, -1) + out_bias.float()


def triton_backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, T: int, H: int,
                    W: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Two passes: recompute u for du and z, then the transposed convolution together with the weight gradient."""
    B, N, C = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    taps, first_bias = _operands(x, weight, bias)
    rows, columns, steps = _launch(H, W, C)
    low = dy.to(x.dtype)
    dz = low @ out_weight.to(x.dtype)
    z, du, dx = (torch.empty((B, N, C), dtype=x.dtype, device=x.device) for _ in range(3))
    _kernel("head_convolve")[(rows, columns, B)](
        x, taps, first_bias, dz, z, du, T, H, W, C, steps, x.stride(0), x.stride(1), *TILE[:2], True,
        num_warps=TILE[2], num_stages=1)
    dweight = torch.empty((B * rows, 27, C), dtype=torch.float32, device=x.device)
    _kernel("head_backward_input")[(rows, columns, B)](
        x, du, taps, dx, dweight, T, H, W, C, steps, x.stride(0), x.stride(1), *TILE[:2], num_warps=TILE[2],
        num_stages=1)
    dlinear = _product(low.reshape(B * N, -1).T, z.view(B * N, C))
    return (dx, dweight.sum(0).T.reshape(C, 1, 3, 3, 3).to(weight.dtype),
            du.sum((0, 1), dtype=torch.float32).to(bias.dtype), dlinear.to(out_weight.dtype), dy.sum((0, 1)))


def fake_forward(x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor, T: int, H: int,
                 W: int) -> Tensor:
    """[B, N, out] in fp32, or fp64 for fp64 inputs."""
    high = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty((x.shape[0], x.shape[1], out_weight.shape[0]), dtype=high)


def fake_backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, T: int, H: int,
                  W: int) -> tuple[Tensor, ...]:
    """Gradients like their tensors, contiguous but dx."""
    rest = [t.new_empty(t.shape) for t in (weight, bias, out_weight)]
    return (torch.empty_like(x), *rest, dy.new_empty((out_weight.shape[0],)))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, out_weight, out_bias = inputs[:5]
    ctx.save_for_backward(x, weight, bias, out_weight)
    ctx.grid, ctx.out_dtype = inputs[5:], out_bias.dtype


_OPERATORS: dict[str, Any] = {}


def _register(engine: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    name = f"offset_head{'_triton' if engine == 'triton' else ''}_{source_hash()}"
    forward_op = torch.library.custom_op(f"graphopt::{name}", forward, mutates_args=())
    backward_op = torch.library.custom_op(f"graphopt::{name}_backward", backward, mutates_args=())
    forward_op.register_fake(fake_forward)
    backward_op.register_fake(fake_backward)
    handle = getattr(torch.ops.graphopt, f"{name}_backward").default

    def formula(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, bias, out_weight = ctx.saved_tensors
        *grads, last = handle(dy, x, weight, bias, out_weight, *ctx.grid)
        return (*grads, last.to(ctx.out_dtype), None, None, None)

    forward_op.register_autograd(formula, setup_context=_setup_context)
    _OPERATORS[engine] = getattr(torch.ops.graphopt, name).default


_register("reference", reference_forward, reference_backward)
if has_triton():
    _register("triton", triton_forward, triton_backward)


def operator(engine: str) -> Any:
    """The operator overload of an engine, "reference" or "triton"."""
    return _OPERATORS[engine]


def pick(x: Tensor, out: int) -> str:
    """The engine for an input: kernels for bf16 and fp16 on a GPU."""
    return "triton" if x.device.type == "cuda" and x.dtype.itemsize == 2 and out <= MAX_OUT else "reference"


def offset_head(x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor,
                grid: tuple[int, int, int]) -> Tensor:
    """Offsets [B, N, out] in fp32 of tokens x [B, N, C].

    Args:
        x: [B, T*H*W, C], raster order.
        weight, bias: of the depthwise convolution, [C, 1, 3, 3, 3] and [C].
        out_weight, out_bias: of the linear layer, [out, C] and [out].
        grid: (T, H, W).
    """
    return operator(pick(x, out_weight.shape[0]))(x, weight, bias, out_weight, out_bias, *grid)
