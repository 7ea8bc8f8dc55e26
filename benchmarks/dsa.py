"""3D deformable sliding attention against cuDNN, FlexAttention's fixed window and grid_sample, through autograd.

    python benchmarks/dsa.py                         everything, the table's rows first
    python benchmarks/dsa.py --only table head       parts: table, head, memory, large, kinds, sizes
    python benchmarks/dsa.py --once                  each part a single time, to fill the compilers' caches
    python benchmarks/dsa.py --plot                  results/<machine>/dsa.png from the saved rows

offsets: none (fixed window), zero (offsets that are all 0), smooth (uniform noise of +-(1, 2, 2) tokens on control
points every 5 x 10 x 13 tokens or so, trilinear between), rough (every 2.5 x 4 x 4.6), noise (every token by itself),
wild (every token by itself, up to a quarter of the grid).  Milliseconds are medians, end
to end through autograd; the backward includes the gradient of the offsets.  Errors are relative L2 norms against fp64
over all queries and keys of one head.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
import _results
import _timing
import dsa_rivals as rivals

import graphopt
from graphopt.codegen.dsa import head as offset_head
from graphopt.codegen.dsa import reference

Triple = tuple[int, int, int]
TINY = not torch.cuda.is_available()  # a CPU checks the script, not the speed
BARS: list[Triple] = [(21, 30, 52), (21, 45, 80)]
SIZES: list[Triple] = [(5, 16, 26), (7, 16, 26), (9, 20, 26), (13, 20, 26), (13, 24, 32), (21, 30, 26), (33, 68, 80)]
LARGE: Triple = (64, 68, 120)
HEADS = 12
K7, K3 = (3, 7, 7), (3, 3, 3)
if TINY:
    BARS, SIZES, LARGE, HEADS = [(3, 8, 9), (4, 8, 9)], [(3, 5, 8)], (4, 9, 9), 2
BF = torch.bfloat16
KEYS = ("what", "tokens", "window", "heads", "head_dim", "dtype", "offsets", "direction")
DIRECTIONS = ("forward", "backward", "both")


def error_of(leaves, dy, offsets, grid, window) -> dict[str, float]:
    """Relative L2 error against fp64 of y and every gradient of head 0, all queries and keys."""
    q, k, v = (x[:, :1].detach() for x in leaves)
    off = None if offsets is None else offsets[:, :1].detach().requires_grad_()
    mine = [x.clone().requires_grad_() for x in (q, k, v)] + ([] if off is None else [off])
    y = graphopt.dsa.video_attention(*mine[:3], off, grid=grid, window=window)
    got = torch.autograd.grad(y, mine, dy[:, :1])
    zero = torch.zeros(1, 1, q.shape[2], 3, device=q.device) if off is None else off.detach()
    wide, scale = [x.double() for x in (q, k, v)], q.shape[-1] ** -0.5
    Y, L = reference.forward(*wide, zero, grid, window, scale)
    want = reference.backward(dy[:, :1].double(), None, *wide, zero, Y, L, grid, window, scale)
    names = ("dq", "dk", "dv", "doffsets")
    relative = lambda a, b: ((a.double() - b.double()).norm() / b.double().norm()).item()
    return {"y": relative(y, Y), **{n: relative(a, b) for n, a, b in zip(names, got, want)}}


@cache
def dense_times(grid: Triple) -> dict[str, float]:
    """cuDNN, measured once per size and run: it knows no window."""
    return rivals.dense(*rivals.inputs(grid, HEADS, 128, BF))


@cache
def flex_times(grid: Triple, window: Triple) -> dict[str, float]:
    """FlexAttention, once per size, window and run."""
    return rivals.flex(*rivals.inputs(grid, HEADS, 128, BF), grid, window)


def ours(grid: Triple, window: Triple, kind: str, sampled: bool, errors: bool, D: int,
         dtype: torch.dtype) -> tuple[dict[str, dict[str, float]], dict[str, float] | None, str]:
    """Times of graphopt and, if asked, of grid_sample; errors; the engine."""
    leaves, dy = rivals.inputs(grid, HEADS, D, dtype)
    offsets = rivals.make_offsets(kind, grid, HEADS)
    mine = leaves + ([] if offsets is None else [offsets.requires_grad_()])
    ms = {"graphopt": rivals.timed(
        lambda: graphopt.dsa.video_attention(*leaves, offsets, grid=grid, window=window), mine, dy)}
    if sampled:
        ms["reference"] = rivals.timed(lambda: rivals.sampled(*leaves, offsets, grid, window), mine, dy)
    error = error_of(leaves, dy, offsets, grid, window) if errors else None
    return ms, error, graphopt.dsa.explain(leaves[0], offsets, grid=grid, window=window).engine


def measure(grid: Triple, window: Triple, kind: str, systems: tuple[str, ...] = (), errors: bool = True, D: int = 128,
            dtype: torch.dtype = BF) -> list[dict[str, Any]]:
    """One shape: forward, backward and both of every system."""
    ms, error, engine = ours(grid, window, kind, "reference" in systems, errors, D, dtype)
    if "cudnn" in systems and not TINY:
        ms["cudnn"] = dense_times(grid)
    if "flex" in systems and not TINY:
        ms["flex"] = flex_times(grid, window)
    common = {"what": "attention", "tokens": math.prod(grid), "grid": list(grid), "window": list(window),
              "heads": HEADS, "head_dim": D, "dtype": "float32" if TINY else str(dtype).removeprefix("torch."),
              "offsets": kind, "engine": engine}
    rows = []
    for direction in DIRECTIONS:
        times = {name: t[direction] for name, t in ms.items()}
        rows.append({**common, "direction": direction, "ms": times, "error": error})
        print(f"{math.prod(grid):7d} {window} {kind:7s} {direction:8s}", *(f"{n} {t:9.3f}" for n, t in times.items()),
              flush=True)
    if error:
        print("        error", *(f"{n} {e:.1e}" for n, e in error.items()), flush=True)
    return rows


def memory(grid: Triple, window: Triple, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Peak memory of one training step above its inputs."""
    peaks = {}
    for name in names:
        leaves, dy = rivals.inputs(grid, HEADS, 128, BF)
        offsets = rivals.make_offsets("smooth", grid, HEADS)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if name == "dense":
            torch.autograd.grad(F.scaled_dot_product_attention(*leaves), leaves, dy)
        else:
            mine = [*leaves, offsets.requires_grad_()]
            torch.autograd.grad(graphopt.dsa.video_attention(*mine, grid=grid, window=window), mine, dy)
        torch.cuda.synchronize()
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
    row = {"what": "memory", "tokens": math.prod(grid), "window": list(window), "heads": HEADS, "head_dim": 128,
           "dtype": "bfloat16", "offsets": "smooth", "direction": "both", "peak_gib": peaks}
    if "dense" in peaks:
        row["extra_gib"] = peaks["graphopt"] - peaks["dense"]
    print(f"memory {math.prod(grid)} {window}:", {n: round(p, 3) for n, p in peaks.items()}, flush=True)
    return [row]


def large(grid: Triple, window: Triple) -> list[dict[str, Any]]:
    """A size that dense attention would take minutes for: its time by its FLOPs, at the rate of the largest bar."""
    rows = measure(grid, window, "smooth", errors=False)
    if not TINY:
        factor = (math.prod(grid) / math.prod(BARS[-1])) ** 2
        for row in rows:
            row["estimated_ms"] = {"cudnn": dense_times(BARS[-1])[row["direction"]] * factor}
        rows += memory(grid, window, ("graphopt",))
    return rows


def head_error(grid: Triple, channels: int, out: int) -> dict[str, float]:
    """Relative L2 error of the offset head against fp64: y and every gradient."""
    dtype = torch.float32 if TINY else BF
    make = lambda *s: torch.randn(*s, device=rivals.DEVICE, dtype=dtype)
    leaves = [make(2, math.prod(grid), channels), make(channels, 1, 3, 3, 3) * 0.2, make(channels) * 0.1,
              make(out, channels) * 0.03, make(out)]
    wide = [x.double().requires_grad_() for x in leaves]
    leaves = [x.requires_grad_() for x in leaves]
    y, Y = offset_head.offset_head(*leaves, grid), offset_head.offset_head(*wide, grid)
    dy = torch.randn_like(y)
    got, want = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(Y, wide, dy.double())
    names = ("y", "dx", "dweight", "dbias", "dmatrix", "dlast")
    return {n: ((a.double() - b).norm() / b.norm()).item() for n, a, b in zip(names, (y, *got), (Y, *want))}


def head_system(f: Callable[[], torch.Tensor], leaves: list[torch.Tensor],
                dy: torch.Tensor) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds as launched from Python, and of the device alone (replayed from CUDA graphs)."""
    launched = rivals.timed(f, leaves, dy)
    if TINY or rivals.once:
        return launched, launched
    stream = torch.cuda.Stream()
    with torch.no_grad():
        forward = _timing.replayed(f, stream)
    with torch.cuda.stream(stream):
        y = f()
    backward = _timing.replayed(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True), stream)
    both = _timing.replayed(lambda: torch.autograd.grad(f(), leaves, dy), stream)
    return launched, dict(zip(DIRECTIONS, (forward / 1e3, backward / 1e3, both / 1e3)))


def head(grid: Triple, channels: int, out: int) -> list[dict[str, Any]]:
    """The offset head against the bytes it must move: x read, offsets written; x, their gradient and du read, du and dx
    written.  `fmas` is what the convolution, its transpose and its weight gradient are in multiplications."""
    N = math.prod(grid)
    dtype = torch.float32 if TINY else BF
    make = lambda *s: torch.randn(*s, device=rivals.DEVICE, dtype=dtype)
    weights = [make(channels, 1, 3, 3, 3) * 0.2, make(channels), make(out, channels) * 0.03, make(out)]
    leaves = [x.requires_grad_() for x in (make(1, N, channels), *weights)]
    dy = torch.randn(1, N, out, device=rivals.DEVICE)
    systems = {"graphopt": head_system(lambda: offset_head.offset_head(*leaves, grid), leaves, dy)}
    if not TINY:
        def eager() -> torch.Tensor:
            x = leaves[0].transpose(1, 2).unflatten(2, grid)
            u = F.conv3d(x, leaves[1], leaves[2], padding=1, groups=channels).flatten(2).transpose(1, 2)
            return F.linear(F.gelu(u, approximate="tanh"), leaves[3], leaves[4]).float()
        systems["eager"] = head_system(eager, leaves, dy)
    unit, small = leaves[0].nbytes, dy.nbytes
    bytes_moved = {"forward": unit + small, "backward": 4 * unit + small, "both": 5 * unit + 2 * small}
    fmas = {"forward": 27 * N * channels, "backward": 54 * N * channels, "both": 81 * N * channels}
    error = head_error((2, 3, 4) if TINY else (5, 17, 23), channels, out)
    rows = [{"what": "offset_head", "tokens": N, "window": [3, 3, 3], "heads": out // 3, "head_dim": channels,
             "dtype": str(dtype).removeprefix("torch."), "offsets": "head", "direction": d,
             "ms": {n: t[0][d] for n, t in systems.items()}, "device_ms": {n: t[1][d] for n, t in systems.items()},
             "bytes": bytes_moved[d], "fmas": fmas[d], "error": error} for d in DIRECTIONS]
    for row in rows:
        print("offset head", N, channels, row["direction"], {n: round(t, 3) for n, t in row["ms"].items()}, "device",
              {n: round(t, 3) for n, t in row["device_ms"].items()}, f"{row['bytes'] / 1e6:.0f} MB", flush=True)
    print("        error", *(f"{n} {e:.1e}" for n, e in error.items()), flush=True)
    return rows


def largest_reference(window: Triple) -> list[dict[str, Any]]:
    """grid_sample at the largest size that fits in memory, beside ours."""
    for grid in sorted(SIZES, key=math.prod, reverse=True):
        if math.prod(grid) > 30_000:
            continue
        try:
            return measure(grid, window, "smooth", ("cudnn", "reference"))
        except torch.OutOfMemoryError:
            print(f"grid_sample does not fit at {math.prod(grid)} tokens", flush=True)
            torch.cuda.empty_cache()
    return []


def cases() -> dict[str, list[tuple[str, Callable[[], list[dict[str, Any]]]]]]:
    """Part -> its cases, most important first."""
    def one(grid: Triple, window: Triple, kind: str, systems: tuple[str, ...] = (), **more: Any) -> Any:
        return f"{grid} {window} {kind} {more or ''}", lambda: measure(grid, window, kind, systems, **more)

    rivalry = ("cudnn", "flex")
    table = [one(g, w, "smooth", rivalry) for w in (K7, K3) for g in BARS]
    table += [one(g, w, "rough") for w in (K7, K3) for g in BARS]
    kinds = [one(g, K7, k) for k in ("none", "zero") for g in BARS] + [one(BARS[0], K3, "none")]
    kinds += [one(BARS[0], w, k) for k in ("noise", "wild") for w in (K7, K3)]
    if not TINY:
        kinds += [one(BARS[0], K7, "smooth", D=d) for d in (64, 96)] + [one(BARS[0], K7, "smooth", dtype=torch.float16)]
        kinds += [one(BARS[0], w, "smooth") for w in ((5, 9, 9), (7, 13, 13))]
    def tried(grid: Triple) -> tuple[str, ...]:
        N = math.prod(grid)
        return ("cudnn", "reference") if N < 6000 else ("cudnn",) if N < 100_000 else ()

    sizes = [one(g, K7, "smooth", tried(g)) for g in SIZES] + [one(g, K7, "none") for g in SIZES]
    return {
        "table": table,
        "head": [("offset head", lambda: head(BARS[1], *((16, 6) if TINY else (1536, 36))))],
        "memory": [] if TINY else [("memory", lambda: memory(BARS[1], K7, ("dense", "graphopt")))],
        "large": [("large", lambda: large(LARGE, K7))],
        "kinds": kinds,
        "sizes": [*sizes, ("largest grid_sample", lambda: largest_reference(K7))],
    }


def main() -> None:
    """Measure, save after every case, stop starting new cases at --limit seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(cases()), choices=list(cases()))
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no new case starts")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    folder = args.out or Path(__file__).parent / "results" / _results.machine()
    if args.plot:
        import dsa_plot

        print(dsa_plot.plot(folder))
        return
    rivals.once = args.once
    torch._dynamo.config.recompile_limit = 64
    import torch._functorch.config as functorch

    functorch.donated_buffer = False  # the benchmark keeps graphs
    begin = time.time()
    for part in args.only:
        for name, case in cases()[part]:
            if time.time() - begin > args.limit:
                print(f"not run for lack of time: {part}, {name}", flush=True)
                continue
            start = time.time()
            try:
                rows = case()
            except RuntimeError as failed:  # out of memory too: one size less, the rest still counts
                print(f"FAILED {part}, {name}: {str(failed).splitlines()[0][:200]}", flush=True)
                continue
            if not args.once:
                _results.save("dsa", rows, KEYS, {}, folder)
            print(f"   {part}, {name}: {time.time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", "/tmp/graphopt_inductor")
    main()
