"""The CPU optimizer: one long-lived thread that updates layers as their gradients land.

A job is one layer.  Jobs whose gradients have landed run lowest layer first, which is forward order for a deferred
update; everything a job needs was copied out of the optimizer when it was queued, so a scheduler may go on meanwhile.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphopt.codegen.adamw import Hyper, Piece
from graphopt.streaming import numa
from graphopt.streaming.link import Link
from graphopt.streaming.store import Entry, HostLayer, HostStore, padded


class State:
    """Optimizer state of one layer, flat over its trained parameters."""

    def __init__(self, layer: HostLayer, store: HostStore, ema: bool) -> None:
        def flat(dtype: torch.dtype) -> torch.Tensor:
            return store.arena.allocate(layer.elements * dtype.itemsize, pin=False).view(dtype)

        self.exp_avg, self.exp_avg_sq = flat(torch.float32), flat(torch.float32)
        split = any(e.dtype == torch.bfloat16 for e in layer.trained)
        self.residual = flat(torch.int16) if split else None
        self.average = flat(torch.float32) if ema else None
        self.steps = dict.fromkeys(layer.trained, 0)
        self._whole: tuple[torch.Tensor, list[Piece]] | None = None  # all parameters under one setting
        if self.average is not None:
            for e in layer.trained:
                self.of(self.average, e).copy_(layer.weight(e).as_strided((e.numel,), (1,)))

    def of(self, flat: torch.Tensor, entry: Entry) -> torch.Tensor:
        """One parameter's part of a flat buffer, 1-d."""
        return flat[entry.element:entry.element + entry.numel]

    def runs(self, layer: HostLayer, slab: torch.Tensor, hypers: dict[Entry, Hyper]) -> list[Piece]:
        """What a kernel needs for a layer whose gradients are all in its slab, neighbours with equal settings as one.

        Buffers are laid out alike, with padding that holds zeros and stays zero, so a layer is one or two pieces.
        """
        hyper = next(iter(hypers.values()), None)
        if hyper is not None and len(hypers) == len(self.steps) and all(h is hyper for h in hypers.values()):
            # the usual case, in the way of the next kernel: only the numbers change from step to step
            if self._whole is None or self._whole[0] is not slab:
                self._whole = slab, self._runs(layer, slab, hypers)
            return [p._replace(hyper=hyper) for p in self._whole[1]]
        return self._runs(layer, slab, hypers)

    def _runs(self, layer: HostLayer, slab: torch.Tensor, hypers: dict[Entry, Hyper]) -> list[Piece]:
        pieces = []
        order = sorted(hypers, key=lambda e: e.element)
        first = 0
        for i, entry in enumerate(order):
            after = order[i + 1] if i + 1 < len(order) else None
            if after is not None and after.dtype == entry.dtype and (
                hypers[after] is hypers[entry] or hypers[after] == hypers[entry]
            ) and after.element == padded(entry.element + entry.numel):
                continue
            a, n = order[first], entry.element + entry.numel - order[first].element
            size = a.dtype.itemsize
            part = slice(a.element, a.element + n)
            pieces.append(Piece(
                layer.weights[a.byte:a.byte + n * size].view(a.dtype),
                self.residual[part] if self.residual is not None and a.dtype == torch.bfloat16 else None,
                slab[a.grad_byte:a.grad_byte + n * size].view(a.dtype), self.exp_avg[part], self.exp_avg_sq[part],
                hypers[a], None if self.average is None else self.average[part]))
            first = i + 1
        return pieces

    def piece(self, entry: Entry, gradient: torch.Tensor, hyper: Hyper) -> Piece:
        """What a kernel needs to update one parameter; gradient: 1-d, host."""
        return Piece(
            entry.layer.weight(entry).as_strided((entry.numel,), (1,)),
            self.of(self.residual, entry) if self.residual is not None and entry.dtype == torch.bfloat16 else None,
            gradient, self.of(self.exp_avg, entry), self.of(self.exp_avg_sq, entry), hyper,
            None if self.average is None else self.of(self.average, entry))


@dataclass
class Job:
    """One update of one layer."""

    layer: HostLayer
    hypers: dict[Entry, Hyper]
    landed: list[Any]  # events
    gradient: Callable[[Entry], torch.Tensor]  # 1-d, host
    slab: torch.Tensor | None = None  # where they all are in the layer's layout, if they are
    scale: Callable[[], float | None] = lambda: None  # of clipping; called when everything has landed
    done: Callable[[], None] = field(default=lambda: None)


class Updates:
    """The thread and its jobs.  threads: of the kernel, where there may be more than the default."""

    def __init__(
        self, store: HostStore, link: Link, states: dict[HostLayer, State], kernel: Callable[[Sequence[Piece]], None],
        threads: int | None = None,
    ) -> None:
        self.store, self.link, self.states, self.kernel = store, link, states, kernel
        self._jobs: list[Job | Callable[[], None]] = []
        self._changed = threading.Condition()
        self._busy = 0
        self.worked = 0.0  # seconds spent in the kernel
        cpus = numa.pool_cpus(link.device, threads) if link.device.type == "cuda" else None
        thread = threading.Thread(target=_loop, args=(weakref.ref(self), self._changed, cpus),
                                  name="graphopt-adamw", daemon=True)
        thread.start()

    @property
    def idle(self) -> bool:
        """Is nothing queued?"""
        return not self._jobs

    def submit(self, job: Job) -> None:
        """Queue an update; readers of the layer wait for it from now on."""
        self.store.check()
        self.store.order(job.layer)
        with self._changed:
            self._jobs.append(job)
            self._busy += 1
            self._changed.notify_all()

    def call(self, function: Callable[[], None]) -> None:
        """Queue something else to be done, before all jobs that come later."""
        self.store.check()
        with self._changed:
            self._jobs.append(function)
            self._busy += 1
            self._changed.notify_all()

    def drain(self) -> None:
        """Block until everything queued is done."""
        with self._changed:
            while self._busy:
                self.store.check()
                self._changed.wait(0.5)
        self.store.check()

    def take(self) -> Job | Callable[[], None] | None:
        """The next thing to do: a call at the head, else the landed job of the lowest layer; None if there is none."""
        with self._changed:
            if not self._jobs:
                return None
            head = self._jobs[0]
            if not isinstance(head, Job):
                return self._jobs.pop(0)
            jobs = []
            for j in self._jobs:
                if not isinstance(j, Job):
                    break
                jobs.append(j)
            landed = [j for j in jobs if all(self.link.ready(e) for e in j.landed)]
            job = min(landed, key=lambda j: j.layer.index) if landed else head
            self._jobs.remove(job)
            return job

    def run(self, job: Job | Callable[[], None]) -> None:
        """Do one thing."""
        if not isinstance(job, Job):
            job()
        else:
            for event in (*job.landed, job.layer.reading):
                if not self.link.ready(event):  # a wait gives the interpreter's lock away, which takes time to get back
                    self.link.join(event)
            state = self.states[job.layer]
            scale = job.scale()
            if scale is not None:
                scaled = {i: replace(h, scale=scale) for i, h in {id(h): h for h in job.hypers.values()}.items()}
                job.hypers = {e: scaled[id(h)] for e, h in job.hypers.items()}
            start = time.perf_counter()
            if job.slab is not None and getattr(self.kernel, "joins", False):
                self.kernel(state.runs(job.layer, job.slab, job.hypers))
            else:
                self.kernel([state.piece(entry, job.gradient(entry), hyper) for entry, hyper in job.hypers.items()])
            end = time.perf_counter()
            self.worked += end - start
            if self.link.recorder is not None:
                self.link.recorder.host("cpu", job.layer.fqn, "optimizer", start, end)
            for entry, hyper in job.hypers.items():
                state.steps[entry] = hyper.step
            job.done()
            self.store.finish(job.layer)
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()


def _loop(owner: Any, changed: threading.Condition, cpus: list[int] | None) -> None:
    # holds its owner only while it works, so a model that is no longer used ends this thread
    if cpus is not None:
        numa.bind(cpus)  # this thread, and the OpenMP team that it starts
    with torch.no_grad():
        while True:
            updates = owner()
            if updates is None:
                return
            job = updates.take()
            if job is None:
                with changed:
                    idle = updates.idle
                    del updates
                    if idle:
                        changed.wait(1.0)
                continue
            try:
                updates.run(job)
            except BaseException as error:
                updates.store.fail(error)
                with changed:
                    changed.notify_all()
                return
            del job, updates
