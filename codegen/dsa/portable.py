"""The lattice engine: video attention in separate portable kernels, for GPUs without the fused ones.

forward   score -> soften -> expand -> spread, a chunk of heads at a time
backward  the chain of kernels.py, with the taps from two score lattices (q . k and dy . v)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphopt.codegen.dsa import kernels, spec
from graphopt.codegen.dsa.kernels import Backward, strides
from graphopt.codegen.dsa.spec import ROWS, Triple


class LatticeBackward(Backward):
    """`Backward` with portable taps; the score lattices share the chunk's budget."""

    lattices = 2

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        shape = (self.lattices, self.chunk, self.N, self.spec.lattice)
        self.scores = torch.empty(shape, dtype=torch.float32, device=self.q.device)

    def score(self, first: int, count: int, q: Tensor, x: Tensor, out: Tensor) -> None:
        """Products of q with x on every query's lattice."""
        from graphopt.codegen.dsa import scores

        tile = spec.SPREAD_TILE
        scores.score[(spec.tiles(self.grid, tile), count)](
            q, x, self.offsets, out, *self.grid, *tile, self.heads, self.share, self.group, first, *strides(q),
            *strides(x), *strides(self.offsets), *self.window, *self.dims, ROWS, 32, 16, self.wide, num_warps=4,
            num_stages=2)

    def soften(self, first: int, count: int, backward: bool) -> None:
        """Scores to tap words."""
        from graphopt.codegen.dsa import scores

        scores.soften[(self.cdiv(self.N, 16), count)](
            self.scores[0], self.scores[-1], self.offsets, self.lse, self.delta, self.taps,
            self.delta if self.doffsets is None else self.doffsets, *self.grid, self.heads, self.group, first,
            self.spec.pitch, *strides(self.offsets), self.scale, *self.window, 1 << (self.window[2] - 1).bit_length(),
            16, self.half, backward, backward and self.doffsets is not None, num_warps=4)

    def run_taps(self, first: int, count: int, tile: Triple | None = None, stages: int = 2) -> None:
        """Probabilities and score gradients of all taps, and the gradient of the offsets."""
        kernels.run_reach(self.offsets, self.reach, self.grid, self.tile, self.window, self.heads, first, count)
        self.score(first, count, self.q, self.k, self.scores[0])
        self.score(first, count, self.dy, self.v, self.scores[1])
        self.soften(first, count, True)


class LatticeForward(LatticeBackward):
    """The same buffers, with one score lattice."""

    lattices = 1

    def run_forward(self, y: Tensor) -> None:
        """y and lse."""
        for batch in range(self.q.shape[0]):
            for head in range(0, self.heads, self.chunk):
                first, count = batch * self.heads + head, min(self.chunk, self.heads - head)
                self.score(first, count, self.q, self.k, self.scores[0])
                self.soften(first, count, False)
                self.run_expand(first, count)
                self.run_spread(first, count, x=self.v, out=y, high=False)


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, grid: Triple, window: Triple,
            scale: float) -> tuple[Tensor, Tensor]:
    """(y, lse) as `kernels.forward`."""
    y = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    LatticeForward(y, q, k, v, offsets, y, lse, grid, window, scale, False).run_forward(y)
    return y, lse


def backward(dy: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, y: Tensor, lse: Tensor,
             grid: Triple, window: Triple, scale: float,
             with_offsets: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `kernels.backward`."""
    return LatticeBackward(dy, q, k, v, offsets, y, lse, grid, window, scale, with_offsets).run(dlse)
