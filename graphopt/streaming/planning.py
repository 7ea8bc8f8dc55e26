"""`graphopt.stream_plan`: bytes, bound and predicted step of a streamed model, without running it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from graphopt.errors import ConfigError
from graphopt.passes import stream_graph
from graphopt.schedule import stream_plan as costs
from graphopt.schedule.stream_sim import Task, Timeline, simulate
from graphopt.streaming import attach, handles
from graphopt.streaming.optimizer import MODES
from graphopt.streaming.store import HostLayer

STEPS = 4  # simulated; the last one is in a steady state


@dataclass(frozen=True)
class StreamPlan:
    """What `stream_plan` found.  Bytes are exact for the host store and the ring; times are predicted.

    host, device: bytes by part.  activations: on the device at the start of a backward: the inputs that layers keep,
    and what one layer holds (an estimate).  uploaded, downloaded: bytes per step.  bound: the least time of each
    resource.  step_s: a step of the simulated schedule, in a steady state.
    """

    layers: int
    resident: int
    activations: dict[str, int]
    classes: dict[str, int]
    host: dict[str, int]
    device: dict[str, int]
    uploaded: int
    downloaded: int
    bound: costs.Bound
    step_s: float
    update: str
    slots: int
    tokens: int
    slots_advised: int
    resident_advised: int
    rates: costs.Rates
    timeline: Timeline = field(repr=False)
    schedule: fx.Graph = field(repr=False)
    calls: tuple[stream_graph.Call, ...] = field(repr=False)

    @property
    def host_bytes(self) -> int:
        """All of the host's."""
        return sum(self.host.values())

    @property
    def device_bytes(self) -> int:
        """Weights, slots and slabs; not the activations."""
        return sum(self.device.values())

    @property
    def peak_bytes(self) -> int:
        """The device's at the start of a backward, estimated; gradients of resident parameters come later."""
        return self.device_bytes - self.device["resident gradients"] + sum(self.activations.values())

    def __str__(self) -> str:
        gb = lambda parts: ", ".join(f"{k} {v / 1e9:.2f}" for k, v in parts.items())  # noqa: E731
        ms = lambda parts: ", ".join(f"{k} {1e3 * v:.0f}" for k, v in parts.items())  # noqa: E731
        return "\n".join((
            f"{self.layers} layers in {len(self.classes)} families streamed, {self.resident} resident, "
            f"{self.slots} slots, update={self.update!r}, {self.tokens} tokens",
            f"host    {self.host_bytes / 1e9:.2f} GB: {gb(self.host)}",
            f"device  {self.device_bytes / 1e9:.2f} GB without activations: {gb(self.device)}",
            f"        about {self.peak_bytes / 1e9:.2f} GB at the peak: {gb(self.activations)}",
            f"moved   {self.uploaded / 1e9:.2f} GB up, {self.downloaded / 1e9:.2f} GB down a step",
            f"ms      forward: {ms(self.bound.forward)}; backward: {ms(self.bound.backward)}; "
            f"step: {ms(self.bound.step)}",
            f"bound   {1e3 * self.bound.seconds:.0f} ms ({self.bound.binds}); "
            f"predicted step {1e3 * self.step_s:.0f} ms",
            f"advice  {self.slots_advised} slots, first {self.resident_advised} layers resident "
            f"(rates: {self.rates.origin})",
        ))


def stream_plan(
    model: nn.Module, tokens: int, *, slots: int = 2, resident: Any = "auto", update: str = "deferred",
    ema: float | None = None, accumulate: int = 1, rates: costs.Rates | None = None, layers: Any = None,
    order: Sequence[str] | None = None, micro: int = 1, sequence: int | None = None, graphs: bool | None = None,
) -> StreamPlan:
    """Plan the streaming of a model (which may be on meta, and may be streamed already).

    tokens: of one step, batch times sequence.  slots, resident, layers: as for graphopt.stream; update, ema,
    accumulate: as for HostAdamW; not clipped, which has a deferred update wait for the whole backward.  rates: of your
    machine (graphopt.schedule.stream_plan.Rates), each measured alone.  order: names of layers as the forward calls
    them (default: each once, as they stand in the model).  micro: micro-batches that go through the layers together
    (graphopt.layer_major); tokens are those of all.  sequence: tokens that attend to each other (default: those of one
    micro-batch).  graphs: layers are replayed as CUDA graphs, which takes memory of its own (default: as a streamed
    model does now; a model that is not streamed yet: no).
    Raises StreamError where the model cannot be streamed, ConfigError for bad values.
    """
    if update not in MODES or tokens < 1 or slots < 1 or micro < 1:
        raise ConfigError(f"stream_plan: update={update!r}, tokens={tokens}, slots={slots}, micro={micro}",
                          remedy=f"update is one of {MODES}; tokens, slots and micro are at least 1")
    rates = rates or costs.Rates()
    everything = _layers(model, resident, layers)
    plan = [x for x in everything if not x.resident]
    named = {x.fqn: x for x in everything}
    unknown = [n for n in order or () if n not in named]
    if unknown:
        raise ConfigError(f"stream_plan: order names {unknown[0]!r}, which is no layer of the plan",
                          remedy=f"layers are {', '.join(list(named)[:4])}, ..")
    used = [named[n] for n in order] if order else everything
    each = max(1, tokens // micro)
    cost = {x.fqn: _cost(x, each, sequence or each, rates) for x in everything}
    calls = [stream_graph.Call(x.fqn, bool(x.grad_bytes), resident=x.resident, gathered=k > 0)
             for x in used for k in range(micro)]
    schedule = stream_graph.build(calls, slots, update, STEPS)
    line, uploaded, downloaded = _simulate(schedule, cost, rates)
    order_of_costs = _once(used, cost, micro)
    return StreamPlan(
        layers=len(plan), resident=len(everything) - len(plan),
        classes=dict(Counter(x.fqn.rsplit(".", 1)[0] for x in plan)),
        activations=_activations(used, tokens, micro, _replays(model) if graphs is None else graphs),
        host=_host(plan, ema, accumulate), device=_device(model, plan, slots, ema), uploaded=uploaded,
        downloaded=downloaded, bound=costs.bound(order_of_costs, rates, slots, update), step_s=_steady(schedule, line),
        update=update, slots=slots, tokens=tokens, slots_advised=1 + costs.prefetch_distance(order_of_costs, rates),
        resident_advised=costs.resident_layers(order_of_costs, rates, update), rates=rates, timeline=line,
        schedule=schedule, calls=tuple(calls),
    )


def _once(used: list[HostLayer], cost: dict[str, costs.LayerCost], micro: int) -> list[costs.LayerCost]:
    """Costs for the bound: a layer's bytes and update once, however often it is called."""
    found = []
    for i, x in enumerate(used):
        c = cost[x.fqn]
        first = all(y is not x for y in used[:i])
        c = replace(c, forward_s=micro * c.forward_s, backward_s=micro * c.backward_s)
        found.append(c if first else replace(c, grad_bytes=0, adamw_bytes=0))
    return found


def _layers(model: nn.Module, resident: Any, layers: Any) -> list[HostLayer]:
    streamed = [e for e in map(handles.entry_of, model.parameters()) if e is not None]
    if streamed:
        return list(streamed[0].layer.engine.layers.values())
    return attach.plan(model, layers, resident, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _adamw_bytes(layer: HostLayer) -> int:
    return sum(e.numel * (costs.ADAMW_BYTES if e.dtype == torch.bfloat16 else costs.ADAMW_BYTES_FP32)
               for e in layer.trained)


def _cost(layer: HostLayer, tokens: int, sequence: int, rates: costs.Rates) -> costs.LayerCost:
    matrices = [e for e in layer.entries if len(e.shape) >= 2]
    forward = backward = 0.0
    if matrices:
        products = sum(e.numel for e in matrices)
        forward, backward = costs.layer_seconds(products, _width(layer)[0], tokens, sequence, rates)
    if layer.resident:
        return costs.LayerCost(layer.fqn, 0, 0, 0, forward, backward)
    return costs.LayerCost(layer.fqn, layer.nbytes, layer.grad_bytes, _adamw_bytes(layer), forward, backward)


def _simulate(
    schedule: fx.Graph, of: dict[str, costs.LayerCost], rates: costs.Rates
) -> tuple[Timeline, int, int]:
    def nbytes(node: fx.Node) -> int:
        x = of[str(node.kwargs["layer"])]
        return {stream_graph.prefetch: x.weight_bytes, stream_graph.grad_offload: x.grad_bytes}.get(
            node.target, 0)  # type: ignore[arg-type,call-overload]

    def seconds(node: fx.Node) -> float:
        x = of[str(node.kwargs["layer"])]
        if node.target is stream_graph.compute:
            return x.forward_s if node.kwargs["phase"] == "forward" else x.backward_s
        if node.target is stream_graph.optimizer:
            return x.adamw_bytes / (costs.BESIDE * rates.adamw)
        rate = rates.h2d if node.target is stream_graph.prefetch else rates.d2h
        return nbytes(node) / rate

    tasks = _stepped(stream_graph.tasks(schedule, seconds, nbytes), schedule)
    last = {n.name for n in schedule.nodes if n.kwargs.get("step") == STEPS - 1}
    up = sum(t.nbytes for t in tasks if t.stream == "upload" and t.name in last)
    down = sum(t.nbytes for t in tasks if t.stream == "download" and t.name in last)
    return simulate(tasks), up, down


def _stepped(tasks: list[Task], schedule: fx.Graph) -> list[Task]:
    """Deferred updates begin when the host calls `step()`, which is ahead of the device, with what has landed by then.

    The graph has them wait for all gradients of the step, as an update that clips does.
    """
    step = {n.name: n.kwargs["step"] for n in schedule.nodes if n.op == "call_function"}
    label = {t.name: t.label for t in tasks}
    forward: dict[Any, str] = {}  # the last one of each step
    backwards: dict[Any, list[Task]] = {}
    for t in tasks:
        if t.kind == "forward":
            forward[step[t.name]] = t.name
        elif t.kind == "backward":
            backwards.setdefault(step[t.name], []).append(t)
    made: dict[Any, Task] = {}
    out = []
    for t in tasks:
        if t.kind == "optimizer" and any(label[a] != t.label for a in t.after):  # it waits for other layers' gradients
            s = step[t.name]
            if s not in made:
                took = sum(min(b.seconds, costs.LAUNCH_BACKWARD_S) for b in backwards[s])
                made[s] = Task(f"step {s}", "launch", took, (forward[s],), label=f"step {s}", kind="launch")
                out.append(made[s])
            reached = backwards[s][max(0, len(backwards[s]) - 1 - costs.LAYERS_AHEAD)].name
            t = replace(t, after=(*(a for a in t.after if label[a] == t.label), made[s].name, reached))
        out.append(t)
    return out


def _steady(schedule: fx.Graph, line: Timeline) -> float:
    ends = [max(line.end[n.name] for n in schedule.nodes if n.target is stream_graph.compute and n.kwargs["step"] == s)
            for s in (STEPS - 2, STEPS - 1)]
    return ends[1] - ends[0]


def _host(plan: list[HostLayer], ema: float | None, accumulate: int) -> dict[str, int]:
    trained = [x for x in plan if x.trained]
    elements = sum(x.elements for x in trained)
    split = sum(x.elements for x in trained if any(e.dtype == torch.bfloat16 for e in x.trained))
    parts = {"weights": sum(x.nbytes for x in plan), "gradients": sum(x.grad_bytes for x in trained),
             "moments": 8 * elements, "residuals": 2 * split}
    if ema is not None:
        parts["average"] = 4 * elements
    if accumulate > 1:
        parts["accumulated gradients"] = 4 * elements + max((x.grad_bytes for x in trained), default=0)
    return parts


def _replays(model: nn.Module) -> bool:
    """Are a streamed model's layers replayed as graphs at present?"""
    streamed = [e for e in map(handles.entry_of, model.parameters()) if e is not None]
    return bool(streamed) and streamed[0].layer.engine.replays.active


def _activations(used: list[HostLayer], tokens: int, micro: int, graphs: bool) -> dict[str, int]:
    widest = fixed = 0.0
    kept = 0
    for x in used:
        width, inner, size = _width(x)
        kept += tokens * width * size
        one = (costs.HELD_UNITS * width + costs.HELD_INNER_UNITS * inner) * size
        widest, fixed = max(widest, one), max(fixed, costs.GRAPH_UNITS * width * size)
    each = max(1, tokens // micro)
    parts = {"inputs of layers": kept, "one layer": int(each * widest), "workspaces": costs.WORKSPACE_BYTES}
    return parts | ({"graphs": int(each * fixed) + costs.WORKSPACE_BYTES} if graphs else {})


def _width(layer: HostLayer) -> tuple[int, int, int]:
    """The length of a token's vector in a layer, the longest inside it, and bytes per element."""
    matrices = [e for e in layer.entries if len(e.shape) >= 2]
    if not matrices:
        return 0, 0, 0
    # tables are matrices too, and may be kept wider than the products are done in
    largest = max(matrices, key=lambda e: e.numel)
    width = Counter(e.shape[-1] for e in matrices).most_common(1)[0][0]
    return width, max(largest.shape), largest.dtype.itemsize


def _device(model: nn.Module, plan: list[HostLayer], slots: int, ema: float | None) -> dict[str, int]:
    mine = {id(e.handle) for x in plan for e in x.entries}
    rest = [p for p in model.parameters() if id(p) not in mine]
    trained = sum(p.numel() for p in rest if p.requires_grad)
    split = sum(p.numel() for p in rest if p.requires_grad and p.dtype == torch.bfloat16)
    pool: dict[torch.dtype, int] = {}
    for e in (e for x in plan for e in x.entries):
        pool[e.dtype] = max(pool.get(e.dtype, 0), e.numel * e.dtype.itemsize)
    return {
        "slots": slots * max(x.nbytes for x in plan), "slabs": 2 * max(x.grad_bytes for x in plan),
        "resident weights": sum(p.numel() * p.element_size() for p in rest),
        "resident gradients": sum(p.numel() * p.element_size() for p in rest if p.requires_grad),
        "resident state": 8 * trained + 2 * split + (4 * trained if ema is not None else 0),
        "handles": sum(pool.values()),
    }
