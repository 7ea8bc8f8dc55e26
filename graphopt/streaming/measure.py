"""What this box sustains: copies to and from the device, and the CPU optimizer, alone and together."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphopt.codegen.adamw import Hyper, Piece
from graphopt.schedule.stream_plan import ADAMW_BYTES, Rates
from graphopt.streaming import numa, optimizer
from graphopt.streaming.link import Link, link_for
from graphopt.streaming.store import Entry, HostLayer, HostStore
from graphopt.streaming.updates import State

ELEMENTS = 46_000_000  # a block of Wan 1.3B


class Bench:
    """Buffers like those of a streamed model, and loops over them.

    Loops give bytes per second; the optimizer's bytes are what it reads and writes (26 per bf16 parameter).
    """

    def __init__(self, link: Link, elements: int = ELEMENTS, layers: int = 3, kernel: str = "auto") -> None:
        self.link, self.kernel, self._named = link, optimizer.kernel_of(kernel, link), kernel
        made = []
        for i in range(layers):
            shape = torch.Size((elements,))
            made.append(HostLayer(f"bench.{i}", i, [Entry("w", f"bench.{i}.w", shape, (1,), torch.bfloat16, True)]))
        self.store = HostStore(made, link.pin, numa.node_of(link.device))
        self.states = {}
        for layer in made:
            self.store.allocate_weights(layer)
            self.store.allocate_slab(layer).zero_()
            self.states[layer] = State(layer, self.store, ema=False)
        self.slot, self.slab = (torch.zeros(made[0].nbytes, dtype=torch.uint8, device=link.device) for _ in range(2))

    def upload(self, layer: HostLayer) -> int:
        """One layer's weights to the device; returns bytes."""
        self.link.join(self.link.upload(self.slot, layer.weights, None))
        return layer.nbytes

    def download(self, layer: HostLayer) -> int:
        """One layer's gradients to the host; returns bytes."""
        assert layer.slab is not None
        self.link.join(self.link.download(layer.slab, self.slab, None))
        return layer.grad_bytes

    def adamw(self, layer: HostLayer, kernel: Callable[[Sequence[Piece]], None] | None = None) -> int:
        """One layer's update; returns bytes."""
        assert layer.slab is not None
        entry, state = layer.entries[0], self.states[layer]
        gradient = entry.gradient(layer.slab).as_strided((entry.numel,), (1,))
        (kernel or self.kernel)([state.piece(entry, gradient, Hyper(0.0, 0.9, 0.999, 1e-8, 0.0, 1))])
        return ADAMW_BYTES * entry.numel

    def alone(self, work: Callable[[HostLayer], int], seconds: float = 0.3) -> float:
        """The best rate of one loop over the layers, bytes/s."""
        for layer in self.store.layers:  # first use: pages, caches, the team of threads
            work(layer)
        best, until = 0.0, time.perf_counter() + seconds
        while best == 0.0 or time.perf_counter() < until:
            start = time.perf_counter()
            done = sum(map(work, self.store.layers))
            best = max(best, done / (time.perf_counter() - start))
        return best

    def together(self, works: Sequence[Callable[[HostLayer], int]], seconds: float = 0.5) -> list[float]:
        """The rates of several loops that run at once, bytes/s."""
        done, failed = [0] * len(works), []
        start = time.perf_counter()

        def loop(k: int) -> None:
            try:
                with self.link.thread(), torch.no_grad():
                    i = 0
                    while not done[k] or time.perf_counter() - start < seconds:
                        done[k] += works[k](self.store.layers[i % len(self.store.layers)])
                        i += 1
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=loop, args=(k,)) for k in range(len(works))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if failed:
            raise failed[0]
        took = time.perf_counter() - start
        return [d / took for d in done]

    def pool(self, seconds: float = 0.3, threads: int | None = None) -> float:
        """The best rate of the optimizer on the CPUs that it has in a step, bytes/s: some cores are spared there.

        threads: as HostAdamW's.
        """
        found: list[Any] = []
        kernel = optimizer.kernel_of(self._named, self.link, threads)

        def work() -> None:
            try:
                if self.link.device.type == "cuda":  # as Updates does
                    numa.bind(numa.pool_cpus(self.link.device, threads))
                with torch.no_grad():
                    found.append(self.alone(lambda layer: self.adamw(layer, kernel), seconds))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=work)  # and the team of threads that it starts
        thread.start()
        thread.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return float(found[0])

    def all(self, seconds: float = 0.4) -> dict[str, float]:
        """GB/s: h2d, d2h, adamw alone; the last on its own CPUs; both copies at once; all three at once."""
        found = {"h2d": self.alone(self.upload, seconds), "d2h": self.alone(self.download, seconds),
                 "adamw": self.alone(self.adamw, seconds), "adamw_pool": self.pool(seconds)}
        pair = self.together([self.upload, self.download], seconds)
        every = self.together([self.upload, self.download, self.adamw], seconds)
        found |= dict(zip(("h2d_with_d2h", "d2h_with_h2d"), pair))
        found |= dict(zip(("h2d_with_all", "d2h_with_all", "adamw_with_all"), every))
        return {k: v / 1e9 for k, v in found.items()}


def host_rates(
    device: str | torch.device = "cuda", seconds: float = 0.4, elements: int | None = None, **settings: Any
) -> dict[str, float]:
    """GB/s of copies and of the CPU optimizer on this box; takes about 3 GB of host memory.  See Bench.all."""
    return Bench(link_for(torch.device(device)), elements or ELEMENTS, **settings).all(seconds)


def rates(
    device: str | torch.device = "cuda", seconds: float = 0.4, host: dict[str, float] | None = None
) -> Rates:
    """The rates of this box for `stream_plan(model, tokens, rates=...)`; a few seconds, about 3 GB of host memory.

    Copies and the optimizer alone; on a GPU also bf16 products, attention forward and backward, and device memory.
    host: what `host_rates` found, if it has run.
    """
    target = torch.device(device)
    found = host or host_rates(target, seconds)
    known = Rates(h2d=1e9 * found["h2d"], d2h=1e9 * found["d2h"], adamw=1e9 * found["adamw_pool"],
                 origin=f"measured here on {target}")
    if target.type != "cuda":
        return known
    device_rates = _device_rates(target)
    return replace(known, matmul=device_rates["matmul"], attention=device_rates["attention"],
                   attention_backward=device_rates["attention_backward"], memory=device_rates["memory"])


def _device_rates(device: torch.device) -> dict[str, float]:
    n, heads, tokens, width = 8192, 12, 16384, 128
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    # three tensors: attention of one to itself looks at one token each, which takes less power and so less time
    q, k, v = (torch.randn(1, heads, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
               for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    scores = 4.0 * tokens * tokens * heads * width
    out = attend(q, k, v)
    copied = torch.empty(1 << 30, device=device, dtype=torch.uint8)
    other = torch.empty_like(copied)
    grad = torch.ones_like(out)
    with torch.no_grad():
        found = {"matmul": 2.0 * n**3 / _seconds(lambda: a @ b, device),
                 "attention": scores / _seconds(lambda: attend(q, k, v), device),
                 "memory": 2.0 * copied.nbytes / _seconds(lambda: other.copy_(copied), device)}
    backward = _seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), device)
    return {**found, "attention_backward": 2.5 * scores / backward}


def _seconds(work: Callable[[], Any], device: torch.device, seconds: float = 0.5) -> float:
    """The time of one run on the device's clock, as in a long step: at the clocks it keeps up, not at the first ones.

    Products and attention take all the power a GPU may use, so its clocks fall within a tenth of a second.
    """
    stream, events = torch.cuda.current_stream(device), [torch.cuda.Event(enable_timing=True)]
    events[0].record(stream)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(events) < 8:
        work()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record(stream)
        if len(events) > 8:  # a few runs ahead of the device, no more
            events[-8].synchronize()
    events[-1].synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.median(times[len(times) // 2:]) / 1e3
