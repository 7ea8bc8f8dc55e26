"""What decides the source of the fused kernels, and the closed-form choice of tiles.

A kernel serves every grid: T, H, W and the tile of queries are run-time values.  A tile is any box of up to 64 queries,
not a power of two per axis: (3, 5, 4) fits the 3 x 12 taps of a chunk where (2, 8, 4) wastes a sixth of the columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from graphopt.codegen.dsa.registers import TAPS_T, TAPS_W

ROWS = 64  # queries of a fused program: one warpgroup
HEAD_DIMS = (64, 96, 128)
MAX_WINDOW = (7, 15, 15)
DTYPES = (torch.bfloat16, torch.float16)
# words of taps and lattice points a backward may hold at once, in bytes
SCRATCH_BYTES = 480 << 20
# tiles of the key-centric kernel and of the lattice kernels, in keys and queries
KEY_TILE = (2, 5, 6)
SPREAD_TILE = (2, 5, 6)

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Spec:
    """One pair of fused kernels: a window (already cut to the grid), a head dimension and a dtype."""

    window: Triple
    head_dim: int
    dtype: torch.dtype

    @property
    def padded_dim(self) -> int:
        """The head dimension as tl.dot wants it."""
        return max(16, 1 << (self.head_dim - 1).bit_length())

    @property
    def lattice(self) -> int:
        """Lattice points of a query."""
        return math.prod(k + 1 for k in self.window)

    @property
    def pitch(self) -> int:
        """Words between two rows of taps: whole 32-byte sectors where that costs little."""
        return 8 if self.window[2] in (5, 6, 7) else self.window[2]

    @property
    def words(self) -> int:
        """32-bit words of scratch per query: its taps and its lattice points."""
        return self.window[0] * self.window[1] * self.pitch + self.lattice


@cache
def query_tile(window: Triple, grid: Triple, spread: tuple[float, float, float] = (1, 1.5, 2)) -> Triple:
    """The box of at most 64 queries with the fewest steps over the whole grid.

    `spread` is how many tokens window starts differ within a tile, per axis, beyond their positions.
    """
    best, cost = (1, 1, 1), math.inf
    taps = [k + (s if k < n else 0) for k, n, s in zip(window, grid, spread)]
    for t in range(1, min(grid[0], 12) + 1):
        for h in range(1, min(grid[1], 32) + 1):
            for w in range(1, min(grid[2], ROWS // (t * h)) + 1):
                tiles = -(-grid[0] // t) * -(-grid[1] // h) * -(-grid[2] // w)
                if t * h * w > ROWS:
                    break
                moved = [a if k < n else 0 for a, k, n in zip((t - 1, h - 1, w - 1), window, grid)]
                chunks = math.ceil((taps[0] + moved[0]) / TAPS_T)
                passes = math.ceil((taps[2] + moved[2]) / TAPS_W)
                steps = passes * (chunks * (taps[1] + moved[1] + 1) + 1) + 1.5  # 1.5: start and end of a program
                if tiles * steps < cost - 1e-9:
                    best, cost = (t, h, w), tiles * steps
    return best


def tiles(grid: Triple, tile: Triple) -> int:
    """How many tiles cover the grid."""
    return math.prod(-(-n // b) for n, b in zip(grid, tile))


def head_chunk(spec: Spec, tokens: int, heads: int, share: int, lattices: int = 0) -> int:
    """Query heads a backward works on at once, a multiple of `share`: its scratch stays within SCRATCH_BYTES."""
    groups = heads // share
    fit = max(1, SCRATCH_BYTES // (4 * (spec.words + lattices * spec.lattice) * tokens * share))
    loops = -(-groups // min(fit, groups))
    return -(-groups // loops) * share
