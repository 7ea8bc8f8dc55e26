"""The measured rates of a box: every kind is there, and a plan takes them."""

from __future__ import annotations

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
