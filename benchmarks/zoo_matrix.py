"""Every model of the zoo, rewritten: how far output and gradients are from fp64, measured in eager's error.

    python benchmarks/zoo_matrix.py [ENTRY ...] [--variants fp32-static,...] [--out FOLDER]

One row per model and variant (fp32 or bf16, static or dynamic): the training step compiled with select="all" and
aot_eager, over batches of fresh inputs (at least five, until `uncertainty`, the standard error of log mean, is 0.02;
at most 64).  `mean` is the geometric mean over tensors and batches of (our error / eager's error), `worst` the largest
of the tensors; the contract is mean <= 1.05 and worst <= 2 (tests/models/contract.py).  Where it is broken, the same is
measured without graphopt: `torch_is_wrong` says that torch's own compiler breaks it, too.  Exit code 1 if a row is
outside for any other reason, or a model cannot be built or run.  CI runs a third of the models, another one each day
(tests/models/test_zoo_matrix.py).
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


def measure(name: str, dtype: torch.dtype, dynamic: bool) -> dict[str, Any]:
    """One row."""
    torch._dynamo.reset()
    entry = zoo.ZOO[name]
    model = entry.build(dtype)[0].train()
    step = torch.compile(model, backend="graphopt", dynamic=dynamic or None, options=OPTIONS)
    found = contract.measure(step, model, contract.fresh_inputs(entry, dtype))
    report = graphopt.report(step)
    row: dict[str, Any] = {}
    if not found.holds:  # is it graphopt, or the compiler behind it?
        torch._dynamo.reset()
        alone = torch.compile(model, backend=OPTIONS["graphopt.compiler"], dynamic=dynamic or None)
        plain = contract.measure(alone, model, contract.fresh_inputs(entry, dtype), most=found.batches)
        row["without_graphopt"] = {"mean": round(plain.mean, 4), "worst": round(plain.worst[1], 4)}
        row["torch_is_wrong"] = not plain.holds
    return row | {
        "tensors": len(found.ratios), "batches": found.batches, "mean": round(found.mean, 4),
        "uncertainty": round(found.uncertainty, 4), "worst": round(found.worst[1], 4), "worst_tensor": found.worst[0],
        "holds": found.holds, "graphs": len(report.graphs),
        **{f"{kind}_{what}": report.count(kind, what) for kind in KINDS for what in ("matched", "rewritten")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("entries", nargs="*", default=list(zoo.ZOO))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    bad = 0
    for variant in args.variants.split(","):
        for name in args.entries:
            start = time.perf_counter()
            row: dict[str, Any] = {"model": name, "variant": variant}
            try:
                row |= measure(name, *VARIANTS[variant])
            except Exception as error:
                traceback.print_exc()
                row |= {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}", "holds": False}
            row["seconds"] = round(time.perf_counter() - start, 1)
            bad += not row["holds"] and not row.get("torch_is_wrong")
            print(row, flush=True)
            save("zoo_matrix", [row], ("model", "variant"), {}, args.out)
            gc.collect()
    print(f"{bad} outside the contract", flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
