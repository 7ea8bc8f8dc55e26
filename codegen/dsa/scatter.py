"""How far offsets pull the windows of neighbouring queries apart, and what that costs the fused kernels.

A tile of queries reads the box that all its windows span, so its steps grow with the spread of the offsets inside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from graphopt.codegen.dsa import reference, spec
from graphopt.codegen.dsa.spec import Triple


@dataclass(frozen=True)
class Scatter:
    """Measured on given offsets: mean (t, h, w) tokens by which starts differ within a tile, and steps of a tile."""

    tokens: tuple[float, float, float]
    tile: Triple
    steps: float  # over the steps of equal offsets

    def __str__(self) -> str:
        apart = ", ".join(f"{x:.1f}" for x in self.tokens)
        return (f"windows of a tile of {' x '.join(map(str, self.tile))} queries are {apart} tokens apart in t, h, w "
                f"beyond their positions: {self.steps:.2f} x the steps of equal offsets")


def _tiled(base: Tensor, grid: Triple, tile: Triple, fill: int) -> Tensor:
    """[heads, T, H, W, 3] -> [heads, tiles, queries, 3], filled up at the end of each axis."""
    pad = [0, 0]
    for n, b in zip(reversed(grid), reversed(tile)):
        pad += [0, -n % b]
    x = torch.nn.functional.pad(base.unflatten(1, grid), pad, value=fill)
    counts = [-(-n // b) for n, b in zip(grid, tile)]
    x = x.view(-1, counts[0], tile[0], counts[1], tile[1], counts[2], tile[2], 3)
    return x.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(x.shape[0], math.prod(counts), math.prod(tile), 3)


def steps(rows: Tensor, window: Triple) -> Tensor:
    """Steps of the fused forward for boxes whose first lattice points span `rows` [.., 3] tokens (0: all equal)."""
    size = rows + torch.tensor(window, device=rows.device)
    chunks = (size[..., 0] / spec.TAPS_T).ceil()
    return (size[..., 2] / spec.TAPS_W).ceil() * (chunks * (size[..., 1] + 1) + 1)


def measure(offsets: Tensor, grid: Triple, window: Triple) -> Scatter:
    """Of shift offsets [B, groups, N, 3] with the tile that the kernels would use."""
    cut = reference.effective_window(window, grid)
    tile = spec.query_tile(cut, grid)
    where = reference.positions(grid, offsets.device)
    span = lambda at: _span(at, grid, tile)  # noqa: E731
    moved = span(reference.window_starts(offsets.detach().float().flatten(0, 1), where, grid, cut)[0])
    still = span(reference.window_starts(torch.zeros_like(where, dtype=torch.float32)[None], where, grid, cut)[0])
    apart = (moved.double() - still).mean((0, 1)).tolist()
    ratio = steps(moved, cut).double().mean() / steps(still, cut).double().mean()
    return Scatter((apart[0], apart[1], apart[2]), tile, ratio.item())


def _span(base: Tensor, grid: Triple, tile: Triple) -> Tensor:
    """Largest minus smallest start of each tile, [heads, tiles, 3]."""
    far = max(grid)
    return _tiled(base, grid, tile, -1).amax(2) - _tiled(base, grid, tile, far).amin(2)
