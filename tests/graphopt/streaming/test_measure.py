"""The measured rates of a box: every kind is there, and a plan takes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_dit import TinyDiT

import graphopt
from graphopt.schedule.stream_plan import Rates
from graphopt.streaming import measure
from graphopt.streaming.link import CpuLink

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_rates_feed_a_plan(device, monkeypatch) -> None:
    monkeypatch.setattr(measure, "ELEMENTS", 20_000)
    found = measure.host_rates(device, 0.01, elements=20_000)
    assert set(found) == {"h2d", "d2h", "adamw", "adamw_pool", "h2d_with_d2h", "d2h_with_h2d", "h2d_with_all", "d2h_with_all", "adamw_with_all"}
    assert all(v > 0 for v in found.values())
    rates = measure.rates(device, 0.01)
    assert rates.origin.startswith("measured")
    if device == "cuda":
        assert all(getattr(rates, k) != getattr(Rates(), k) for k in ("matmul", "attention", "attention_backward", "memory"))
    plan = graphopt.stream_plan(TinyDiT(), tokens=64, rates=rates)
    assert "measured here" in str(plan)


def test_what_fails_beside_others_is_told() -> None:
    bench = measure.Bench(CpuLink(), elements=64, kernel="torch")

    def fails(layer):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        bench.together([bench.upload, fails], 0.01)
    before = {x: bench.states[x].exp_avg.clone() for x in bench.store.layers}
    assert bench.adamw(bench.store.layers[0]) == 26 * 64
    assert all(torch.equal(before[x], bench.states[x].exp_avg) for x in bench.store.layers), "zero gradients, no change"


@pytest.mark.parametrize("steps", [1, 4])
def test_the_benchmark_of_steps_takes_few_of_them(steps, tmp_path) -> None:
    """One step had nothing to take the median of; every order has threads of its own, and its row says the machine."""
    script = Path(__file__).parents[3] / "benchmarks" / "stream_step.py"
    subprocess.run([sys.executable, script, "--width", "tiny", "--layers", "3", "--grids", "1x2x2", "--resident", "1", "--steps", str(steps),
                    "--updates", "priority,serial,deferred@1/2", "--rates-seconds", "0.01", "--compiler", "eager", "--out", tmp_path],
                   check=True, capture_output=True)
    rows = json.loads((tmp_path / "stream.json").read_text())["rows"]
    assert [(r["system"], r["update"]) for r in rows] == [("graphopt", "priority"), ("serial", "deferred"), ("graphopt", "deferred")]
    assert [r["threads"] for r in rows][2] == 1
    for r in rows:
        assert r["steps"] == max(1, steps - 2)
        assert r["cores"] == len(os.sched_getaffinity(0))
        assert 1 <= r["physical_cores"] <= r["cores"]
        assert min(r["step_ms"], r["resident_ms"], r["d2h_after_gb_per_s"], r["h2d_after_gb_per_s"], *r["rates_gb_per_s"].values()) > 0
