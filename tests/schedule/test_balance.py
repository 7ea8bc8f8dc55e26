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
