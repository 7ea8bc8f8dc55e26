"""The host store: every streamed layer's weights, gradients and optimizer state, in flat buffers.

Layout of one layer: its parameters by dtype, trained ones first within a dtype, each aligned to 64 bytes.  Weights are
one byte buffer, so an upload is one copy; gradients of the trained ones are another.  Optimizer state is indexed like
the trained parameters, in elements.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from graphopt.errors import StreamError
from graphopt.streaming.memory import Arena

ALIGN = 64  # elements; 128 bytes of bf16, so every tensor starts on a cache line and on a DMA boundary


def padded(elements: int) -> int:
    """Elements up to where the next parameter starts."""
    return (elements + ALIGN - 1) // ALIGN * ALIGN


@dataclass(eq=False)
class Entry:
    """One streamed parameter: what it is, and where it lies in its layer's buffers.

    byte: offset in the weight buffer.  grad_byte: offset in the gradient buffer; element: offset in the optimizer
    state; both -1 for a frozen one.
    """

    name: str
    fqn: str
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    byte: int = -1
    grad_byte: int = -1
    element: int = -1
    layer: HostLayer = field(default=None, repr=False)  # type: ignore[assignment]
    handle: torch.nn.Parameter = field(default=None, repr=False)  # type: ignore[assignment]
    sites: list[tuple[torch.nn.Module, str]] = field(default_factory=list, repr=False)  # where the model keeps it
    written: int = 0  # version of the handle, which nobody may write to
    _alone: torch.Tensor | None = field(default=None, repr=False)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for entries that lie at the same place of equal layers."""
        return (self.byte, self.grad_byte, tuple(self.shape), self.stride, self.dtype, self.trained)

    def alone(self) -> torch.Tensor:
        """Its values in host memory, as a tensor that shares its storage with no other parameter's.

        torch.save writes whole storages, and refuses one that is seen in two dtypes, as a layer's may be.
        """
        if self._alone is None:
            size = self.numel * self.dtype.itemsize
            memory = torch.from_numpy(self.layer.weights[self.byte:self.byte + size].numpy())
            self._alone = memory.view(self.dtype).as_strided(self.shape, self.stride)
        return self._alone.detach()

    def view(self, weights: torch.Tensor) -> torch.Tensor:
        """This parameter inside a weight buffer (uint8)."""
        flat = weights[self.byte:self.byte + self.numel * self.dtype.itemsize].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)

    def gradient(self, slab: torch.Tensor) -> torch.Tensor:
        """Its gradient inside a gradient buffer (uint8)."""
        flat = slab[self.grad_byte:self.grad_byte + self.numel * self.dtype.itemsize].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


class HostLayer:
    """One layer in host memory.

    version counts finished updates of the weights, target the updates that were ordered: whoever reads the weights
    waits until they are equal.  slab is None until the layer trains.  A resident layer has no buffers here: its
    weights are the model's own parameters on the device, and only the layout counts.
    """

    def __init__(self, fqn: str, index: int, entries: list[Entry], resident: bool = False) -> None:
        self.fqn, self.index, self.resident = fqn, index, resident
        self.entries = entries
        order = sorted(entries, key=lambda e: (str(e.dtype), not e.trained))
        at = grad = element = 0
        for e in order:
            e.layer = self
            size = padded(e.numel)
            e.byte, at = at, at + size * e.dtype.itemsize
            if e.trained:
                e.grad_byte, grad = grad, grad + size * e.dtype.itemsize
                e.element, element = element, element + size
        self.nbytes, self.grad_bytes, self.elements = at, grad, element
        self.place = {e: i for i, e in enumerate(entries)}
        self.key = (fqn.rsplit(".", 1)[0], tuple(e.key for e in entries))
        self.weights: torch.Tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.slab: torch.Tensor | None = None
        self.version = self.target = 0
        self.reading: Any = None  # event of the latest upload of these weights
        self.engine: Any = None
        self.missing: set[str] = set()  # parameters never given a value (built on meta)

    @property
    def trained(self) -> list[Entry]:
        """The entries that train."""
        return [e for e in self.entries if e.trained]

    def weight(self, entry: Entry) -> torch.Tensor:
        """A parameter's values, in host memory."""
        return entry.view(self.weights)


class HostStore:
    """All streamed layers of one model."""

    def __init__(self, layers: Iterable[HostLayer], pin: bool, node: int | None = None) -> None:
        self.arena = Arena(pin, node)
        self.layers = list(layers)
        self.by_fqn = {layer.fqn: layer for layer in self.layers}
        self.changed = threading.Condition()
        self.error: BaseException | None = None

    @property
    def entries(self) -> Iterator[Entry]:
        """All entries, layer by layer."""
        return (e for layer in self.layers for e in layer.entries)

    def allocate_weights(self, layer: HostLayer) -> None:
        """Room for a layer's weights (pinned)."""
        layer.weights = self.arena.allocate(layer.nbytes)

    def allocate_slab(self, layer: HostLayer) -> torch.Tensor:
        """Room for a layer's gradients (pinned)."""
        if layer.slab is None:
            layer.slab = self.arena.allocate(layer.grad_bytes)
        return layer.slab

    def order(self, layer: HostLayer) -> None:
        """An update of this layer will come: readers from now on wait for it."""
        with self.changed:
            layer.target += 1

    def finish(self, layer: HostLayer) -> None:
        """An update of this layer has come."""
        with self.changed:
            layer.version += 1
            self.changed.notify_all()

    def replaced(self, layer: HostLayer) -> None:
        """The weights were written from outside: copies on the device are out of date."""
        with self.changed:
            layer.target += 1
            layer.version += 1
            self.changed.notify_all()

    def wait_for(self, layer: HostLayer, version: int) -> None:
        """Block until that many updates have finished.  Raises StreamError when the runtime has failed."""
        with self.changed:
            while layer.version < version:
                self.check()
                self.changed.wait(1.0)
            self.check()

    def fail(self, error: BaseException) -> None:
        """A thread of the runtime has died: whoever waits gets StreamError."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def check(self) -> None:
        """Raise StreamError if a thread of the runtime has failed."""
        if self.error is not None:
            raise StreamError(
                f"a thread of the streaming runtime failed: {type(self.error).__name__}: {self.error}",
                remedy="weights are as at the last finished update of each layer; load the last checkpoint",
            ) from self.error
