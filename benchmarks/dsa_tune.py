"""Milliseconds of each kernel of the offset head under other cuts, and of the whole: results/<machine>/dsa_tune.json.

    python benchmarks/dsa_tune.py                            the size of the bar: 21 x 45 x 80 tokens, 1,536 channels
    python benchmarks/dsa_tune.py --grid 21 30 52 --once     compile only
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import _results

from graphopt.codegen.dsa import head, head_emit, head_kernels
from graphopt.codegen.dsa.head import Product, Walk

WHOLE = 1 << 20
FORWARDS = [Walk((2, 4), (1, 4), WHOLE), Walk((2, 4), (2, 2), WHOLE), Walk((1, 4), (2, 2), WHOLE),
            Walk((1, 8), (4, 1), WHOLE)]
BACKWARDS = [Walk((1, 4), (2, 2), 96), Walk((1, 4), (2, 2), WHOLE), Walk((2, 2), (2, 2), 96), Walk((1, 5), (2, 2), 96),
             Walk((1, 2), (2, 2), 96)]
SLOPES = [Product(64, 64, 4, 2, 44), Product(64, 64, 4, 3, 44), Product(64, 64, 4, 4, 44), Product(64, 64, 4, 3, 88),
          Product(128, 64, 8, 3, 44)]
LINEARS = [Product(128, 64, 4, 3), Product(64, 64, 4, 4), Product(64, 128, 4, 3), Product(128, 128, 8, 3)]


def cases(grid: tuple[int, int, int], C: int, out: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """(what, a launch)."""
    N = grid[0] * grid[1] * grid[2]
    make = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    x, u, du, dx = make(1, N, C), make(1, N, C), make(1, N, C), make(1, N, C)
    weight, bias, matrix, last = make(C, 1, 3, 3, 3) * 0.2, make(C), make(out, C) * 0.03, make(out)
    dy = torch.randn(1, N, out, device="cuda")
    low, y, taps = dy.bfloat16(), torch.empty_like(dy), head._taps(weight)
    even_odd = bias.float().view(C // 2, 2).T.contiguous()
    padded, ptx = head._padded(out), head._ptx()
    for w in FORWARDS:
        yield f"convolution {w}", lambda w=w: head._walk("head_convolve", w, (x, taps, even_odd, u), x, grid)
    for w in BACKWARDS:
        sums = torch.empty(w.launch(*grid[1:], C)[0], head_emit.SUMS, 2, C // 2, device="cuda")
        yield f"backward {w}", lambda w=w, s=sums: head._walk("head_backward_input", w, (x, du, taps, dx, s), x, grid)
    for p in SLOPES:
        blocks = -(-N // p.rows)
        steps = -(-blocks // p.programs)
        programs = -(-blocks // steps)
        sums = torch.empty(programs, out, C, device="cuda")
        yield f"slope {p}", lambda p=p, n=programs, k=steps, s=sums: head_kernels.head_slope[(n, -(-C // p.channels))](
            u, low, matrix, du, s, N, k, C, out, padded, p.rows, p.channels, p.stages, ptx, num_warps=p.warps)
    for p in LINEARS:
        yield f"linear {p}", lambda p=p: head_kernels.head_linear[(-(-N // p.rows),)](
            u, matrix, last, y, N, C, out, padded, p.rows, p.channels, ptx, num_warps=p.warps, num_stages=p.stages)
    kept = head.triton_forward(x, weight, bias, matrix, last, *grid)[1]
    yield "forward", lambda: head.triton_forward(x, weight, bias, matrix, last, *grid)
    yield "backward", lambda: head.triton_backward(dy, x, kept, weight, bias, matrix, *grid)
    big = torch.empty(1 << 29, device="cuda", dtype=torch.bfloat16)
    other = torch.empty_like(big)
    yield "copy of 1 GiB", lambda: other.copy_(big)


def main() -> None:
    """One line and one row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=int, nargs=3, default=[21, 45, 80])
    parser.add_argument("--channels", type=int, default=1536)
    parser.add_argument("--out", type=int, default=36)
    parser.add_argument("--once", action="store_true")
    args = parser.parse_args()
    from triton.testing import do_bench

    for name, launch in cases(tuple(args.grid), args.channels, args.out):
        launch()
        torch.cuda.synchronize()
        if args.once:
            continue
        ms = do_bench(launch, warmup=3, rep=20, return_mode="median")
        print(f"{name:100s} {ms:.4f}", flush=True)
        row = {"tokens": args.grid[0] * args.grid[1] * args.grid[2], "channels": args.channels, "case": name, "ms": ms}
        _results.save("dsa_tune", [row], ("tokens", "channels", "case"), {})


if __name__ == "__main__":
    main()
