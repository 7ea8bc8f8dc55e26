"""The simulator against closed forms, and the planner's bars on small versions of the benchmark data."""

import sys
from pathlib import Path

import numpy as np
import pytest

from graphopt.errors import ConfigError
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.dataset import Samples
from graphopt.schedule.planner import plan_batches
from graphopt.schedule.simulate import simulate

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import schedule_data as data

FLAT = CostFit.two_term(0.0, 1e-3, 1e-12)


def test_one_rank_without_noise_or_overhead_is_the_limit():
    plan = plan_batches(Samples.of_tokens([1000, 2000, 3000] * 10), FLAT, ranks=1, m_mem=3000)
    r = simulate(plan, FLAT, noise=0)
    assert np.isclose(r.limit_fraction, 1)
    assert np.isclose(r.bubble, 0)
    assert np.isclose(r.tokens_per_s, 1000, rtol=1e-5)


def test_two_ranks_by_hand():
    """Ranks get 1 s and 3 s: half the time of the first is... one third of the job's time is waiting."""
    samples = Samples.of_tokens([1000, 3000])
    plan = plan_batches(samples, FLAT, ranks=2, m_mem=3000, policy="equal_token")
    r = simulate(plan, FLAT, noise=0, step_overhead_s=1.0)
    assert r.steps == 1
    assert np.isclose(r.wall_s, 4, rtol=1e-4)  # 3 s and the overhead
    assert np.isclose(r.bubble, 1 - (1 + 3) / (2 * 4), rtol=1e-4)
    assert np.isclose(r.tokens_per_s, 1000, rtol=1e-4)
    assert np.isclose(r.limit_fraction, 0.5, rtol=1e-4)
    assert np.isclose(r.load_cv, 0.5, rtol=1e-4)
    assert np.isclose(r.imbalance, 0.5, rtol=1e-4)


def test_barrier_per_microbatch_waits_for_every_slot():
    samples = Samples.of_tokens([2000, 3000, 3000, 2000] * 4)
    plan = plan_batches(samples, FLAT, ranks=2, m_mem=3000, policy="equal_token", microbatches=4)
    slots = plan_batches(samples, FLAT, ranks=2, m_mem=3000, policy="equal_token", microbatches=4, sync="microbatch")
    assert plan.table() == slots.table()
    cost = plan.column("cost_s").reshape(2, 2, 4)  # step, rank, k
    assert np.isclose(simulate(slots, FLAT, noise=0).wall_s, cost.max(1).sum())
    assert np.isclose(simulate(plan, FLAT, noise=0).wall_s, cost.sum(2).max(1).sum())


def test_noise_costs_what_order_statistics_say():
    """Two ranks with equal work and independent sigma: the slower one takes 1 + sigma / sqrt(pi) on average."""
    plan = plan_batches(Samples.of_tokens([1000] * 4000), FLAT, ranks=2, m_mem=1000, policy="equal_token")
    r = simulate(plan, FLAT, noise=0.05, seed=1)
    assert np.isclose(r.wall_s / len(plan), 1 + 0.05 / np.sqrt(np.pi), rtol=2e-3)
    assert simulate(plan, FLAT, noise=0.05, seed=1) == r


def test_slow_rank_in_truth_only():
    plan = plan_batches(Samples.of_tokens([1000] * 40), FLAT, ranks=2, m_mem=1000, tau=2)
    assert np.isclose(simulate(plan, FLAT, noise=0, speeds=[1, 0.5]).wall_s, 2 * simulate(plan, FLAT, noise=0).wall_s)
    with pytest.raises(ConfigError, match="3 speeds for 2"):
        simulate(plan, FLAT, speeds=[1, 1, 1])
    with pytest.raises(ConfigError, match="noise must not be negative"):
        simulate(plan, FLAT, noise=-1)


@pytest.mark.parametrize(
    ("ranks", "rows", "limit", "imbalance"),
    [(8, 12_000, 0.94, 0.01), (64, 30_000, 0.92, 0.01), (1024, 150_000, 0.90, 0.012)],
)
def test_bars_on_data_a(ranks, rows, limit, imbalance):
    samples = data.data_a(rows, seed=7)  # not the benchmark's seed
    plan = plan_batches(samples, data.WAN_14B, ranks=ranks, m_mem=data.CAP_A, tau=1.3)
    r = simulate(plan, data.WAN_14B, noise=0.03)
    assert r.limit_fraction >= limit
    assert r.imbalance <= imbalance
    assert r.token_cv <= 0.02
    random = simulate(
        plan_batches(samples, data.WAN_14B, ranks=ranks, m_mem=data.CAP_A, policy="equal_token"),
        data.WAN_14B,
        noise=0.03,
    )
    assert r.tokens_per_s > 1.5 * random.tokens_per_s


def test_slot_mode_is_level_in_every_slot():
    samples = data.data_a(12_000, seed=7)
    plan = plan_batches(samples, data.WAN_14B, ranks=8, m_mem=data.CAP_A, sync="microbatch", microbatches=8)
    r = simulate(plan, data.WAN_14B, noise=0.03)
    assert r.limit_fraction >= 0.93
    assert r.imbalance <= 0.01


def test_planning_with_a_wrong_cost_is_seen_by_the_simulator():
    samples = data.data_a(12_000, seed=7)
    by_tokens = CostFit.two_term(0.5, 1e-3, 0.0)
    wrong = simulate(plan_batches(samples, by_tokens, ranks=8, m_mem=data.CAP_A), data.WAN_14B)
    right = simulate(plan_batches(samples, data.WAN_14B, ranks=8, m_mem=data.CAP_A), data.WAN_14B)
    assert wrong.limit_fraction < right.limit_fraction - 0.1
    assert wrong.imbalance > 0.1


def test_published_regime():
    samples, cost = data.paper_regime(60_000, seed=3), data.PAPER_COST
    got = {}
    for ranks in (8, 16):
        before, after = (
            simulate(plan_batches(samples, cost, ranks=ranks, m_mem=data.PAPER_M_MEM, policy=p), cost, noise=0)
            for p in ("equal_token", "adaptive_load")
        )
        got[f"gain_{ranks}"] = after.tokens_per_s / before.tokens_per_s - 1
        if ranks == 16:
            got |= {
                "load_cv_before": before.load_cv,
                "load_cv_after": after.load_cv,
                "step_cv_before": before.step_cv,
                "step_cv_after": after.step_cv,
            }
    for name, published in data.PAPER_FIGURES.items():
        assert abs(got[name] / published - 1) <= 0.17, name
    ours = simulate(plan_batches(samples, cost, ranks=16, m_mem=data.PAPER_M_MEM, tau=4), cost, noise=0)
    assert ours.tokens_per_s > 1.3 * after.tokens_per_s


@pytest.mark.nightly
def test_ten_million_rows(tmp_path):
    import schedule

    row = schedule.speed((10_000_000,))[0]
    assert row["seconds"] <= 90
    assert row["gib"] <= 3
