"""How far offsets pull windows apart, against a count tile by tile."""

from __future__ import annotations

import math

import dsa_oracle as oracle
import pytest
import torch

from graphopt.codegen.dsa import scatter, spec


def test_equal_offsets_cost_nothing_more() -> None:
    grid, window = (6, 10, 12), (3, 3, 3)
    inner = scatter.measure(torch.zeros(1, 2, math.prod(grid), 3), grid, window)
    assert inner.tokens == (0, 0, 0)
    assert inner.steps == 1
    assert "1.00 x" in str(inner)


def test_against_a_loop_over_tiles() -> None:
    grid, window = (5, 7, 9), (3, 3, 2)
    offsets = torch.randn(1, 1, math.prod(grid), 3) * 2
    starts = oracle.starts(offsets[0, 0].double(), grid, window)
    high = torch.tensor([n - k - 1 for n, k in zip(grid, window)])
    base = torch.minimum(starts.floor(), high).view(*grid, 3)
    still = torch.minimum(oracle.starts(torch.zeros(math.prod(grid), 3), grid, window), high).view(*grid, 3)
    tile = spec.query_tile(window, grid)
    apart, moved, fixed = [], [], []
    for t in range(0, grid[0], tile[0]):
        for h in range(0, grid[1], tile[1]):
            for w in range(0, grid[2], tile[2]):
                spans = []
                for x in (base, still):
                    box = x[t : t + tile[0], h : h + tile[1], w : w + tile[2]].reshape(-1, 3)
                    spans.append(box.amax(0) - box.amin(0))
                apart.append(spans[0] - spans[1])
                for s, out in zip(spans, (moved, fixed)):
                    size = s + torch.tensor(window)
                    out.append(math.ceil(size[2] / 12) * (math.ceil(size[0] / 3) * (size[1] + 1) + 1))
    got = scatter.measure(offsets, grid, window)
    assert got.tile == tile
    assert got.tokens == pytest.approx(torch.stack(apart).double().mean(0).tolist())
    assert got.steps == pytest.approx(float(sum(moved) / sum(fixed)))
