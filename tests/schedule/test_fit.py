"""Fits recover what made the data; bad ones are refused; the benchmark survives OOM, resumes and counts the slowest
rank."""

import json
import sys

import numpy as np
import pytest
import sympy
import torch
import torch.multiprocessing as mp

from graphopt.errors import ConfigError, GraphoptError
from graphopt.schedule import bench
from graphopt.schedule.bench import Calls, Runs, Shape, _measure, largest_batch, shape_benchmark, sweep, sweep_order
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.fitting import fit_cost, fit_memory
from graphopt.schedule.shapes import ShapeTable
from graphopt.schedule.symbolic import SymbolicCost, symbol

TOKENS = np.array([1000, 2000, 4000, 8000, 16000, 32000, 64000, 97200])


def runs(f, noise=0.0, seed=0, memory=False):
    rng = np.random.default_rng(seed)
    rows = [
        {"B": b, "T": 1, "H": 1, "W": int(s), "L": 512, "seconds": float(f(b, s) * rng.lognormal(0, noise))}
        for s in TOKENS
        for b in (1, 2)
    ]
    for r in rows:
        r["bytes"] = int(20e9 + r["B"] * (1.5e6 * r["W"] + 4e5 * r["L"])) if memory else None
    return rows


def truth(b, s):
    return 0.5 + b * (2.43e-4 * s + 9.2e-9 * s * s)


def test_two_term_recovers_its_coefficients():
    fit = fit_cost(runs(truth))
    assert np.allclose([fit.coefficients[k] for k in "abc"], [0.5, 2.43e-4, 9.2e-9], rtol=1e-6)
    assert fit.r2 > 1 - 1e-9
    assert fit.max_error < 1e-6


def test_two_term_under_noise_fits_to_the_noise_and_its_intervals_hold_the_truth():
    inside = 0
    for seed in range(40):
        fit = fit_cost(runs(truth, noise=0.03, seed=seed))
        assert fit.mape < 0.04
        inside += all(low <= t <= high for (low, high), t in zip(fit.intervals.values(), (0.5, 2.43e-4, 9.2e-9)))
    assert inside >= 30  # three 95 % intervals at once


def test_power_law_recovers_p_and_m_comp():
    fit = fit_cost(runs(lambda b, s: 0.2 + 3e-7 * b * s**1.4), form="power_law")
    assert np.isclose(fit.p, 1.4, atol=1e-4)
    assert np.isclose(fit.coefficients["b"], 3e-7, rtol=1e-2)
    assert np.isclose(fit.m_comp, 2 * 97200**fit.p)


def test_power_law_misses_two_term_times():
    """p is not a constant of the model: it depends on the range of the sweep."""
    whole = fit_cost(runs(truth), form="power_law", refuse=False)
    upper = fit_cost([r for r in runs(truth) if r["W"] >= 16000], form="power_law", refuse=False)
    assert upper.p > whole.p + 0.1
    assert whole.max_error > 3 * fit_cost(runs(truth, noise=0.01)).max_error


def test_symbolic_form_takes_its_terms_from_the_cost():
    B, T, H, W = (symbol(x) for x in "BTHW")
    S = T * H * W
    cost = SymbolicCost(
        tuple("BTHWL"),
        flops_forward=3e9 * B * S + 1e5 * B * S**2,
        flops_backward=6e9 * B * S + 2e5 * B * S**2,
        attention_flops=3e5 * B * S**2,
        saved_bytes=B * S,
        traffic=1e6 * B * S + 1e8,
        parameter_bytes=sympy.Integer(5),
    )
    made = runs(lambda b, s: 0.1 + b * (9e9 * s / 3e14 + 3e5 * s * s / 4e14) + (1e6 * b * s + 1e8) / 4e12)
    fit = fit_cost(made, form="symbolic", cost=cost)
    assert fit.max_error < 1e-6
    table = ShapeTable.of_tokens(TOKENS, 512)
    predicted = fit.seconds(table, np.arange(8), np.full(8, 2))
    assert np.allclose(predicted, [r["seconds"] for r in made if r["B"] == 2], rtol=1e-5)
    with pytest.raises(ConfigError, match="needs cost="):
        fit_cost(made, form="symbolic")


def test_bad_fits_are_refused_with_the_worst_shape():
    rng = np.random.default_rng(0)
    rows = runs(lambda b, s: rng.uniform(1, 3))
    with pytest.raises(GraphoptError, match=r"misses the measured times by \d+"):
        fit_cost(rows)
    assert fit_cost(rows, refuse=False).mape > 0.1
    with pytest.raises(GraphoptError, match="2 measured shapes cannot"):
        fit_cost(runs(truth)[:2])
    with pytest.raises(GraphoptError, match="no measured runs"):
        fit_cost([{"B": 1, "S": 5, "seconds": None}])
    with pytest.raises(ConfigError, match="no positive time"):
        fit_cost([{"B": 1, "S": 5, "seconds": -1.0}])
    for bad, match in ((dict(seconds=float("inf")), "no positive time"), (dict(seconds="1"), "no positive time"),
                       (dict(S=-5), "sizes"), (dict(bytes=float("nan")), "bytes"), (dict(bytes=-1), "bytes")):  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            fit_cost([{"B": 1, "S": s, "seconds": 1.0, **bad} for s in (1000, 2000, 4000, 8000)])
    same = fit_cost([{"B": 1, "S": s, "seconds": 1.0} for s in (1000, 2000, 4000, 8000)], refuse=False)
    assert same.r2 == 0.0, "times that do not depend on the size"
    with pytest.raises(ConfigError, match="unknown cost form"):
        fit_cost(runs(truth), form="cubic")


def test_memory_fit():
    rows = runs(truth, memory=True)
    for r, caption in zip(rows, [0, 512, 1024] * 8):  # L must vary to be told from m0
        r["L"] = caption
        r["bytes"] = int(20e9 + r["B"] * (1.5e6 * r["W"] + 4e5 * caption))
    m = fit_memory(rows)
    assert np.allclose([m.m0, m.m1, m.m2], [20e9, 1.5e6, 4e5], rtol=1e-3)
    assert fit_cost(rows).memory == m
    table = ShapeTable.of_tokens([10000], 512)
    assert m.cap(table, 20e9 + 3 * (1.5e10 + 4e5 * 512) + 1e9).tolist() == [3]
    assert m.cap(table, 10e9).tolist() == [0]


def test_order_covers_the_range_early():
    order = [s.S for s in sweep_order([(1, 1, 1, int(s)) for s in TOKENS])]
    assert sorted(order) == TOKENS.tolist()
    assert order[:2] == [1000, 97200]
    assert order[2] == 16000
    assert {s.B for s in sweep(TOKENS)} == {1, 2, 4}
    with pytest.raises(ConfigError, match="positive"):
        sweep_order([(0, 1, 1, 5)])


class Clock:
    """Time that passes in `sleep` alone: what other processes do on this machine cannot matter."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(bench, "time", made)
    return made


def test_benchmark_survives_oom_skips_larger_and_resumes(tmp_path, clock):
    calls = []

    def step(shape):
        calls.append(shape)
        if shape.B * shape.S > 4000:
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        clock.sleep(shape.B * shape.S * 1e-6)

    freed = []
    out = tmp_path / "runs.json"
    r = shape_benchmark(
        step,
        [(1, 1, 1, int(s), 0) for s in TOKENS],
        warmup=1,
        repeats=3,
        device="cpu",
        path=out,
        reset=lambda: freed.append(1),
        progress=False,
    )
    status = {row["S"]: row["status"] for row in r.rows}
    assert status == {
        1000: "ok",
        2000: "ok",
        4000: "ok",
        8000: "oom",
        16000: "oom",
        32000: "skipped",
        64000: "skipped",
        97200: "oom",
    }
    assert len(freed) == 3
    assert all(3 <= len(row["times"]) <= 20 for row in r.rows if row["status"] == "ok")
    measured = {row["S"]: row["seconds"] for row in r.rows if row["status"] == "ok"}
    assert np.allclose([measured[s] for s in (1000, 2000, 4000)], [1e-3, 2e-3, 4e-3])
    before = len(calls)
    again = shape_benchmark(
        step,
        [(1, 1, 1, int(s), 0) for s in TOKENS] + [(1, 1, 1, 500)],
        warmup=1,
        repeats=3,
        device="cpu",
        path=out,
        progress=False,
    )
    assert set(calls[before:]) == {(1, 1, 1, 500, 0)}  # only the new shape
    assert len(again.rows) == 9
    assert Runs.load(out).rows == again.rows
    with pytest.raises(ConfigError, match="other settings: remat"):
        shape_benchmark(step, [(1, 1, 1, 5)], device="cpu", path=out, key={"remat": True}, progress=False)


def test_a_noisy_shape_is_timed_on_and_a_quiet_one_is_not(clock):
    pauses = iter([0.001, 0.03] * 50)
    noisy = shape_benchmark(
        lambda s: clock.sleep(next(pauses)), [(1, 1, 1, 5)], warmup=0, repeats=2, most_repeats=9, device="cpu", progress=False
    )
    assert len(noisy.rows[0]["times"]) == 9
    assert noisy.rows[0]["spread"] > 0.01
    quiet = shape_benchmark(
        lambda s: clock.sleep(0.05), [(1, 1, 1, 5)], warmup=0, repeats=3, spread=0.5, device="cpu", progress=False
    )
    assert len(quiet.rows[0]["times"]) == 3
    with pytest.raises(ConfigError, match="spread = 0"):
        shape_benchmark(lambda s: None, [(1, 1, 1, 5)], spread=0, device="cpu", progress=False)


class Queue:
    """Stands for a GPU's queue: what is behind it takes 2 ms per token."""

    bytes = 0

    def __init__(self):
        self.filled = []

    def start(self, seconds):
        self.filled.append(seconds)
        return len(self.filled)

    def since(self, start):
        assert start == len(self.filled)
        return 0.002 * self.shape.S


def test_queued_times_are_the_devices_and_the_queue_outlasts_the_host(clock):
    queue = Queue()

    def step(shape):
        queue.shape = shape
        clock.sleep(0.02)

    row = _measure(step, Shape(1, 1, 1, 5), Calls(2, 3, 5, 0.01, queue), torch.device("cpu"), False, None)
    assert row["times"] == [0.01] * 3  # the host's 20 ms do not count
    assert np.isclose(row["host_s"], 0.02)
    assert len(queue.filled) == 3  # not in front of warm-up calls
    assert all(s >= 1.3 * row["host_s"] for s in queue.filled)


def test_queued_is_for_gpus():
    r = shape_benchmark(lambda s: None, [(1, 1, 1, 5)], queued=True, device="cpu", progress=False)
    assert "host_s" not in r.rows[0]
    assert "queued" not in r.key


def test_floor_is_found_where_launching_binds_and_only_there():
    def launched(b, s):
        return max(1.9, truth(b, s))

    fit = fit_cost(runs(launched, noise=0.01))
    assert np.isclose(fit.floor_s, 1.9, rtol=0.02)
    assert np.allclose([fit.coefficients[k] for k in "bc"], [2.43e-4, 9.2e-9], rtol=0.1)
    assert fit.max_error < 0.05
    assert "floor" in fit.describe()
    assert fit_cost(runs(launched, noise=0.01), form="power_law", refuse=False).floor_s == 0
    for seed in range(20):
        assert fit_cost(runs(truth, noise=0.03, seed=seed)).floor_s == 0
    table = ShapeTable.of_tokens([100, 97200], 512)
    assert np.allclose(fit.seconds(table, np.array([0, 1]), np.array([1, 1])), [fit.floor_s, truth(1, 97200)], rtol=0.02)


def test_other_errors_pass_through():
    def step(shape):
        raise ValueError("a bug of the user's")

    with pytest.raises(ValueError, match="a bug"):
        shape_benchmark(step, [(1, 1, 1, 5)], device="cpu", progress=False)


def test_time_budget_ends_the_sweep_at_a_shape(clock, tmp_path, caplog):
    def sweep():
        return shape_benchmark(
            lambda s: clock.sleep(0.06),
            [(1, 1, 1, i) for i in range(1, 20)],
            warmup=0,
            repeats=1,
            most_repeats=1,
            budget_s=0.2,
            device="cpu",
            path=tmp_path / "runs.json",
            progress=False,
        )

    for rows, left in ((4, 15), (8, 11)):
        r = sweep()
        assert not r.complete
        assert len(r.rows) == rows
        assert f"with {left} shapes left" in caplog.text


def test_a_file_of_a_sweep_that_was_stopped_is_not_complete(tmp_path):
    def step(shape):
        if shape.S == 3:
            raise KeyboardInterrupt

    path, shapes = tmp_path / "runs.json", [(1, 1, 1, i) for i in range(1, 5)]
    with pytest.raises(KeyboardInterrupt):
        shape_benchmark(step, shapes, warmup=0, device="cpu", path=path, progress=False)
    assert 0 < len(Runs.load(path).rows) < 4
    assert not Runs.load(path).complete
    assert shape_benchmark(lambda s: None, shapes, warmup=0, device="cpu", path=path, progress=False).complete
    assert Runs.load(path).complete


@pytest.mark.parametrize("limit", [0, 1, 5, 13, 40])
def test_largest_batch_is_found_by_bisection(limit):
    def step(shape):
        if limit < shape.B:
            raise MemoryError

    assert largest_batch(step, (1, 1, 1, 7), most=32, device="cpu") == min(limit, 32)


def worker(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)

    clock = bench.time = Clock()

    def step(shape):
        if shape.S == 3000 and rank == 1:
            raise torch.OutOfMemoryError("only here")
        clock.sleep(0.06 if rank == 1 else 0.005)

    r = shape_benchmark(
        step, [(1, 1, 1, 1000), (1, 1, 1, 2000), (1, 1, 1, 3000)], warmup=0, repeats=3, device="cpu", progress=False
    )
    with open(f"{folder}/{rank}.json", "w") as f:
        json.dump([[row["S"], row["status"], row["seconds"]] for row in r.rows], f)
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(sys.platform == "win32", reason="gloo file store")
def test_slowest_rank_counts_and_oom_on_one_rank_is_oom_on_all(tmp_path):
    mp.start_processes(worker, args=(str(tmp_path),), nprocs=2, start_method="fork")
    a, b = (json.loads((tmp_path / f"{r}.json").read_text()) for r in range(2))
    assert a == b
    rows = {s: (status, t) for s, status, t in a}
    assert rows[1000][0] == "ok"
    assert np.isclose(rows[1000][1], 0.06)  # rank 0 needed 5 ms
    assert rows[3000][0] == "oom"


def test_shape_tuple():
    assert Shape(2, 3, 4, 5).S == 60


def waves(b, s):
    """A cost whose matrix products run in waves of 40 tiles of 256 rows."""
    return 4e-3 + b * 1.5e-10 * s * s + 2.8e-6 * 256 * 40 * np.ceil(b * s / 256 / 40)


def test_anchors_take_measured_sizes_as_they_are_and_the_form_between():
    measured = [{"B": b, "T": 1, "H": 1, "W": s, "L": 512, "seconds": float(waves(b, s))}
                for s in (256, 1000, 4096, 14_400, 20_280, 23_400, 26_520, 30_400, 32_760) for b in (1, 2, 4) if b * s <= 32_760]  # fmt: skip
    plain, anchored = fit_cost(measured, refuse=False), fit_cost(measured, anchored=True, refuse=False)
    assert anchored.coefficients == plain.coefficients
    assert (anchored.mape, anchored.r2) == (plain.mape, plain.r2)  # the quality stated is the form's
    assert [a[0] for a in anchored.anchors] == sorted({r["W"] for r in measured if r["seconds"] > anchored.floor_s * 1.05})
    table = ShapeTable.of([[1, 1, r["W"], 512] for r in measured])
    batch, seconds = np.array([r["B"] for r in measured]), np.array([r["seconds"] for r in measured])
    error = lambda fit: np.abs(fit.seconds(table, np.arange(len(batch)), batch) / seconds - 1)
    alone = np.array([sum(q["W"] == r["W"] for q in measured) == 1 for r in measured])
    assert error(anchored)[alone].max() < 1e-9
    assert error(anchored).mean() < 0.75 * error(plain).mean()  # several B of one S are affine, waves are not
    # halfway between two sizes: the form's value times the mean of their ratios
    s = round((14_400 * 20_280) ** 0.5)
    between = ShapeTable.of([[1, 1, s, 512]])
    at = {a[0]: a[2] for a in anchored.anchors}
    ratio = anchored.affine(between)[1] / plain.affine(between)[1]
    assert np.isclose(ratio, (at[14_400] + at[20_280]) / 2, rtol=1e-4)
    outside = ShapeTable.of([[1, 1, 65_000, 512]])
    assert np.isclose(anchored.affine(outside)[1] / plain.affine(outside)[1], at[32_760])
    again = CostFit.of(json.loads(json.dumps(anchored.to_json())))
    np.testing.assert_array_equal(again.affine(table), anchored.affine(table))
    assert "anchored at" in again.describe()


def test_anchors_of_a_noisy_sweep_stay_near_the_form():
    fit = fit_cost(runs(truth, noise=0.02), anchored=True)
    assert [a[0] for a in fit.anchors] == TOKENS.tolist()
    ratios = np.array(fit.anchors)[:, 1:]
    assert ratios.min() > 0.2
    long = np.array(fit.anchors)[-4:, 2]
    assert np.abs(long - 1).max() < 0.08
