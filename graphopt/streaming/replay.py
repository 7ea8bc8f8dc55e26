"""CUDA graphs per class of layers: the launches of a layer's forward, or of its recomputation and backward, as one.

A graph reads what stands at fixed addresses: the weights of a slot, and copies of the call's inputs in buffers that
all calls of the class share; what it returns is copied out before the next replay.  All graphs use one memory pool,
because they run one after the other on one stream.  A layer that draws random numbers, writes into its inputs or runs
under autocast is launched kernel by kernel, and so is everything after a capture that fails (one warning): the device
refused to record something, or the graphs' memory did not fit.  Whatever else goes wrong inside a layer is raised.

Python's launches show where a layer's kernels are short or the CPU is busy with the optimizer: mode "auto" records
graphs once the device has run dry before most of the recent launches.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt.streaming.link import Link

log = logging.getLogger(__name__)
MODES = ("auto", "on", "off")
WARM = 3  # plain runs of a signature before it is recorded: compilation, autotuning and library handles are behind it
SIGNATURES = 16  # that may be recorded: more means that shapes change all the time
RECENT = 64  # launches that "auto" looks back on


class Unrecordable(RuntimeError):
    """A layer that runs cannot be recorded, or does something that a replay would not repeat."""


class Recorded:
    """One graph: the buffers it reads, and what it leaves."""

    def __init__(self, replay: Callable[[], None], outputs: list[Any]) -> None:
        self.replay, self.outputs = replay, outputs


class Buffer:
    """One input at a fixed address; what is there already is not copied again."""

    def __init__(self, like: torch.Tensor) -> None:
        self.tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        self._held: torch.Tensor | None = None  # what it is a copy of, if calls pass that again and again
        self._version = self._last = -1

    def fill(self, value: torch.Tensor) -> torch.Tensor:
        """Copy one call's input in."""
        address, held = value.data_ptr(), self._held
        if held is not None and held.data_ptr() == address and self._version == value._version:
            return self.tensor
        _once(self.tensor).copy_(_once(value))
        self._held = value.detach() if address == self._last else None
        self._last, self._version = address, value._version
        return self.tensor

    def forget(self) -> None:
        """Hold on to no tensor of a caller."""
        self._held, self._last = None, -1


class Replays:
    """The recorded graphs of one streamed model."""

    def __init__(self, link: Link, mode: str = "auto") -> None:
        self.link = link
        self.set(mode)
        self._seen: dict[Any, int] = {}
        self._buffers: dict[Any, Buffer] = {}
        self._graphs: dict[Any, Recorded] = {}
        self._pool: Any = None
        self._recent: deque[bool] = deque(maxlen=RECENT)
        self.replayed = 0

    def set(self, mode: str) -> None:
        """Another mode, from the next launch on."""
        self.mode, self.active = mode, mode == "on"

    @property
    def recorded(self) -> int:
        """Graphs there are."""
        return len(self._graphs)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Device bytes of the inputs' buffers, and of the graphs' memory pool."""
        pool = 0 if self._pool is None else self.link.pool_bytes(self._pool)
        return sum(b.tensor.untyped_storage().nbytes() for b in self._buffers.values()), pool

    def launching(self, dry: bool) -> None:
        """A layer is about to be launched; dry: the device has done everything that was queued."""
        if self.mode != "auto" or self.active:
            return
        self._recent.append(dry)
        self.active = len(self._recent) == RECENT and sum(self._recent) > RECENT // 2

    def clear(self) -> None:
        """Forget all graphs: their addresses are no longer valid."""
        self.link.join(self.link.mark())
        self._graphs.clear()
        self._pool = None  # it ends with its last graph
        self._buffers.clear()
        self._seen.clear()

    def forget(self) -> None:
        """Hold on to no tensor of a caller."""
        for buffer in self._buffers.values():
            buffer.forget()

    def run(
        self, code: Any, weights: Sequence[torch.Tensor], values: Sequence[Any],
        work: Callable[[Sequence[Any]], Sequence[Any]],
    ) -> list[Any] | None:
        """Do `work` on the values by a graph; None where there is none (yet), and the caller does it.

        code: what `work` depends on beside weights and values.  weights: what it reads at their present addresses.
        The results are the graph's own memory, valid until the next run.
        """
        if not self.active or torch.is_autocast_enabled(self.link.device.type) or torch.is_anomaly_enabled():
            return None
        if any(isinstance(v, torch.Tensor) and (v.device != self.link.device or v.is_inference()) for v in values):
            return None
        numerics = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
        signature = code, numerics, tuple(map(_form, values))
        seen = self._seen.get(signature, 0)
        if seen < WARM:
            if seen or len(self._seen) < SIGNATURES:
                self._seen[signature] = seen + 1
            return None
        inputs = self._fill(values)
        key = signature, tuple(w.data_ptr() for w in weights)
        graph = self._graphs.get(key)
        if graph is None and not any(k[0] == signature for k in self._graphs):
            self.link.trim()  # what plain runs used and graphs keep for themselves now
        if graph is None and (graph := self._record(inputs, work)) is None:
            return None
        self._graphs[key] = graph
        graph.replay()
        self.replayed += 1
        return graph.outputs

    def _fill(self, values: Sequence[Any]) -> list[Any]:
        """The inputs in buffers; calls of every class use the same ones."""
        inputs: list[Any] = []
        used: dict[Any, int] = {}
        for v in values:
            if isinstance(v, torch.Tensor):
                form = _form(v)[:3]
                key = form, used.setdefault(form, 0)
                used[form] += 1
                if key not in self._buffers:
                    self._buffers[key] = Buffer(v)
                v = self._buffers[key].fill(v)
            inputs.append(v)
        return inputs

    def _record(self, inputs: list[Any], work: Callable[[Sequence[Any]], Sequence[Any]]) -> Recorded | None:
        try:
            return self._try(inputs, work)
        except Unrecordable as error:
            self.set("off")
            self.clear()
            log.warning("graphopt: a layer cannot be recorded as a CUDA graph, its kernels are launched one by one: %s",
                        (str(error).splitlines() or [type(error.__cause__).__name__])[0])
            return None

    def _try(self, inputs: list[Any], work: Callable[[Sequence[Any]], Sequence[Any]]) -> Recorded:
        """Record.  Raises Unrecordable, or what the layer raises by itself."""
        versions = lambda: [v._version for v in inputs if isinstance(v, torch.Tensor)]  # noqa: E731
        before = versions()
        try:
            self._pool = self.link.pool() if self._pool is None else self._pool
            graph = Recorded(*self.link.record(lambda: work(inputs), self._pool))
        except RuntimeError as error:
            # Of recording or of the layer?  CUDA's and torch's messages differ between versions and have no class of
            # their own; but what the layer does wrong it does wrong when it is launched plainly, too.
            if isinstance(error, torch.OutOfMemoryError):
                self.clear()  # the graphs' own memory, which a plain launch does not need
            work(inputs)
            raise Unrecordable(str(error)) from error
        if versions() != before:
            raise Unrecordable("it writes into its inputs")
        return graph


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.requires_grad
    return value


def _once(t: torch.Tensor) -> torch.Tensor:
    """Without the dimensions that repeat one element."""
    for d, (size, stride) in enumerate(zip(t.shape, t.stride())):
        if stride == 0 and size > 1:
            t = t.narrow(d, 0, 1)
    return t


def copied(value: Any) -> Any:
    """A result that outlives the next replay, with the same strides."""
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    _once(made).copy_(_once(value))
    return made
