"""Streams, events and copies between host and device, behind one small interface.

`CudaLink` uses two copy streams beside the current one.  `CpuLink` is the same interface where "device" memory is host
memory and every copy happens at once.  `LateLink` is CpuLink with copies that happen as late as the waits allow, in a
random order between the two streams: what forgets a wait reads poison or old values.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch

Recording = tuple[Callable[[], None], list[Any]]  # runs it again; where its results are then


class Link(Protocol):
    """What the runtime needs of a device."""

    device: torch.device
    pin: bool
    recorder: Any  # timeline.Recorder while a timeline is made, else None

    def overlap(self, on: bool) -> None:
        """Off: copies take turns with the kernels, on their stream (to measure what overlap gains)."""
        ...

    def spare(self) -> int:
        """Bytes of device memory that nobody has needed so far."""
        ...

    def stamp(self) -> Any:
        """A point in time of the compute stream, for a timeline."""
        ...

    def seconds(self, since: Any, stamp: Any) -> float:
        """Seconds from one stamp to another; blocks until both are there."""
        ...

    def upload(self, device: torch.Tensor, host: torch.Tensor, after: Any) -> Any:
        """Queue host -> device on the upload stream, after an event of the compute stream; return an event."""
        ...

    def download(self, host: torch.Tensor, device: torch.Tensor, after: Any) -> Any:
        """Queue device -> host on the download stream, after an event of the compute stream; return an event."""
        ...

    def mark(self) -> Any:
        """An event at the current end of the compute stream."""
        ...

    def wait(self, event: Any) -> None:
        """Let the compute stream wait for an event; the host goes on."""
        ...

    def join(self, event: Any) -> None:
        """Let the host wait for an event."""
        ...

    def ready(self, event: Any) -> bool:
        """Has the event happened?"""
        ...

    def thread(self) -> Any:
        """A context for a thread that will queue copies."""
        ...

    def trim(self) -> None:
        """Give back device memory that the allocator holds and nobody uses."""
        ...

    def pool(self) -> Any:
        """A pool of memory for recordings; it lives as long as one of them does."""
        ...

    def pool_bytes(self, pool: Any) -> int:
        """Device bytes that a pool of recordings holds."""
        ...

    def record(self, work: Callable[[], Sequence[Any]], pool: Any) -> Recording:
        """Record what `work` launches: what runs it again, and where its results are then.

        Results are valid until the next replay of any recording of that pool.
        Raises RuntimeError where it cannot be recorded.
        """
        ...


class CpuLink:
    """Everything at once, in host memory."""

    pin = False
    recorder: Any = None

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def overlap(self, on: bool) -> None:
        """See Link.  Nothing overlaps here."""

    def spare(self) -> int:
        """See Link.  Host memory is not given away for slots."""
        return 0

    def stamp(self) -> Any:
        """See Link."""
        return time.perf_counter()

    def seconds(self, since: Any, stamp: Any) -> float:
        """See Link."""
        return float(stamp - since)

    def upload(self, device: torch.Tensor, host: torch.Tensor, after: Any) -> Any:
        """See Link."""
        return self._now(device, host)

    def download(self, host: torch.Tensor, device: torch.Tensor, after: Any) -> Any:
        """See Link."""
        return self._now(host, device)

    def _now(self, to: torch.Tensor, source: torch.Tensor) -> Any:
        began = self.stamp()
        to.copy_(source)
        return None if self.recorder is None else _Copied(began, self.stamp())

    def mark(self) -> Any:
        """See Link."""
        return None

    def wait(self, event: Any) -> None:
        """See Link."""

    def join(self, event: Any) -> None:
        """See Link."""

    def ready(self, event: Any) -> bool:
        """See Link."""
        return True

    def thread(self) -> Any:
        """See Link."""
        return nullcontext()

    def trim(self) -> None:
        """See Link."""

    def pool(self) -> Any:
        """See Link."""
        return None

    def pool_bytes(self, pool: Any) -> int:
        """See Link."""
        return 0

    def record(self, work: Callable[[], Sequence[Any]], pool: Any) -> Recording:
        """See Link.  What runs again is `work`, into the results of the first run."""
        results = list(work())

        def replay() -> None:
            for to, value in zip(results, work()):
                if isinstance(to, torch.Tensor) and to.data_ptr() != value.data_ptr():
                    to.copy_(value)

        return replay, results


class LateLink(CpuLink):
    """CpuLink whose copies happen late, at random: a test of the waits, on real data."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._queues: dict[str, deque[_Copy]] = {"up": deque(), "down": deque()}

    def upload(self, device: torch.Tensor, host: torch.Tensor, after: Any) -> Any:
        """See Link.  The destination is poisoned at once: nothing may read it before the copy."""
        device.fill_(0xFF)
        return self._queue("up", device, host)

    def download(self, host: torch.Tensor, device: torch.Tensor, after: Any) -> Any:
        """See Link."""
        host.fill_(0xFF)
        return self._queue("down", host, device)

    def _queue(self, stream: str, to: torch.Tensor, source: torch.Tensor) -> _Copy:
        with self._lock:
            copy = _Copy(stream, to, source)
            self._queues[stream].append(copy)
            self._drift()
            return copy

    def _drift(self) -> None:
        for _ in range(self._random.randrange(3)):
            queue = self._queues[self._random.choice(("up", "down"))]
            if queue:
                queue.popleft().run()

    def wait(self, event: Any) -> None:
        """See Link."""
        if event is None:
            return
        with self._lock:
            while not event.done:
                self._queues[event.stream].popleft().run()
            self._drift()

    join = wait

    def ready(self, event: Any) -> bool:
        """See Link."""
        return event is None or event.done


class _Copied:
    """A copy that is over, with its times."""

    def __init__(self, began: float, ended: float) -> None:
        self.began, self.ended, self.done = began, ended, True


class _Copy:
    began = ended = 0.0

    def __init__(self, stream: str, to: torch.Tensor, source: torch.Tensor) -> None:
        self.stream, self.to, self.source, self.done = stream, to, source, False

    def run(self) -> None:
        self.began = time.perf_counter()
        self.to.copy_(self.source)
        self.ended, self.done = time.perf_counter(), True


class CudaLink:
    """Two copy streams beside the current stream of whoever computes.

    slow: repeat every copy that often, to make races visible in tests.
    """

    pin = True
    recorder: Any = None

    def __init__(self, device: torch.device, slow: int = 1) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.slow = slow
        self._streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        self._up, self._down = self._streams
        self._capture: torch.cuda.Stream | None = None

    def overlap(self, on: bool) -> None:
        """See Link."""
        one = torch.cuda.default_stream(self.device)
        self._up, self._down = self._streams if on else (one, one)

    def upload(self, device: torch.Tensor, host: torch.Tensor, after: Any) -> Any:
        """See Link."""
        return self._copy(self._up, device, host, after)

    def download(self, host: torch.Tensor, device: torch.Tensor, after: Any) -> Any:
        """See Link."""
        return self._copy(self._down, host, device, after)

    def _copy(self, stream: torch.cuda.Stream, to: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        timed = self.recorder is not None
        event = torch.cuda.Event(blocking=True, enable_timing=timed)
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            if timed:
                event.began, event.ended = torch.cuda.Event(enable_timing=True), event
                event.began.record(stream)
            for _ in range(self.slow):
                to.copy_(source, non_blocking=True)
            event.record(stream)
        return event

    def spare(self) -> int:
        """See Link."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.max_memory_allocated(self.device)

    def stamp(self) -> Any:
        """See Link."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, since: Any, stamp: Any) -> float:
        """See Link."""
        stamp.synchronize()
        return float(since.elapsed_time(stamp)) / 1e3

    def mark(self) -> Any:
        """See Link."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: Any) -> None:
        """See Link."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def join(self, event: Any) -> None:
        """See Link."""
        if event is not None:
            event.synchronize()

    def ready(self, event: Any) -> bool:
        """See Link."""
        return event is None or bool(event.query())

    def thread(self) -> Any:
        """See Link."""
        return torch.cuda.device(self.device)

    def trim(self) -> None:
        """See Link."""
        torch.cuda.empty_cache()

    def pool(self) -> Any:
        """See Link."""
        return torch.cuda.graph_pool_handle()

    def pool_bytes(self, pool: Any) -> int:
        """See Link."""
        return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool))

    def record(self, work: Callable[[], Sequence[Any]], pool: Any) -> Recording:
        """See Link."""
        stream = self._capture = self._capture or torch.cuda.Stream(self.device)
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            # the libraries' workspaces of this thread and stream must not come from the pool
            a = torch.zeros(16, 16, device=self.device, dtype=torch.bfloat16)
            torch.nn.functional.linear(a @ a, a, a[0])
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                results = [_Place(r) if isinstance(r, torch.Tensor) else r for r in work()]
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph.replay, [r.tensor(self.device) if isinstance(r, _Place) else r for r in results]


class _Memory:
    """Device memory that somebody else owns, as numba's protocol describes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}


class _Place:
    """Where a tensor is, without holding it: its memory may be used again by what is recorded later."""

    def __init__(self, t: torch.Tensor) -> None:
        self.address, self.shape, self.stride, self.dtype = t.data_ptr(), t.shape, t.stride(), t.dtype
        self.nbytes = t.dtype.itemsize * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))) if t.numel() else 0

    def tensor(self, device: torch.device) -> torch.Tensor:
        if not self.nbytes:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        flat = torch.as_tensor(_Memory(self.address, self.nbytes), device=device).view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


def link_for(device: torch.device | str) -> Link:
    """The link to a device."""
    device = torch.device(device)
    return CudaLink(device) if device.type == "cuda" else CpuLink()
