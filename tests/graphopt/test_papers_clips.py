"""benchmarks/papers_clips.py: the search for the largest clip, against memory that is a line and memory that is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from papers_clips import search, wait_for


def tried(peak, capacity: float, first: int = 3, seconds: float = 1e9, step_s: float = 0.0) -> list[tuple[int, bool]]:
    """Every T tried, and whether it fitted; at the capacity itself memory is full."""
    run = lambda T: {"fits": peak(T) <= capacity, "peak_gib": min(peak(T), capacity), "step_s": step_s}
    return [(T, row["fits"]) for T, row in search(run, first, capacity - 1.5, seconds)]


@pytest.mark.parametrize(("peak", "limit"), [
    (lambda T: 20 + 5 * T, 24), (lambda T: 20 + 5 * T + 0.3 * max(0, T - 9), 23), (lambda T: 20 + 5.4 * T - 0.02 * T * T, 24),
    (lambda T: 50 + 30 * T, 3), (lambda T: 137 + T, 3)])
def test_it_ends_between_neighbours(peak, limit: int) -> None:
    found = dict(tried(peak, 140.0))
    assert found[limit] is True
    assert found[limit + 1] is False
    assert max(T for T, fits in found.items() if fits) == limit
    assert len(found) <= 7, found


def test_a_first_clip_too_large_ends_it() -> None:
    assert dict(tried(lambda T: 200.0, 140.0)) == {3: False, 5: False}


def test_no_step_is_begun_that_would_end_too_late() -> None:
    assert tried(lambda T: 20 + 5 * T, 140.0, seconds=60, step_s=10.0) == [(3, True), (5, True)]


def test_nothing_is_measured_while_others_may_hold_the_memory(tmp_path) -> None:
    there, missing = tmp_path / "there", tmp_path / "missing"
    there.touch()
    wait_for([there], 0)
    with pytest.raises(SystemExit, match="missing not there"):
        wait_for([there, missing], 0.1)
