"""Which engine serves a call, and why.

    dense       the window is the whole grid: attention over all tokens, whatever the offsets
    window      no offsets, or whole ones without gradient: a window attention without interpolation
    fused       offsets, bf16 or fp16, on Hopper: one kernel, interpolation in registers
    lattice     offsets, bf16 or fp16, elsewhere: scores, softmax and sums on the lattice in separate kernels
    reference   fp32 and fp64, per-tap offsets, the "border" boundary, unusual head dimensions, CPU
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
        target: such as "sm90" or "gfx942"; None on a CPU.
        grid: (T, H, W).
        window: (kt, kh, kw), may be larger than the grid.
        offsets: "none", "whole" (integers), "shift" or "tap".
        boundary: "inside" or "border".
    """
    cut = effective_window(window, grid)
    if offsets == "tap":
        return Choice("reference", "per-tap offsets have the reference engine only")
    if boundary != "inside" and offsets != "none":
        return Choice("reference", f"the boundary {boundary!r} has the reference engine only")
    if device != "cuda":
        return Choice("reference", f"on {device} plain torch computes it")
    if dtype not in spec.DTYPES:
        return Choice("reference", f"{str(dtype).removeprefix('torch.')} has the reference engine only")
    if head_dim not in spec.HEAD_DIMS:
        return Choice("reference", f"head dimension {head_dim} has no kernel; 64, 96 and 128 have")
    if any(k > m for k, m in zip(cut, spec.MAX_WINDOW)):
        return Choice("reference", f"the window {cut} is over {spec.MAX_WINDOW}")
    if target == "sm90":
        return Choice("fused", "on Hopper the interpolation stays in registers")
    return Choice("reference", f"no kernels for {target} yet")


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, grid: Triple, window: Triple,
            scale: float) -> tuple[Tensor, Tensor]:
    """(y, lse) by the kernels."""
    from graphopt.codegen.dsa import kernels

    cut = effective_window(window, grid)
    place = _offsets(q, offsets)
    return kernels.forward(q, k, v, place, grid, cut, scale)


def backward(dy: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, y: Tensor,
             lse: Tensor, grid: Triple, window: Triple, scale: float,
             with_offsets: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, doffsets or None) by the kernels."""
    from graphopt.codegen.dsa import kernels

    cut = effective_window(window, grid)
    place = _offsets(q, offsets)
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    dq, dk, dv, each = kernels.backward(dy, dlse, q, k, v, place, y, lse, grid, cut, scale, with_offsets)
    if each is None or offsets is None:
        return dq, dk, dv, None
    B, heads, N, _ = each.shape
    g = offsets.shape[1]
    summed = each.view(B, g, heads // g, N, 3).sum(2) if g < heads else each
    return dq, dk, dv, torch.empty_like(offsets).copy_(summed)


def _offsets(q: Tensor, offsets: Tensor | None) -> Tensor:
    if offsets is None:
        return q.new_zeros((1, 1, 1, 3), dtype=torch.float32).expand(q.shape[0], 1, q.shape[2], 3)
    offsets = offsets.float()
    return offsets if offsets.stride(-1) == 1 else offsets.contiguous()
