"""schedule/balance.py: what the planner's own tests do not see."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest

from graphopt.schedule.balance import refine


def test_interrupted_it_ends_within_a_round() -> None:
    """A pool's threads are waited for at the end of the process: Ctrl-C must not take as long as what was begun."""
    rng = np.random.default_rng(0)
    step, rank, cost = rng.integers(0, 4, 400), rng.integers(0, 8, 400), rng.exponential(1.0, 400)
    stop = threading.Event()
    as_ever, watched = (refine(step, rank.copy(), cost, 4, 8, None, tolerance=1e-3, stop=s) for s in (None, stop))
    assert (as_ever == watched).all()
    stop.set()
    with pytest.raises(CancelledError):
        refine(step, rank.copy(), cost, 4, 8, None, tolerance=1e-3, stop=stop)


@pytest.mark.parametrize("units", [250, 300, 2000])
def test_ranks_of_very_many_units_are_levelled_too(units) -> None:
    """More than fill an exchange table: many small images in a step."""
    cost = np.random.default_rng(1).exponential(1.0, units + 3)
    rank = np.r_[np.zeros(units, np.int32), 1, 2, 3].astype(np.int32)  # the first rank holds nearly all
    made = refine(np.zeros(len(cost), np.int32), rank, cost, 1, 4, None, tolerance=1e-3, rounds=2000 if units < 1000 else 60)
    load, before = np.bincount(made, cost, 4), np.bincount(rank, cost, 4)
    assert load.sum() == pytest.approx(before.sum())
    assert load.max() < (1.01 * load.mean() if units < 1000 else before.max())
    assert np.bincount(made, minlength=4).min() >= 1
