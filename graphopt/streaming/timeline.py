"""A timeline of real steps: what the three streams, the CPU pool and the launching thread did, and when.

Device times are CUDA events, recorded only while a timeline is made; host times are of the same moment's clock.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphopt.errors import StreamError
from graphopt.schedule import stream_timeline as pictures
from graphopt.schedule.stream_timeline import Span
from graphopt.streaming import attach
from graphopt.streaming.engine import Engine
from graphopt.streaming.link import Link


class Recorder:
    """Collects spans; events are read when it is closed."""

    def __init__(self, link: Link) -> None:
        if link.device.type == "cuda":
            torch.cuda.synchronize(link.device)
        self._link = link
        self._zero, self._host_zero = link.stamp(), time.perf_counter()
        self._lock = threading.Lock()
        self._device: list[tuple[str, str, str, Any, Any]] = []
        self._spans: list[Span] = []

    def copied(self, track: str, name: str, copy: Any) -> None:
        """A copy was queued; `copy` is what the link returned."""
        if not hasattr(copy, "began"):  # queued before the recording began
            return
        with self._lock:
            self._device.append((track, name, track, copy, None))

    def host(self, track: str, name: str, kind: str, start: float, end: float) -> None:
        """Something was done on the host, between two times of `time.perf_counter`."""
        with self._lock:
            self._spans.append(Span(track, name, kind, start - self._host_zero, end - self._host_zero))

    @contextmanager
    def computing(self, name: str, kind: str) -> Iterator[None]:
        """What is queued on the compute stream inside is one span, and the queueing another."""
        began, start = self._link.stamp(), time.perf_counter()
        yield
        ended, end = self._link.stamp(), time.perf_counter()
        self.host("launch", name, "launch" if kind in ("forward", "backward") else kind, start, end)
        with self._lock:
            self._device.append(("compute", name, kind, began, ended))

    def spans(self) -> list[Span]:
        """All spans, by time; blocks until the device is done."""
        found = list(self._spans)
        for track, name, kind, began, ended in self._device:
            if ended is None:
                self._link.join(began)
                began, ended = began.began, began.ended
            times = self._link.seconds(self._zero, began), self._link.seconds(self._zero, ended)
            found.append(Span(track, name, kind, *times))
        return sorted(found, key=lambda s: s.start)


class StreamTimeline:
    """What `stream_timeline` recorded.  spans: seconds since its start; complete when the context has ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def busy(self, track: str, kind: str | None = None) -> float:
        """Seconds a track ("compute", "upload", "download", "cpu", "launch") worked."""
        return pictures.busy(self.spans, track, kind)

    def save(self, path: str | os.PathLike, title: str = "Streamed steps") -> Path:
        """Write it: a page with a picture (.html), or a Chrome trace (.json)."""
        return pictures.write(self.spans, path, title)

    def __str__(self) -> str:
        return "\n".join(f"{t:9} {k:10} {n:5} spans {1e3 * b:9.2f} ms" for t, k, n, b in pictures.summary(self.spans))


@contextmanager
def stream_timeline(model: nn.Module) -> Iterator[StreamTimeline]:
    """Record the streams and the CPU pool of a streamed model while steps run inside.

        with graphopt.stream_timeline(model) as line:
            loss = step(**batch)[0].square().mean(); loss.backward(); opt.step(); opt.zero_grad()
        line.save("steps.html"); line.save("steps.json")

    Raises StreamError if the model is not streamed, or is recorded already.
    """
    engine: Engine = attach.engine_of(model)
    if engine.link.recorder is not None:
        raise StreamError("a timeline of this model is being recorded already", remedy="end it first")
    line = StreamTimeline()
    recorder = Recorder(engine.link)
    engine.link.recorder = recorder
    try:
        yield line
        optimizer = engine.optimizer() if engine.optimizer else None
        if optimizer is not None:
            optimizer.flush()
    finally:
        engine.link.recorder = None
    line.spans = recorder.spans()
