"""A gather forward beside video attention's engine at tiny windows: does loading each query's own keys pay?

    python benchmarks/dsa_gather.py                  results/<machine>/dsa_gather.json
    python benchmarks/dsa_gather.py --check          tiny, against the reference (works under Triton's interpreter)

The gather is the best case of the idea: one program per few queries, every lattice point of a query's window loaded
once for the scores and once for the values, starts and fractions given to it beforehand and not counted.  It has no
backward: dK and dV of gathered keys are scattered, by atomics, which are not repeatable, or by a sort.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent))
import _results
import _timing
import dsa_rivals as rivals

import graphopt
from graphopt.codegen.dsa import reference

Triple = tuple[int, int, int]
WINDOWS: list[Triple] = [(1, 3, 3), (3, 3, 3)]
GRIDS: list[Triple] = [(3, 16, 26), (9, 20, 26), (21, 30, 52)]
KEYS = ("tokens", "window", "offsets")


@triton.jit
def gather_forward(Q, K, V, BASE, FRACTION, Y, SCORES, WEIGHTS, N, T, H, W, scale, KT: tl.constexpr, KH: tl.constexpr,
                   KW: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, LP: tl.constexpr, TP: tl.constexpr):
    # Q, K, V, Y [heads, N, D]; BASE, FRACTION [heads, N, 3]; SCORES [programs, BM, LP] and WEIGHTS [.., TP] stay in L1
    LH: tl.constexpr = KH + 1
    LW: tl.constexpr = KW + 1
    L: tl.constexpr = (KT + 1) * LH * LW
    head = tl.program_id(1).to(tl.int64) * N
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    m = head + tl.minimum(m, N - 1)
    d = tl.arange(0, D)[None, :]
    program = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    rows = tl.arange(0, BM)[:, None]
    scores, weights = SCORES + (program * BM + rows) * LP, WEIGHTS + (program * BM + rows) * TP
    t, h, w = tl.load(BASE + m * 3), tl.load(BASE + m * 3 + 1), tl.load(BASE + m * 3 + 2)
    fraction = FRACTION + m[:, None] * 3
    f = (tl.load(fraction), tl.load(fraction + 1), tl.load(fraction + 2))
    q = tl.load(Q + m[:, None] * D + d).to(tl.float32)
    point = tl.arange(0, LP)[None, :]
    S = tl.zeros([BM, LP], tl.float32)
    for i in tl.static_range(L):
        plane, line = tl.minimum(t + i // (LH * LW), T - 1), tl.minimum(h + i // LW % LH, H - 1)
        at = (plane * H + line) * W + tl.minimum(w + i % LW, W - 1)
        k = tl.load(K + (head + at)[:, None] * D + d).to(tl.float32)
        S = tl.where(point == i, tl.sum(q * k, 1)[:, None], S)
    tl.store(scores + point, S)
    tl.debug_barrier()
    tap = tl.arange(0, TP)[None, :]
    first = (tap // (KH * KW) * LH + tap // KW % KH) * LW + tap % KW
    real = tap < KT * KH * KW
    logits = tl.zeros([BM, TP], tl.float32)
    for c in tl.static_range(8):
        part = tl.load(scores + first + ((c // 4) * LH + c // 2 % 2) * LW + c % 2, mask=real, other=0.0)
        for axis in tl.static_range(3):
            part *= f[axis] if (c >> (2 - axis)) % 2 == 1 else 1.0 - f[axis]
        logits += part
    logits = tl.where(real, logits * scale, float("-inf"))
    p = tl.exp(logits - tl.max(logits, 1, keep_dims=True))
    p /= tl.sum(p, 1, keep_dims=True)
    tl.store(weights + tap, p)
    tl.debug_barrier()
    P = tl.zeros([BM, LP], tl.float32)
    for c in tl.static_range(8):
        a, b, e = point // (LH * LW) - c // 4, point // LW % LH - c // 2 % 2, point % LW - c % 2
        inside = (a >= 0) & (a < KT) & (b >= 0) & (b < KH) & (e >= 0) & (e < KW)
        part = tl.load(weights + (a * KH + b) * KW + e, mask=inside, other=0.0)
        for axis in tl.static_range(3):
            part *= f[axis] if (c >> (2 - axis)) % 2 == 1 else 1.0 - f[axis]
        P += part
    y = tl.zeros([BM, D], tl.float32)
    for i in tl.static_range(L):
        plane, line = tl.minimum(t + i // (LH * LW), T - 1), tl.minimum(h + i // LW % LH, H - 1)
        at = (plane * H + line) * W + tl.minimum(w + i % LW, W - 1)
        v = tl.load(V + (head + at)[:, None] * D + d).to(tl.float32)
        y += tl.sum(tl.where(point == i, P, 0.0), 1)[:, None] * v
    tl.store(Y + m[:, None] * D + d, y.to(Y.dtype.element_ty))


def gather(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, base: torch.Tensor, fraction: torch.Tensor, grid: Triple,
           window: Triple, rows: int = 16, warps: int = 4) -> torch.Tensor:
    """y [1, heads, N, D] of starts `base` and fractions [heads, N, 3]."""
    _, heads, N, D = q.shape
    up = lambda n: max(2, triton.next_power_of_2(n))
    LP, TP = up(math.prod(n + 1 for n in window)), up(math.prod(window))
    programs = -(-N // rows)
    y, scratch = torch.empty_like(q), [torch.empty(heads * programs * rows * n, device=q.device) for n in (LP, TP)]
    gather_forward[(programs, heads)](q, k, v, base, fraction, y, *scratch, N, *grid, D**-0.5, *window, D, rows, LP, TP,
                                      num_warps=warps)
    return y


def case(grid: Triple, window: Triple, kind: str, heads: int = 12, D: int = 128, time: bool = True) -> dict:
    """Milliseconds of both, L2 flushed, as launched from Python (through the operator, the gather without one) and of
    the device alone; relative L2 error of the gather against the reference where it is not timed.
    """
    (q, k, v), _ = rivals.inputs(grid, heads, D, torch.bfloat16)
    q, k, v = (x.detach() for x in (q, k, v))
    offsets = rivals.make_offsets(kind, grid, heads)
    base, fraction, _ = reference.window_starts(offsets[0], reference.positions(grid, q.device), grid, window)
    base, fraction = base.int().contiguous(), fraction.float().contiguous()
    if not time:
        want, _ = reference.forward(q.double(), k.double(), v.double(), offsets, grid, window, D**-0.5)
        got = gather(q, k, v, base, fraction, grid, window)
        return {"error": ((got.double() - want).norm() / want.norm()).item()}
    ours = lambda: graphopt.dsa.video_attention(q, k, v, offsets, grid=grid, window=window)
    y = ours()
    ms = {"graphopt": rivals.median(ours, rep=20)}
    cuts = {(r, w): rivals.median(lambda r=r, w=w: gather(q, k, v, base, fraction, grid, window, r, w), rep=20)
            for r, w in ((16, 4), (8, 4))}
    cut = min(cuts, key=cuts.get)
    ms["gather"] = cuts[cut]
    z = gather(q, k, v, base, fraction, grid, window)
    device = {} if rivals.once or rivals.DEVICE == "cpu" else {
        "graphopt": _timing.replayed(ours) / 1e3,
        "gather": _timing.replayed(lambda: gather(q, k, v, base, fraction, grid, window, *cut)) / 1e3}
    return {"tokens": math.prod(grid), "grid": list(grid), "window": list(window), "offsets": kind, "heads": heads,
            "head_dim": D, "engine": graphopt.dsa.explain(q, offsets, grid=grid, window=window).engine, "ms": ms,
            "device_ms": device, "cut": list(cut),
            "difference": ((y.double() - z.double()).norm() / y.double().norm()).item()}


def main() -> None:
    """One row per grid, window and kind of offsets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--window", type=int, nargs=3, default=None, help="this one only")
    parser.add_argument("--once", action="store_true", help="compile only")
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    rivals.once = args.once
    if args.check:
        for window in ((1, 2, 2), (2, 1, 1)):
            print(window, case((2, 3, 4), window, "noise", heads=1, D=16, time=False), flush=True)
        return
    grids = GRIDS[:1] if args.once else GRIDS
    for kind in ("smooth", "wild"):
        for window in WINDOWS if args.window is None else [tuple(args.window)]:
            for grid in grids:
                row = case(grid, window, kind)
                print(row, flush=True)
                if not args.once:
                    _results.save("dsa_gather", [row], KEYS, {}, args.folder)


if __name__ == "__main__":
    main()
