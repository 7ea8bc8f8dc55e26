"""The ring of slots: fixed device buffers that layers' weights are uploaded into.

A slot remembers which layer it holds and at which version.  A prefetch is queued to one thread, because it may have to
wait on the host for the layer's update; the copy itself waits on the device for the slot's last reader.  Buffers are
allocated once, so no copy ever meets the caching allocator.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from graphopt.errors import StreamError
from graphopt.streaming.link import Link
from graphopt.streaming.store import HostLayer, HostStore


class Fetch:
    """One upload: queued, then issued (the host has given it to the device), then ready (an event)."""

    def __init__(self, layer: HostLayer, version: int, free: Any) -> None:
        self.layer, self.version, self.free = layer, version, free
        self.issued = threading.Event()
        self.ready: Any = None


class Slot:
    """One device buffer."""

    def __init__(self, index: int, nbytes: int, device: torch.device) -> None:
        self.index = index
        self.buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.fetch: Fetch | None = None
        self.free: Any = None  # event of the last reader
        self.readers = 0
        self.used = 0  # when it was last handed out

    def holds(self, layer: HostLayer) -> bool:
        """Does it hold (or will it hold) the newest weights of this layer?"""
        return self.fetch is not None and self.fetch.layer is layer and self.fetch.version == layer.target


class Ring:
    """The slots, and the thread that fills them."""

    def __init__(self, store: HostStore, link: Link, slots: int) -> None:
        self.store, self.link = store, link
        size = max((layer.nbytes for layer in store.layers), default=0)
        self.slots = [Slot(i, size, link.device) for i in range(slots)]
        self.misses = self.uploads = self.uploaded_bytes = 0
        self.waited = 0.0  # seconds the launching thread stood still for an update or an upload queue
        self._clock = 0
        self._views: dict[tuple[int, tuple[Any, ...]], list[torch.Tensor]] = {}
        self._queue: queue.SimpleQueue[tuple[Slot, Fetch] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_fetch_loop, args=(weakref.ref(self), self._queue, link),
                                        name="graphopt-fetch", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._queue.put, None)

    @property
    def nbytes(self) -> int:
        """Device bytes of all slots."""
        return sum(s.buffer.numel() for s in self.slots)

    def prefetch(self, layer: HostLayer, index: int) -> bool:
        """Queue an upload into a slot, unless it is there already or the slot is being read.  Was it queued?"""
        slot = self.slots[index]
        if slot.readers or any(s.holds(layer) for s in self.slots):
            return False
        self._fill(slot, layer)
        return True

    def acquire(self, layer: HostLayer) -> Slot:
        """A slot that holds a layer's newest weights, ready for what the compute stream does next."""
        slot = next((s for s in self.slots if s.holds(layer)), None)
        if slot is None:
            slot = self._victim()
            self._fill(slot, layer)
            self.misses += 1
        fetch = slot.fetch
        assert fetch is not None
        if not fetch.issued.is_set():
            start = time.perf_counter()
            while not fetch.issued.wait(0.5):
                self.store.check()
            stood = time.perf_counter()
            self.waited += stood - start
            if self.link.recorder is not None:
                self.link.recorder.host("launch", layer.fqn, "wait", start, stood)
        self.store.check()
        self.link.wait(fetch.ready)
        self._clock += 1
        slot.readers, slot.used = slot.readers + 1, self._clock
        return slot

    def release(self, slot: Slot) -> None:
        """The compute stream has queued its last read of the slot."""
        slot.free = self.link.mark()
        slot.readers -= 1

    def views(self, slot: Slot, layer: HostLayer) -> list[torch.Tensor]:
        """The layer's parameters inside a slot, in the order of its entries; made once per slot and layout.

        Trained ones require gradients even where none are taken: torch.matmul of a non-contiguous input chooses between
        mm and bmm by that, and a resident model's parameters say so under no_grad, too.
        """
        key = (slot.index, layer.key)
        if key not in self._views:
            with torch.inference_mode(False):  # made while sampling, used in training
                self._views[key] = [e.view(slot.buffer).detach().requires_grad_(e.trained)
                                    for e in layer.entries]
        return self._views[key]

    def _victim(self) -> Slot:
        idle = [s for s in self.slots if not s.readers]
        if not idle:
            raise StreamError(
                f"all {len(self.slots)} slots are being read at once", remedy="give graphopt.stream more slots"
            )
        return min(idle, key=lambda s: (s.fetch is not None, s.used))

    def _fill(self, slot: Slot, layer: HostLayer) -> None:
        if layer.missing:
            raise StreamError(
                f"{len(layer.missing)} weights of {layer.fqn} were never loaded: "
                f"{', '.join(sorted(layer.missing)[:3])}",
                remedy="call model.load_state_dict(...) or pass weights= to graphopt.stream",
            )
        slot.fetch = Fetch(layer, layer.target, slot.free)
        self.uploads += 1
        self.uploaded_bytes += layer.nbytes
        self._queue.put((slot, slot.fetch))


def casts_not_kept(device: torch.device) -> AbstractContextManager[None]:
    """Inside, autocast keeps no casts of weights: the next layer in a slot has other values at the same place."""
    return _casts_not_kept() if torch.is_autocast_enabled(device.type) else nullcontext()


@contextmanager
def _casts_not_kept() -> Iterator[None]:
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)


def _fetch_loop(owner: Any, todo: queue.SimpleQueue, link: Link) -> None:
    # holds the ring only while it works: a model that is no longer used frees its memory and ends this thread
    with link.thread():
        while (item := todo.get()) is not None:
            slot, fetch = item
            ring = owner()
            if ring is None:
                return
            try:
                ring.store.wait_for(fetch.layer, fetch.version)
                fetch.ready = link.upload(slot.buffer[:fetch.layer.nbytes], fetch.layer.weights, fetch.free)
                fetch.layer.reading = fetch.ready
                if link.recorder is not None:
                    link.recorder.copied("upload", fetch.layer.fqn, fetch.ready)
            except BaseException as error:
                ring.store.fail(error)
                return
            fetch.issued.set()
            del item, slot, fetch, ring
