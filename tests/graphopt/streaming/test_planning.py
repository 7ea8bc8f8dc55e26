"""The plan's bytes against what a run holds and moves, and its times against the formula."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from resident import OPTIONS, train
from tiny_dit import TinyDiT, inputs

import graphopt
from graphopt.errors import ConfigError
from graphopt.schedule.stream_plan import BESIDE, WORKSPACE_BYTES, Rates
from graphopt.streaming import attach
from graphopt.streaming.memory import PAGE


@pytest.mark.parametrize("update", ["deferred", "priority"])
@pytest.mark.parametrize("slots", [2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 4))])
def test_bytes_are_those_of_a_run(slots: int, update: str) -> None:
    model = TinyDiT(layers=6, D=64).bfloat16()
    plan = graphopt.stream_plan(model, tokens=12, slots=slots, update=update, ema=0.9, accumulate=2)
    graphopt.stream(model, "cpu", slots=slots)
    opt = graphopt.HostAdamW(model.parameters(), update=update, ema=0.9, accumulate=2)
    engine = attach.engine_of(model)
    step = torch.compile(model, backend="graphopt", options=OPTIONS)
    x = tuple(v.bfloat16() for v in inputs())
    train(step, opt, x, steps=2, micro=2)
    up, down = engine.ring.uploaded_bytes, engine.gradients.downloaded_bytes
    train(step, opt, x, steps=1, micro=2)
    opt.flush()
    layer = engine.store.layers[0]
    kept = min(slots, 6) * layer.nbytes
    # the second pass of two begins where the first ended: the ring still holds the first layers
    assert engine.ring.uploaded_bytes - up == pytest.approx(2 * plan.uploaded - kept, rel=0.02)
    assert engine.gradients.downloaded_bytes - down == 2 * plan.downloaded
    assert plan.device["slots"] == engine.ring.nbytes
    assert plan.device["slabs"] == engine.gradients.nbytes
    buffers = 6 * 7 + 1
    assert plan.host_bytes <= engine.store.arena.nbytes <= plan.host_bytes + buffers * PAGE
    again = graphopt.stream_plan(model, tokens=12, slots=slots, update=update, ema=0.9, accumulate=2)
    assert (again.host, again.device, again.uploaded) == (plan.host, plan.device, plan.uploaded)


def test_activations() -> None:
    model = TinyDiT(layers=6, D=64).bfloat16()
    one = graphopt.stream_plan(model, tokens=1000, resident=1)
    assert one.activations["inputs of layers"] == 6 * 1000 * 64 * 2
    more = graphopt.stream_plan(model, tokens=1000, resident=1, micro=4)
    assert more.activations["inputs of layers"] == one.activations["inputs of layers"]
    assert more.activations["one layer"] * 4 == one.activations["one layer"]
    assert more.uploaded == one.uploaded, "micro-batches cross the link together"
    assert more.downloaded == one.downloaded, "and their gradients come down together"
    assert one.peak_bytes > one.device_bytes - one.device["resident gradients"]


def test_graphs_take_memory_of_their_own() -> None:
    model = TinyDiT(layers=6, D=64).bfloat16()
    plain, more = (graphopt.stream_plan(model, tokens=1000, graphs=g) for g in (False, True))
    assert graphopt.stream_plan(model, tokens=1000).activations == plain.activations
    assert more.peak_bytes - plain.peak_bytes == more.activations["graphs"] > 7 * 1000 * 64 * 2
    graphopt.stream(model, "cpu", graphs="on")
    assert graphopt.stream_plan(model, tokens=1000).activations == more.activations
    attach.engine_of(model).replays.set("off")
    assert graphopt.stream_plan(model, tokens=1000).activations == plain.activations


def test_times() -> None:
    model = TinyDiT(layers=8, D=64)
    rates = Rates(h2d=1e9, d2h=1e9, adamw=1e9, matmul=1e12, attention=1e12)
    for update in ("deferred", "priority", "in_backward"):
        plan = graphopt.stream_plan(model, tokens=4096, slots=3, update=update, rates=rates)
        assert plan.step_s >= plan.bound.seconds * 0.999
        assert plan.step_s <= 1.3 * plan.bound.seconds
        assert plan.timeline.overlaps() == []
        assert "bound" in str(plan)
    slow = graphopt.stream_plan(model, tokens=4096, slots=3, rates=Rates(h2d=1e6, d2h=1e9, adamw=1e9, matmul=1e12, attention=1e12))
    assert "upload" in slow.bound.binds
    assert slow.slots_advised == 9


def test_a_published_size_without_memory() -> None:
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel(num_layers=40).bfloat16()
    plan = graphopt.stream_plan(model, tokens=32760)
    assert plan.layers == 40
    assert plan.classes == {"blocks": 40}
    assert 160e9 < plan.host_bytes < 200e9, "14 bytes a parameter of 14 B"
    assert plan.device_bytes < 7e9, "two layers, two slabs, and what stays with its state"


WIDTHS = {"1.3b": dict(num_attention_heads=12, attention_head_dim=128, ffn_dim=8960),
          "14b": dict(num_attention_heads=40, attention_head_dim=128, ffn_dim=13824)}


@pytest.mark.parametrize("width", WIDTHS)
def test_steps_and_peaks_of_an_h200_are_as_planned(width: str) -> None:
    """Peaks within 2 %, steps within 7 %; in_backward is not predicted that well.

    Rows of 32 cores by the rates that are built in, rows of fewer by those of their own host, measured in their run.
    """
    from diffusers import WanTransformer3DModel

    text = (Path(__file__).parents[3] / "benchmarks" / "results" / "h200" / "stream.json").read_text()
    rows = [r for r in json.loads(text)["rows"] if r.get("width") == width and r["system"] in ("graphopt", "serial")]
    with torch.device("meta"):
        model = WanTransformer3DModel(num_layers=rows[0]["layers"], **WIDTHS[width]).bfloat16()
    steps = 0
    for r in rows:
        rates, alone = Rates(), r.get("rates_gb_per_s")
        if alone:
            rates = Rates(h2d=1e9 * alone["h2d"], d2h=1e9 * alone["d2h"], adamw=1e9 * alone["adamw_pool"])
        plan = graphopt.stream_plan(model, r["tokens"], slots=r["slots"], resident=r["resident"], update=r["update"],
                                    graphs=bool(r["graphs"]), rates=rates)
        short = r["update"] == "in_backward" and r["tokens"] < 20000
        # these steps came after graphs in one process: the workspaces of the stream that recorded were still there
        left = WORKSPACE_BYTES if short else 0
        assert (plan.peak_bytes + left) / 2**30 == pytest.approx(r["peak_gib"], rel=0.02), r
        if r.get("step_ms") and r["system"] == "graphopt" and not r["graphs"] and not short:
            assert alone or r["cores"] == 32, r
            assert 1e3 * plan.step_s == pytest.approx(r["step_ms"], rel=0.07), r
            steps += 1
    assert steps == {"1.3b": 15, "14b": 0}[width]


def test_what_is_advised_to_stay() -> None:
    """A slow optimizer asks for more layers on the device in the order that lets it work all step long, up to a quarter."""
    model = TinyDiT(layers=16, D=64)
    fast = Rates(h2d=1e12, d2h=1e12, adamw=1e12, matmul=1e12, attention=1e12)
    plan = lambda **given: graphopt.stream_plan(model, 4096, update="priority", **given)
    free = plan(rates=fast, resident=0)
    assert free.resident_advised == 1
    work, room = free.bound.step["optimizer"] * fast.adamw, free.bound.forward["compute"] + free.bound.backward["compute"]
    # at 0.6 a quarter of the layers is not enough: what is left is that the turn waits for one update, longer than a layer
    for part, advised in ((1.05, 1), (0.96, 2), (0.9, 3), (0.84, 4), (0.6, 2)):
        slow = replace(fast, adamw=part * work / room / BESIDE)
        assert plan(rates=slow, resident=0).resident_advised == advised, part
        assert plan(rates=slow, resident=3).resident_advised == advised, "what stays now is no part of the answer"
    assert graphopt.stream_plan(model, 4096, rates=replace(fast, adamw=0.9 * work / room / BESIDE)).resident_advised == 1


def test_a_deferred_update_begins_when_the_host_calls_step() -> None:
    """The launches are ahead of the device: what has landed by then is updated under the end of the backward."""
    plan = graphopt.stream_plan(TinyDiT(layers=8, D=64), 200_000, slots=3, rates=Rates(matmul=1e12, attention=1e12))
    step = next(t.name for t in plan.timeline.tasks if t.stream == "launch")
    last = max(plan.timeline.end[t.name] for t in plan.timeline.tasks if t.kind == "backward")
    first = min(plan.timeline.start[t.name] for t in plan.timeline.tasks if t.stream == "cpu")
    assert plan.timeline.end[step] <= first < plan.timeline.end[step] + 0.1 * last
    assert sum(t.stream == "launch" for t in plan.timeline.tasks) == 4, "one a step"
    ahead = [t for t in plan.timeline.tasks if t.stream == "cpu" and "0" in t.label]
    assert ahead
    assert graphopt.stream_plan(TinyDiT(layers=8, D=64), 64, update="priority").timeline.busy("launch") == 0


def test_bad_values() -> None:
    for bad in (dict(tokens=0), dict(tokens=1, slots=0), dict(tokens=1, update="soon")):
        with pytest.raises(ConfigError):
            graphopt.stream_plan(TinyDiT(), **bad)
