"""The engine of a call, and that a reason comes with it."""

from __future__ import annotations

import pytest
import torch

from graphopt.codegen.dsa import engines, spec

BF = torch.bfloat16
GRID, WINDOW = (21, 30, 52), (3, 7, 7)
TABLE = [
    ((128, BF, "cuda", "sm90", GRID, WINDOW, "shift"), "fused"),
    ((64, torch.float16, "cuda", "sm90", GRID, (7, 15, 15), "shift"), "fused"),
    ((128, BF, "cuda", "sm80", GRID, WINDOW, "shift"), "lattice"),
    ((128, BF, "cuda", "gfx942", GRID, WINDOW, "shift"), "lattice"),
    ((128, BF, "cuda", "sm90", GRID, WINDOW, "none"), "window"),
    ((128, BF, "cuda", "sm80", GRID, WINDOW, "whole"), "window"),
    ((128, BF, "cuda", "sm90", GRID, WINDOW, "tap"), "reference"),
    ((128, BF, "cuda", "sm90", GRID, WINDOW, "shift", "border"), "reference"),
    ((128, torch.float32, "cuda", "sm90", GRID, WINDOW, "shift"), "reference"),
    ((80, BF, "cuda", "sm90", GRID, WINDOW, "shift"), "reference"),
    ((128, BF, "cuda", "sm90", GRID, (9, 7, 7), "shift"), "reference"),
    ((128, BF, "cpu", None, GRID, WINDOW, "shift"), "reference"),
    ((128, BF, "cuda", "sm90", (2, 5, 6), WINDOW, "shift"), "dense"),
    ((128, BF, "cuda", "sm90", (2, 5, 8), WINDOW, "shift"), "fused"),
    ((128, BF, "cuda", "sm90", (64, 68, 120), WINDOW, "shift"), "fused"),
    ((128, BF, "cuda", "sm90", (500, 68, 120), (7, 15, 15), "shift"), "reference"),
]


@pytest.mark.parametrize(("call", "engine"), TABLE)
def test_choice(call, engine) -> None:
    choice = engines.choose(*call)
    assert choice.engine == engine
    assert len(choice.reason) > 10


def test_a_tiny_window_is_told_why_nothing_gathers() -> None:
    for window, told in (((1, 3, 3), True), ((3, 3, 3), True), (WINDOW, False)):
        assert ("gather" in engines.choose(128, BF, "cuda", "sm90", GRID, window, "shift").reason) == told


def test_tiles_fit_the_columns_of_a_chunk() -> None:
    for grid in (GRID, (21, 45, 80), (1, 64, 64), (64, 68, 120), (5, 7, 9)):
        for window in (WINDOW, (3, 3, 3), (5, 9, 9), (1, 7, 7)):
            t, h, w = spec.query_tile(window, grid)
            assert t * h * w <= spec.ROWS
            assert all(a <= b for a, b in zip((t, h, w), grid))
    assert spec.query_tile(WINDOW, GRID) == (3, 5, 4)  # measured fastest: 546 exact tiles
    assert spec.query_tile((3, 3, 3), GRID) == (3, 3, 7)


def test_scratch_stays_within_its_budget() -> None:
    s = spec.Spec(WINDOW, 128, BF)
    for tokens, share in ((32760, 1), (75600, 1), (75600, 3), (522240, 1)):
        heads = spec.head_chunk(s, tokens, 12, share)
        assert heads % share == 0
        assert heads == share or heads * tokens * s.words * 4 <= spec.SCRATCH_BYTES
