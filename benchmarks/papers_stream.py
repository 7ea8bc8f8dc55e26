"""Streaming beside the second paper: MFU with prefetch, without, with the optimizer on the GPU; forwards by size.

    python benchmarks/papers_stream.py mfu [--width 14b] [--layers 6] [--grids 5x30x52,21x30x52]
    python benchmarks/papers_stream.py forward [--width 14b] [--sizes 4,16,40] [--grids 5x30x52]

mfu: steps of one streamed model (no layer resident) at the width of Wan 14B.  prefetch: three streams, the AdamW of
the CPU beside them, in two orders.  no prefetch: copies and kernels on one stream, the update at the end.  optimizer
on the GPU: with prefetch, then masters, moments and gradients of a layer go up, are updated there and come down, two
layers in flight.
MFU counts the forward three times (HFU four: a layer is recomputed), by torch's counter, over 989 TFLOP/s.
forward: without gradients, streams overlapped against one stream and one slot.
--seconds: nothing is begun after them; sizes, systems and grids that are left out are told.
--warm: compile and end; a run with the same cache folder then times at once, and that alone needs the host to itself.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import stream_step
import torch
from _results import save
from stream_step import between, inputs, mark

import graphopt
from graphopt.streaming import attach
from graphopt.streaming.engine import Engine
from graphopt.streaming.store import HostLayer, padded

PEAK = 989e12  # dense bf16 of an H100 or H200
KEYS = ("figure", "system", "shape", "direction", "layers", "width")
GPU = torch.cuda.is_available()


class OnGpu:
    """AdamW on the GPU whose state lives in host memory: as stock offloading does it."""

    def __init__(self, model: torch.nn.Module, engine: Engine, lr: float = 1e-5) -> None:
        self.model, self.engine, self.link, self.lr, self.t = model, engine, engine.link, lr, 0
        self.state: dict[HostLayer, torch.Tensor] = {}
        for layer in engine.store.layers:
            state = engine.store.arena.allocate(12 * layer.elements).view(torch.float32).view(3, -1)
            state[0] = torch.cat([part.float() for part in _parts(layer, layer.weights)])
            self.state[layer] = state
        largest = max(engine.store.layers, key=lambda x: x.elements)
        new = lambda count, dtype: torch.empty(count, dtype=dtype, device=self.link.device)
        self.buffers = [(new(3 * largest.elements, torch.float32), new(largest.grad_bytes, torch.uint8),
                         new(largest.nbytes, torch.uint8)) for _ in range(2)]
        self.rest = torch.optim.AdamW([p for p in model.parameters() if p.device.type == self.link.device.type
                                       and not any(e.handle is p for e in engine.store.entries)], lr=lr)

    def step(self) -> None:
        """Every layer up, updated and down; then the weights are final."""
        self.t += 1
        free: list[Any] = [None, None]
        for i, layer in enumerate(self.engine.store.layers):
            state, slab, weights = self.buffers[i % 2]
            state = state[:3 * layer.elements].view(3, -1)
            for event in self.engine.gradients.take(layer).events:
                self.link.join(event)
            assert layer.slab is not None
            there = [self.link.upload(state, self.state[layer], free[i % 2]),
                     self.link.upload(slab[:layer.grad_bytes], layer.slab, free[i % 2])]
            for event in there:
                self.link.wait(event)
            self._adamw(state, torch.cat([part.float() for part in _parts(layer, slab)]))
            at = 0
            for part in _parts(layer, weights):
                part.copy_(state[0, at:at + part.numel()])
                at += part.numel()
            done = self.link.mark()
            self.link.download(self.state[layer], state, done)
            free[i % 2] = self.link.download(layer.weights, weights[:layer.nbytes], done)
        for event in free:
            self.link.join(event)
        for layer in self.engine.store.layers:
            self.engine.store.replaced(layer)
        self.rest.step()

    def _adamw(self, state: torch.Tensor, gradient: torch.Tensor) -> None:
        master, mean, square = state
        mean.lerp_(gradient, 0.1)
        square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        root = (square / (1 - 0.999**self.t)).sqrt_().add_(1e-8)
        master.mul_(1 - 0.01 * self.lr).addcdiv_(mean, root, value=-self.lr / (1 - 0.9**self.t))

    def zero_grad(self) -> None:
        self.engine.gradients.clear()
        self.rest.zero_grad()


def _parts(layer: HostLayer, flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """A weight or gradient buffer as one tensor per dtype, in the order of the optimizer's elements."""
    at = 0
    for dtype in sorted({e.dtype for e in layer.trained}, key=str):
        mine = [e for e in layer.trained if e.dtype == dtype]
        elements = sum(padded(e.numel) for e in mine)
        nbytes = elements * dtype.itemsize
        yield flat[at:at + nbytes].view(dtype)
        at += nbytes


def forward_flops(width: str, layers: int, grid: tuple[int, int, int]) -> int:
    """Of one forward, by torch's counter on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        from diffusers import WanTransformer3DModel

        model = WanTransformer3DModel(num_layers=layers, in_channels=16, out_channels=16, rope_max_seq_len=1024,
                                      **stream_step.WIDTHS[width])
        T, H, W = grid
        text = stream_step.WIDTHS[width]["text_dim"]
        kw = dict(hidden_states=torch.empty(1, 16, T, 2 * H, 2 * W), timestep=torch.empty(1),
                  encoder_hidden_states=torch.empty(1, 512 if text > 100 else 8, text), return_dict=False)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(**kw)
    return counter.get_total_flops()


def streamed(width: str, layers: int, slots: int) -> tuple[torch.nn.Module, Engine, Any, float]:
    """Model, runtime, compiled model and billions of parameters."""
    torch._dynamo.reset()
    gc.collect()  # the model before: its host memory
    model = stream_step.build(width, layers)
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    graphopt.stream(model, "cuda" if GPU else "cpu", slots=slots, resident=0)
    if GPU:
        torch.cuda.empty_cache()
    options = {} if GPU else {"graphopt.compiler": "aot_eager"}
    step = torch.compile(model, backend="graphopt", options=options, dynamic=False)
    return model, attach.engine_of(model), step, billions


def mfu(width: str, layers: int, grids: list[tuple[int, int, int]], slots: int, n: int, on_gpu: bool) -> Iterator[dict]:
    """Rows per grid, and per place and order of the update; fewer steps of long ones."""
    model, engine, step, billions = streamed(width, layers, slots)
    flops = {grid: forward_flops(width, layers, grid) for grid in grids}
    for system, update, driver in _drivers(model, engine, slots, on_gpu):
        for grid in grids:
            kw = inputs(grid, stream_step.WIDTHS[width]["text_dim"])
            if GPU:
                torch.cuda.reset_peak_memory_stats()
            count = n if kw["hidden_states"].numel() < 16 * 4 * 20000 else max(2, n // 2)
            times, forward, losses = stream_step.steps(step, kw, driver, count + 1, 1)
            getattr(driver, "flush", int)()
            ms = statistics.median(times)
            print(f"{system} {update} {grid}: {[round(t) for t in times]} losses {losses[0]:.5f} {losses[-1]:.5f}")
            yield dict(figure="mfu", system=system, shape=list(grid), direction=update, layers=layers,
                       width=width, params_b=round(billions, 3), tokens=grid[0] * grid[1] * grid[2], step_ms=ms,
                       forward_ms=statistics.median(forward), mfu=3 * flops[grid] / (ms / 1e3) / PEAK,
                       hfu=4 * flops[grid] / (ms / 1e3) / PEAK, steps=count, cores=stream_step.cores(),
                       peak_gib=torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0)


def _drivers(model: torch.nn.Module, engine: Engine, slots: int, on_gpu: bool) -> Iterator[tuple[str, str, Any]]:
    """(system, update, optimizer), one at a time."""
    if on_gpu:
        first = OnGpu(model, engine)  # kept: its memory is registered with the driver until the arena ends
        yield "optimizer on the GPU", "gpu", first
    opt = graphopt.HostAdamW(model.parameters(), lr=1e-5)
    for state in opt.states.values():  # a first update would meet untouched pages
        state.exp_avg.zero_(), state.exp_avg_sq.zero_(), state.residual.zero_()
    for system, update in (("prefetch", "priority"), ("prefetch", "deferred"), ("no prefetch", "deferred")):
        serial = system == "no prefetch"
        opt.update = update
        engine.gradients.keep_norms = update == "deferred"
        engine.link.overlap(not serial)
        engine.set_slots(1 if serial else slots)
        yield system, update, stream_step.Serial(opt) if serial else opt


def forwards(width: str, layers: list[int], grids: list[tuple[int, int, int]], slots: int, n: int) -> Iterator[dict]:
    """Rows per size of the model, with and without overlap."""
    grid = grids[0]
    kw = inputs(grid, stream_step.WIDTHS[width]["text_dim"])
    for count in layers:
        model, engine, step, billions = streamed(width, count, slots)
        with torch.no_grad():
            step(**kw)  # compiles
            for system in ("asynchronous", "serial"):
                engine.link.overlap(system == "asynchronous")
                engine.set_slots(slots if system == "asynchronous" else 1)
                marks = [mark()]
                for _ in range(n + 1):
                    step(**kw)
                    marks.append(mark())
                times = [between(a, b) for a, b in pairwise(marks[1:])]
                print(f"{billions:.1f} B {system}: {[round(t, 1) for t in times]}", flush=True)
                yield dict(figure="forward", system=system, shape=list(grid), direction="forward", layers=count,
                           width=width, params_b=round(billions, 3), tokens=grid[0] * grid[1] * grid[2],
                           forward_ms=statistics.median(times), cores=stream_step.cores())
        del model, engine, step


def warm(parts: list[str], width: str, layers: int, sizes: list[int], grids: list[tuple[int, int, int]],
         slots: int) -> None:
    """One step per grid and one forward: layers are one code, however many."""
    text = stream_step.WIDTHS[width]["text_dim"]
    if "mfu" in parts:
        model, engine, step, _ = streamed(width, layers, slots)
        for grid in grids:
            stream_step.steps(step, inputs(grid, text), stream_step.Nothing(model, engine), 1, 1)
        del model, engine, step
    if "forward" in parts:
        step = streamed(width, sizes[0], slots)[2]
        with torch.no_grad():
            step(**inputs(grids[0], text))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("parts", nargs="+", choices=["mfu", "forward"])
    p.add_argument("--width", choices=sorted(stream_step.WIDTHS), default="14b")
    p.add_argument("--layers", type=int, default=6, help="of mfu")
    p.add_argument("--sizes", default="4,16,40", help="layers of forward")
    p.add_argument("--grids", default="5x30x52,21x30x52", help="of mfu; forward takes the first")
    p.add_argument("--slots", type=int, default=3)
    p.add_argument("--steps", type=int, default=4)
    p.add_argument("--seconds", type=float, default=1e9)
    p.add_argument("--host-only", action="store_true", help="no optimizer on the GPU, which takes long to set up")
    p.add_argument("--warm", action="store_true")
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    grids = [tuple(int(x) for x in g.split("x")) for g in a.grids.split(",")]
    sizes = [int(x) for x in a.sizes.split(",")]
    if a.warm:
        return warm(a.parts, a.width, a.layers, sizes, grids, a.slots)
    begun = time.perf_counter()
    rows = {"mfu": lambda: mfu(a.width, a.layers, grids, a.slots, a.steps, not a.host_only),
            "forward": lambda: forwards(a.width, sizes, grids, a.slots, a.steps)}
    for row in chain.from_iterable(rows[part]() for part in a.parts):
        print(f"[{time.perf_counter() - begun:.0f} s]", row, flush=True)
        save("papers", [row], KEYS, {}, a.out)
        if time.perf_counter() - begun > a.seconds:
            print(f"{a.seconds:.0f} s are over: the rest is left out", flush=True)
            break


if __name__ == "__main__":
    main()
