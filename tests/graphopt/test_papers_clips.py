"""benchmarks/papers_clips.py: the search for the largest clip, against memory that is a line and memory that is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from papers_clips import foretold, search, wait_for


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
    assert dict(tried(lambda T: 200.0, 140.0)) == {3: False}


def test_no_step_is_begun_that_would_end_too_late() -> None:
    assert tried(lambda T: 20 + 5 * T, 140.0, seconds=30, step_s=10.0) == [(3, True), (6, True)]


def test_seconds_of_a_step_are_a_line_and_a_square() -> None:
    row = lambda T, timed=True: {"fits": True, "step_s": 0.5 * T + 0.04 * T * T if timed else None}
    assert foretold({4: row(4), 8: row(8)}, 28) == pytest.approx(row(28)["step_s"])
    assert foretold({4: row(4, timed=False), 8: row(8)}, 16) == pytest.approx(4 * row(8)["step_s"])  # at most
    assert foretold({4: row(4, timed=False)}, 16) == 0


def test_an_error_of_another_kind_ends_it() -> None:
    rows = {3: {"fits": True, "peak_gib": 30.0, "step_s": 1.0}, 6: {"fits": True, "peak_gib": 60.0, "step_s": 2.0},
            13: {"fits": False, "peak_gib": 60.0, "step_s": 3.0, "error": "RuntimeError: no such kernel", "other": True}}
    assert [T for T, _ in search(rows.__getitem__, 3, 140.0, 1e9)] == [3, 6, 13]


def test_nothing_is_measured_while_others_may_hold_the_memory(tmp_path) -> None:
    there, missing = tmp_path / "there", tmp_path / "missing"
    there.touch()
    wait_for([there], 0)
    with pytest.raises(SystemExit, match="missing not there"):
        wait_for([there, missing], 0.1)
