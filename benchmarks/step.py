"""One training step of a model at its real width, side by side: eager, Inductor with and without mix-order, graphopt.

    python benchmarks/step.py [--models wan-1.3b,flux-dev,...] [--systems eager,graphopt] [--rep 1500] [--out FOLDER]

Models and sizes are those of step_models.py.  A row: forward_ms (no_grad), step_ms (forward + backward), peak_gib of a
step, grad_norm over all parameters, and grad_gap: the largest relative L2 distance of one parameter's gradient from
eager's in the same dtype.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from _results import copy_tb_per_s, save
from step_models import CONFIGS, SIZES, build, inputs, layers

SYSTEMS = ("eager", "inductor", "inductor_no_mix_order", "graphopt", "graphopt_experimental")


def compiled(model: torch.nn.Module, system: str):
    torch._dynamo.reset()
    if system == "eager":
        return model
    if system.startswith("graphopt"):
        more = ["norm_rotate", "column_sums", "gradient_addends"] if system == "graphopt_experimental" else []
        return torch.compile(model, backend="graphopt", options={"graphopt.experimental": more})
    return torch.compile(model, options={"triton.mix_order_reduction": system == "inductor"})


def step(f, kw: dict) -> None:
    f(**kw)[0].float().square().mean().backward()


def measure(
    model: torch.nn.Module, system: str, kw: dict, reference: dict | None, rep: float
) -> tuple[dict, dict]:
    from triton.testing import do_bench

    f = compiled(model, system)
    clear = lambda: [setattr(p, "grad", None) for p in model.parameters()]
    clear()
    start = time.perf_counter()
    step(f, kw)
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - start
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([g.float().norm() for g in grads.values()]).norm().item()
    gap = 0.0
    if reference:
        gap = max(((grads[n].float() - g.float()).norm() / g.float().norm().clamp_min(1e-12)).item()
                  for n, g in reference.items())
    clear()
    torch.cuda.reset_peak_memory_stats()
    step(f, kw)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30
    clear()
    with torch.no_grad():
        forward = do_bench(lambda: f(**kw), 100, rep / 3, return_mode="median")
    whole = do_bench(lambda: step(f, kw), 200, rep, return_mode="median")
    row = dict(forward_ms=forward, step_ms=whole, peak_gib=peak, grad_norm=norm, grad_gap=gap, compile_s=compile_s)
    if system.startswith("graphopt"):
        import graphopt

        report = graphopt.report(f)
        print(report, flush=True)
        row |= {f"{k}_{w}": report.graphs and report.count(k, w) for k in ("modulate", "gate")
                for w in ("matched", "rewritten")}
    return row, grads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--batches", help="only sizes with these batch sizes, as 1,2")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--rep", type=float, default=2500.0, help="milliseconds of timed steps per system")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ceilings = {"copy_tb_per_s": copy_tb_per_s()}
    batches = None if args.batches is None else [int(b) for b in args.batches.split(",")]
    for name in args.models.split(","):
        model = build(name)
        for size in SIZES[name]:
            if batches is not None and size.batch not in batches:
                continue
            kw, reference = inputs(name, size), None
            for system in args.systems.split(","):
                try:
                    row, grads = measure(model, system, kw, reference, args.rep)
                except Exception as error:  # stock Inductor may raise here: that is a result
                    row, grads = dict(error=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"), None
                if system == "eager":
                    reference = grads
                row = dict(model=name, grid=size.grid, batch=size.batch, layers=layers(name), system=system, **row)
                print({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                save("step", [row], ("model", "grid", "batch", "layers", "system"), ceilings, args.out)
                del grads
                for p in model.parameters():
                    p.grad = None
                torch.cuda.empty_cache()
            del reference
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
