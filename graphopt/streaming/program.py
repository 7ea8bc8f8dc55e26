"""A compiled graph of a streamed model: its segments in order, and one execution of them.

Glue runs as compiled, under torch's own autograd.  Each call of a layer is one autograd node: its forward runs without
gradients from a slot of the ring, its backward runs the layer again with gradients and lands them.  Autograd adds up
the gradients of inputs that several layers share, and may skip or repeat a backward as it does for any other node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from graphopt import _compat_capture
from graphopt.errors import StreamError
from graphopt.passes import stream_check, stream_graph
from graphopt.segments import Step
from graphopt.streaming import lockstep
from graphopt.streaming.engine import Engine, JointWalk, Walk
from graphopt.streaming.handles import member_of
from graphopt.streaming.replay import copied
from graphopt.streaming.ring import casts_not_kept
from graphopt.streaming.store import Entry, HostLayer


@dataclass(eq=False)
class LayerCall:
    """One call of a layer in the graph.

    forward: compiled without gradients; train: compiled with them (None where the graph never trains).  arguments: for
    each argument of both, a position among the layer's entries (weight) or among the call's values.  grads: for each
    value, whether it needs a gradient.  outputs: for each output, whether it carries one.
    """

    index: int
    layer: HostLayer
    forward: Callable[..., Any]
    train: Callable[..., Any] | None
    arguments: tuple[tuple[str, int], ...]
    grads: tuple[bool, ...]
    outputs: tuple[bool, ...]
    random: bool
    where: str | None

    @property
    def entries(self) -> list[Entry]:
        """The entries this call reads, in argument order."""
        return [self.layer.entries[i] for kind, i in self.arguments if kind == "weight"]

    def bind(self, weights: Sequence[torch.Tensor], values: Sequence[Any]) -> list[Any]:
        """The arguments of `forward` and `train`."""
        return [weights[i] if kind == "weight" else values[i] for kind, i in self.arguments]


@dataclass
class Program:
    """The segments of one graph.  Values are numbered; the first ones are the graph's arguments."""

    engine: Engine
    steps: list[Step]
    constants: dict[int, Any]
    results: tuple[Any, ...]  # structure of the output: a number stands for a value
    size: int
    anchors: tuple[int, ...]  # for each call of a layer, an argument that is one of its handles
    classes: tuple[Any, ...] = ()  # keeps the compiled classes for other models as long as this program lives
    schedule: fx.Graph = field(default_factory=fx.Graph)
    forward_nodes: list[Any] = field(default_factory=list)
    backward_nodes: list[Any] = field(default_factory=list)
    planned: int = 0  # slots the schedule was made for
    bound: dict[tuple[HostLayer, ...], Program] = field(default_factory=dict)
    joint: dict[Any, tuple[list[Any], list[Any]]] = field(default_factory=dict)  # phases of layer-major micro-batches

    @property
    def calls(self) -> list[LayerCall]:
        """Calls of layers, in order."""
        return [s.call for s in self.steps if isinstance(s.call, LayerCall)]

    def plan(self) -> None:
        """Make the schedule for the engine's ring and the optimizer's order, and prove it over two steps."""
        self.schedule, (self.forward_nodes, self.backward_nodes) = self.make_schedule(1)
        self.planned = len(self.engine.ring.slots)

    def make_schedule(self, micro: int) -> tuple[fx.Graph, tuple[list[Any], list[Any]]]:
        """The schedule of so many micro-batches, layer-major, and its two phases."""
        planned = [stream_graph.Call(c.layer.fqn, any(e.trained for e in c.entries), c.train is not None,
                                     c.layer.resident, gathered=k > 0)
                   for c in self.calls for k in range(micro)]
        optimizer = self.engine.optimizer() if self.engine.optimizer else None
        settings: dict[str, Any] = {"slots": len(self.engine.ring.slots), "train": any(c.backward for c in planned),
                                    "update": "deferred" if optimizer is None else optimizer.update}
        stream_check.check(stream_graph.build(planned, steps=2, **settings))
        schedule = stream_graph.build(planned, **settings)
        return schedule, stream_graph.phases(schedule)

    def walks(self) -> tuple[Walk, Walk]:
        """Places at the start of the schedule's two phases; micro-batches that take turns share them."""
        place = lockstep.current()
        if place is None:
            return Walk(self.forward_nodes), Walk(self.backward_nodes)
        group, member = place
        order = tuple(c.layer.fqn for c in self.calls)
        if order not in group.walks:
            optimizer = self.engine.optimizer() if self.engine.optimizer else None
            key = group.size, len(self.engine.ring.slots), optimizer and optimizer.update
            if key not in self.joint:
                self.joint[key] = self.make_schedule(group.size)[1]
            group.walks[order] = [JointWalk(nodes, group.size) for nodes in self.joint[key]]
        forward, backward = group.walks[order]
        return forward.of(member), backward.of(member)

    def bind(self, layers: tuple[HostLayer, ...]) -> Program:
        """This program for other layers of the same model.

        torch runs code compiled for one module for every module like it: a block that is compiled by itself is compiled
        once for all of them, and the handles it is called with tell which one it is.
        """
        if layers not in self.bound:
            for call, layer in zip(self.calls, layers):
                places = [i for kind, i in call.arguments if kind == "weight"]
                if layer.engine is not self.engine or any(
                    i >= len(layer.entries) or layer.entries[i].key != call.layer.entries[i].key for i in places
                ):
                    raise StreamError(f"code compiled for {call.layer.fqn} was called with {layer.fqn}",
                                      where=call.where, remedy="call torch._dynamo.reset()")
            of = iter(layers)
            steps = [replace(s, call=replace(s.call, layer=next(of))) if isinstance(s.call, LayerCall) else s
                     for s in self.steps]
            self.bound[layers] = replace(self, steps=steps, bound={}, joint={})
            self.bound[layers].plan()
        return self.bound[layers]

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        layers = tuple(member_of(args[i]).layer for i in self.anchors)  # type: ignore[union-attr]
        if any(c.layer is not x for c, x in zip(self.calls, layers)):
            return self.bind(layers)(*args)
        engine = self.engine
        engine.begin(self)
        if self.planned != len(engine.ring.slots):
            self.plan()
        values: list[Any] = [None] * self.size
        values[:len(args)] = args
        for i, constant in self.constants.items():
            values[i] = constant
        forward, backward = self.walks()
        for step in self.steps:
            inputs = [values[i] for i in step.inputs]
            if isinstance(step.call, LayerCall):
                out = run_layer(engine, step.call, forward, backward, inputs)
                lockstep.turn_over()
            else:
                with engine.span(None, "glue"):
                    out = step.call(*inputs)
            del inputs
            for i, value in zip(step.outputs, out):
                values[i] = value
            del out
            for i in step.dead:
                values[i] = None
        return [values[r] if isinstance(r, int) else r[0] for r in self.results]


def run_layer(engine: Engine, call: LayerCall, forward: Walk, backward: Walk, values: list[Any]) -> Sequence[Any]:
    """One call of a layer, with an autograd node if anything needs a gradient."""
    trains = torch.is_grad_enabled() and call.train is not None and (
        any(e.trained and e.handle.requires_grad for e in call.entries)
        or any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
    )
    if not trains:
        return _forward(engine, call, forward, values, keep_random=False)[0]
    ticket = engine.ticket(call.layer)
    return _Layer.apply(engine, call, forward, backward, ticket, engine.spark, *values)  # type: ignore[no-untyped-call]


def _forward(
    engine: Engine, call: LayerCall, walk: Walk, values: Sequence[Any], keep_random: bool
) -> tuple[Sequence[Any], Any]:
    state = _random_state(engine.link.device) if keep_random else None
    walk.until(engine, call.index)
    with engine.weights(call.layer) as (slot, weights), torch.no_grad(), engine.span(call.layer, "forward"):
        out = _replayed_forward(engine, call, weights, values)
        if out is None:
            with casts_not_kept(engine.link.device):
                out = call.forward(*call.bind(weights, values))
    engine.log("compute", call.layer, slot, "forward")
    walk.after(engine)
    return out, state


class _Layer(torch.autograd.Function):
    """A layer whose weights are elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, engine: Engine, call: LayerCall, forward: Walk, backward: Walk, ticket: Any, spark: Any, *values: Any
    ) -> Any:
        out, state = _forward(engine, call, forward, values, keep_random=call.random)
        ctx.save_for_backward(*(v for v in values if isinstance(v, torch.Tensor)))
        ctx.others = [v for v in values if not isinstance(v, torch.Tensor)]
        ctx.tensors = [isinstance(v, torch.Tensor) for v in values]
        ctx.engine, ctx.call, ctx.walk, ctx.ticket, ctx.state = engine, call, backward, ticket, state
        ctx.autocast = _autocast_state(engine.link.device)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(o for o, carries in zip(out, call.outputs) if isinstance(o, torch.Tensor) and not carries))
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        call: LayerCall = ctx.call
        if torch.is_grad_enabled():
            raise StreamError("a streamed layer cannot be differentiated twice (create_graph=True)", where=call.where,
                              remedy="keep the layer resident: graphopt.stream(..., resident=[...])")
        saved, others = iter(ctx.saved_tensors), iter(ctx.others)
        values = [next(saved) if tensor else next(others) for tensor in ctx.tensors]
        # torch.autograd.grad(loss, x) and backward(inputs=...) leave the weights out: so do they the spark, the first
        # tensor of this node
        lands = _compat_capture.runs_in_this_backward(ctx.next_functions[0][0])
        found = _backward(ctx.engine, call, ctx.walk, ctx.ticket, values, grads, ctx.state, ctx.autocast, lands)
        return (None, None, None, None, None, None, *found)


def _backward(
    engine: Engine, call: LayerCall, walk: Walk, ticket: Any, values: list[Any], grads: Sequence[torch.Tensor | None],
    state: Any, autocast: Any, lands: bool,
) -> list[torch.Tensor | None]:
    engine.check_backward(call.layer, ticket, lands)
    walk.until(engine, call.index)
    with (
        engine.weights(call.layer) as (slot, views), engine.span(call.layer, "backward"),
        engine.landing(call.layer, call.arguments) as slab,
    ):
        found = _replayed_backward(engine, call, views, slab, values, grads, state, autocast)
        if found is None:
            found = _differentiate(engine, call, views, values, grads, state, autocast)
        if lands:
            landed = zip(call.layer.entries, found[len(values):])
            engine.land(call.layer, [(e, g) for e, g in landed if g is not None], ticket)
    engine.log("compute", call.layer, slot, "backward")
    walk.after(engine)
    return found[:len(values)]


def _replayed_forward(
    engine: Engine, call: LayerCall, weights: Sequence[torch.Tensor], values: Sequence[Any]
) -> list[Any] | None:
    """The forward by a recorded graph, if there is one."""
    if call.random:
        return None
    out = engine.replays.run((call.forward, call.arguments), weights, values,
                             lambda given: call.forward(*call.bind(weights, given)))
    return None if out is None else [copied(o) for o in out]


def _replayed_backward(
    engine: Engine, call: LayerCall, weights: Sequence[torch.Tensor], slab: list[torch.Tensor], values: list[Any],
    grads: Sequence[torch.Tensor | None], state: Any, autocast: Any,
) -> list[torch.Tensor | None] | None:
    """`_differentiate` by a recorded graph, if there is one.  Gradients of weights are valid until the next replay.

    slab: where gradients may be written, and so part of what is recorded.
    """
    if call.random or state is not None:
        return None
    n = len(values)
    needed = [isinstance(v, torch.Tensor) and v.requires_grad for v in values]

    def work(given: Sequence[Any]) -> Sequence[Any]:
        inputs = [v.detach().requires_grad_() if r else v for v, r in zip(given, needed)]
        return _differentiate(engine, call, weights, inputs, given[n:], None, autocast)

    trained = tuple(e.trained and e.handle.requires_grad for e in call.layer.entries)
    found = engine.replays.run((call.train, call.arguments, trained), [*weights, *slab], [*values, *grads], work)
    if found is None:
        return None
    kept = len(found) if call.layer.resident else n  # a resident weight keeps its gradient
    return [*map(copied, found[:kept]), *found[kept:]]


def _differentiate(
    engine: Engine, call: LayerCall, views: Sequence[torch.Tensor], values: Sequence[Any],
    grads: Sequence[torch.Tensor | None], state: Any, autocast: Any,
) -> list[torch.Tensor | None]:
    """Gradients of a call's values, then of its layer's weights; None where there is none."""
    weights = [v.detach().requires_grad_(e.trained and e.handle.requires_grad)
               for v, e in zip(views, call.layer.entries)]
    inputs = [v.detach().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v for v in values]
    found = _gradients(engine, call, weights, inputs, grads, state, autocast)
    return [found.get(id(v)) if isinstance(v, torch.Tensor) and v.requires_grad else None for v in (*inputs, *weights)]


def _gradients(
    engine: Engine, call: LayerCall, weights: list[torch.Tensor], inputs: list[Any],
    grads: Sequence[torch.Tensor | None], state: Any, autocast: Any,
) -> dict[int, torch.Tensor | None]:
    """Recompute a layer and differentiate it: gradients by the id of the weight or input."""
    assert call.train is not None
    arguments = call.bind(weights, inputs)
    with torch.enable_grad(), _restored(state, engine.link.device), autocast():
        out = call.train(*arguments)
    pairs = [(o, g) for o, g in zip(out, grads)
             if g is not None and isinstance(o, torch.Tensor) and o.requires_grad]
    wanted = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    if not pairs or not wanted:
        return {}
    result = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    return {id(a): g for a, g in zip(wanted, result)}


def _random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _restored(state: Any, device: torch.device) -> AbstractContextManager[Any]:
    """The random state of the forward, for the time of the recomputation."""
    stack = ExitStack()
    if state is not None:
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], device)
    return stack


def _autocast_state(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The autocast setting of the forward; the backward runs in a thread of its own, which has none."""
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cache = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache)
