"""Launches of the window engine: attention to a window without offsets, or moved by whole tokens."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from graphopt.codegen.dsa import kernels, spec
from graphopt.codegen.dsa.kernels import LOG2E, strides
from graphopt.codegen.dsa.spec import ROWS, Spec, Triple

# columns of a step, and how many of them lie along w
COLUMNS, ALONG = 64, 16
KEY_COLUMNS = 32


def stages(amd: bool) -> int:
    """Pipeline depth of the forward: three stages need 72 KB, AMD's GPUs have 64."""
    return 2 if amd else 3


@cache
def tile_of(grid: Triple, window: Triple, spread: int, rows: int = ROWS, columns: int = COLUMNS) -> Triple:
    """The box of at most `rows` tokens with the fewest steps, when its other side is a box of k - 1 + spread more."""
    best, cost = (1, 1, 1), float("inf")
    for t in range(1, min(grid[0], 16) + 1):
        for h in range(1, min(grid[1], 32) + 1):
            for w in range(1, min(grid[2], rows // (t * h)) + 1):
                box = [min(n, b + k - 1 + spread) for n, b, k in zip(grid, (t, h, w), window)]
                steps = -(-box[2] // ALONG) * -(-box[0] * box[1] * ALONG // columns) + 1.5
                total = spec.tiles(grid, (t, h, w)) * steps
                if total < cost - 1e-9:
                    best, cost = (t, h, w), total
    return best


def _offsets(q: Tensor, offsets: Tensor | None) -> Tensor:
    """Whole offsets as int32, or something to point at."""
    if offsets is None:
        return q.new_zeros((1, 1, 1, 3), dtype=torch.int32).expand(q.shape[0], 1, q.shape[2], 3)
    return offsets.clamp(-(1 << 30), 1 << 30).to(torch.int32).contiguous()


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, grid: Triple, window: Triple, scale: float,
            tile: Triple | None = None, columns: int = COLUMNS, along: int = ALONG, warps: int = 4,
            pipeline: int | None = None) -> tuple[Tensor, Tensor]:
    """(y, lse); offsets None or of an integer dtype, [B, g, N, 3]."""
    from graphopt.codegen.dsa import window_kernels

    B, heads, N, D = q.shape
    s = Spec(window, D, q.dtype)
    place = _offsets(q, offsets)
    tile = tile or tile_of(grid, window, 0 if offsets is None else 2)
    y = torch.empty_like(q)
    lse = torch.empty((B, heads, N), dtype=torch.float32, device=q.device)
    window_kernels.window_forward[(spec.tiles(grid, tile), B * heads)](
        q, k, v, place, y, lse, *grid, *tile, heads, heads // k.shape[1], heads // place.shape[1], *strides(q),
        *strides(k), *strides(v), *strides(place), *strides(y), scale * LOG2E, *window, D, s.padded_dim,
        offsets is not None, ROWS, columns, along, num_warps=warps,
        num_stages=pipeline or stages(torch.version.hip is not None))
    return y, lse


def backward(dy: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, y: Tensor,
             lse: Tensor, grid: Triple, window: Triple, scale: float, tile: Triple | None = None,
             key_tile: Triple | None = None, columns: int = 32, key_columns: int = KEY_COLUMNS,
             stages: int = 2, key_stages: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)."""
    import triton

    from graphopt.codegen.dsa import lattice, window_kernels

    B, heads, N, D = q.shape
    DP = Spec(window, D, q.dtype).padded_dim
    place, moved = _offsets(q, offsets), offsets is not None
    group, share = heads // place.shape[1], heads // k.shape[1]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = torch.empty_like(lse)
    lattice.row_sums[(triton.cdiv(N, 16), B * heads)](
        dy, y, delta if dlse is None else dlse, delta, N, heads, 0, *strides(dy), *strides(y), D, DP, 16,
        dlse is not None, num_warps=4)
    tile = tile or tile_of(grid, window, 2 if moved else 0)
    window_kernels.window_backward_query[(spec.tiles(grid, tile), B * heads)](
        q, k, v, dy, place, lse, delta, dq, *grid, *tile, heads, share, group, *strides(q), *strides(k), *strides(v),
        *strides(dy), *strides(place), *strides(dq), scale, *window, D, DP, moved, ROWS, columns, ALONG, num_warps=4,
        num_stages=stages)
    key_tile = key_tile or tile_of(grid, window, 2 if moved else 0, columns=key_columns)
    keys = spec.tiles(grid, key_tile)
    boxes = place
    if moved:  # the lattice kernels' boxes are at most one plane larger
        reached = place.float()
        reach = torch.empty((B * heads, spec.tiles(grid, tile), 8), dtype=torch.int32, device=q.device)
        boxes = torch.empty((B * heads, keys, 8), dtype=torch.int32, device=q.device)
        kernels.run_reach(reached, reach, grid, tile, window, heads, 0, B * heads)
        lattice.query_boxes[(keys, B * heads)](
            reached, reach, reach, boxes, *grid, *tile, *key_tile, spec.tiles(grid, tile), heads, group, 0,
            *strides(reached), *window, 512, True, num_warps=4)
    window_kernels.window_backward_key[(keys, B * heads // share)](
        q, k, v, dy, place, boxes, lse, delta, dk, dv, *grid, *key_tile, heads, group, *strides(q), *strides(k),
        *strides(v), *strides(dy), *strides(place), *strides(dk), *strides(dv), scale, share, *window, D, DP, moved,
        ROWS, key_columns, ALONG, num_warps=4, num_stages=key_stages)
    return dq, dk, dv
