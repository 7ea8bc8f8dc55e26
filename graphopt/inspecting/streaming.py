"""The schedule a captured model would be streamed by: from the order its graph calls the layers in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from graphopt.errors import ConfigError, GraphoptError
from graphopt.passes import partition, pipeline, stream_check, stream_graph
from graphopt.passes.partition import example
from graphopt.schedule import stream_timeline as pictures
from graphopt.streaming import attach
from graphopt.streaming.planning import STEPS, StreamPlan, stream_plan

SETTINGS = ("slots", "resident", "layers", "update", "ema", "accumulate", "tokens", "rates")


@dataclass(frozen=True)
class Schedule:
    """A streamed step, planned.  graph: the schedule, an FX graph; calls: the layers in the order they are called."""

    plan: StreamPlan
    graph: fx.Graph
    calls: tuple[str, ...]

    @property
    def text(self) -> str:
        """One line per node of one step: its stream, what it does, what it waits for."""
        return stream_graph.describe(self.graph)

    def to_svg(self) -> str:
        """One simulated step in a steady state: a row per stream and one for the CPU."""
        last = {n.name for n in self.plan.schedule.nodes if n.kwargs.get("step") == STEPS - 2}
        line = self.plan.timeline
        spans = [s for t, s in zip(line.tasks, pictures.of_simulation(line, keep_empty=True)) if t.name in last]
        return pictures.to_svg([s for s in spans if s.end > s.start])


def planned(model: Any, graphs: list[fx.GraphModule], settings: Mapping[str, Any]) -> Schedule:
    """Plan the streaming of a captured model.

    settings: of `graphopt.stream`, `HostAdamW` and `stream_plan` (slots, resident, layers, update, ema, accumulate,
    rates); tokens are counted from the graph if they are not among them.
    Raises ConfigError for settings that are not known, StreamError where the model cannot be streamed.
    """
    unknown = [k for k in settings if k not in SETTINGS]
    if unknown:
        raise ConfigError(f"stream={{{unknown[0]!r}: ..}} is unknown", remedy=f"known are {', '.join(SETTINGS)}")
    if not isinstance(model, nn.Module):
        raise ConfigError("a function has no layers to stream", remedy="inspect the model")
    layers = {x.fqn for x in attach.plan(model, settings.get("layers"), settings.get("resident", "auto"))}
    calls: list[str] = []
    tokens = 0
    for gm in graphs:
        found, most = _calls(gm, layers)
        calls += found
        tokens = max(tokens, most)
    if not calls:
        raise GraphoptError("the captured graphs call none of the layers", remedy="pass stream={'layers': [..]}")
    options = {"tokens": tokens, **settings, "order": calls}
    plan = stream_plan(model, **options)
    one = stream_graph.build(plan.calls, plan.slots, plan.update)
    stream_check.check(one)
    return Schedule(plan, one, tuple(calls))


def _calls(gm: fx.GraphModule, layers: set[str]) -> tuple[list[str], int]:
    """The layers a graph calls, in order, and the most rows of a tensor that enters one."""
    twin = pipeline.copy(gm)
    parameters = {n for n in twin.graph.find_nodes(op="placeholder") if isinstance(example(n), nn.Parameter)}
    names = {"".join(f"_modules_{part}" for part in layer.split(".")) + "_": layer for layer in layers}

    def layer_at(node: Node) -> str | None:
        # Dynamo names an input after its place: l_self_modules_blocks_modules_0_parameters_..; "" for no layer's weight
        return next((v for k, v in names.items() if k in node.name), "") if node in parameters else None

    partition.inline_checkpoints(twin, layer_at)
    calls, most = [], 0
    for segment in partition.partition(twin, layers):
        if segment.layer is None:
            continue
        calls.append(segment.layer)
        for node in segment.inputs:
            value = example(node)
            if isinstance(value, torch.Tensor) and value.dim() >= 3 and node not in parameters:
                rows = value.numel() // max(1, value.shape[-1])
                most = max(most, int(rows))
    return calls, most
