"""3D deformable sliding attention against cuDNN, FlexAttention's fixed window and grid_sample, through autograd.

    python benchmarks/dsa.py                         every size, both windows
    python benchmarks/dsa.py --sizes 32760 75600     the sizes of the bars
    python benchmarks/dsa.py --plot                  results/<machine>/dsa.png from the saved rows

offsets: none (fixed window), zero (offsets that are all 0), smooth (uniform noise of +-(1, 2, 2) tokens on control
points every 5 x 10 x 13 tokens or so, trilinear between), rough (every 2.5 x 4 x 4.6).  Milliseconds are medians.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
import _results

import graphopt
from graphopt.codegen.dsa import head as offset_head
from graphopt.codegen.dsa import reference

GRIDS = [(5, 16, 26), (9, 20, 26), (13, 24, 32), (21, 30, 26), (21, 30, 52), (21, 45, 80), (33, 68, 80), (64, 68, 120)]
HEADS, D = 12, 128
KEYS = ("what", "tokens", "window", "heads", "head_dim", "offsets", "direction")
SPACING = {"smooth": (7, 15, 15), "rough": (3, 5, 5)}
START = time.time()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_offsets(kind: str, grid: tuple[int, int, int], heads: int) -> torch.Tensor | None:
    N = math.prod(grid)
    if kind == "none":
        return None
    if kind == "zero":
        return torch.zeros(1, heads, N, 3, device=DEVICE)
    torch.manual_seed(0)
    points = [n // s + 2 for n, s in zip(grid, SPACING[kind])]
    control = torch.rand(heads, 3, *points, device=DEVICE) * 2 - 1
    field = F.interpolate(control, size=grid, mode="trilinear", align_corners=True)
    field = field * torch.tensor([1.0, 2.0, 2.0], device=DEVICE)[None, :, None, None, None]
    return field.flatten(2).transpose(1, 2).contiguous()[None]


def inputs(grid):
    torch.manual_seed(1)
    shape = (1, HEADS, math.prod(grid), D)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    q, k, v, dy = (torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], dy


def median(f: Callable[[], Any], rep: int = 60) -> float:
    if DEVICE == "cpu":
        begin = time.time()
        f()
        return (time.time() - begin) * 1e3
    from triton.testing import do_bench

    return do_bench(f, warmup=10, rep=rep, return_mode="median")


def timed(f: Callable[[], torch.Tensor], leaves, dy, rep=60) -> dict[str, float]:
    """Forward without a graph, backward of a kept graph, and both."""
    out = {}
    with torch.no_grad():
        out["forward"] = median(f, rep)
    y = f()
    out["backward"] = median(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True), rep)
    out["both"] = median(lambda: torch.autograd.grad(f(), leaves, dy), rep)
    return out


def flex(grid, window):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    T, H, W = grid
    N = T * H * W

    def inside(_b, _h, i, j):
        ok = (i // (H * W) - j // (H * W)).abs() <= window[0] // 2
        ok = ok & ((i // W % H - j // W % H).abs() <= window[1] // 2)
        return ok & ((i % W - j % W).abs() <= window[2] // 2)

    mask = create_block_mask(inside, None, None, N, N, device=DEVICE, _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def sampled(q, k, v, offsets, grid, window):
    """The published way: grid_sample of every tap's key and value, then a softmax."""
    T, H, W = grid
    where = reference.positions(grid, q.device)
    window = reference.effective_window(window, grid)
    base, f, _ = reference.window_starts(offsets[0], where, grid, window)
    at = (base + f)[..., None, :] + reference.positions(window, q.device)
    size = torch.tensor(grid, device=q.device) - 1
    at = (at / size.clamp(min=1) * 2 - 1).flip(-1)  # grid_sample wants (w, h, t) in -1 .. 1
    K = at.shape[-2]

    def sample(x):
        volume = x[0].float().transpose(1, 2).unflatten(2, (T, H, W))
        out = F.grid_sample(volume, at.view(x.shape[1], T * H * W, K, 1, 3), align_corners=True)
        return out[..., 0].permute(0, 2, 3, 1)

    logits = (q[0].float()[:, :, None] * sample(k)).sum(-1) * q.shape[-1] ** -0.5
    return ((logits.softmax(-1)[..., None] * sample(v)).sum(2)[None]).to(q.dtype)


def error_of(leaves, dy, offsets, grid, window) -> dict[str, float]:
    """Relative L2 error against fp64 of y and every gradient of head 0, all queries and keys."""
    q, k, v = (x[:, :1].detach() for x in leaves)
    off = None if offsets is None else offsets[:, :1].detach().requires_grad_(offsets.is_floating_point())
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


def measure(grid, window, kind, systems, errors) -> list[dict[str, Any]]:
    leaves, dy = inputs(grid)
    offsets = make_offsets(kind, grid, HEADS)
    mine = leaves + ([] if offsets is None else [offsets.requires_grad_()])
    ms: dict[str, dict[str, float]] = {}
    rep = 60 if math.prod(grid) < 200_000 else 300
    ours = lambda: graphopt.dsa.video_attention(*leaves, offsets, grid=grid, window=window)
    ms["graphopt"] = timed(ours, mine, dy, rep)
    if "cudnn" in systems:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            ms["cudnn"] = timed(lambda: F.scaled_dot_product_attention(*leaves), leaves, dy, rep)
    if "flex" in systems:
        call = flex(grid, window)
        ms["flex"] = timed(lambda: call(*leaves), leaves, dy, rep)
    if "reference" in systems and offsets is not None:
        ms["reference"] = timed(lambda: sampled(*leaves, offsets, grid, window), mine, dy, 20)
    error = error_of(leaves, dy, offsets, grid, window) if errors else None
    common = {"what": "attention", "tokens": math.prod(grid), "grid": list(grid), "window": list(window),
              "heads": HEADS, "head_dim": D, "offsets": kind}
    rows = []
    for direction in ("forward", "backward", "both"):
        times = {name: t[direction] for name, t in ms.items()}
        rows.append({**common, "direction": direction, "ms": times, "error": error})
        print(f"{math.prod(grid):7d} {window} {kind:7s} {direction:8s}", *(f"{n} {t:9.3f}" for n, t in times.items()),
              flush=True)
    if error:
        print("        error", *(f"{n} {e:.1e}" for n, e in error.items()), flush=True)
    return rows


def memory(grid, window) -> dict[str, Any]:
    """Peak memory of one training step above its inputs, ours and dense flash."""
    peaks = {}
    for name in ("dense", "graphopt"):
        leaves, dy = inputs(grid)
        offsets = make_offsets("smooth", grid, HEADS)
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
    row = {"what": "memory", "tokens": math.prod(grid), "window": list(window), "heads": HEADS, "head_dim": D,
           "offsets": "smooth", "direction": "both", "peak_gib": peaks, "extra_gib": peaks["graphopt"] - peaks["dense"]}
    print(f"memory {math.prod(grid)} {window}: {peaks}, extra {row['extra_gib']:.3f} GiB", flush=True)
    return row


def head(grid, channels=1536, out=36) -> list[dict[str, Any]]:
    """The offset head against its traffic: x read forward; x and dy read, du written and read, dx written backward."""
    N = math.prod(grid)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    make = lambda *s: torch.randn(*s, device=DEVICE, dtype=dtype)
    weights = [make(channels, 1, 3, 3, 3) * 0.2, make(channels), make(out, channels) * 0.03, make(out)]
    leaves = [x.requires_grad_() for x in (make(1, N, channels), *weights)]
    dy = torch.randn(1, N, out, device=DEVICE)
    ms = {"graphopt": timed(lambda: offset_head.offset_head(*leaves, grid), leaves, dy)}
    if DEVICE == "cuda":
        def eager():
            x = leaves[0].transpose(1, 2).unflatten(2, grid)
            u = F.conv3d(x, leaves[1], leaves[2], padding=1, groups=channels).flatten(2).transpose(1, 2)
            return F.linear(F.gelu(u, approximate="tanh"), leaves[3], leaves[4]).float()
        ms["eager"] = timed(eager, leaves, dy, 20)
    unit, small = leaves[0].nbytes, dy.nbytes
    bytes_moved = {"forward": unit + small, "backward": 4 * unit + small, "both": 5 * unit + 2 * small}
    rows = [{"what": "offset_head", "tokens": N, "window": [3, 3, 3], "heads": out // 3, "head_dim": channels,
             "offsets": "head", "direction": d, "ms": {n: t[d] for n, t in ms.items()}, "bytes": bytes_moved[d]}
            for d in ("forward", "backward", "both")]
    for row in rows:
        print("offset head", N, channels, row["direction"], {n: round(t, 3) for n, t in row["ms"].items()},
              f"{row['bytes'] / 1e6:.0f} MB", flush=True)
    return rows


def plot(folder: Path) -> Path:
    """Time over tokens, with the crossover."""
    import json

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = json.loads((folder / "dsa.json").read_text())["rows"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    for axis, direction in zip(axes, ("forward", "backward")):
        series: dict[str, list[tuple[int, float]]] = {}
        for r in rows:
            if r["what"] != "attention" or r["window"] != [3, 7, 7] or r["direction"] != direction:
                continue
            for name, t in r["ms"].items():
                label = f"graphopt, {r['offsets']}" if name == "graphopt" else name
                if name == "graphopt" and r["offsets"] in ("zero", "rough"):
                    continue
                series.setdefault(label, []).append((r["tokens"], t))
        for label, points in sorted(series.items()):
            points = sorted(set(points))
            axis.loglog(*zip(*points), marker="o", markersize=3, label=label)
        axis.set_xlabel("tokens")
        axis.set_ylabel("ms")
        axis.set_title(f"{direction}, 12 heads x 128, window 3 x 7 x 7")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    path = folder / "dsa.png"
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return path


def main() -> None:
    """Measure, save after every case, stop starting new cases at --limit seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[math.prod(g) for g in GRIDS])
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no new case starts")
    parser.add_argument("--flex", type=int, nargs="*", default=[4680, 32760, 75600], help="sizes for FlexAttention")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    folder = args.out or Path(__file__).parent / "results" / _results.machine()
    if args.plot:
        print(plot(folder))
        return
    torch._dynamo.config.recompile_limit = 64
    import torch._functorch.config as functorch

    functorch.donated_buffer = False  # the benchmark keeps graphs
    bars = [(21, 30, 52), (21, 45, 80)]
    cases: list[tuple[str, Callable[[], Any]]] = []

    def add(grid, window, kind, systems=(), errors=False):
        cases.append((f"{grid} {window} {kind}", lambda: measure(grid, window, kind, systems, errors)))

    wanted = [g for g in GRIDS if math.prod(g) in args.sizes]
    dense = lambda g: ("cudnn",) if math.prod(g) < 200_000 and DEVICE == "cuda" else ()
    for g in (g for g in bars if g in wanted):
        add(g, (3, 7, 7), "smooth", dense(g), errors=True)
    for g in (g for g in bars if g in wanted):
        for kind in ("none", "rough", "zero"):
            add(g, (3, 7, 7), kind)
    for kind in ("smooth", "none") if bars[0] in wanted else ():
        add(bars[0], (3, 3, 3), kind, errors=kind == "smooth")
    others = [g for g in wanted if g not in bars]
    largest_first = sorted(others, key=lambda g: -math.prod(g))
    slow = [g for g in others if 100_000 < math.prod(g) < 200_000]  # dense takes 20 s there: last
    for g in (g for g in largest_first if g not in slow):
        small = ("reference",) if math.prod(g) < 12_000 else ()
        add(g, (3, 7, 7), "smooth", dense(g) + small)
        add(g, (3, 7, 7), "none")
    if DEVICE == "cuda" and bars[1] in wanted:
        cases.insert(2, ("memory", lambda: [memory(bars[1], (3, 7, 7))]))
    if bars[1] in wanted or DEVICE == "cpu":
        shape = (bars[1], 1536) if DEVICE == "cuda" else (wanted[0], 16)
        cases.insert(3, ("offset head", lambda: head(*shape)))
    if DEVICE == "cuda":
        for g in (g for g in wanted if math.prod(g) in args.flex):
            add(g, (3, 7, 7), "smooth", (*dense(g), "flex"), errors=g in bars)
        if bars[0] in wanted and math.prod(bars[0]) in args.flex:
            add(bars[0], (3, 3, 3), "smooth", ("flex",), errors=True)
    for g in slow:
        add(g, (3, 7, 7), "smooth", dense(g))
    for name, case in cases:
        if time.time() - START > args.limit:
            print(f"not run for lack of time: {name}", flush=True)
            continue
        begin = time.time()
        try:
            rows = case()
        except (RuntimeError, torch.OutOfMemoryError) as failed:
            print(f"FAILED {name}: {str(failed).splitlines()[0][:200]}", flush=True)
            continue
        _results.save("dsa", rows, KEYS, {}, folder)
        print(f"   {name}: {time.time() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", "/tmp/graphopt_inductor")
    main()
