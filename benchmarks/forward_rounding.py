"""What 1 / sqrt and tanh to the last bit cost a forward: the kernel alone, with and without, in turns.

    python benchmarks/forward_rounding.py [--cases F5f:1x64000x3072,...] [--workers 4] [--out FOLDER]

`before`: both as the hardware approximates them, the code before commit d7f6841.  `now`: emit_base.py.  Medians of five
turns, each a median of CUDA-graph replays; writes results/<machine>/forward_rounding.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from _results import save
from _timing import replayed
from _turns import compile_beside
from adaln_tune import Case

from graphopt.codegen.emit_base import Base, horner

SHAPES = ("1x75600x5120", "1x64000x3072", "2x16384x3072", "1x32760x1536", "8x4096x1152", "1x4096x3072", "1x64x1152")
CASES = ",".join(f"{code}:{shape}" for code in ("F1f", "F2f", "F2af", "F5f") for shape in SHAPES)
SERIES = (-1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075, -929569 / 638512875)


def approximate_tanh(self: Base, name: str) -> None:
    """tanh from `tl.exp` and a quotient."""
    self(f"square = {name} * {name}")
    self(f"series = {name} + {name} * square * {horner('square', SERIES)}")
    self(f"shrunk = tl.exp(-2.0 * tl.abs({name}))")
    self("far = (1.0 - shrunk) / (1.0 + shrunk)")
    self(f"{name} = {self.rounded(f'tl.where(square < 0.25, series, tl.where({name} < 0.0, -far, far))', 'activated')}")


def approximate_root(self: Base, name: str, variance: str, eps: float) -> None:
    """1 / sqrt without the Newton step."""
    self(f"{name} = 1.0 / tl.sqrt({variance} + {eps!r})")


WAYS = {"before": (approximate_tanh, approximate_root), "now": (Base.tanh, Base.inverse_root)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--workers", type=int, default=1, help="processes that compile first")
    parser.add_argument("--warm", help="what such a process does: its share, as i/n")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases = args.cases.split(",")
    i, n = map(int, args.warm.split("/")) if args.warm else (0, 1)
    if args.workers > 1 and not args.warm:
        compile_beside([sys.executable, __file__, "--cases", args.cases, "--warm"], args.workers)
    for text in cases[i::n]:
        case, calls = Case(text), {}
        for way, (tanh, root) in WAYS.items():
            Base.tanh, Base.inverse_root = tanh, root  # type: ignore[method-assign]
            calls[way] = case.launch(case.base)
            calls[way]()
        torch.cuda.synchronize()
        if args.warm:
            continue
        turns = [[replayed(call, warmup=4, rep=25) for call in calls.values()] for _ in range(5)]
        us = {way: sorted(times)[2] for way, times in zip(calls, zip(*turns))}
        print(f"{text:18s} " + "  ".join(f"{way} {t:8.2f} us" for way, t in us.items())
              + f"  {100 * us['now'] / us['before'] - 100:+.1f} %", flush=True)
        save("forward_rounding", [dict(case=text, us=us)], ("case",), {}, args.out)
        del case, calls
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
