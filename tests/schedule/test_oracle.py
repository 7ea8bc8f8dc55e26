"""Makespans against scipy's MILP (HiGHS) on small cases, and against bounds on larger ones."""

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from graphopt.schedule.balance import lpt, refine
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.dataset import Samples
from graphopt.schedule.planner import plan_batches


def optimum(cost: np.ndarray, ranks: int, speeds: np.ndarray) -> float:
    """Least makespan of independent units, by mixed-integer programming."""
    n = len(cost)
    size = n * ranks + 1
    once = np.zeros((n, size))
    for i in range(n):
        once[i, i * ranks : (i + 1) * ranks] = 1
    load = np.zeros((ranks, size))
    for r in range(ranks):
        load[r, r : n * ranks : ranks] = cost / speeds[r]
        load[r, -1] = -1
    objective = np.zeros(size)
    objective[-1] = 1
    result = milp(
        objective,
        constraints=[LinearConstraint(once, 1, 1), LinearConstraint(load, -np.inf, 0)],
        integrality=np.r_[np.ones(size - 1), 0],
        bounds=Bounds(0, np.r_[np.ones(size - 1), np.inf]),
        options={"time_limit": 10, "mip_rel_gap": 0.002},
    )
    assert result.x is not None, result.message
    return float(result.mip_dual_bound)  # never above the optimum, so the comparison stays honest when time runs out


@pytest.mark.parametrize("case", range(6))
def test_makespan_within_two_percent_of_the_optimum(case):
    rng = np.random.default_rng(case)
    ranks = int(rng.integers(2, 5))
    cost = rng.choice([0.8, 1.7, 4.5, 8.0, 15.0, 33.0, 60.0], 5 * ranks) * rng.uniform(0.8, 1.2, 5 * ranks)
    speeds = np.ones(ranks) if case % 2 else rng.uniform(0.7, 1.0, ranks)
    step = np.zeros(len(cost), np.int64)
    rank = refine(step, lpt(step, cost, 1, ranks, speeds), cost, 1, ranks, speeds, tolerance=1e-3, rounds=200)
    ours = (np.bincount(rank, cost, ranks) / speeds).max()
    assert ours <= 1.02 * optimum(cost, ranks, speeds)


def test_lpt_keeps_its_bound_and_refine_never_harms():
    rng = np.random.default_rng(1)
    for _ in range(30):
        steps, ranks = int(rng.integers(1, 5)), int(rng.integers(1, 9))
        step = np.sort(rng.integers(0, steps, 200))
        cost = rng.lognormal(0, 1, 200)
        first = lpt(step, cost, steps, ranks, None)
        after = refine(step, first, cost, steps, ranks, None, tolerance=1e-3)
        for s in range(steps):
            load, better = (np.bincount(r[step == s], cost[step == s], ranks) for r in (first, after))
            lower = max(load.mean(), cost[step == s].max(initial=0))
            assert load.max() <= (4 / 3 - 1 / (3 * ranks)) * lower * 1.5 or len(load) == 1
            assert better.max() <= load.max() + 1e-9
            assert np.isclose(better.sum(), load.sum())
            assert (np.bincount(after[step == s], minlength=ranks) > 0).all() == (
                np.bincount(first[step == s], minlength=ranks) > 0
            ).all()


@pytest.mark.parametrize("ranks", [2, 3])
def test_whole_plan_against_the_oracle(ranks):
    """One step, B = 1 everywhere (memory holds one sample), so that the MILP's units are the plan's microbatches."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(20000, 39000, 5 * ranks)
    fit = CostFit.two_term(0.5, 2.43e-4, 9.2e-9)
    plan = plan_batches(Samples.of_tokens(tokens), fit, ranks=ranks, m_mem=39000, tau=100)
    assert len(plan) == 1
    ours = np.bincount(plan.column("rank"), plan.column("cost_s")).max()
    assert ours <= 1.02 * optimum(0.5 + 2.43e-4 * tokens + 9.2e-9 * tokens.astype(float) ** 2, ranks, np.ones(ranks))
