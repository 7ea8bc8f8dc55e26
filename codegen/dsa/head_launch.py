"""Launches of the offset head's kernels: fmas for the convolutions (head_emit.py), tl.dot for the linear layer
(head_kernels.py), and for its backward, the slope, one of two that a GPU gets:

    mma     tensor cores without tl.dot (head_products.py): NVIDIA from sm80, channels a multiple of 16
    dot     tl.dot (head_kernels.py): everything else, and where Triton does not hold one element of a value per thread
"""

from __future__ import annotations

import logging
import math
import os
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from graphopt.codegen import store
from graphopt.codegen.dsa import head_emit, head_products

log = logging.getLogger(__name__)
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Walk:
    """How a convolution kernel is cut: a warp per strip, walked along t; a block of strips per program."""

    strip: head_emit.Strip  # tokens of a thread, (h, w)
    block: tuple[int, int]  # strips of a program, (h, w)
    programs: int  # a plane is spread over at most this many
    words: int = 32  # pairs of channels: one a thread

    def launch(self, H: int, W: int, C: int) -> tuple[int, int, int]:
        """(programs over a plane, programs over channels, tiles per program)."""
        tiles = -(-H // (self.strip[0] * self.block[0])) * -(-W // (self.strip[1] * self.block[1]))
        steps = -(-tiles // self.programs)
        return -(-tiles // steps), -(-C // (2 * self.words)), steps


@dataclass(frozen=True)
class Product:
    """Tile of a matrix product: rows, channels, warps, stages, and programs over the rows where each takes several."""

    rows: int
    channels: int
    warps: int
    stages: int
    programs: int = 1

    def launch(self, rows: int) -> tuple[int, int]:
        """(programs over the rows, steps of each)."""
        blocks = -(-rows // self.rows)
        steps = -(-blocks // self.programs)
        return -(-blocks // steps), steps


FORWARD = Walk((2, 4), (1, 4), 1 << 20)
BACKWARD = Walk((1, 4), (2, 2), 96)
LINEAR = Product(64, 64, 4, 3)
SLOPE = Product(64, 64, 4, 3, 44)
MMA_SLOPE = Product(16, head_products.CHANNELS * head_products.WARPS, head_products.WARPS, 1, 33)
NARROW = Product(64, 64, 4, 1, 264)
WARPS = head_products.WARPS
AHEAD = 2  # steps of MMA_SLOPE that are called into L2 before they are loaded: 0.167 ms on an H200, 0.198 without
CHANNELS_AT_ONCE = 16


def uses_ptx() -> bool:
    """May the kernels use NVIDIA's assembly?  Not on AMD, and not under the interpreter."""
    return torch.version.hip is None and os.environ.get("TRITON_INTERPRET") != "1"


def engine_of(x: Tensor, out: int) -> str:
    """ "mma" or "dot", for a tensor on its device and a number of outputs."""
    if x.shape[-1] % CHANNELS_AT_ONCE:
        return "dot"
    if x.device.type != "cuda":
        return "mma"  # the interpreter
    if torch.version.hip is not None or torch.cuda.get_device_capability(x.device) < (8, 0):
        return "dot"
    return "mma" if _sound(x.shape[-1], out, x.dtype, x.device) else "dot"


def one_per_thread(ttgir: str) -> bool:
    """Does every matrix step of a compiled kernel work on tensors whose element i is in thread i?"""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", ttgir, re.M))
    used = set(re.findall(r"(?:mma|movmatrix|shfl)\.sync.*?tensor<(\d+)x\w+, (#\w+)>", ttgir))
    plain = r"sizePerThread = \[1\], threadsPerWarp = \[32\], warpsPerCTA = \[{}\], order = \[0\]"
    return bool(used) and all(re.search(plain.format(int(n) // 32), layouts.get(name, "")) for n, name in used)


@cache
def _sound(C: int, out: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Compile the kernel of "mma" for a GPU and look at its layouts: nothing in Triton promises them."""
    with torch.cuda.device(device):
        x = torch.empty((1, 1, C), dtype=dtype, device=device)
        sums = torch.empty((1,), dtype=torch.float32, device=device)
        kernel, _, arguments, options = _slope_launch(x, x, x, x, sums, 1, out)
        text = kernel.warmup(*arguments, grid=(1,), **options).asm.get("ttgir")
    if text is not None and one_per_thread(text):
        return True
    log.warning("graphopt: the offset head runs without its tensor core kernel: %s", (
        f"Triton's cache holds {kernel.__name__} without the text that tells its layout; empty the cache"
        if text is None else f"{kernel.__name__} would spread values over threads"))
    return False


@cache
def _walks(name: str, strip: head_emit.Strip) -> Any:
    return getattr(store.load(name, head_emit.module(name, strip)), name)


@cache
def _products(name: str, out: int) -> Any:
    return getattr(store.load(name, head_products.module(name, out)), name)


Launch = tuple[Any, tuple[int, ...], list[Any], dict[str, Any]]  # kernel, programs, arguments, options


def _slope_launch(u: Tensor, low: Tensor, matrix: Tensor, du: Tensor, parts: Tensor, rows: int, out: int) -> Launch:
    programs, steps = MMA_SLOPE.launch(rows)
    C = u.shape[-1]
    arguments = [u, low, matrix, du, parts, rows, steps, C, WARPS, u.dtype == torch.float16, uses_ptx(),
                 AHEAD]
    return _products("head_slope", out), (programs, -(-C // MMA_SLOPE.channels)), arguments, {"num_warps": WARPS}


def taps(weight: Tensor) -> Tensor:
    """Weights as the walks read them, [27, 2, C / 2] in fp32: the even channels, then the odd ones."""
    C = weight.shape[0]
    new = torch.empty((27, 2, C // 2), dtype=torch.float32, device=weight.device)
    return new.copy_(weight.reshape(C // 2, 2, 27).permute(2, 1, 0))


def walk(kernel: str, cut: Walk, tensors: tuple[Tensor, ...], x: Tensor, grid: Grid) -> None:
    """Launch a convolution by fmas; it reads x in words of two channels."""
    B, _, C = x.shape
    rows, columns, steps = cut.launch(grid[1], grid[2], C)
    _walks(kernel, cut.strip)[(rows, columns, B)](
        *tensors, *grid, steps, x.stride(0) // 2, x.stride(1) // 2, C, *cut.block, cut.words,
        x.dtype == torch.float16, uses_ptx(), num_warps=math.prod(cut.block), num_stages=1)


def convolve(x: Tensor, weight: Tensor, bias: Tensor, u: Tensor, grid: Grid) -> None:
    """u = the depthwise convolution of x."""
    even_odd = bias.float().view(-1, 2).T.contiguous()
    walk("head_convolve", FORWARD, (x, taps(weight), even_odd, u), x, grid)


def transposed(x: Tensor, du: Tensor, weight: Tensor, dx: Tensor, grid: Grid) -> Tensor:
    """dx = the transposed convolution of du; the weight gradient in parts [n, C, 27]."""
    B, _, C = x.shape
    parts = torch.empty((B * BACKWARD.launch(*grid[1:], C)[0], C, 27), dtype=torch.float32, device=x.device)
    walk("head_backward_input", BACKWARD, (x, du, taps(weight), dx, parts), x, grid)
    return parts


def padded(out: int) -> int:
    """Columns of a product's tile for `out` of them."""
    return max(16, 1 << (out - 1).bit_length())


def linear(u: Tensor, matrix: Tensor, bias: Tensor, y: Tensor) -> None:
    """y [.., out] = gelu(u) @ matrix^T + bias; matrix [out, C] has u's dtype."""
    C, out = u.shape[-1], matrix.shape[0]
    rows = u.numel() // C
    from graphopt.codegen.dsa import head_kernels

    head_kernels.head_linear[(-(-rows // LINEAR.rows),)](
        u, matrix, bias, y, rows, C, out, padded(out), LINEAR.rows, LINEAR.channels, u.dtype == torch.float16,
        uses_ptx(), num_warps=LINEAR.warps, num_stages=LINEAR.stages)


def narrow(dy: Tensor, dtype: torch.dtype, engine: str) -> tuple[Tensor, Tensor]:
    """dy [.., out] rounded and padded, [rows, pitch]; and its column sums in parts [n, out]."""
    from graphopt.codegen.dsa import head_kernels

    out = dy.shape[-1]
    rows = dy.numel() // out
    programs, steps = NARROW.launch(rows)
    pitch = 16 * head_products.steps_of(out) if engine == "mma" else padded(out)
    low = torch.empty((rows, pitch), dtype=dtype, device=dy.device)
    parts = torch.empty((programs, out), dtype=torch.float32, device=dy.device)
    head_kernels.head_narrow[(programs,)](
        dy.contiguous(), low, parts, rows, steps, out, pitch, padded(out), NARROW.rows, num_warps=NARROW.warps)
    return low, parts


def slope(u: Tensor, low: Tensor, matrix: Tensor, du: Tensor, engine: str) -> Tensor:
    """du = (dy @ matrix) gelu'(u); in parts [n, out + 1, C] the matrix's gradient and below it the sum of du."""
    from graphopt.codegen.dsa import head_kernels

    out, C = matrix.shape
    rows = u.numel() // C
    programs, steps = (MMA_SLOPE if engine == "mma" else SLOPE).launch(rows)
    parts = torch.empty((programs, out + 1, C), dtype=torch.float32, device=u.device)
    if engine == "mma":
        function, where, arguments, options = _slope_launch(u, low, matrix, du, parts, rows, out)
        function[where](*arguments, **options)
    else:
        head_kernels.head_slope[(programs, -(-C // SLOPE.channels))](
            u, low, matrix, du, parts, rows, steps, C, out, padded(out), SLOPE.rows, SLOPE.channels, SLOPE.stages,
            u.dtype == torch.float16, uses_ptx(), num_warps=SLOPE.warps)
    return parts


def add(of_taps: Tensor, of_slope: Tensor, of_rows: Tensor, weight: Tensor, bias: Tensor,
        matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of weight, bias, matrix and of the linear layer's bias (fp32) from their parts."""
    from graphopt.codegen.dsa import head_kernels

    out, C = matrix.shape
    new = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (weight, bias, matrix)]
    last = torch.empty((out,), dtype=torch.float32, device=weight.device)
    BN = 64
    programs = -(-C * 27 // BN) + -(-out * C // BN) + -(-C // BN) + -(-out // BN)
    head_kernels.head_add[(programs,)](
        of_taps, of_slope, of_rows, *new, last, of_taps.shape[0], of_slope.shape[0], of_rows.shape[0], C, out, 16, BN,
        num_warps=4)
    return (*new, last)
