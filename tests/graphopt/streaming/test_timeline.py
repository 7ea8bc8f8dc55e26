"""Timelines: what ran, on which track, in an order that the schedule allows."""

from __future__ import annotations

import json

import pytest
import torch
from resident import OPTIONS, train
from tiny_dit import TinyDiT, inputs

import graphopt
from graphopt.errors import StreamError
from graphopt.schedule import stream_timeline as pictures
from graphopt.schedule.stream_timeline import Span
from graphopt.streaming import attach
from graphopt.streaming.link import LateLink


@pytest.mark.parametrize("late", [None, 3])
def test_a_real_step(late, tmp_path) -> None:
    model = graphopt.stream(TinyDiT(), "cpu", resident=[], link=None if late is None else LateLink(late))
    opt = graphopt.HostAdamW(model.parameters(), update="priority")
    step = torch.compile(model, backend="graphopt", options=OPTIONS)
    train(step, opt, inputs(), steps=1)
    opt.flush()
    ring = attach.engine_of(model).ring
    for slot in ring.slots:  # what is counted as uploaded is, so the recording holds none of it
        assert slot.fetch is None or slot.fetch.issued.wait(30)
    before = ring.uploads
    with graphopt.stream_timeline(model) as line:
        with pytest.raises(StreamError, match="being recorded"), graphopt.stream_timeline(model):
            pass
        train(step, opt, inputs(), steps=2)
    names = {f"blocks.{i}" for i in range(4)}
    of = lambda track, kind: [s for s in line.spans if (s.track, s.kind) == (track, kind)]
    for track, kind in (("compute", "forward"), ("compute", "backward"), ("download", "download"), ("cpu", "optimizer")):
        assert len(of(track, kind)) == 8, (track, kind)
        assert {s.name for s in of(track, kind)} == names
    assert len(of("launch", "launch")) == 16
    # an upload that is queued when the recording ends may or may not be in it
    assert ring.uploads - before - 2 <= len(of("upload", "upload")) <= ring.uploads - before
    assert all(s.end >= s.start for s in line.spans)
    for name in names:
        landed = [s.end for s in of("download", "download") if s.name == name]
        updated = [s.start for s in of("cpu", "optimizer") if s.name == name]
        assert all(a <= b for a, b in zip(landed, updated)), "an update reads what has landed"
    trace = json.loads(line.save(tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in trace) == len(line.spans)
    page = line.save(tmp_path / "t.html").read_text()
    assert page.count("<title>") == len(line.spans) + 1
    assert "optimizer" in str(line)
    assert attach.engine_of(model).link.recorder is None


def test_busy_counts_overlaps_once() -> None:
    spans = [Span("cpu", "a", "x", 0.0, 2.0), Span("cpu", "b", "x", 1.0, 3.0), Span("cpu", "c", "y", 5.0, 6.0), Span("up", "d", "x", 0.0, 9.0)]
    assert pictures.busy(spans, "cpu") == 4.0
    assert pictures.busy(spans, "cpu", "y") == 1.0
    assert pictures.summary(spans)[0] == ("cpu", "x", 2, 3.0)
    assert pictures.to_svg([]).startswith("<svg")


def test_a_simulated_schedule_has_the_same_picture() -> None:
    plan = graphopt.stream_plan(TinyDiT(), tokens=64, update="priority")
    spans = pictures.of_simulation(plan.timeline)
    assert {s.track for s in spans} == {"compute", "upload", "download", "cpu"}
    assert {s.kind for s in spans} == {"forward", "backward", "upload", "download", "optimizer"}
    assert pictures.to_svg(spans).count("<title>") == len(spans)
