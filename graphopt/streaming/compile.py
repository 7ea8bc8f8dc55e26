"""The streaming half of the backend: a Dynamo graph with handles in, a program out.

    graph -> checkpoints of layers in line -> segments by layer -> classes of equal segments, each rewritten and
    compiled once (without gradients, and with them) -> schedule graph, checked -> program

Everything is compiled inside the backend call, under Dynamo's own fake mode: what a class specialises on becomes a
guard of the frame, and a miss compiles the graph again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx
from torch.fx import Node

from graphopt import segments
from graphopt.errors import StreamError
from graphopt.passes import partition, pipeline, stream_classes
from graphopt.passes.partition import Segment, example
from graphopt.passes.record import PassRecord
from graphopt.segments import Step
from graphopt.streaming import handles
from graphopt.streaming.engine import Engine
from graphopt.streaming.program import LayerCall, Program
from graphopt.streaming.store import Entry, HostLayer

Compile = Callable[..., Callable[..., Any]]  # graph, inputs, whether gradients land in slabs
Rewrite = Callable[[fx.GraphModule], tuple[fx.GraphModule, list[PassRecord], Compile]]


@dataclass(eq=False)
class Built:
    """One class of equal layers: its callables, and the first member."""

    forward: Callable[..., Any]
    train: Callable[..., Any] | None
    outputs: tuple[bool, ...]
    random: bool
    layer: str
    records: list[PassRecord]


# classes of graphs with fixed shapes, for every model of the process: such a graph leaves no guard that a later frame
# would miss; kept as long as a program runs them
_shared: WeakValueDictionary[str, Built] = WeakValueDictionary()


@dataclass
class Result:
    """What the backend gets: the program, the records of its passes, and a line for the report."""

    program: Program
    records: list[PassRecord]
    notes: list[str]


def engine_of(inputs: list[Any]) -> Engine | None:
    """The runtime behind a graph's inputs; None if none of them is a handle."""
    engines = {id(e.layer.engine): e.layer.engine for e in map(handles.entry_of, inputs) if e is not None}
    if len(engines) > 1:
        raise StreamError("one graph uses two streamed models", remedy="compile each of them by itself")
    return next(iter(engines.values()), None)


def compile_streamed(
    gm: fx.GraphModule, inputs: list[Any], engine: Engine, rewrite: Rewrite, frame: str, settings: str
) -> Result:
    """Compile one Dynamo graph of a streamed model.

    rewrite: runs the passes on a segment; gives the rewritten one, what was done, and what compiles it.
    frame: the frame's number.  settings: what else a compiled class depends on (the options of the backend).
    """
    for entry in filter(None, map(handles.member_of, inputs)):
        handles.check_untouched(entry)
    twin = pipeline.copy(gm)
    nodes = twin.graph.find_nodes(op="placeholder")
    entries = {n: e for n, e in zip(nodes, map(handles.member_of, inputs)) if e is not None}
    partition.inline_checkpoints(twin, lambda n: entries[n].layer.fqn if n in entries else None)
    read = {e.layer.fqn for e in entries.values()}
    parts = partition.partition(twin, engine.layers, next(iter(read)) if len(read) == 1 else None)
    _own(parts, entries)
    number = segments.numbers(twin, parts)
    real = dict(zip(nodes, inputs))
    builder = _Builder(twin, engine, entries, real, rewrite, settings)
    steps = [builder.step(s, number) for s in parts]
    segments.mark_dead(steps, segments.results(twin, number))
    calls = [s.call for s in steps if isinstance(s.call, LayerCall)]
    program = Program(
        engine, steps,
        constants={number[n]: partition.attribute(twin, str(n.target)) for n in number if n.op == "get_attr"},
        results=segments.results(twin, number), size=len(number), anchors=tuple(builder.anchors),
        classes=tuple(builder.layers.values()),
    )
    program.plan()
    classes = Counter(id(c.forward) for c in calls)
    note = f"streamed: {len(calls)} calls of layers in {len(classes)} classes, {len(engine.ring.slots)} slots"
    notes = [note]
    split = _split(entries, engine, frame)
    if split:
        notes.append(f"{split[0]} is in more than one graph, so its weights are uploaded for each of them; a graph "
                     "break inside it? (TORCH_LOGS=graph_breaks)")
    return Result(program, builder.records, notes)


def _own(parts: list[Segment], entries: dict[Node, Entry]) -> None:
    """Check that every layer's weights are read inside the layer."""
    for segment in parts:
        for node in segment.inputs:
            entry = entries.get(node)
            if entry is None:
                continue
            if segment.layer != entry.layer.fqn:
                raise StreamError(
                    f"{entry.fqn} is read outside its layer, by {segment.layer or 'the code between layers'}",
                    where=segment.where,
                    remedy=f"keep it resident: graphopt.stream(..., resident=['{entry.layer.fqn}'])",
                )
            if entry.handle.requires_grad and not entry.trained:
                raise StreamError(f"{entry.fqn} was frozen when the model was streamed and is trained now",
                                  remedy="set requires_grad before graphopt.stream")
def _split(entries: dict[Node, Entry], engine: Engine, frame: str) -> list[str]:
    """Layers that are in another frame's graph too: a graph break inside them, or a part compiled by itself."""
    split = []
    for layer in engine.store.layers:
        read = {e.name for n, e in entries.items() if e.layer is layer and n.users}
        if read:
            frames = engine.frames.setdefault(layer.fqn, {})
            frames[frame] = frames.get(frame, set()) | read
            if len(frames) > 1 and len(set().union(*frames.values())) > min(map(len, frames.values())):
                split.append(layer.fqn)
    return split


class _Builder:
    """Compiles segments, equal ones once."""

    def __init__(
        self, gm: fx.GraphModule, engine: Engine, entries: dict[Node, Entry], real: dict[Node, Any],
        rewrite: Rewrite, settings: str,
    ) -> None:
        self.gm, self.engine, self.entries, self.real = gm, engine, entries, real
        self.rewrite, self.settings = rewrite, settings
        self.glued: dict[str, Callable[..., Any]] = {}
        self.layers: dict[str, Built] = {}
        self.records: list[PassRecord] = []
        self.calls = 0
        self.anchors: list[int] = []

    def step(self, segment: Segment, number: dict[Node, int]) -> Step:
        """One segment, compiled."""
        sub = partition.extract(self.gm, segment)
        outputs = tuple(number[n] for n in segment.outputs)
        weights = [n for n in segment.inputs if n in self.entries]
        if not weights:
            return Step(self.glue(segment, sub), tuple(number[n] for n in segment.inputs), outputs)
        values = [n for n in segment.inputs if n not in self.entries]
        call = self.layer(segment, sub, values)
        self.anchors.append(number[weights[0]])
        return Step(call, tuple(number[n] for n in values), outputs)

    def glue(self, segment: Segment, sub: fx.GraphModule) -> Callable[..., Any]:
        """Code between layers; what holds no tensor operation runs as it is."""
        if all(segments.is_trivial(n) for n in segment.nodes):
            return sub.forward
        key = "glue " + stream_classes.structural_hash(sub, lambda i: self._identity(segment.inputs[i]))
        if key not in self.glued:
            rewritten, records, compile_one = self.rewrite(sub)
            self.records += records
            self.glued[key] = compile_one(
                rewritten, [self.real.get(n, segments.fresh(example(n))) for n in segment.inputs])
        return self.glued[key]

    def _identity(self, node: Node) -> object:
        # two pieces of glue that read different parameters of the model are not one class: a compiler may bake them in
        return node.name if node in self.real else None

    def layer(self, segment: Segment, sub: fx.GraphModule, values: list[Node]) -> LayerCall:
        """One call of a layer."""
        layer: HostLayer = self.engine.layers[segment.layer]  # type: ignore[index]
        place = {e: i for i, e in enumerate(layer.entries)}
        arguments = tuple(
            ("weight", place[self.entries[n]]) if n in self.entries else ("value", values.index(n))
            for n in segment.inputs)
        random = stream_classes.is_random(sub)
        key = stream_classes.structural_hash(
            sub, lambda i: (layer.entries[arguments[i][1]].key, layer.entries[arguments[i][1]].handle.requires_grad)
            if arguments[i][0] == "weight" else "value")
        built = self._class(key, segment, sub, layer, arguments, random)
        self.calls += 1
        grads = tuple(segments.carries(example(n)) for n in values)
        return LayerCall(self.calls - 1, layer, built.forward, built.train, arguments, grads, built.outputs,
                         built.random, segment.where)

    def _class(
        self, key: str, segment: Segment, sub: fx.GraphModule, layer: HostLayer, arguments: tuple[tuple[str, int], ...],
        random: bool,
    ) -> Built:
        """The class of a layer: of this graph, of another model with the same settings, or compiled now."""
        built = self.layers.get(key)
        fixed = stream_classes.has_fixed_shapes(sub)
        if built is None and fixed:
            built = _shared.get(self.settings + key)
        if built is None:
            built = self._build(segment, sub, layer, arguments, random)
            self.records += built.records
            if fixed:
                _shared[self.settings + key] = built
        else:
            self.records += [segments.renamed(r, built.layer, layer.fqn) for r in built.records]
        self.layers[key] = built
        return built

    def _build(
        self, segment: Segment, sub: fx.GraphModule, layer: HostLayer, arguments: tuple[tuple[str, int], ...],
        random: bool,
    ) -> Built:
        rewritten, records, compile_one = self.rewrite(sub)
        outputs = tuple(segments.carries(example(n)) for n in segment.outputs)

        def fakes(grad: bool) -> list[Any]:
            made = []
            for node, (kind, i) in zip(segment.inputs, arguments):
                if kind == "weight":
                    e = layer.entries[i]
                    made.append(segments.fake(example(node), e.shape, e.stride, e.dtype, e.handle.requires_grad))
                else:
                    made.append(segments.fresh(example(node), grad))
            return made

        train = None
        if torch.is_grad_enabled() and any(outputs):
            train = compile_one(rewritten, fakes(True), lands=True)
        if train is not None and random:
            forward = train  # the same kernels, so that the recomputation draws the same numbers
        else:
            with torch.no_grad():
                forward = compile_one(pipeline.copy(rewritten), fakes(False))
        return Built(forward, train, outputs, random, layer.fqn, records)
