"""Every model of the zoo, rewritten: how far output and gradients are from fp64, measured in eager's error.

    python benchmarks/zoo_matrix.py [ENTRY ...] [--variants fp32-static,...] [--compiler inductor] [--out FOLDER]
    python benchmarks/zoo_matrix.py --compiler aot_eager,inductor --workers 8 --seconds 300             (on a GPU)

One row per model and variant (fp32 or bf16, static or dynamic): the training step compiled with select="all" and
aot_eager, over batches of fresh inputs (at least five, until `uncertainty`, the standard error of log mean, is 0.02;
at most 64).  `mean` is the geometric mean over tensors and batches of (our error / eager's error), `worst` the largest
of the tensors; the contract is mean <= 1.05 and worst <= 2 (tests/models/contract.py).  Where it is broken, the same is
measured without graphopt: `torch_is_wrong` says that torch's own compiler breaks it, too.  Exit code 1 if a row is
outside for any other reason, or a model cannot be built or run.  On a GPU the kernels are the generated ones; where
eager itself is not finite or far off there (torch 2.11: cuDNN's attention in bf16 at these small sizes), the row says
so (`eager_with_cudnn_attention`) and is measured without cuDNN's attention.  Models that no time was left for are
printed.  CI runs a third of the models, another one each day (tests/models/test_zoo_matrix.py).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
import queue
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for a GPU must not start CUDA before workers fork

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
OPTIONS = {"graphopt.select": "all", "graphopt.on_error": "raise"}


def plain(model: torch.nn.Module, compiler: str, dynamic: bool) -> Any:
    """The model compiled without graphopt (Inductor without its mix-order reduction, which is wrong)."""
    if compiler == "inductor":
        return torch.compile(model, dynamic=dynamic or None, options={"triton.mix_order_reduction": False})
    return torch.compile(model, backend=compiler, dynamic=dynamic or None)


def eager_is_wrong(model: torch.nn.Module, batches: Iterator[dict[str, Any]], most: int = 4) -> str | None:
    """How eager is wrong in one of a few batches: not finite, or a tensor as far from fp64 as it is large."""
    twin = contract.wide_twin(model)
    for seed, inputs in enumerate(itertools.islice(batches, most)):
        found = contract.run(model, model, inputs, seed)
        try:
            contract.finite("eager", found)
        except contract.NotFinite as error:
            return str(error)
        errors = contract.errors(found, contract.truth(twin, inputs, seed, found["output"].dtype))
        worst = max(errors, key=errors.__getitem__)
        if errors[worst] > 1:
            return f"eager's relative error is {errors[worst]:.1e} at {worst}"
    return None


def measure(name: str, dtype: torch.dtype, dynamic: bool, compiler: str, device: str) -> dict[str, Any]:
    """One row."""
    entry = zoo.ZOO[name]
    model = entry.build(dtype)[0].train().to(device)
    row: dict[str, Any] = {}
    if device == "cuda" and (wrong := eager_is_wrong(model, contract.fresh_inputs(entry, dtype, device))):
        torch.backends.cuda.enable_cudnn_sdp(False)  # this process ends with the row, or sets it again
        row["eager_with_cudnn_attention"] = wrong
    torch._dynamo.reset()
    options = OPTIONS | {"graphopt.compiler": compiler}
    step = torch.compile(model, backend="graphopt", dynamic=dynamic or None, options=options)
    found = contract.measure(step, model, contract.fresh_inputs(entry, dtype, device))
    report = graphopt.report(step)
    if not found.holds:  # is it graphopt, or the compiler behind it?
        torch._dynamo.reset()
        batches = contract.fresh_inputs(entry, dtype, device)
        alone = contract.measure(plain(model, compiler, dynamic), model, batches, most=found.batches)
        row["without_graphopt"] = {"mean": round(alone.mean, 4), "worst": round(alone.worst[1], 4)}
        row["torch_is_wrong"] = not alone.holds
    return row | {
        "tensors": len(found.ratios), "batches": found.batches, "mean": round(found.mean, 4),
        "uncertainty": round(found.uncertainty, 4), "worst": round(found.worst[1], 4), "worst_tensor": found.worst[0],
        "holds": found.holds, "graphs": len(report.graphs),
        **{f"{kind}_{what}": report.count(kind, what) for kind in KINDS for what in ("matched", "rewritten")},
    }


def row_of(name: str, variant: str, compiler: str, device: str) -> dict[str, Any]:
    """One row, with the error where there is no measurement."""
    start = time.perf_counter()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    row: dict[str, Any] = {"model": name, "variant": variant}
    if compiler != "aot_eager":
        row["compiler"] = compiler
    try:
        row |= measure(name, *VARIANTS[variant], compiler, device)
    except Exception as error:
        traceback.print_exc()
        text = str(error).strip().splitlines() or [""]
        row |= {"error": f"{type(error).__name__}: {text[0][:200]}", "holds": False}
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def kept(row: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """The row, written to the result file."""
    save("zoo_matrix", [row], ("model", "variant", "compiler"), {}, out)
    return row


def in_processes(
    jobs: list[tuple[str, str, str]], device: str, workers: int, end: float, out: Path | None
) -> Iterator[dict[str, Any]]:
    """Rows from a process of its own per job, which writes its row; so many at a time, none started after `end`."""
    fork = multiprocessing.get_context("fork")  # before CUDA is touched: nothing is imported again
    results = fork.Queue()
    work = lambda job: results.put(kept(row_of(*job, device), out))
    running: list[tuple[Any, tuple[str, str, str]]] = []
    waiting = list(jobs)
    while waiting or running:
        while waiting and len(running) < workers and time.time() < end:
            job = waiting.pop(0)
            running.append((fork.Process(target=work, args=(job,)), job))
            running[-1][0].start()
        if time.time() >= end and waiting:
            print("no time left for", *(" ".join(job) for job in waiting), sep="\n  ", flush=True)
            waiting = []
        try:
            yield results.get(timeout=1)
        except queue.Empty:
            for process, job in [r for r in running if not r[0].is_alive() and r[0].exitcode]:
                yield {"model": job[0], "variant": job[1], "compiler": job[2], "holds": False, "seconds": 0.0,
                       "error": f"the process ended with exit code {process.exitcode}"}
        running = [r for r in running if r[0].is_alive()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", nargs="*", default=list(zoo.ZOO))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--compiler", default="aot_eager", help="aot_eager, inductor, or both")
    parser.add_argument("--workers", type=int, default=0, help="processes on a GPU; 0: this one")
    parser.add_argument("--seconds", type=float, default=1e9, help="with --workers: start nothing after this long")
    parser.add_argument("--no-cudnn-attention", action="store_true", help="on a GPU: scaled dot product without cuDNN")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(not args.no_cudnn_attention)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    jobs = [(n, v, c) for c in args.compiler.split(",") for v in args.variants.split(",") for n in args.entries]
    if args.workers:
        rows = in_processes(jobs, "cuda", args.workers, time.time() + args.seconds, args.out)
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        rows = (kept(row_of(*job, device), args.out) for job in jobs)
    bad, count = 0, 0
    for row in rows:
        count += 1
        bad += not row["holds"] and not row.get("torch_is_wrong")
        print(row, flush=True)
        gc.collect()
    print(f"{count} rows, {len(jobs) - count} not run, {bad} outside the contract", flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
