"""What a machine sustains and what a step could take at least: for stream_step.py."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from graphopt.streaming import measure
from graphopt.streaming.link import link_for


def number(x: float) -> float | None:
    """None for what was not measured."""
    return x if x == x else None


def bounds(engine, rate: dict[str, float], slots: int, r: float, f: float) -> dict[str, float]:
    """Least milliseconds of a step in each order; r, f: resident step and its forward."""
    layers = engine.store.layers
    nbytes, kept = sum(x.nbytes for x in layers), sum(x.nbytes for x in layers[len(layers) - slots:])
    up1, up2 = nbytes / rate["h2d"] / 1e6, (nbytes - kept) / rate["h2d"] / 1e6
    down = sum(x.grad_bytes for x in layers) / rate["d2h"] / 1e6
    adam = 26 * sum(x.elements for x in layers) / rate["adamw"] / 1e6
    b = r - f
    return {"deferred": max(f, up1, adam) + max(b, up2, down), "priority": max(r, adam, up1 + up2),
            "in_backward": max(f, up1) + max(b, up2, down, adam), "serial": r + up1 + up2 + down + adam,
            "adamw": adam, "up": up1 + up2, "down": down}


def cores() -> int:
    """CPUs that this process may use: rows of machines with more or fewer of them stand side by side."""
    return len(os.sched_getaffinity(0))


def copies(engine) -> dict[str, float]:
    """GB/s of the copies of all layers' gradients, down and up again, with nothing beside; gradients are lost."""
    layers, slab = [x for x in engine.store.layers if x.slab is not None], engine.gradients.slabs[0]
    if not layers:
        return {}
    found = {}
    for what in ("d2h", "h2d"):
        start = time.perf_counter()
        for x in layers:
            host, device = x.slab[:x.grad_bytes], slab[:x.grad_bytes]
            end = engine.link.download(host, device, None) if what == "d2h" else engine.link.upload(device, host, None)
        engine.link.join(end)
        found[f"{what}_after_gb_per_s"] = sum(x.grad_bytes for x in layers) / (time.perf_counter() - start) / 1e9
    return found


def rss() -> float:
    """GiB of memory this process holds."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in status if x.startswith("VmRSS")).split()[1]) / 2**20


class Box:
    """The rates of this machine, GB/s; AdamW's of each number of threads that is asked for, on the CPUs they get."""

    def __init__(self, seconds: float, threads: set[int | None], elements: int) -> None:
        self.rate = dict.fromkeys(("h2d", "d2h", "adamw"), float("nan"))
        self.rates = None
        self.pools: dict[int | None, float] = {}
        if not seconds:
            return
        device = "cuda" if torch.cuda.is_available() else "cpu"
        bench = measure.Bench(link_for(torch.device(device)), elements)
        self.rate = bench.all(seconds)
        self.rates = measure.rates(device, host=self.rate)
        for n in threads:
            self.pools[n] = bench.pool(seconds, n) / 1e9 if n else self.rate["adamw_pool"]

    def of(self, threads: int | None) -> dict[str, float]:
        """What was measured, for an order."""
        return {k: v for k, v in self.rate.items() if number(v)} | (
            {"adamw_pool": self.pools[threads]} if threads in self.pools else {})

    def plan(self, threads: int | None):
        """The rates for its plan."""
        return self.rates and replace(self.rates, adamw=1e9 * self.pools[threads])
