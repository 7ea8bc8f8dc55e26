"""Shape benchmark of a Wan-shaped stack on a GPU: `python benchmarks/schedule_shape.py --machine h200`.

Under three minutes: eager diffusers Wan at 1.3B widths, two layers, bf16, forward and backward, 1k to 32,760 tokens.
Writes rows of check `shape_fit` to benchmarks/results/<machine>/schedule.json, and the raw runs beside it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

GRIDS = [(1, 32, 32), (5, 16, 26), (3, 30, 52), (5, 30, 52), (8, 30, 52), (11, 30, 52), (16, 30, 52), (21, 30, 52)]


def make_step(layers: int, width: int, device: str):
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=width // 128,
        attention_head_dim=128,
        ffn_dim=int(width * 35 / 6),
        num_layers=layers,
        in_channels=16,
        out_channels=16,
    ).to(device, torch.bfloat16)

    def step(s) -> None:
        model.zero_grad(set_to_none=True)
        x = torch.randn(s.B, 16, s.T, 2 * s.H, 2 * s.W, device=device, dtype=torch.bfloat16)
        text = torch.randn(s.B, max(1, s.L), 4096, device=device, dtype=torch.bfloat16)
        t = torch.full((s.B,), 500, device=device)
        model(x, timestep=t, encoder_hidden_states=text, return_dict=False)[0].float().square().mean().backward()

    return step, lambda: model.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--budget", type=float, default=120)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--grids", type=int, default=len(GRIDS), help="how many of the grids, smallest first")
    o = parser.parse_args()
    import schedule
    from graphopt.schedule.bench import Shape, shape_benchmark
    from graphopt.schedule.fitting import fit_cost
    from graphopt.schedule.hardware import analytic_fit, hardware
    from graphopt.schedule.models import model_cost
    from graphopt.schedule.shapes import ShapeTable

    device = "cuda" if torch.cuda.is_available() else "cpu"
    step, reset = make_step(o.layers, o.width, device)
    shapes = [Shape(b, *g, 512) for g in GRIDS[: o.grids] for b in (1, 2) if b * np.prod(g) <= 33_000]
    out = ROOT / "benchmarks" / "results" / o.machine
    key = {"model": f"wan width {o.width}, {o.layers} layers", "dtype": "bf16", "remat": "none", "compile": False}
    runs = shape_benchmark(
        step, shapes, budget_s=o.budget, path=out / "schedule_shape_runs.json", key=key, reset=reset, progress=False
    )
    whole = model_cost("wan-1.3b")
    model = type(whole)("slice", whole.rest, whole.layer, o.layers, whole.width)
    ok = [r for r in runs.rows if r["status"] == "ok"]
    noise = [float(np.std(np.log(r["times"]))) for r in ok]
    common = {
        "check": "shape_fit",
        "data": "shape sweep",
        "shapes": len(ok),
        "simulated": False,
        "device": runs.key["device"],
    }
    rows = []
    for form in ("two_term", "power_law", "symbolic"):
        fit = fit_cost(runs, form, cost=model.total, refuse=False)
        rows.append({**common, "mode": form, "mape": fit.mape, "max_error": fit.max_error, "r2": fit.r2, "p": fit.p,
                     "coefficients": fit.coefficients, "intervals": fit.intervals, "noise": float(np.median(noise)),
                     "memory_error": fit.memory.max_error if fit.memory else None})  # fmt: skip
    if o.width == whole.width:  # the description alone, nothing measured
        table = ShapeTable.of([[r["T"], r["H"], r["W"], r["L"]] for r in ok])
        guess = analytic_fit(model, hardware("h200"), remat="none")
        predicted = guess.seconds(table, np.arange(len(ok)), np.array([r["B"] for r in ok]))
        error = predicted / np.array([r["seconds"] for r in ok]) - 1
        rows.append({**common, "mode": "hardware description", "mape": float(np.abs(error).mean()),
                     "max_error": float(np.abs(error).max())})  # fmt: skip
    for r in rows:
        print(r)
    print(schedule.save(rows, o.machine))


if __name__ == "__main__":
    main()
