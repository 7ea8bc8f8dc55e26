"""benchmarks/schedule_in_turn.py: the ranks of a plan one after the other, composed to the steps of a job without communication."""

import argparse
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from graphopt.schedule.bench import Shape
from graphopt.schedule.costmodel import CostFit

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
FIT = CostFit.two_term(0.004, 3e-6, 2e-10)
TRUTH = CostFit.two_term(0.005, 4e-6, 1e-10)  # what the clock below shows


@pytest.fixture
def tools(monkeypatch):
    """The modules under test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("schedule_in_turn", "schedule_composed", "schedule_step", "schedule_fit")
    return argparse.Namespace(**{n.removeprefix("schedule_"): importlib.import_module(n) for n in names})


@pytest.fixture
def plans(tools):
    return plans_with(tools, FIT)


def plans_with(tools, fit):
    """Of every policy, on data C at a quarter of its grids."""
    o = argparse.Namespace(cap=32_760, seed=0, shrink=4, m_comp=1.05)
    samples = tools.fit.samples_of(o)
    return tools.step.plans_of(samples, fit, o, int(samples.shapes.tokens.max()), 4, 1.3)


def seconds(s):
    return 0.005 + 4e-6 * s.B * s.S + 1e-10 * s.B * s.S**2


class Clock:
    """A job whose device takes what TRUTH says, and runs out of memory where it is told to."""

    device = torch.device("cpu")

    def __init__(self, full=()):
        self.now, self.full, self.log = 0.0, set(full), []

    def alone(self, s):
        if len(self.log) in self.full:
            self.full.remove(len(self.log))
            raise torch.OutOfMemoryError("no room")
        self.log.append(s)
        self.now += seconds(s)

    def mark(self):
        return self.now

    def seconds(self, marks):
        return np.diff(marks)

    def clear(self):
        pass


def measured(tools, plans, path, steps=5, job=None, time_for=lambda case, step: True, key="a"):
    """The file of a run over these plans, and the job."""
    case, job = tools.composed.Case(4, 1.3, steps), job or Clock()
    lines = tools.composed.Lines(path, {"key": key})
    own = dict.fromkeys(tools.step.twins(plans).values())
    todo = {case: {p: tools.composed.steps_of(plans[p], steps) for p in own}}
    hashes = {case: {p: plans[p].hash for p in own}}
    tools.in_turn.measure(tools.in_turn.in_turn(todo, hashes, {"graphopt": job}, lines, time_for), lines, lambda: None, {})
    return case, lines, job


def test_a_step_takes_as_long_as_its_slowest_rank(tools, plans, tmp_path):
    case, lines, _ = measured(tools, plans, tmp_path / "steps.jsonl")
    rows = {r["policy"]: r for r in tools.composed.rows_of(case, plans, lines, FIT, {})}
    assert set(rows) == {"step_balanced", "equal_token", "adaptive_load"}
    assert rows["equal_token"]["same_plan_as"] == "adaptive_load"  # one longest sample fills memory
    for p, row in rows.items():
        plan = plans[p]
        # from the plan's own list of microbatches, another way than the script's
        load, planned = np.zeros((4, 5)), np.zeros((4, 5))
        tokens = np.zeros(5)
        for mb in itertools.takewhile(lambda mb: mb.step < 5, plan.microbatches()):
            S = int(plan.shapes.tokens[mb.shape])
            load[mb.rank, mb.step] += seconds(Shape(len(mb.samples), 1, 1, S))
            planned[mb.rank, mb.step] += mb.cost_s
            tokens[mb.step] += len(mb.samples) * S
        assert np.allclose(row["busy_s"], load)
        assert np.allclose(row["step_s"], load.max(0))
        assert np.allclose(row["predicted_s"], planned.max(0))
        assert np.isclose(row["tokens_per_s"], tokens.sum() / load.max(0).sum())
        assert np.isclose(row["limit_fraction"], load.mean(0).sum() / load.max(0).sum())
        assert np.isclose(row["predicted_limit_fraction_steps"], planned.mean(0).sum() / planned.max(0).sum())
        assert np.isclose(row["mape"], np.abs(planned.max(0) / load.max(0) - 1).mean())
        assert np.isclose(row["mape_ranks"], np.abs(planned / load - 1).mean())
        assert np.isclose(row["load_cv"], load.std() / load.mean())
        assert (row["steps"], row["oom"], row["mode"]) == (5, 0, "in turn")
        for B, T, H, W, count, mean in row["microbatch_s"]:
            assert count >= 1
            assert np.isclose(mean, seconds(Shape(B, T, H, W)))
    assert rows["step_balanced"]["gain_over_equal_token"] == pytest.approx(
        rows["step_balanced"]["tokens_per_s"] / rows["equal_token"]["tokens_per_s"] - 1)
    # a policy that has another's plan is not run again
    assert sum(x["policy"] == "step_balanced" for x in lines.found) == 5 == len(lines.found) / 2


def test_a_fit_that_is_right_predicts_every_step_and_the_gain(tools, tmp_path):
    plans = plans_with(tools, TRUTH)
    case, lines, _ = measured(tools, plans, tmp_path / "steps.jsonl")
    r = {r["policy"]: r for r in tools.composed.rows_of(case, plans, lines, TRUTH, {})}["step_balanced"]
    assert r["mape"] < 1e-9
    assert r["mape_ranks"] < 1e-9
    assert r["noise"] < 1e-9
    assert r["limit_fraction"] == pytest.approx(r["predicted_limit_fraction_steps"])
    assert r["gain_over_equal_token"] == pytest.approx(r["planned_gain_steps"])
    assert r["planned_gain_corrected"] == pytest.approx(r["planned_gain"])
    assert r["planned_gain_interval"] == pytest.approx([r["planned_gain"]] * 2)


def test_policies_take_turns_and_what_is_there_is_not_run_again(tools, plans, tmp_path):
    path = tmp_path / "steps.jsonl"
    _, _, straight = measured(tools, plans, tmp_path / "straight.jsonl")
    _, lines, first = measured(tools, plans, path, time_for=lambda case, step: step < 2)
    assert [(x["policy"], x["step"]) for x in lines.found] == [
        (p, i) for i in range(2) for p in dict.fromkeys(tools.step.twins(plans).values())]
    with path.open("a") as f:
        f.write('{"policy": "step_bal')  # killed while it wrote
    _, lines, second = measured(tools, plans, path)
    assert first.log + second.log == straight.log
    assert [x["step"] for x in lines.of(plans["step_balanced"].hash, "graphopt")] == [0, 1, 2, 3, 4]
    again = measured(tools, plans, path)[2]
    assert not again.log
    other = measured(tools, plans, path, key="another commit")[2]
    assert other.log == straight.log


def test_a_policy_that_runs_out_of_memory_ends_and_is_counted(tools, plans, tmp_path):
    steps = {p: tools.composed.steps_of(plans[p], 3) for p in plans}
    one = [sum(map(len, step)) for step in steps["step_balanced"]]
    path = tmp_path / "steps.jsonl"
    case, lines, _ = measured(tools, plans, path, steps=3, job=Clock(full=[one[0] + sum(map(len, steps["equal_token"][0])) + 1]))
    rows = {r["policy"]: r for r in tools.composed.rows_of(case, plans, lines, FIT, {})}
    assert (rows["step_balanced"]["oom"], rows["step_balanced"]["steps"]) == (1, 1)
    assert (rows["equal_token"]["oom"], rows["equal_token"]["steps"]) == (0, 3)
    assert not measured(tools, plans, path, steps=3)[2].log, "it is not tried again"
    case, lines, _ = measured(tools, plans, tmp_path / "none.jsonl", steps=3, job=Clock(full=[0]))
    rows = {r["policy"]: r for r in tools.composed.rows_of(case, plans, lines, FIT, {})}
    assert rows["step_balanced"]["error"] == "no room"
    assert "gain_over_equal_token" not in rows["equal_token"]


def test_other_kernels_are_compared_on_the_same_microbatches(tools):
    place = {"ranks": 2, "tau": 1.3, "memory": 1.0, "policy": "step_balanced"}
    rows = [{**place, "system": "graphopt", "busy_s": [[1.0, 2.0, 9.0], [3.0, 4.0, 9.0]]},
            {**place, "system": "inductor", "busy_s": [[1.1, 2.2], [3.3, 4.4]]}]
    tools.composed.beside(rows, "graphopt")
    assert rows[1]["time_over_graphopt"] == pytest.approx(1.1)
    assert rows[1]["time_over_interval"] == pytest.approx([1.1, 1.1])
    assert "time_over_graphopt" not in rows[0]


def test_cases_of_the_command_line(tools):
    case = tools.composed.Case.of
    assert case("8:1.3:6") == tools.composed.Case(8, 1.3, 6)
    assert case("2:2:4:inductor:2") == tools.composed.Case(2, 2.0, 4, "inductor", 2.0)
    with pytest.raises(SystemExit, match="unknown system nothing"):
        case("2:2:4:nothing")


def test_rows_of_several_runs_are_joined(tools, tmp_path):
    row = dict.fromkeys(tools.in_turn.KEYS, 1)
    files = []
    for name, rows in (("a", [{**row, "x": 1}, {**row, "ranks": 8}]), ("b", [{**row, "x": 2, "commit": "new"}])):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"name": "schedule_in_turn", "command": name, "rows": rows}))
    for _ in range(2):
        path = tools.in_turn.join(files, tmp_path)
    assert json.loads(path.read_text()) == {
        "name": "schedule_in_turn", "command": "b", "rows": [{**row, "x": 2, "commit": "new"}, {**row, "ranks": 8}]}


TINY = ["--layers=1", "--width=128", "--text-dim=32", "--shrink=6", "--shapes=3", "--sizes=2", "--budget=60", "--machine=here"]


@pytest.mark.nightly
def test_killed_and_started_again_on_a_tiny_model(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "schedule_in_turn.py"), *TINY, "--out", str(tmp_path),
               "--cases=2:1.3:200:aot_eager,4:2:2:aot_eager,2:1.3:2:eager"]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GRAPHOPT_COMMIT": "abc"}
    job = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    steps = tmp_path / "schedule_in_turn_steps_32760.jsonl"
    end = time.monotonic() + 300
    while time.monotonic() < end and job.poll() is None and not (steps.exists() and steps.read_text().count("\n") > 12):
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)  # a time limit
    assert job.wait(60) == 143, job.stderr.read()
    rows = json.loads((tmp_path / "schedule_in_turn.json").read_text())["rows"]
    assert {r["policy"] for r in rows if r["mode"] == "in turn"} == {"step_balanced", "equal_token", "adaptive_load"}
    there = steps.read_text().splitlines()
    command[-1] = command[-1].replace(":200:", ":3:")
    subprocess.run(command, env=env, check=True, timeout=300)
    assert steps.read_text().splitlines()[: len(there)] == there
    rows = json.loads((tmp_path / "schedule_in_turn.json").read_text())["rows"]
    told = {(r["ranks"], r["tau"], r["system"], r["policy"]): r for r in rows if r["mode"] == "in turn"}
    assert len(told) == 9
    for (ranks, _, system, _), r in told.items():
        assert (r["oom"], r["simulated"], len(r["busy_s"])) == (0, False, ranks)
        assert r["graphs"] == (2 if system == "aot_eager" else 0)  # B = 1, and more
        assert ("mape" in r) == (system == "aot_eager")
        assert ("time_over_aot_eager" in r) == (system == "eager")
    made = [*command, "--rows"]
    subprocess.run(made, env=env, check=True, timeout=100)
    assert len(json.loads((tmp_path / "schedule_in_turn.json").read_text())["rows"]) == len(rows)
