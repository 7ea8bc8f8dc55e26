"""Shape benchmark of a Wan-shaped stack: `python benchmarks/schedule_shape.py --machine h200`, also under torchrun.

diffusers' Wan at 1.3B widths, two layers, bf16, forward and backward, 1k to 32,760 tokens, eager and with its blocks
compiled by graphopt.  `--fsdp` shards it with FSDP2 (NCCL on GPUs, gloo on CPUs; the slowest rank counts):

    torchrun --nproc-per-node=1 benchmarks/schedule_shape.py --fsdp --systems graphopt --machine h200

Writes rows of check `shape_fit` to benchmarks/results/<machine>/schedule.json, and the raw runs beside it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.fx.experimental._config

from graphopt.schedule.bench import Shape

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

GRIDS = [(1, 32, 32), (3, 16, 26), (5, 16, 26), (3, 30, 52), (5, 30, 52), (8, 30, 52), (11, 30, 52), (16, 30, 52),
         (21, 30, 52)]  # fmt: skip


def build(layers: int, width: int, device: torch.device, system: str, fsdp: bool) -> torch.nn.Module:
    """Wan of any depth and width; blocks compiled with dynamic shapes, then sharded."""
    from diffusers import WanTransformer3DModel

    # Otherwise equal sizes (a square image, S = L) become one symbol, and each coincidence another graph.
    torch.fx.experimental._config.use_duck_shape = False
    torch.manual_seed(0)
    with torch.device(device):
        model = WanTransformer3DModel(
            num_attention_heads=width // 128, attention_head_dim=128, ffn_dim=int(width * 35 / 6), num_layers=layers,
            in_channels=16, out_channels=16,
        ).to(torch.bfloat16)  # fmt: skip
    for block in model.blocks if system != "eager" else ():
        block.compile(backend="graphopt", dynamic=True)
    if fsdp:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=False, mp_policy=policy)
        fully_shard(model, reshard_after_forward=False, mp_policy=policy)
    return model


def make_step(model: torch.nn.Module, device: torch.device) -> Callable:
    """One microbatch: random latents on the shape's token grid, forward, backward."""

    def step(s) -> None:
        model.zero_grad(set_to_none=True)
        x = torch.randn(s.B, 16, s.T, 2 * s.H, 2 * s.W, device=device, dtype=torch.bfloat16)
        text = torch.randn(s.B, max(2, s.L), 4096, device=device, dtype=torch.bfloat16)
        t = torch.full((s.B,), 500, device=device)
        model(x, timestep=t, encoder_hidden_states=text, return_dict=False)[0].float().square().mean().backward()

    return step


def compile_first(step: Callable, grids: list[tuple[int, int, int]], batches: tuple[int, ...]) -> float:
    """Run the smallest shape of every kind that torch compiles apart (T and B of 1 or more); seconds it took."""
    begin = time.perf_counter()
    for images in (True, False):
        some = [g for g in grids if (g[0] == 1) == images]
        for b in batches if some else ():
            step(Shape(b, *min(some, key=np.prod), 512))
    return time.perf_counter() - begin


def start() -> torch.device:
    """The process group, if there is one to join, and this rank's device."""
    cuda = torch.cuda.is_available()
    if "RANK" not in os.environ:
        return torch.device("cuda" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def above(fit) -> float:
    """Largest relative error of the shapes that take longer than the floor."""
    return max(abs(e["error"]) for e in fit.errors if e["seconds"] * (1 + e["error"]) > fit.floor_s * 1.0001)


def rows_of(runs, model, common: dict, compiled: bool, whole_width: bool) -> list[dict]:
    """The quality of each form on these runs, and of the hardware description without them."""
    from graphopt.errors import GraphoptError
    from graphopt.schedule.fitting import fit_cost
    from graphopt.schedule.hardware import analytic_fit, hardware
    from graphopt.schedule.shapes import ShapeTable

    ok = [r for r in runs.rows if r["status"] == "ok"]
    noise = float(np.median([np.std(np.log(r["times"])) for r in ok]))
    common = {**common, "shapes": len(ok), "device": runs.key["device"], "noise": noise}
    rows = []
    for form in ("two_term", "power_law", "symbolic"):
        try:
            fit = fit_cost(runs, form, cost=model.total, refuse=False)
        except GraphoptError as e:  # a short sweep
            print(e)
            continue
        rows.append({**common, "mode": form, "mape": fit.mape, "max_error": fit.max_error, "r2": fit.r2, "p": fit.p,
                     "coefficients": fit.coefficients, "floor_s": fit.floor_s, "intervals": fit.intervals,
                     "max_error_above_floor": above(fit),
                     "memory_error": fit.memory.max_error if fit.memory else None})  # fmt: skip
    if whole_width:
        table = ShapeTable.of([[r["T"], r["H"], r["W"], r["L"]] for r in ok])
        guess = analytic_fit(model, hardware("h200"), remat="none", compiled=compiled)
        predicted = guess.seconds(table, np.arange(len(ok)), np.array([r["B"] for r in ok]))
        error = predicted / np.array([r["seconds"] for r in ok]) - 1
        rows.append({**common, "mode": "hardware description", "mape": float(np.abs(error).mean()),
                     "max_error": float(np.abs(error).max())})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--budget", type=float, default=60, help="seconds per system, compilation apart")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--grids", type=int, default=len(GRIDS), help="how many of the grids, smallest first")
    parser.add_argument("--systems", default="eager,graphopt")
    parser.add_argument("--fsdp", action="store_true", help="shard with FSDP2; start with torchrun")
    parser.add_argument("--refit", action="store_true", help="fit the raw runs that are there; measure nothing")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    o = parser.parse_args()
    import schedule
    from graphopt.schedule.bench import Runs, shape_benchmark
    from graphopt.schedule.models import model_cost

    device = start()
    first = not dist.is_initialized() or dist.get_rank() == 0
    out = o.out or ROOT / "benchmarks" / "results" / o.machine
    # Torch compiles sizes of 1 apart, so B = 1 only for images: three graphs, not four.
    shapes = [Shape(b, *g, 512) for g in GRIDS[: o.grids] for b in ((1,) if g[0] == 1 else (1, 2, 4))
              if b * np.prod(g) <= 33_000]  # fmt: skip
    whole = model_cost("wan-1.3b")
    stack = type(whole)("slice", whole.rest, whole.layer, o.layers, whole.width)
    for system in o.systems.split(","):
        name = f"schedule_shape_runs_{system}{'_fsdp' if o.fsdp else ''}.json"
        if o.refit:
            runs = Runs.load(out / name)
            common = {"check": "shape_fit", "data": "shape sweep", "system": system, "fsdp": o.fsdp,
                      "ranks": runs.key["world_size"], "simulated": False}  # fmt: skip
            found = rows_of(runs, stack, common, system != "eager", o.width == whole.width)
            for r in found:
                print(r["mode"], f"mean {r['mape']:.1%}, largest {r['max_error']:.1%}, floor {r.get('floor_s')}")
            print(schedule.save(found, o.machine, folder=o.out))
            continue
        torch._dynamo.reset()
        model = build(o.layers, o.width, device, system, o.fsdp)
        key = {"model": f"wan width {o.width}, {o.layers} layers", "dtype": "bf16", "remat": "none", "system": system,
               "fsdp": o.fsdp}  # fmt: skip
        step = make_step(model, device)
        if system != "eager":
            kinds = [g for g in GRIDS[: o.grids] if g[0] > 1]
            seconds = compile_first(step, kinds, (1, 2)) + compile_first(step, [GRIDS[0]], (1,))
            print(f"compiled in {seconds:.0f} s", flush=True)
        runs = shape_benchmark(step, shapes, budget_s=o.budget, path=out / name, key=key,
                               warmup=3, reset=lambda m=model: m.zero_grad(set_to_none=True),
                               progress=False)  # fmt: skip
        if first:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            common = {"check": "shape_fit", "data": "shape sweep", "system": system, "fsdp": o.fsdp, "graphs": graphs,
                      "ranks": runs.key["world_size"], "simulated": False}  # fmt: skip
            found = rows_of(runs, stack, common, system != "eager", o.width == whole.width)
            for r in sorted(runs.rows, key=lambda r: r["B"] * r["S"]):
                seconds = f"{r['seconds'] * 1e3:9.2f} ms" if r["seconds"] else ""
                print(r["B"], r["S"], r["status"], seconds, r.get("spread"), len(r.get("times", [])), flush=True)
            for r in found:
                print(r, flush=True)
            print(schedule.save(found, o.machine, folder=out), flush=True)
        del model
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
