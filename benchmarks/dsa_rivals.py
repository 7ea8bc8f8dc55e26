"""What benchmarks/dsa.py compares with, its inputs, and how it times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from graphopt.codegen.dsa import reference

Triple = tuple[int, int, int]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPACING = {"smooth": (7, 15, 15), "rough": (3, 5, 5)}
once = False  # run everything a single time: fills the compilers' caches


def make_offsets(kind: str, grid: Triple, heads: int) -> torch.Tensor | None:
    """[1, heads, N, 3]: none, zero, noise of +-(1, 2, 2) tokens on control points, trilinear between (smooth, rough) or
    on every token (noise), or of a quarter of the grid on every token (wild).
    """
    N = math.prod(grid)
    if kind == "none":
        return None
    if kind == "zero":
        return torch.zeros(1, heads, N, 3, device=DEVICE)
    torch.manual_seed(0)
    if kind in ("noise", "wild"):
        reach = (1.0, 2.0, 2.0) if kind == "noise" else tuple(n / 4 for n in grid)
        return (torch.rand(1, heads, N, 3, device=DEVICE) * 2 - 1) * torch.tensor(reach, device=DEVICE)
    points = [n // s + 2 for n, s in zip(grid, SPACING[kind])]
    control = torch.rand(heads, 3, *points, device=DEVICE) * 2 - 1
    field = F.interpolate(control, size=grid, mode="trilinear", align_corners=True)
    field = field * torch.tensor([1.0, 2.0, 2.0], device=DEVICE)[None, :, None, None, None]
    return field.flatten(2).transpose(1, 2).contiguous()[None]


def inputs(grid: Triple, heads: int, D: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v and dy, [1, heads, N, D]."""
    torch.manual_seed(1)
    shape = (1, heads, math.prod(grid), D)
    q, k, v, dy = (torch.randn(shape, device=DEVICE, dtype=dtype if DEVICE == "cuda" else torch.float32)
                   for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], dy


def median(f: Callable[[], Any], rep: int = 60) -> float:
    """Milliseconds, L2 flushed before each run; five runs of what takes long."""
    if DEVICE == "cpu" or once:
        begin = time.time()
        f()
        return (time.time() - begin) * 1e3
    from triton.testing import do_bench

    f()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    f()
    end.record()
    torch.cuda.synchronize()
    first = begin.elapsed_time(end)
    if first < 50:
        return do_bench(f, warmup=10, rep=rep, return_mode="median")
    times = [first]
    for _ in range(4 if first < 500 else 2):
        begin.record()
        f()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def timed(f: Callable[[], torch.Tensor], leaves: list[torch.Tensor], dy: torch.Tensor) -> dict[str, float]:
    """Forward without a graph, backward of a kept graph, and both."""
    with torch.no_grad():
        forward = median(f)
    return {"forward": forward, "backward": _backward(f(), leaves, dy),
            "both": median(lambda: torch.autograd.grad(f(), leaves, dy))}


def _backward(y: torch.Tensor, leaves: list[torch.Tensor], dy: torch.Tensor) -> float:
    return median(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True))


def dense(leaves: list[torch.Tensor], dy: torch.Tensor) -> dict[str, float]:
    """cuDNN's attention over all tokens."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return timed(lambda: F.scaled_dot_product_attention(*leaves), leaves, dy)


def flex(leaves: list[torch.Tensor], dy: torch.Tensor, grid: Triple, window: Triple) -> dict[str, float]:
    """Compiled FlexAttention over a fixed window that is cut at borders."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    T, H, W = grid
    N = T * H * W

    def inside(_b, _h, i, j):
        ok = (i // (H * W) - j // (H * W)).abs() <= window[0] // 2
        ok = ok & ((i // W % H - j // W % H).abs() <= window[1] // 2)
        return ok & ((i % W - j % W).abs() <= window[2] // 2)

    mask = torch.compile(create_block_mask)(inside, None, None, N, N, device=DEVICE)
    compiled = torch.compile(flex_attention, dynamic=False)
    return timed(lambda: compiled(*leaves, block_mask=mask), leaves, dy)


def sampled(q, k, v, offsets, grid, window):
    """The published way: grid_sample of every tap's key and value, then a softmax."""
    T, H, W = grid
    where = reference.positions(grid, q.device)
    window = reference.effective_window(window, grid)
    base, f, _ = reference.window_starts(offsets[0], where, grid, window)
    at = (base + f)[..., None, :] + reference.positions(window, q.device)
    size = torch.tensor(grid, device=q.device) - 1
    at = (at / size.clamp(min=1) * 2 - 1).flip(-1)  # grid_sample wants (w, h, t) in -1 .. 1
    K = at.shape[-2]

    def sample(x):
        volume = x[0].float().transpose(1, 2).unflatten(2, (T, H, W))
        out = F.grid_sample(volume, at.view(x.shape[1], T * H * W, K, 1, 3), align_corners=True)
        return out[..., 0].permute(0, 2, 3, 1)

    logits = (q[0].float()[:, :, None] * sample(k)).sum(-1) * q.shape[-1] ** -0.5
    return ((logits.softmax(-1)[..., None] * sample(v)).sum(2)[None]).to(q.dtype)
