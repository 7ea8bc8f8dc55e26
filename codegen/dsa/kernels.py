"""Launches of the video attention kernels: the fused forward, and the backward as a chain of kernels per head chunk."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from graphopt.codegen import store
from graphopt.codegen.dsa import emit, spec
from graphopt.codegen.dsa.spec import ROWS, Spec, Triple

LOG2E = math.log2(math.e)
# axes up to here fit the packed coordinates of the lattice kernels
PACKED_AXIS = 384


@cache
def fused(window: Triple, padded: bool, with_offsets: bool) -> Any:
    """The generated module of a window: `forward`, `taps`, `expand`."""
    source = emit.module(window, padded, with_offsets)
    return store.load("video_attention_{}x{}x{}".format(*window), source)


def strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and token; the last dimension must be contiguous."""
    return x.stride(0), x.stride(1), x.stride(2)


def walkable(k: Tensor, v: Tensor, grid: Triple) -> tuple[Tensor, Tensor]:
    """k and v, copied unless their token strides agree and 32-bit offsets reach over a chunk of planes.

    The fused kernels walk both with one set of offsets that each thread holds.
    """
    reach = (3 * grid[1] * grid[2] + 16) * k.stride(2)
    return (k, v) if v.stride(2) == k.stride(2) and reach < 1 << 31 else (k.contiguous(), v.contiguous())


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, grid: Triple, window: Triple, scale: float,
            tile: Triple | None = None, stages: int = 3, fixed: bool | None = None) -> tuple[Tensor, Tensor]:
    """(y, lse) of the fused kernel.

    q, k, v in bf16 or fp16 with a contiguous last dimension; offsets [B, g, N, 3] fp32; window already cut to the grid.
    """
    B, heads, N, D = q.shape
    k, v = walkable(k, v, grid)
    s = Spec(window, D, q.dtype)
    tile = tile or spec.query_tile(window, grid)
    y = torch.empty_like(q)
    lse = torch.empty((B, heads, N), dtype=torch.float32, device=q.device)
    reach = torch.empty((B * heads, spec.tiles(grid, tile), 8), dtype=torch.int32, device=q.device)
    run_reach(offsets, reach, grid, tile, window, heads, 0, B * heads)
    module = fused(window, s.padded_dim != D, True)
    # weights up to 2^64 relative to the reference overflow fp16
    fixed = q.dtype != torch.float16 if fixed is None else fixed
    (module.forward_fixed if fixed else module.forward)[(spec.tiles(grid, tile), B * heads)](
        q, k, v, offsets, reach, y, lse, *grid, *tile, heads, heads // k.shape[1], heads // offsets.shape[1], 0,
        *strides(q), *strides(k), *strides(v)[:2], *strides(offsets), *strides(y), scale * LOG2E,
        *window, D, s.padded_dim, q.dtype == torch.float16, num_warps=4, num_stages=stages)
    return y, lse


def run_reach(offsets: Tensor, reach: Tensor, grid: Triple, tile: Triple, window: Triple, heads: int, first: int,
              count: int) -> None:
    """What each tile of queries reads, [count, tiles, 8] int32."""
    from graphopt.codegen.dsa import lattice

    lattice.tile_reach[(spec.tiles(grid, tile), count)](
        offsets, reach, *grid, *tile, heads, heads // offsets.shape[1], first, *strides(offsets), *window, ROWS,
        num_warps=1)


class Backward:
    """The steps of one backward over a chunk of query heads (of one batch element), and the buffers between them."""

    lattices = 0  # fp32 score lattices beside the words

    def __init__(self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, y: Tensor, lse: Tensor,
                 grid: Triple, window: Triple, scale: float, with_offsets: bool = True) -> None:
        import triton

        from graphopt.codegen.dsa import lattice

        self.cdiv, self.lattice = triton.cdiv, lattice
        B, self.heads, self.N, D = q.shape
        self.dy, self.q = dy, q
        self.k, self.v = walkable(k, v, grid)
        self.offsets, self.y, self.lse = offsets, y, lse
        self.grid, self.window, self.scale = grid, window, scale
        self.spec = Spec(window, D, q.dtype)
        self.half, self.dims = q.dtype == torch.float16, (D, self.spec.padded_dim)
        self.share, self.group = self.heads // k.shape[1], self.heads // offsets.shape[1]
        self.module = fused(window, self.spec.padded_dim != D, with_offsets)
        self.wide = max(grid) > PACKED_AXIS
        new = lambda *shape, dtype=torch.int32: torch.empty(shape, dtype=dtype, device=q.device)  # noqa: E731
        self.dq, self.dk, self.dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self.doffsets = new(B, self.heads, self.N, 3, dtype=torch.float32) if with_offsets else None
        self.delta = torch.empty_like(lse)
        self.chunk = min(self.heads, spec.head_chunk(self.spec, self.N, self.heads, self.share, self.lattices))
        self.taps = new(self.chunk, self.N, math.prod(window[:2]) * self.spec.pitch)
        self.words = new(self.chunk, self.N, self.spec.lattice)
        self.bases = new(self.chunk, self.N)
        self.tile = spec.query_tile(window, grid)
        self.key_tile = spec.KEY_TILE
        self.reach = new(self.chunk, spec.tiles(grid, self.tile), 8)
        self.boxes = new(self.chunk, spec.tiles(grid, self.key_tile), 8)

    def row_sums(self, dlse: Tensor | None) -> None:
        """delta = sum(dy * y) - dlse for every head."""
        B = self.q.shape[0]
        self.lattice.row_sums[(self.cdiv(self.N, 16), B * self.heads)](
            self.dy, self.y, self.delta if dlse is None else dlse, self.delta, self.N, self.heads, 0,
            *strides(self.dy), *strides(self.y), *self.dims, 16, dlse is not None, num_warps=4)

    def run_taps(self, first: int, count: int, tile: Triple | None = None, stages: int = 2) -> None:
        """Probabilities and score gradients of all taps, and the gradient of the offsets."""
        tile = tile or self.tile
        run_reach(self.offsets, self.reach, self.grid, tile, self.window, self.heads, first, count)
        self.module.taps[(spec.tiles(self.grid, tile), count)](
            self.q, self.k, self.v, self.dy, self.offsets, self.reach, self.lse, self.delta, self.taps,
            self.delta if self.doffsets is None else self.doffsets, *self.grid, *tile, self.heads, self.share,
            self.group, first, *strides(self.q), *strides(self.k), *strides(self.v)[:2], *strides(self.offsets),
            *strides(self.dy), self.scale * LOG2E, self.scale, self.spec.pitch, *self.window, *self.dims, self.half,
            num_warps=4, num_stages=stages)

    def run_expand(self, first: int, count: int, queries: int = 8, warps: int = 2) -> None:
        """Taps to lattice words."""
        self.module.expand[(self.cdiv(self.N, queries), count)](
            self.taps, self.offsets, self.words, self.bases, *self.grid, self.heads, self.group, first,
            self.spec.pitch, *strides(self.offsets), queries, self.half, num_warps=warps)

    def run_spread(self, first: int, count: int, tile: Triple = spec.SPREAD_TILE, rows: int = ROWS, columns: int = 32,
                   along: int = 16, warps: int = 4, stages: int = 3, x: Tensor | None = None,
                   out: Tensor | None = None, high: bool = True) -> None:
        """dq from k, or another sum over lattice points."""
        x, out = self.k if x is None else x, self.dq if out is None else out
        self.lattice.spread[(spec.tiles(self.grid, tile), count)](
            self.words, x, self.offsets, out, *self.grid, *tile, self.heads, self.share, self.group, first,
            *strides(x), *strides(self.offsets), *strides(out), 1.0, *self.window, *self.dims, rows, columns,
            along, self.half, high, self.wide, num_warps=warps, num_stages=stages)

    def run_boxes(self, first: int, count: int) -> None:
        """For each tile of keys the box of queries that touch it."""
        reach, keys = spec.tiles(self.grid, self.tile), spec.tiles(self.grid, self.key_tile)
        self.lattice.query_boxes[(keys, count)](
            self.offsets, self.bases, self.reach, self.boxes, *self.grid, *self.tile, *self.key_tile, reach, self.heads,
            self.group, first, *strides(self.offsets), *self.window, 512, self.wide, num_warps=4)

    def run_gather(self, first: int, count: int, columns: int = 32, along: int = 16, stages: int = 3,
                   warps: int = 4, rows: int = ROWS) -> None:
        """dk and dv."""
        self.lattice.gather[(spec.tiles(self.grid, self.key_tile), count // self.share)](
            self.words, self.bases, self.q, self.dy, self.offsets, self.boxes, self.dk, self.dv, *self.grid,
            *self.key_tile, self.heads, self.group, first, *strides(self.q), *strides(self.dy),
            *strides(self.offsets), *strides(self.dk), *strides(self.dv), self.share, *self.window, *self.dims, rows,
            columns, along, self.half, self.wide, num_warps=warps, num_stages=stages)

    def run(self, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Everything, one chunk of heads after the other."""
        self.row_sums(dlse)
        for batch in range(self.q.shape[0]):
            for head in range(0, self.heads, self.chunk):
                first, count = batch * self.heads + head, min(self.chunk, self.heads - head)
                self.run_taps(first, count)
                self.run_expand(first, count)
                self.run_spread(first, count)
                self.run_boxes(first, count)
                self.run_gather(first, count)
        return self.dq, self.dk, self.dv, self.doffsets


def backward(dy: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, y: Tensor, lse: Tensor,
             grid: Triple, window: Triple, scale: float,
             with_offsets: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, doffsets [B, heads, N, 3] fp32, not yet summed over groups)."""
    return Backward(dy, q, k, v, offsets, y, lse, grid, window, scale, with_offsets).run(dlse)
