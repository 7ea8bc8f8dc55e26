"""The shape benchmark survives OOM, resumes, counts the slowest rank and times a shape as long as it is noisy."""

import json
import sys

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from graphopt.errors import ConfigError
from graphopt.schedule import bench
from graphopt.schedule.bench import Calls, Runs, Shape, _measure, largest_batch, shape_benchmark, sweep, sweep_order

TOKENS = np.array([1000, 2000, 4000, 8000, 16000, 32000, 64000, 97200])


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
