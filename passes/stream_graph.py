"""The schedule of one training step as an FX graph.

    prefetch(layer, slot) -> wait -> compute(forward) -> stash -> release -> .. -> compute(backward) -> grad_offload
    -> release -> optimizer(layer) -> prefetch(layer) of the next step

A node's arguments are the nodes it waits for; its keywords say what it does.  Nodes of one stream run in the order
they stand in.  The graph is built from the order in which a model calls its layers; `stream_check` proves every read,
write and reuse of a slot, `streaming.engine` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx import Node

from graphopt.schedule.stream_sim import Task


def prefetch(*after: Any, layer: str, slot: int, step: int) -> None:
    """Copy a layer's weights into a slot (upload stream)."""


def update_resident(*after: Any, layer: str, step: int) -> None:
    """Update a resident layer's weights where they are (compute stream)."""


def wait(*after: Any, layer: str, slot: int, step: int) -> None:
    """The compute stream waits for a prefetch."""


def compute(
    *after: Any, layer: str, slot: int | None, step: int, call: int, phase: str, slab: int | None = None
) -> None:
    """Run a layer's forward, or its recomputation and backward; the backward packs its gradients into a slab."""


def stash(*after: Any, layer: str, call: int, step: int, place: str) -> None:
    """Keep a layer's inputs for its backward."""


def release(*after: Any, layer: str, slot: int, step: int) -> None:
    """The slot's last read is queued: it may be written once the compute stream is past this."""


def grad_offload(*after: Any, layer: str, slab: int, call: int, step: int) -> None:
    """Copy a slab of gradients to the host (download stream)."""


def optimizer(*after: Any, layer: str, step: int) -> None:
    """Update a layer's weights in host memory (CPU pool)."""


STREAM = {prefetch: "upload", wait: "compute", compute: "compute", stash: "compute", release: "compute",
          grad_offload: "download", optimizer: "cpu", update_resident: "compute"}
KIND = {prefetch: "upload", grad_offload: "download", optimizer: "optimizer"}  # of a picture's spans


@dataclass(frozen=True)
class Call:
    """One call of a layer in a model's forward.

    trained: it has weights that get gradients.  backward: it takes part in the backward.  resident: its weights stay
    on the device, without a slot.  gathered: its gradients are added on the device to those of the call before it,
    which goes backward next (micro-batches layer by layer).
    """

    layer: str
    trained: bool = True
    backward: bool = True
    resident: bool = False
    gathered: bool = False


def build(
    calls: Sequence[Call], slots: int, update: str = "deferred", steps: int = 1, slabs: int = 2, train: bool = True
) -> fx.Graph:
    """The schedule of `steps` training steps (or forwards, if not train) over a ring of slots.

    A slot is given away when its layer is needed later than the layer that comes in (Belady's rule), so the last
    layers of a forward stay for the backward.  Prefetches stand as early as a slot is free for them.
    """
    return _Builder(calls, slots, update, steps, slabs, train).graph


class _Builder:
    def __init__(
        self, calls: Sequence[Call], slots: int, update: str, steps: int, slabs: int, train: bool
    ) -> None:
        self.calls, self.update, self.slabs = calls, update, slabs
        self.graph = fx.Graph()
        self.uses: list[tuple[int, str, int]] = []
        for step in range(steps):
            self.uses += [(step, "forward", i) for i in range(len(calls))]
            if train:
                self.uses += [(step, "backward", i) for i in reversed(range(len(calls))) if calls[i].backward]
        self.held: list[str | None] = [None] * slots
        self.freed: list[Node | None] = [None] * slots
        self.fetched: dict[str, Node] = {}
        self.updated: dict[str, Node] = {}
        self.stashed: dict[int, Node] = {}
        self.offloads: dict[str, list[Node]] = {}
        self.slab_busy: list[Node | None] = [None] * slabs
        self.landed = 0
        self.due: set[str] = set()  # trained layers whose update of the running step is still to come
        self._run()
        self.graph.output(None)

    def _node(self, target: Any, *after: Node | None, **what: Any) -> Node:
        waits = tuple(dict.fromkeys(a for a in after if a is not None))
        return self.graph.call_function(target, waits, what)

    def _run(self) -> None:
        last = {(s, c): i for i, (s, phase, c) in enumerate(self.uses) if phase == "backward"}
        self._open(0, last)
        self._fill(0)
        for t, (step, phase, c) in enumerate(self.uses):
            if step != self.now:
                self._open(step, last)
            call = self.calls[c]
            if call.resident:
                self._resident(step, phase, c, (step, c) in last)
                self._turn(t, step)
                continue
            slot = self.held.index(call.layer)
            ready = self._node(wait, self.fetched[call.layer], layer=call.layer, slot=slot, step=step)
            if phase == "forward":
                done = self._node(compute, ready, layer=call.layer, slot=slot, step=step, call=c, phase=phase)
                if (step, c) in last:
                    self.stashed[c] = self._node(stash, done, layer=call.layer, call=c, step=step, place="device")
                self.freed[slot] = self._node(release, done, layer=call.layer, slot=slot, step=step)
            else:
                self._backward(step, c, slot, ready)
            self._turn(t, step)

    def _turn(self, t: int, step: int) -> None:
        """What stands between one use and the next."""
        self._fill(t + 1)
        final = t + 1 == len(self.uses) or self.uses[t + 1][0] != step
        if final and self.due:
            self._updates(step)
            self._fill(t + 1)

    def _resident(self, step: int, phase: str, c: int, kept: bool) -> None:
        call = self.calls[c]
        stashed = self.stashed[c] if phase == "backward" else None
        done = self._node(compute, stashed, self.updated.get(call.layer), layer=call.layer, slot=None, step=step,
                          call=c, phase=phase, slab=None)
        if phase == "forward" and kept:
            self.stashed[c] = self._node(stash, done, layer=call.layer, call=c, step=step, place="device")
        elif phase == "backward":
            self.offloads.setdefault(call.layer, []).append(done)

    def _open(self, step: int, last: dict[tuple[int, int], int]) -> None:
        self.now, self.offloads = step, {}
        self.due = {x.layer for i, x in enumerate(self.calls) if x.trained and (step, i) in last}

    def _backward(self, step: int, c: int, slot: int, ready: Node) -> None:
        call = self.calls[c]
        slab = self.landed % self.slabs if call.trained and not call.gathered else None
        busy = self.slab_busy[slab] if slab is not None else None
        done = self._node(compute, ready, self.stashed[c], busy, layer=call.layer, slot=slot, step=step, call=c,
                          phase="backward", slab=slab)
        self.freed[slot] = self._node(release, done, layer=call.layer, slot=slot, step=step)
        if slab is None:
            return
        self.landed += 1
        down = self._node(grad_offload, done, layer=call.layer, slab=slab, call=c, step=step)
        self.slab_busy[slab] = down
        self.offloads.setdefault(call.layer, []).append(down)
        whole = sum(x.layer == call.layer and x.backward and not x.gathered for x in self.calls) == len(
            self.offloads[call.layer])
        if self.update != "deferred" and whole:
            self._update(call.layer, step)

    def _update(self, layer: str, step: int) -> None:
        if any(x.resident for x in self.calls if x.layer == layer):
            self.updated[layer] = self._node(update_resident, *self.offloads[layer], layer=layer, step=step)
            self.due.discard(layer)
            return
        landed = self.offloads[layer] if self.update != "deferred" else [n for v in self.offloads.values() for n in v]
        self.updated[layer] = self._node(optimizer, *landed, layer=layer, step=step)
        self.due.discard(layer)
        if layer in self.held:  # what the slot holds is out of date
            self.held[self.held.index(layer)] = None

    def _updates(self, step: int) -> None:
        for layer in dict.fromkeys(c.layer for c in self.calls):
            if layer in self.due:
                self._update(layer, step)

    def _fill(self, t: int) -> None:
        """Queue prefetches for the uses from `t` on, as long as a slot may be given away for them."""
        for v in range(t, len(self.uses)):
            step, _, c = self.uses[v]
            layer = self.calls[c].layer
            if self.calls[c].resident or layer in self.held:
                continue
            if step > self.now and layer in self.due:
                return  # its update is still to come
            slot = self._victim(t, v)
            if slot is None:
                return
            self.held[slot] = layer
            self.fetched[layer] = self._node(prefetch, self.freed[slot], self.updated.get(layer), layer=layer,
                                             slot=slot, step=step)

    def _victim(self, t: int, v: int) -> int | None:
        best, farthest = None, -1
        for slot, layer in enumerate(self.held):
            if layer is None:
                return slot
            later = (u for u in range(t, len(self.uses)) if self.calls[self.uses[u][2]].layer == layer)
            following = next(later, 1 << 60)
            if following > v and following > farthest:
                best, farthest = slot, following
        return best


def describe(graph: fx.Graph) -> str:
    """The schedule as a table: one line per node, its stream, what it does, and what it waits for."""
    lines = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        what = " ".join(f"{k}={v}" for k, v in node.kwargs.items() if v is not None)
        after = ", ".join(a.name for a in node.all_input_nodes)
        lines.append(f"{STREAM[node.target]:9} {node.name:18} {what:60} after {after or '-'}")
    return "\n".join(lines)


def to_dot(graph: fx.Graph) -> str:
    """The schedule as a Graphviz picture: one column per stream, arrows for what waits for what."""
    lines = ["digraph schedule {", "  rankdir=TB; node [shape=box, fontsize=10];"]
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    for stream in dict.fromkeys(STREAM.values()):
        lines.append(f'  subgraph "cluster_{stream}" {{ label="{stream}";')
        for n in nodes:
            if STREAM[n.target] == stream:
                slot = f"\\nslot {n.kwargs['slot']}" if "slot" in n.kwargs else ""
                lines.append(f'    "{n.name}" [label="{n.target.__name__} {n.kwargs["layer"]}{slot}"];')
        lines.append("  }")
    lines += [f'  "{a.name}" -> "{n.name}";' for n in nodes for a in n.all_input_nodes]
    return "\n".join([*lines, "}"])


def phases(graph: fx.Graph) -> tuple[list[Node], list[Node]]:
    """The nodes of the first step's forward and of its backward: prefetches belong to where they stand."""
    forward: list[Node] = []
    backward: list[Node] = []
    seen = False
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if not seen and node.target in (wait, compute):
            seen = any(u.kwargs["phase"] == "backward" for u in (node, *node.users) if u.target is compute)
        (backward if seen else forward).append(node)
    return forward, backward


def tasks(graph: fx.Graph, seconds: Callable[[Node], float], nbytes: Callable[[Node], int]) -> list[Task]:
    """The schedule for the fake clock: what every node takes and moves is given by the caller."""
    from graphopt.passes.stream_check import accesses

    made = []
    layers: dict[Any, int] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            reads, writes = accesses(node)
            place = layers.setdefault(node.kwargs["layer"], len(layers))
            made.append(Task(node.name, STREAM[node.target], seconds(node), tuple(a.name for a in node.all_input_nodes),
                             tuple(reads), tuple(writes), nbytes(node), str(node.kwargs["layer"]),
                             str(node.kwargs.get("phase") or KIND.get(node.target, "")),
                             # as streaming.updates does: of what has landed, the lowest layer
                             (1 << 20) * int(node.kwargs["step"]) + place  # type: ignore[call-overload]
                             if node.target is optimizer else None))
    return made
