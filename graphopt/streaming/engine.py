"""The runtime of one streamed model: ring, gradients, updates, and the walk along the schedule.

The schedule says when a prefetch is queued.  What a call of a layer reads is checked again when it runs: a layer that
is not in a slot at its newest version is fetched then (a miss), so an execution that leaves the schedule (two forwards
before one backward, a skipped layer) is slower and not wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from graphopt.codegen import landing
from graphopt.errors import StreamError
from graphopt.passes import stream_graph
from graphopt.streaming import lockstep
from graphopt.streaming.gradients import Gradients
from graphopt.streaming.link import Link
from graphopt.streaming.replay import Replays
from graphopt.streaming.ring import Ring
from graphopt.streaming.store import Entry, HostLayer, HostStore


class Ticket:
    """One forward of a layer whose backward is still to come; gone when autograd drops it."""

    def __init__(self, engine: Engine, layer: HostLayer) -> None:
        self.version = layer.target
        self.open = True
        self.together = lockstep.current() is not None  # one of several micro-batches, layer by layer
        self._engine = weakref.ref(engine)
        self._layer = layer

    def close(self) -> None:
        """Its backward has come, or never will."""
        engine = self._engine()
        if self.open and engine is not None:
            engine.outstanding[self._layer] -= 1
        self.open = False

    def __del__(self) -> None:
        self.close()


class Engine:
    """The runtime of one streamed model on one device."""

    def __init__(
        self, store: HostStore, link: Link, slots: int, resident: Sequence[HostLayer] = (), grows: bool = False,
        graphs: str = "off",
    ) -> None:
        self.grows = grows  # the ring takes spare memory after the first step
        self.store, self.link, self.resident = store, link, list(resident)
        self.layers = {x.fqn: x for x in (*self.resident, *store.layers)}
        self.ring = Ring(store, link, slots)
        self.replays = Replays(link, graphs)
        self.gradients = Gradients(store, link)
        self.outstanding = dict.fromkeys(self.layers.values(), 0)
        self.optimizer: Any = None  # weak reference to HostAdamW
        self.spark = torch.zeros((), device=link.device, requires_grad=True)  # makes a layer's node part of a backward
        self._latest: Any = None  # event after what was launched last
        self.left_out = False  # has a backward taken no gradients of weights since the last step?
        self.trace: list[tuple[str, str, int, str]] | None = None
        self.program: Any = None  # the latest training program, weakly
        self.frames: dict[str, dict[str, set[str]]] = {}  # layer -> frame -> its parameters that the frame reads

    def log(self, what: str, layer: HostLayer, slot: int, phase: str = "") -> None:
        """Keep what ran, for tests and pictures."""
        if self.trace is not None:
            self.trace.append((what, layer.fqn, slot, phase))

    def span(self, layer: HostLayer | None, kind: str) -> AbstractContextManager[Any]:
        """What is queued inside belongs to one layer (or is `kind`): noted where a timeline is made."""
        recorder = self.link.recorder
        return nullcontext() if recorder is None else recorder.computing(layer.fqn if layer else kind, kind)

    def begin(self, program: Any) -> None:
        """A forward starts."""
        self.check_whole()
        if torch.is_grad_enabled():
            self.program = weakref.ref(program)

    def check_whole(self) -> None:
        """Raise StreamError if the runtime has failed, or if the weights are of two different steps."""
        self.store.check()
        optimizer = self.optimizer() if self.optimizer else None
        if optimizer is not None:
            optimizer.check_whole()

    def set_slots(self, slots: int) -> None:
        """Another number of slots, from the next forward on; no backward may be outstanding."""
        if any(self.outstanding.values()):
            raise StreamError("slots cannot change between a forward and its backward",
                              remedy="change them after step()")
        self.replays.clear()
        self.ring = Ring(self.store, self.link, slots)

    def grow(self) -> None:
        """Once, after a first step: more slots from memory that the step left unused, so that fewer layers go up again.

        The last layers of a forward stay for the backward.  A quarter of what is spare is left alone.
        """
        program = self.program() if self.program else None
        if not self.grows or program is None or any(self.outstanding.values()):
            return
        self.grows = False
        size = max(x.nbytes for x in self.store.layers)
        slots = min(len(self.store.layers), len(self.ring.slots) + int(0.75 * self.link.spare()) // size)
        if slots > len(self.ring.slots):
            self.set_slots(slots)
            program.plan()

    def prime(self) -> None:
        """Queue the first prefetches of the next forward: called when the updates they wait for are queued."""
        program = self.program() if self.program else None
        if program is not None and program.planned == len(self.ring.slots):
            Walk(program.forward_nodes).after(self)

    def ticket(self, layer: HostLayer) -> Ticket:
        """Note a forward whose backward will come."""
        self.outstanding[layer] += 1
        return Ticket(self, layer)

    @contextmanager
    def weights(self, layer: HostLayer) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """A layer's weights on the device, and the slot they are in (-1: resident), for what is queued inside."""
        if layer.resident:
            yield -1, [e.handle.detach().requires_grad_(e.trained) for e in layer.entries]
            return
        dry, waited = self.link.ready(self._latest), self.ring.waited
        slot = self.ring.acquire(layer)
        self.replays.launching(dry and waited == self.ring.waited)
        try:
            yield slot.index, self.ring.views(slot, layer)
        finally:
            self.ring.release(slot)
            self._latest = slot.free

    @contextmanager
    def landing(self, layer: HostLayer, arguments: Sequence[tuple[str, int]]) -> Iterator[list[torch.Tensor]]:
        """Products that are gradients of a layer's weights are written into the next slab (which is given)."""
        if layer.resident or not layer.grad_bytes:
            yield []
            return
        slab, places = self.gradients.next_slab(layer)
        with landing.into([places[i] if kind == "weight" else None for kind, i in arguments]):
            yield [slab]

    def check_backward(self, layer: HostLayer, ticket: Ticket, lands: bool) -> None:
        """Raise StreamError where a backward cannot be right, before it runs; lands: gradients of weights will come."""
        self.store.check()
        if layer.target != ticket.version:
            raise StreamError("the weights were updated between this forward and its backward", where=layer.fqn,
                              remedy="run backward before step(), or run the forward again")
        if not ticket.open:
            raise StreamError("a second backward through the same forward (retain_graph=True)", where=layer.fqn,
                              remedy="add the losses and call backward once")
        self.left_out |= not lands
        if lands and not layer.resident:
            self.gradients.check_open(layer)

    def land(self, layer: HostLayer, found: Sequence[tuple[Entry, torch.Tensor]], ticket: Ticket) -> None:
        """Gradients of one backward of a layer are there."""
        if layer.resident:
            for entry, gradient in found:
                p = entry.handle
                p.grad = gradient if p.grad is None else p.grad + gradient
            ticket.close()
            return
        optimizer = self.optimizer() if self.optimizer else None
        updates = optimizer.updates if optimizer is not None else None
        ticket.close()
        wait = self.outstanding[layer] > 0
        if self.gradients.gather(layer, found, wait and ticket.together, updates):
            self.log("grad_offload", layer, -1)
        if optimizer is not None and self.outstanding[layer] == 0:
            optimizer.landed(layer)


class Walk:
    """A place in one phase of a schedule: what is queued as an execution goes along it."""

    def __init__(self, nodes: list[Any]) -> None:
        self.nodes, self.at = nodes, 0

    def until(self, engine: Engine, call: int) -> None:
        """Queue the prefetches that stand before a call of a layer; calls that were skipped are passed over."""
        end = next((i for i in range(self.at, len(self.nodes)) if self.nodes[i].kwargs.get("call") == call
                    and self.nodes[i].target is stream_graph.compute), None)
        if end is None:  # out of order: the call fetches for itself
            return
        for node in self.nodes[self.at:end]:
            _queue(engine, node)
        self.at = end + 1

    def after(self, engine: Engine) -> None:
        """Queue the prefetches that stand between the last call and the next."""
        while self.at < len(self.nodes) and self.nodes[self.at].target not in (
            stream_graph.wait, stream_graph.compute
        ):
            _queue(engine, self.nodes[self.at])
            self.at += 1


class JointWalk(Walk):
    """One place that several micro-batches share, in the schedule of all of them."""

    def __init__(self, nodes: list[Any], size: int) -> None:
        super().__init__(nodes)
        self.size = size

    def of(self, member: int) -> MemberWalk:
        """The walk as one micro-batch sees it."""
        return MemberWalk(self, member)


class MemberWalk(Walk):
    """A shared walk: the calls of one micro-batch are every n-th of the schedule's."""

    def __init__(self, joint: JointWalk, member: int) -> None:
        self.joint, self.member = joint, member

    def until(self, engine: Engine, call: int) -> None:
        """See Walk."""
        self.joint.until(engine, call * self.joint.size + self.member)

    def after(self, engine: Engine) -> None:
        """See Walk."""
        self.joint.after(engine)


def _queue(engine: Engine, node: Any) -> None:
    if node.target is stream_graph.prefetch:
        layer = engine.store.by_fqn[node.kwargs["layer"]]
        if engine.ring.prefetch(layer, node.kwargs["slot"]):
            engine.log("prefetch", layer, node.kwargs["slot"])
