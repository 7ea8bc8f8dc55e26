"""Image and text streams of a joint block, normed and modulated: one launch for both against two, and Inductor.

    python benchmarks/joint_launch.py [--sizes 1x4096+512x3072,...] [--out FOLDER]

The function is what stands before joint attention in FLUX, SD3.5 and HunyuanVideo (`first`: norm and modulate of both
streams) and behind it (`second`: gate, residual, norm, modulate of both).  `joint` is graphopt with the pass
joint_launch in both directions (by default it joins forwards), `graphopt` without.  Microseconds, medians of CUDA-graph
replays over turns, forward and backward.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
import torch._functorch.config
from _results import copy_tb_per_s, save
from _timing import replayed
from adaln_functions import f1h, f2h

SIZES = "1x4096+512x3072,4x4096+333x2432,1x32760+256x3072"
SYSTEMS = {
    "inductor": dict(options={"triton.mix_order_reduction": False}),
    "graphopt": dict(backend="graphopt", options={"graphopt.select": "all", "graphopt.disable": ["joint_launch"]}),
    "joint": dict(backend="graphopt", options={"graphopt.select": "all", "graphopt.experimental": ["joint_launch"]}),
}


def first(x, c, *m):
    return f1h(x, *m[:2]), f1h(c, *m[2:4])


def second(x, c, a, b, *m):
    return *f2h(x, a, *m[:3]), *f2h(c, b, *m[3:6])


FUNCTIONS = {"first": (first, 1, 4), "second": (second, 2, 6)}  # function, activations of a stream, factors


def measure(what: str, size: tuple[int, int, int, int], turns: int) -> dict[str, dict[str, float]]:
    """system -> direction -> microseconds."""
    B, N, text, D = size
    f, streams, factors = FUNCTIONS[what]
    torch.manual_seed(0)
    new = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    rows = [n for _ in range(streams) for n in (N, text)]
    calls = {}
    for system, how in SYSTEMS.items():
        torch._dynamo.reset()
        args = [new(B, n, D) for n in rows] + [(0.3 * new(B, 1, D)) for _ in range(factors)]
        args = [a.requires_grad_() for a in args]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compiled = torch.compile(f, dynamic=False, **how)
            out = compiled(*args)
        cotangents = [torch.randn_like(o) for o in out]

        def backward(out=out, args=args, cotangents=cotangents):
            return torch.autograd.grad(out, args, cotangents, retain_graph=True)

        with torch.cuda.stream(stream):
            backward()
        calls[system] = {"forward": lambda compiled=compiled, args=args: compiled(*args), "backward": backward}, stream
    found: dict[str, dict[str, list[float]]] = {s: {"forward": [], "backward": []} for s in SYSTEMS}
    for _ in range(turns):
        for system, (directions, stream) in calls.items():
            for direction, call in directions.items():
                found[system][direction].append(replayed(call, stream, warmup=5, rep=40))
    return {s: {d: statistics.median(t or [0.0]) for d, t in directions.items()} for s, directions in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES, help="BxN+TEXTxD, ...")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch._functorch.config.donated_buffer = False
    bandwidth = copy_tb_per_s()
    for text in args.sizes.split(","):
        size = tuple(int(n) for n in text.replace("+", "x").split("x"))
        for what in FUNCTIONS:
            us = measure(what, size, args.turns)
            rows = [dict(what=what, size=text, direction=d, us={s: t[d] for s, t in us.items()})
                    for d in ("forward", "backward")]
            for row in rows:
                print(what, text, row["direction"], {s: round(t, 1) for s, t in row["us"].items()}, flush=True)
            save("joint_launch", rows, ("what", "size", "direction"), {"copy_tb_per_s": bandwidth}, args.out)


if __name__ == "__main__":
    main()
