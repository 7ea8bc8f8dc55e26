"""Gradients on their way down: packed into a flat device slab, one copy to the host, accumulated there in fp32.

A slab is fixed and used in turn; its next user waits on the device for the copy before.  The host buffer holds the
first gradient since `zero_grad` in the weights' dtype; a second one makes the layer accumulate in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphopt import _compat_tensors
from graphopt.errors import StreamError
from graphopt.streaming import handles, memory
from graphopt.streaming.link import Link
from graphopt.streaming.store import Entry, HostLayer, HostStore
from graphopt.streaming.updates import Updates

OPEN = 2  # layers whose gradients are added up on the device at once


class Landing:
    """What one layer's gradient buffers hold since the last zero_grad."""

    def __init__(self) -> None:
        self.fresh: list[Entry] = []  # with a gradient
        self.events: list[Any] = []  # copies on their way
        self.norms: dict[Entry, torch.Tensor] = {}  # fp32, 0-d, on the device; only of gradients that landed once
        self.sum: torch.Tensor | None = None  # fp32, by element: more than one gradient landed
        self.consumed = False
        self.rounds = 0  # backward passes that have landed whole


class Gradients:
    """The slabs of one model, and where its gradients are."""

    def __init__(self, store: HostStore, link: Link, slabs: int = 2) -> None:
        self.store, self.link = store, link
        size = max((layer.grad_bytes for layer in store.layers), default=0)
        self.slabs = [torch.zeros(size, dtype=torch.uint8, device=link.device) for _ in range(slabs)]
        self.landings = {layer: Landing() for layer in store.layers}
        self.downloads = self.downloaded_bytes = 0
        self.copied = 0  # gradients that were copied into a slab
        self.keep_norms = True
        self._busy: list[Any] = [None] * slabs
        self._turn = 0
        self._views: dict[tuple[int, Any], list[Any]] = {}
        self._handles: dict[Entry, torch.Tensor] = {}  # what stands where a gradient would be
        self._stage: torch.Tensor | None = None  # host, pinned: gradients that will be added to a sum
        self._sums: dict[HostLayer, torch.Tensor] = {}
        self.open: dict[HostLayer, dict[Entry, torch.Tensor]] = {}  # sums on the device, more to come: fp32

    @property
    def nbytes(self) -> int:
        """Device bytes of all slabs."""
        return sum(s.numel() for s in self.slabs)

    def check_open(self, layer: HostLayer) -> None:
        """Raise StreamError if a backward would add to gradients that step() has already used up."""
        landing = self.landings[layer]
        if not landing.consumed:
            return
        if any(e.handle.grad is not None for e in layer.trained):
            raise StreamError(
                "a backward after step() without zero_grad(): streamed gradients are used up by the update",
                where=layer.fqn, remedy="call opt.zero_grad() after opt.step()",
            )
        landing.consumed = False

    def gather(
        self, layer: HostLayer, found: Sequence[tuple[Entry, torch.Tensor]], more: bool, updates: Updates | None
    ) -> bool:
        """Take some of a layer's gradients; if more are to come soon, add them up on the device.  Did a copy start?"""
        if not more and layer not in self.open:
            self.land(layer, found, updates)
            return bool(found)
        sums = self.open.setdefault(layer, {})
        for e, g in found:
            if e in sums:
                sums[e].add_(g)
            else:
                sums[e] = g.to(torch.float32, copy=True)
        if not more:
            self._close(layer, updates)
            return True
        if len(self.open) > OPEN:  # their backward passes do not come layer by layer: the host adds them up
            self._close(next(iter(self.open)), updates)
            return True
        return False

    def _close(self, layer: HostLayer, updates: Updates | None) -> None:
        self.land(layer, [(e, g.to(e.dtype)) for e, g in self.open.pop(layer).items()], updates)

    def settle(self, updates: Updates | None) -> None:
        """Send down what waits for gradients that may never come."""
        for layer in list(self.open):
            self._close(layer, updates)

    def next_slab(self, layer: HostLayer) -> tuple[torch.Tensor, list[Any]]:
        """The slab of the next layer that lands, free to be written, and every entry's place in it."""
        self.link.wait(self._busy[self._turn])
        return self.slabs[self._turn], self._slab_views(layer, self._turn)

    def land(self, layer: HostLayer, found: Sequence[tuple[Entry, torch.Tensor]], updates: Updates | None) -> None:
        """Queue the copy of some of a layer's gradients to the host.

        found: trained entries and their gradients on the device.
        """
        if not found:
            return
        landing = self.landings[layer]
        landing.fresh = [e for e in landing.fresh if e.handle.grad is not None]
        if not landing.fresh:  # zeroed by whoever set .grad to None
            landing = self.landings[layer] = Landing()
        turn = self._turn
        slab, views = self.next_slab(layer)
        self._turn = (turn + 1) % len(self.slabs)
        entries = [e for e, _ in found]
        # products were written there by the compiled backward
        away = [(v, g) for e, g in found if not _same(v := views[layer.place[e]], g)]
        self.copied += len(away)
        if away:
            _compat_tensors.foreach_copy([v for v, _ in away], [g for _, g in away])
        again = landing.sum is not None or any(e in landing.fresh for e in entries)
        if again:
            landing.norms.clear()
        elif self.keep_norms:
            landing.norms.update(zip(entries, _compat_tensors.foreach_norm([g for _, g in found])))
        if again:
            self._busy[turn] = self._accumulate(layer, landing, entries, slab, updates)
        else:
            host = self.store.allocate_slab(layer)
            event = self._download(host, slab, entries, layer)
            landing.events.append(event)
            landing.fresh += entries
            self._busy[turn] = event
        for e in entries:
            if e.handle.grad is None:
                if e not in self._handles:
                    self._handles[e] = handles.gradient_of(e.handle)
                e.handle.grad = self._handles[e]

    def _slab_views(self, layer: HostLayer, turn: int) -> list[Any]:
        """Every entry's gradient inside a slab, made once per slab and layout."""
        key = (turn, layer.key)
        if key not in self._views:
            self._views[key] = [e.gradient(self.slabs[turn]) if e.trained else None for e in layer.entries]
        return self._views[key]

    def _download(self, host: torch.Tensor, slab: torch.Tensor, entries: list[Entry], layer: HostLayer) -> Any:
        after, event = self.link.mark(), None
        if len(entries) == len(layer.trained):
            spans = [(0, layer.grad_bytes)]
        else:
            spans = [(e.grad_byte, e.grad_byte + e.numel * e.dtype.itemsize) for e in entries]
        for a, b in spans:
            event = self.link.download(host[a:b], slab[a:b], after)
            if self.link.recorder is not None:
                self.link.recorder.copied("download", layer.fqn, event)
            self.downloads += 1
            self.downloaded_bytes += b - a
        return event

    def _accumulate(
        self, layer: HostLayer, landing: Landing, entries: list[Entry], slab: torch.Tensor, updates: Updates | None
    ) -> Any:
        first = landing.sum is None
        if first:
            if layer not in self._sums:
                if not self._sums:  # before any is added, and for all: HostAdamW counted them if it was told of them
                    memory.require(4 * sum(x.elements for x in self.store.layers), "the sum of several gradients")
                self._sums[layer] = self.store.arena.allocate(layer.elements * 4, pin=False).view(torch.float32)
            landing.sum = self._sums[layer]
        if self._stage is None:
            self._stage = self.store.arena.allocate(max(x.grad_bytes for x in self.store.layers))
        elif updates is not None:
            updates.drain()  # the stage is read by the sum before
        known, events = list(landing.fresh), list(landing.events)
        event = self._download(self._stage, slab, entries, layer)
        stage, total, host = self._stage, landing.sum, layer.slab
        assert total is not None

        def add() -> None:
            for e in events if first else ():
                self.link.join(e)
            if first:
                assert host is not None
                for e in known:
                    _part(total, e).copy_(e.gradient(host).as_strided((e.numel,), (1,)))
            self.link.join(event)
            for e in entries:
                value = e.gradient(stage).as_strided((e.numel,), (1,))
                if e in known:
                    _part(total, e).add_(value)
                else:
                    _part(total, e).copy_(value)

        landing.fresh += [e for e in entries if e not in known]
        landing.events = []
        if updates is None:
            add()
        else:
            updates.call(add)
        return event

    def read(self, landing: Landing, entry: Entry) -> torch.Tensor:
        """A gradient in host memory, 1-d; the caller has waited for its copy."""
        if landing.sum is not None:
            return _part(landing.sum, entry)
        assert entry.layer.slab is not None
        return entry.gradient(entry.layer.slab).as_strided((entry.numel,), (1,))

    def norm(self, landing: Landing, entry: Entry) -> torch.Tensor:
        """The 2-norm of one gradient, fp32, 0-d."""
        if entry in landing.norms:
            return landing.norms[entry]
        for event in landing.events:
            self.link.join(event)
        return torch.linalg.vector_norm(self.read(landing, entry), dtype=torch.float32)

    def take(self, layer: HostLayer) -> Landing:
        """Hand over what has landed: the layer starts anew."""
        landing, self.landings[layer] = self.landings[layer], Landing()
        self.landings[layer].consumed = bool(landing.fresh)
        return landing

    def clear(self) -> None:
        """Forget all gradients (zero_grad)."""
        self.open.clear()
        for layer in self.store.layers:
            landing = self.landings[layer]
            if landing.fresh or landing.consumed:
                self.landings[layer] = Landing()
            for e in layer.entries:
                if e.trained:
                    e.handle.grad = None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def _part(flat: torch.Tensor, entry: Entry) -> torch.Tensor:
    return flat[entry.element:entry.element + entry.numel]
