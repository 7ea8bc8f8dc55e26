"""Predicted milliseconds of attention on an H200, dense and sliding, forward and backward.

Constants are what benchmarks/dsa_fit.py makes of benchmarks/results/h200/dsa.json, which a test holds them to (heads of
128, bf16; within 10 % of its rows from 6,000 tokens on, 15,000 without offsets): dense attention by cuDNN runs at a
fixed rate, the kernels take a time per step of a tile, per tap of a query and per query.  Below, launches from Python
are most of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from graphopt.codegen.dsa import spec
from graphopt.codegen.dsa.reference import effective_window
from graphopt.codegen.dsa.registers import TAPS_T, TAPS_W
from graphopt.codegen.dsa.spec import Triple

DENSE_FLOPS = (599.5e12, 538.0e12)  # forward, backward
# ns per step of a tile, per tap of a token and head, per token and head: forward and backward, with learned offsets
# (True) and with none.  Steps alone fit one window only: 7x13x13 has 8 times the taps and 6 times the backward of 3x7x7
PARTS_NS = {True: ((3.550, 0.0003421, 0.3562), (0.8776, 0.04571, 3.932)),
            False: ((0.8640, 0.002811, 0.4159), (3.291, 0.01006, 1.178))}
# the least that forward and backward take: alone up to 1.2 ms was measured, in a model Python is often ahead
LAUNCH_MS = {True: (0.2, 0.7), False: (0.12, 0.4)}
HEAD_NS = (0.002827, 0.005999)  # per token and channel of the offset head
SPREAD = (1.0, 1.5, 2.0)  # of learned offsets within a tile, as in the benchmark
TARGETS = ("sm90",)


@dataclass(frozen=True)
class Milliseconds:
    """Forward and backward of one attention."""

    forward: float
    backward: float

    @property
    def step(self) -> float:
        """Both."""
        return self.forward + self.backward


def known(dtype: torch.dtype, head_dim: int, target: str) -> bool:
    """Are there kernels and measurements for this?"""
    return dtype in spec.DTYPES and head_dim in spec.HEAD_DIMS and target in TARGETS


def dense(batch: int, heads: int, tokens: int, head_dim: int) -> Milliseconds:
    """Attention of all tokens with all tokens."""
    flops = 4.0 * batch * heads * tokens**2 * head_dim
    return Milliseconds(1e3 * flops / DENSE_FLOPS[0], 2.5e3 * flops / DENSE_FLOPS[1])


def sliding(batch: int, heads: int, grid: Triple, head_dim: int, window: Triple, text: int = 0, channels: int = 0,
            learned: bool = True) -> Milliseconds:
    """A window over the grid, text tokens merged in, and the offset head over `channels` where offsets are learned."""
    cut = effective_window(window, grid)
    video = math.prod(grid)
    scale = spec.Spec(cut, head_dim, torch.bfloat16).padded_dim / 128
    parts = (steps(cut, grid, SPREAD if learned else (0.0, 0.0, 0.0)), video * math.prod(cut), video)
    both = [max(batch * heads * scale * 1e-6 * sum(a * b for a, b in zip(ns, parts)), least)
            for ns, least in zip(PARTS_NS[learned], LAUNCH_MS[learned])]
    if text:  # video queries over text keys, and text queries over everything
        flops = 4.0 * batch * heads * head_dim * text * (2 * video + text)
        both = [both[0] + 1e3 * flops / DENSE_FLOPS[0], both[1] + 2.5e3 * flops / DENSE_FLOPS[1]]
    if learned:
        both = [ms + batch * video * channels * ns * 1e-6 for ms, ns in zip(both, HEAD_NS)]
    return Milliseconds(*both)


def steps(window: Triple, grid: Triple, spread: tuple[float, float, float]) -> float:
    """Steps of 64 queries times 64 keys of the fused forward, over all tiles of the grid."""
    tile = spec.query_tile(window, grid, spread)
    free = [k < n for k, n in zip(window, grid)]
    taps = [k + (s if f else 0) + (b - 1 if f else 0) for k, s, b, f in zip(window, spread, tile, free)]
    chunks, passes = math.ceil(taps[0] / TAPS_T), math.ceil(taps[2] / TAPS_W)
    return spec.tiles(grid, tile) * (passes * (chunks * (taps[1] + 1) + 1) + 1.5)
