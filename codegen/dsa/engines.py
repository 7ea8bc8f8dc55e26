"""Which engine serves a call, and why.

    dense       the window is the whole grid: attention over all tokens, whatever the offsets
    window      no offsets, or whole ones without gradient: window attention without interpolation
    fused       offsets, bf16 or fp16, on Hopper: one kernel, interpolation in registers
    lattice     offsets, bf16 or fp16, other GPUs: scores, softmax and sums in separate portable kernels
    reference   fp32 and fp64, per-tap offsets, the "border" boundary, unusual head dimensions, CPU

There is no engine for short sequences: windowed attention has no dense equivalent, so whether a layer should use it at
all for few tokens is decided where a model is converted (docs/dsa.md has the measured crossover).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphopt.codegen.dsa import spec
from graphopt.codegen.dsa.reference import effective_window
from graphopt.codegen.dsa.spec import Triple


@dataclass(frozen=True)
class Choice:
    """An engine and the reason for it, in words."""

    engine: str
    reason: str


def target_of(device: torch.device) -> str | None:
    """The target of a device, None where kernels do not run."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    from graphopt.codegen.readiness import local_target

    return local_target()


def choose(head_dim: int, dtype: torch.dtype, device: str, target: str | None, grid: Triple, window: Triple,
           offsets: str, boundary: str = "inside") -> Choice:
    """The engine for a call.

    Args:
        head_dim: D.
        dtype: of q, k and v.
        device: "cpu", "cuda", ..
        target: such as "sm90" or "gfx942"; None without a GPU.
        grid: (T, H, W).
        window: (kt, kh, kw), may be larger than the grid.
        offsets: "none", "whole" (an integer dtype), "shift" or "tap".
        boundary: "inside" or "border".
    """
    cut = effective_window(window, grid)
    if offsets == "tap":
        return Choice("reference", "per-tap offsets have the reference engine only")
    if boundary != "inside":
        return Choice("reference", f"the boundary {boundary!r} has the reference engine only")
    if cut == tuple(grid):
        return Choice("dense", "the window is the whole grid: every token sees all, whatever the offsets")
    if device != "cuda":
        return Choice("reference", f"on {device} plain torch computes it")
    if dtype not in spec.DTYPES:
        return Choice("reference", f"{str(dtype).removeprefix('torch.')} has the reference engine only")
    if head_dim not in spec.HEAD_DIMS:
        return Choice("reference", f"head dimension {head_dim} has no kernel; 64, 96 and 128 have")
    if any(k > m for k, m in zip(cut, spec.MAX_WINDOW)):
        return Choice("reference", f"the window {cut} is over {spec.MAX_WINDOW}")
    lattice = (cut[0] + 1) * (cut[1] + 1) * (cut[2] + 1)  # torch 2.11 traces no generator into math.prod
    if offsets == "shift" and grid[0] * grid[1] * grid[2] * lattice >= 1 << 31:
        return Choice("reference", "a head's lattice words would pass 2^31")
    if offsets in ("none", "whole"):
        return Choice("window", "no offsets: nothing to interpolate" if offsets == "none" else "whole offsets")
    if target == "sm90":
        few = cut[0] * cut[1] * cut[2] <= 27
        return Choice("fused", "offsets on Hopper: interpolation in registers" + (
            "; there is no engine that gathers each query's few keys (docs/dsa.md: no gather engine)"
            if few else ""))
    return Choice("lattice", f"offsets on {target}: accumulators there do not hold lattice neighbours in registers")


def _kind(offsets: Tensor | None) -> str:
    return "none" if offsets is None else "shift" if offsets.is_floating_point() else "whole"


def engine_of(q: Tensor, offsets: Tensor | None, grid: Triple, window: Triple) -> str:
    """The kernel engine of a call that reached the kernels' operator."""
    return choose(q.shape[-1], q.dtype, q.device.type, target_of(q.device), grid, window, _kind(offsets)).engine


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, grid: Triple, window: Triple,
            scale: float) -> tuple[Tensor, Tensor]:
    """(y, lse) by the kernels."""
    from graphopt.codegen.dsa import kernels, portable
    from graphopt.codegen.dsa import window as whole

    cut = effective_window(window, grid)
    engine = engine_of(q, offsets, grid, window)
    if offsets is None or not offsets.is_floating_point():
        return whole.forward(q, k, v, offsets, grid, cut, scale)
    module = kernels if engine == "fused" else portable
    return module.forward(q, k, v, _contiguous(offsets), grid, cut, scale)


def backward(dy: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, y: Tensor,
             lse: Tensor, grid: Triple, window: Triple, scale: float,
             with_offsets: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, doffsets or None) by the kernels."""
    from graphopt.codegen.dsa import kernels, portable
    from graphopt.codegen.dsa import window as whole

    cut = effective_window(window, grid)
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    if offsets is None or not offsets.is_floating_point():
        return (*whole.backward(dy, dlse, q, k, v, offsets, y, lse, grid, cut, scale), None)
    module = kernels if engine_of(q, offsets, grid, window) == "fused" else portable
    dq, dk, dv, each = module.backward(
        dy, dlse, q, k, v, _contiguous(offsets), y, lse, grid, cut, scale, with_offsets)
    if each is None:
        return dq, dk, dv, None
    B, heads, N, _ = each.shape
    g = offsets.shape[1]
    summed = each.view(B, g, heads // g, N, 3).sum(2) if g < heads else each
    return dq, dk, dv, torch.empty_like(offsets).copy_(summed)


def _contiguous(offsets: Tensor) -> Tensor:
    offsets = offsets.float()
    return offsets if offsets.stride(-1) == 1 else offsets.contiguous()
