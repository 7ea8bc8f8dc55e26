"""Milliseconds of each kernel of the offset head under other cuts, and of the whole: results/<machine>/dsa_tune.json.

    python benchmarks/dsa_tune.py                            the size of the bar: 21 x 45 x 80 tokens, 1,536 channels
    python benchmarks/dsa_tune.py --grid 3 6 8 --once        compile only
    python benchmarks/dsa_tune.py --only walks whole         parts: walks (convolutions), linear, slope, whole
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import _results
import _timing

from graphopt.codegen.dsa import head, head_launch
from graphopt.codegen.dsa.head_launch import Product, Walk

WHOLE = 1 << 20
FORWARDS = [Walk((2, 4), (1, 4), WHOLE), Walk((2, 4), (2, 2), WHOLE)]
BACKWARDS = [Walk((1, 4), (2, 2), 96), Walk((1, 5), (2, 2), 96)]
SLOPES = [Product(64, 64, 4, 2, 44), Product(64, 64, 4, 3, 44)]
LINEARS = [Product(64, 64, 4, 4), Product(64, 64, 4, 3), Product(64, 64, 4, 2), Product(64, 128, 4, 2),
           Product(32, 64, 2, 4), Product(32, 128, 2, 3), Product(32, 128, 4, 3), Product(128, 64, 4, 3)]
STEPS_AHEAD = [0, 1, 2, 4]
Case = tuple[str, str, Callable[[], object]]


def cut(name: str, value: object, launch: Callable[[], object], module: object = head_launch) -> Callable[[], object]:
    """The launch with one setting of a module replaced."""
    def run() -> object:
        before = getattr(module, name)
        setattr(module, name, value)
        try:
            return launch()
        finally:
            setattr(module, name, before)
    return run


def cases(grid: tuple[int, int, int], C: int, out: int) -> Iterator[Case]:
    """(part, what, a launch)."""
    N = grid[0] * grid[1] * grid[2]
    make = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    x, u, du, dx = make(1, N, C), make(1, N, C), make(1, N, C), make(1, N, C)
    weight, bias, matrix, last = make(C, 1, 3, 3, 3) * 0.2, make(C), make(out, C) * 0.03, make(out)
    dy = torch.randn(1, N, out, device="cuda")
    y = torch.empty_like(dy)
    rest, L = (weight, bias, matrix, last), head_launch
    low = {engine: L.narrow(dy, x.dtype, engine) for engine in ("mma", "dot")}
    slope = lambda: L.slope(u, low["mma"][0], matrix, du, "mma")
    for steps in STEPS_AHEAD:
        yield "slope", f"slope, {steps} steps ahead", cut("AHEAD", steps, slope)
    yield "slope", "slope, 66 programs", cut("MMA_SLOPE", Product(16, L.MMA_SLOPE.channels, L.WARPS, 1, 66), slope)
    for p in SLOPES:
        yield "slope", f"slope {p}", cut("SLOPE", p, lambda: L.slope(u, low["dot"][0], matrix, du, "dot"))
    for p in LINEARS:
        yield "linear", f"linear {p}", cut("LINEAR", p, lambda: L.linear(u, matrix, last, y))
    for w in FORWARDS:
        yield "walks", f"convolution {w}", cut("FORWARD", w, lambda: L.convolve(x, weight, bias, u, grid))
    for w in BACKWARDS:
        yield "walks", f"backward {w}", cut("BACKWARD", w, lambda: L.transposed(x, du, weight, dx, grid))
    yield "whole", "rounding of dy", lambda: L.narrow(dy, x.dtype, "mma")
    parts = [L.slope(u, low["mma"][0], matrix, du, "mma"), L.transposed(x, du, weight, dx, grid)]
    yield "whole", "sums of parts", lambda: L.add(parts[1], parts[0], low["mma"][1], weight, bias, matrix)
    kept = head.triton_forward(x, *rest, *grid)[1]
    yield "whole", "forward", lambda: head.triton_forward(x, *rest, *grid)
    yield "whole", "backward", lambda: head.triton_backward(dy, x, kept, *rest[:3], *grid)
    big = torch.empty(1 << 29, device="cuda", dtype=torch.bfloat16)
    other = torch.empty_like(big)
    yield "whole", "copy of 1 GiB", lambda: other.copy_(big)


def main() -> None:
    """One line and one row per case; `ms` of launches, `device_ms` replayed from a CUDA graph."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=int, nargs=3, default=[21, 45, 80])
    parser.add_argument("--channels", type=int, default=1536)
    parser.add_argument("--out", type=int, default=36)
    parser.add_argument("--only", nargs="*", default=["walks", "linear", "slope", "whole"])
    parser.add_argument("--folder", type=Path, default=None, help="where dsa_tune.json goes")
    parser.add_argument("--once", action="store_true")
    args = parser.parse_args()
    from triton.testing import do_bench

    for part, name, launch in cases(tuple(args.grid), args.channels, args.out):
        if part not in args.only:
            continue
        try:
            launch()
            torch.cuda.synchronize()
        except RuntimeError as failed:
            print(f"FAILED {part} {name}: {str(failed).splitlines()[0][:200]}", flush=True)
            continue
        if args.once:
            continue
        ms = do_bench(launch, warmup=3, rep=20, return_mode="median")
        replayed = _timing.replayed(launch, warmup=3, rep=20) / 1e3
        print(f"{part} {name:90s} {ms:.4f} {replayed:.4f}", flush=True)
        row = {"tokens": args.grid[0] * args.grid[1] * args.grid[2], "channels": args.channels, "part": part,
               "case": name, "ms": ms, "device_ms": replayed}
        _results.save("dsa_tune", [row], ("tokens", "channels", "part", "case"), {}, args.folder)


if __name__ == "__main__":
    main()
