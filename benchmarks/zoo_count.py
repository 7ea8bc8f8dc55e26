"""Sites matched in every model of the zoo against those the oracle counts: fp32 and bf16, static and dynamic.

    python benchmarks/zoo_count.py [NAME ...] [--variants fp32-static,bf16-dynamic] [--out FOLDER]

Needs no GPU; a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch
from _results import ROOT, save

sys.path.insert(0, str(ROOT.parent / "tests" / "models"))
import counting
import zoo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--variants", default="fp32-static,fp32-dynamic,bf16-static,bf16-dynamic")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    for variant in args.variants.split(","):
        kind, _, shapes = variant.partition("-")
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[kind]
        dynamic = {"static": False, "dynamic": True}[shapes]
        for name in args.names or zoo.ZOO:
            start = time.perf_counter()
            found = counting.of_model(name, dtype, dynamic)
            row = dict(model=name, dtype=str(dtype).removeprefix("torch."), dynamic=dynamic, sites=found.wanted,
                       matched=found.matched, extra=found.extra, missing=found.missing,
                       norms_without_answer=found.unexplained, rules=found.rules,
                       seconds=round(time.perf_counter() - start, 1))
            print(row, flush=True)
            rows.append(row)
        save("zoo_count", rows, ("model", "dtype", "dynamic"), {}, args.out)
    sites, matched = sum(r["sites"] for r in rows), sum(r["matched"] for r in rows)
    print(f"{matched} of {sites} sites matched ({100 * matched / max(sites, 1):.1f} %), "
          f"{sum(len(r['extra']) for r in rows)} matched that the oracle does not count")


if __name__ == "__main__":
    main()
