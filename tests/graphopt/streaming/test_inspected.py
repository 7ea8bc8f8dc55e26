"""The schedule in `inspect`: made from the order the graph calls the layers in, printed, drawn, on the page."""

from __future__ import annotations

import pytest
import torch
import zoo
from tiny_dit import TinyDiT, inputs

import graphopt
from graphopt.errors import ConfigError
from graphopt.passes import stream_graph


def test_a_zoo_model(tmp_path) -> None:
    model, x = zoo.ZOO["hunyuan_video"].build()
    seen = graphopt.inspect(model, **x, return_dict=False, options={"graphopt.rules": []},
                            stream=dict(slots=2, update="priority", resident=[]))
    plan = seen.schedule.plan
    names = [n for n, _ in model.named_modules()]
    assert set(seen.schedule.calls) <= set(names)
    assert len(seen.schedule.calls) == plan.layers
    assert "prefetch" in seen.schedule.text
    assert "streamed:" in str(seen)
    page = seen.to_html(tmp_path / "p.html")
    assert 'id="streaming"' in page
    bars = 6 * plan.layers - plan.slots  # forward, backward, two uploads less the turn, download, update
    assert page.count("<title>") == 1 + bars
    assert seen.to_dot("schedule").startswith("digraph schedule")


def test_the_order_is_that_of_the_forward() -> None:
    model = TinyDiT(order=[0, 1, 0, 3])
    seen = graphopt.inspect(model, *inputs(B=2, S=6), stream=dict(slots=3, resident=[]))
    assert seen.schedule.calls == ("blocks.0", "blocks.1", "blocks.0", "blocks.3")
    assert seen.schedule.plan.tokens == 12
    done = [n.kwargs["layer"] for n in seen.schedule.graph.nodes if n.target is stream_graph.compute]
    assert done == [*seen.schedule.calls, *reversed(seen.schedule.calls)]


def test_checkpoints_are_seen_through() -> None:
    model = TinyDiT()
    model.checkpoint = True
    seen = graphopt.inspect(model, *inputs(), stream=dict(resident=1))
    assert seen.schedule.calls == tuple(f"blocks.{i}" for i in range(4))
    assert seen.schedule.plan.resident == 1


def test_bad_input() -> None:
    model = TinyDiT()
    with pytest.raises(ConfigError, match="'slot'"):
        graphopt.inspect(model, *inputs(), stream=dict(slot=2))
    with pytest.raises(ConfigError, match="no layers"):
        graphopt.inspect(lambda x: x + 1, torch.ones(2), stream={})
    seen = graphopt.inspect(model, *inputs())
    assert seen.schedule is None
    with pytest.raises(ConfigError, match="no schedule"):
        seen.to_dot("schedule")
    graphopt.stream(model, "cpu", resident=[])
    with pytest.raises(ConfigError, match="before graphopt.stream"):
        graphopt.inspect(model, *inputs())
