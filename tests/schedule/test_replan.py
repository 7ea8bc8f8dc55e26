"""What follows a plan: the rest of an epoch for other ranks, the next epoch, and which microbatch comes first."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphopt.errors import ConfigError, PlanInfeasible
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.dataset import Samples
from graphopt.schedule.plan import Plan
from graphopt.schedule.planner import plan_batches
from graphopt.schedule.problem import Window
from graphopt.schedule.replan import following, known_samples, owed, replan
from graphopt.schedule.worst_first import worst_first

FIT = CostFit.two_term(0.5, 2.43e-4, 9.2e-9)
MODES = {
    "step": {},
    "slots": {"sync": "microbatch", "microbatches": 2},
    "allowed": {"allowed_b": (2, 4)},
    "equal_token": {"policy": "equal_token"},
    "adaptive_load": {"policy": "adaptive_load", "m_comp": 2e7},
}


def used(plan: Plan, first: int = 0, last: int | None = None) -> Counter:
    rows, offsets = plan.samples()
    step = np.repeat(plan.column("step"), np.diff(offsets))
    return Counter(rows[(step >= first) & (step < (len(plan) if last is None else last))].tolist())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 50),
    mode=st.sampled_from(sorted(MODES)),
    tail=st.sampled_from(["carry", "drop", "pad"]),
    ranks=st.integers(1, 6),
    others=st.integers(1, 6),
    at=st.floats(0, 0.8),
)
def test_consumed_and_replanned_are_everything_once(seed, mode, tail, ranks, others, at):
    tokens = np.random.default_rng(seed).choice([100, 256, 1000, 4096], 150)
    samples = Samples.of_tokens(tokens)
    carry = [3, 5] if seed % 3 == 0 else []
    plan = plan_batches(samples, FIT, ranks=ranks, m_mem=9000, tail=tail, seed=seed, carry_in=carry, **MODES[mode])
    step = int(at * len(plan))
    refused = None
    try:
        rest = replan(plan, step=step, ranks=others)
    except PlanInfeasible as e:
        refused = e.what
    if refused is not None:
        assert tail != "pad"
        assert any(t in refused for t in ("do not fill", "cannot give", "no whole step")), refused
        return
    done = used(plan, 0, step)
    total = done + used(rest) + Counter(rest.carried) + Counter(rest.dropped)
    total += Counter(plan.dropped)  # what the first plan dropped stays dropped
    wanted = Counter(range(150)) + Counter(carry)
    if tail == "pad":  # repeats only fill up; nothing is lost
        assert all(total[r] >= n for r, n in wanted.items())
    else:
        assert total == wanted
    assert rest.ranks == others
    assert (known_samples(plan).shape_id == samples.shape_id).all()
    assert (samples.shape_id[rest.samples()[0]] == np.repeat(rest.column("shape"), rest.column("batch"))).all()
    assert replan(plan, step=step, ranks=others).hash == rest.hash


def test_replanned_limits_are_those_of_the_plan():
    samples = Samples.of_tokens(np.random.default_rng(0).choice([256, 1024, 4096, 9000], 400))
    limits = np.minimum(8, 20000 // samples.shapes.tokens)
    plan = plan_batches(samples, FIT, ranks=4, m_mem=20000, limits=limits, tau=2.0, speeds=[1, 1, 1, 0.5])
    rest = replan(plan, step=2, ranks=4)
    assert rest.manifest["limits"]["tau"] == 2.0
    assert rest.manifest["layout"]["speeds"] == [1, 1, 1, 0.5]
    assert rest.column("batch").max() <= 8
    assert rest.manifest["replanned"] == {"plan": plan.hash, "step": 2, "ranks_before": 4}
    assert replan(plan, step=2, ranks=3, tau=4).manifest["layout"]["speeds"] is None
    with pytest.raises(ConfigError, match="outside the plan"):
        replan(plan, step=len(plan), ranks=4)
    pairs = plan_batches(samples, FIT, ranks=4, sp=2, m_mem=20000)
    with pytest.raises(PlanInfeasible, match="3 ranks do not form groups of 2"):
        replan(pairs, step=1, ranks=3)
    assert replan(pairs, step=1, ranks=6).groups == 3


def test_what_is_owed_counts_repeats_and_doubles():
    samples = Samples.of_tokens([1000] * 10)
    plan = plan_batches(samples, FIT, ranks=4, m_mem=1000, policy="equal_token", tail="pad", carry_in=[2])
    rows, twice = owed(plan, 0)
    assert rows.tolist() == list(range(10))
    assert twice.tolist() == [2]
    assert len(plan.repeated) == 1
    assert owed(plan, len(plan))[0].tolist() == []


def test_the_next_epoch_needs_the_whole_data_set():
    samples = Samples.of_tokens(np.random.default_rng(1).choice([256, 1024, 4096], 200))
    plan = plan_batches(samples, FIT, ranks=4, m_mem=9000)
    after = following(plan, epoch=1, carry_in=[7])
    same = plan_batches(samples, FIT, ranks=4, m_mem=9000, epoch=1, carry_in=[7])
    assert after.table() == same.table()
    part = plan_batches(samples, FIT, ranks=4, m_mem=9000, only=np.arange(100))
    with pytest.raises(PlanInfeasible, match="covers a part"):
        following(part, epoch=1, carry_in=[])


def window(step, rank, k, size, start):
    """Microbatches whose samples count on from `start`."""
    size = np.array(size)
    offsets = np.r_[0, np.cumsum(size)]
    n = len(step)
    columns = [np.array(c, np.int32) for c in (step, rank, k)]
    return Window(*columns, np.arange(n, dtype=np.int32), np.zeros(n, np.uint8), offsets, np.arange(offsets[-1]) + start)


@pytest.mark.parametrize("together", [False, True])
def test_worst_first_exchanges_two_steps_and_nothing_else(together):
    a = window([0, 0, 0, 1, 1, 1], [0, 0, 1, 0, 1, 1], [0, 1, 0, 0, 0, 1], [1, 2, 2, 1, 3, 1], 0)
    b = window([2, 2, 2, 2, 3, 3], [0, 0, 1, 1, 0, 1], [0, 1, 0, 1, 0, 0], [1, 9, 2, 3, 1, 1], 100)
    contents = lambda w, step: {tuple(w.rows[w.offsets[i] : w.offsets[i + 1]]) for i in np.flatnonzero(w.step == step)}
    before = {s: contents(w, s) for w, steps in ((a, (0, 1)), (b, (2, 3))) for s in steps}
    out = dict(worst_first([a, b], lambda w: w.size, together=together))
    assert sorted(out) == [0, 1]
    for s, old in ((0, 2), (1, 1), (2, 0), (3, 3)):
        assert contents(out[s // 2], s) == before[old]
    first = out[0]
    assert first.size[0] == 9
    assert list(zip(first.step, first.rank, first.k)) == sorted(zip(first.step, first.rank, first.k))
    # Meeting microbatches stay together: rank 1's second came forward as well.
    assert first.size[:4].tolist() == ([9, 1, 3, 2] if together else [9, 1, 2, 3])


def test_worst_first_leaves_a_plan_that_begins_with_it():
    a = window([0, 1], [0, 0], [0, 0], [4, 4], 0)
    b = window([2], [0], [0], [4], 50)
    out = list(worst_first([a, b], lambda w: w.size, together=False))
    assert sorted(i for i, _ in out) == [0, 1]
    assert dict(out)[0].rows.tolist() == a.rows.tolist()
    assert list(worst_first([], lambda w: w.size, together=False)) == []
