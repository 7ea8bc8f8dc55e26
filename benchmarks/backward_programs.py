"""Backward kernels by programs a multiprocessor, depth of the ring and warps: the first stage alone, one by one.

    python benchmarks/backward_programs.py [--cases F4b:1x32760x1536,...] [--workers 8] [--out FOLDER]

Cases and times are those of adaln_tune.py, which goes through more neighbours of fewer cases; here every ring of 30 to
130 KB a multiprocessor is tried, with the closed form's warps and half of them.  `closed_form`: what configure.py chose
at that commit.  Prints the best four of a case and the closed form; writes results/<machine>/backward_programs.json.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from _results import copy_tb_per_s, save
from _turns import compile_beside
from adaln_tune import Case

from graphopt.codegen.configure import Configuration, cut

CASES = ("F4b:1x32760x1536,F5b:1x32760x1536,F2b:1x32760x1536,F2ab:1x32760x1536,F4b:8x4096x1152,F5b:8x4096x1152,"
         "F4b:1x32768x2048,F5b:1x32768x2048,F4b:1x32768x2432,F5b:1x32768x2432,F4b:1x4096x3072,F5b:1x4096x3072")


def row_bytes(case: Case) -> int:
    """Bytes of one row of everything that comes through the ring."""
    return case.D * sum(case.spec.dtype(t).itemsize for t in case.spec.rows_in)


def candidates(case: Case) -> list[Configuration]:
    """The closed form first."""
    base, found = case.base, [case.base]
    for programs in (1, 2, 3, 4):
        for stages in (3, 4, 5, 6):
            for warps in sorted({base.warps, max(2, base.warps // 2)}):
                blocks = base.blocks if warps == base.warps else cut(case.D, warps * 256)
                if 30e3 < (stages - 1) * programs * row_bytes(case) < 130e3 and case.D / warps <= 800:
                    found.append(replace(base, programs_per_sm=programs, stages=stages, warps=warps, blocks=blocks))
    return list(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--workers", type=int, default=1, help="processes that compile first")
    parser.add_argument("--warm", help="what such a process does: its share, as i/n")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases = args.cases.split(",")
    if args.warm:
        i, n = map(int, args.warm.split("/"))
        for text in cases:
            case = Case(text)
            for config in candidates(case)[i::n]:
                case.launch(config)()
                torch.cuda.synchronize()
        return
    if args.workers > 1:
        compile_beside([sys.executable, __file__, "--cases", args.cases, "--warm"], args.workers)
    bandwidth = copy_tb_per_s()
    for text in cases:
        case = Case(text)
        floor = case.floor_bytes / bandwidth / 1e6
        found = sorted(((case.time(c), c) for c in candidates(case)), key=lambda f: f[0])
        for us, c in [*found[:4], *(f for f in found[4:] if f[1] == case.base)]:
            print(f"{'*' if c == case.base else ' '} {text:18s} {floor / us:.3f} {us:8.1f} us  w{c.warps} st{c.stages} "
                  f"per{c.programs_per_sm} {'+'.join(map(str, c.blocks))}", flush=True)
        rows = [dict(case=text, us=us, share=floor / us, closed_form=c == case.base, **asdict(c)) for us, c in found]
        save("backward_programs", rows, ("case", "blocks", "warps", "stages", "programs_per_sm"),
             {"copy_tb_per_s": bandwidth}, args.out)
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
