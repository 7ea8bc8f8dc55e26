"""Every model of the zoo, rewritten: how far output and gradients are from fp64, measured in eager's error.

    python benchmarks/zoo_matrix.py [ENTRY ...] [--variants fp32-static,...] [--third INDEX] [--out FOLDER]

One row per model and variant (fp32 or bf16, static or dynamic): the training step compiled with select="all" and
aot_eager, over five batches of fresh inputs.  `mean` is the geometric mean over tensors of (our error / eager's
error), `worst` the largest of them; the contract is mean <= 1.05 and worst <= 2 (tests/models/contract.py).  Exit code
1 if a row is outside it, or a model cannot be built or run.  `--third` takes the models number INDEX mod 3, in fp32
static: what CI runs by rotation.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from _results import save

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "models"))
import contract
import zoo

import graphopt

VARIANTS = {
    f"{'fp32' if dtype == torch.float32 else 'bf16'}-{'dynamic' if dynamic else 'static'}": (dtype, dynamic)
    for dtype in (torch.float32, torch.bfloat16) for dynamic in (False, True)
}
KINDS = ("modulate", "gate")
OPTIONS = {"graphopt.select": "all", "graphopt.compiler": "aot_eager", "graphopt.on_error": "raise"}


def measure(name: str, dtype: torch.dtype, dynamic: bool, batches: int) -> dict[str, Any]:
    """One row."""
    torch._dynamo.reset()
    model, inputs = zoo.ZOO[name].build(dtype)
    rest = [zoo.ZOO[name].build(dtype, seed)[1] for seed in range(1, batches)]
    step = torch.compile(model.train(), backend="graphopt", dynamic=dynamic or None, options=OPTIONS)
    found = contract.measure(step, model, [inputs, *rest])
    report = graphopt.report(step)
    return {
        "tensors": len(found.ratios), "mean": round(found.mean, 4), "worst": round(found.worst[1], 4),
        "worst_tensor": found.worst[0], "holds": found.holds, "graphs": len(report.graphs),
        **{f"{kind}_{what}": report.count(kind, what) for kind in KINDS for what in ("matched", "rewritten")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("entries", nargs="*", default=list(zoo.ZOO))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--third", type=int)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    variants = args.variants.split(",") if args.third is None else ["fp32-static"]
    entries = args.entries if args.third is None else args.entries[args.third % 3 :: 3]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    bad = 0
    for variant in variants:
        for name in entries:
            start = time.perf_counter()
            row: dict[str, Any] = {"model": name, "variant": variant}
            try:
                row |= measure(name, *VARIANTS[variant], args.batches)
            except Exception as error:
                traceback.print_exc()
                row |= {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}", "holds": False}
            row["seconds"] = round(time.perf_counter() - start, 1)
            bad += not row["holds"]
            print(row, flush=True)
            save("zoo_matrix", [row], ("model", "variant"), {}, args.out)
            gc.collect()
    print(f"{bad} outside the contract", flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
