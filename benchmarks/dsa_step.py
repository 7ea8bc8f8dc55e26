"""One training step of Wan 1.3B's shape with sliding self-attention, against the dense model.

    python benchmarks/dsa_step.py [--layers 4] [--grids 21x30x52,21x45x80] [--window 3x7x7] [--whole] [--out FOLDER]

Systems: eager, inductor, graphopt (all dense), graphopt_dsa (every layer converted, offsets of about +-(1, 2, 2)
tokens), graphopt_window (converted with zero offsets, no parameters).  A row: forward_ms (no_grad), step_ms (forward +
backward), peak_gib of a step, grad_norm, ratio (step_ms over that of graphopt dense in the same run).  Blocks are
compiled one by one, which takes a quarter of the time; --whole compiles the model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _results import copy_tb_per_s, save
from step_models import CONFIGS, Size, build, inputs

import graphopt

SYSTEMS = ("graphopt", "graphopt_dsa", "graphopt_window", "inductor", "eager")


def converted(model: torch.nn.Module, system: str, window: tuple[int, int, int]) -> graphopt.dsa.Handle:
    """The model with sliding attention in every layer; heads get offsets that differ from head to head and place."""
    offsets = "head" if system == "graphopt_dsa" else "zero"
    config = graphopt.dsa.DSAConfig(window=window, offsets=offsets)
    handle = graphopt.dsa.convert(model, config, select="blocks.*.attn1")
    torch.manual_seed(2)
    for head in handle.layers.values():
        if offsets == "head":
            reach = torch.tensor([1.0, 2.0, 2.0], device="cuda").repeat(head.groups)
            head.out_bias.data = (torch.rand_like(head.out_bias) * 2 - 1) * reach
            torch.nn.init.normal_(head.out_weight, std=0.2 * head.channels**-0.5)
    return handle


def compiled(model: torch.nn.Module, system: str, whole: bool) -> torch.nn.Module:
    """The model compiled in place, as a whole or block by block."""
    torch._dynamo.reset()
    for module in (model, *model.blocks):
        module._compiled_call_impl = None
    stock = {"options": {"triton.mix_order_reduction": False}}
    how = {"backend": "graphopt"} if system.startswith("graphopt") else stock
    for module in [] if system == "eager" else [model] if whole else model.blocks:
        module.compile(**how)
    return model


def step(model: torch.nn.Module, kw: dict) -> None:
    """Forward and backward."""
    model(**kw)[0].float().square().mean().backward()


def median(f: Callable[[], Any], milliseconds: float) -> float:
    """Milliseconds of a call: median of five and more, after two that are not counted."""
    f()
    times: list[float] = []
    while len(times) < 6 or sum(times) < milliseconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        f()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def measure(model: torch.nn.Module, system: str, kw: dict, milliseconds: int, whole: bool) -> dict:
    """One row."""
    f = compiled(model, system, whole)
    clear = lambda: [setattr(p, "grad", None) for p in model.parameters()]
    clear()
    start = time.perf_counter()
    step(f, kw)
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - start
    norm = torch.stack([p.grad.float().norm() for p in model.parameters() if p.grad is not None]).norm().item()
    clear()
    torch.cuda.reset_peak_memory_stats()
    step(f, kw)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30
    clear()
    row = dict(grad_norm=norm, compile_s=compile_s, peak_gib=peak)
    row["step_ms"] = median(lambda: (clear(), step(f, kw)), milliseconds)
    clear()
    with torch.no_grad():
        row["forward_ms"] = median(lambda: f(**kw), milliseconds / 2)
    if system.startswith("graphopt_"):
        sites = [s for s in graphopt.last_report().sites if s.kind == "video_attention"]
        row["attention_rewritten"] = len([s for s in sites if s.status == "rewritten"])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--grids", default="21x30x52,21x45x80")
    parser.add_argument("--window", default="3x7x7")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--whole", action="store_true", help="compile the model as one graph")
    parser.add_argument("--milliseconds", type=int, default=1500, help="per timing")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    window = tuple(int(n) for n in args.window.split("x"))
    ceilings = {"copy_tb_per_s": copy_tb_per_s()}
    CONFIGS["wan-1.3b"]["num_layers"] = args.layers
    model = build("wan-1.3b")
    systems, base = args.systems.split(","), {}
    for part in (systems[:2], systems[2:]):  # what the ratio needs, first
        for grid in args.grids.split(","):
            for system in part:
                row = one(model, system, grid, window, args)
                if system == "graphopt":
                    base[grid] = row.get("step_ms")
                if base.get(grid) and "step_ms" in row:
                    row["ratio"] = row["step_ms"] / base[grid]
                print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                save("dsa_step", [row], ("model", "grid", "layers", "window", "system", "compiled"), ceilings, args.out)
                torch.cuda.empty_cache()


def one(model: torch.nn.Module, system: str, grid: str, window: tuple[int, int, int], args: argparse.Namespace) -> dict:
    """The row of a system at a grid."""
    T, H, W = map(int, grid.split("x"))
    handle = converted(model, system, window) if system.startswith("graphopt_") else None
    try:
        row = measure(model, system, inputs("wan-1.3b", Size(1, T, H, W, 512)), args.milliseconds, args.whole)
    except Exception as error:  # a system that fails is a result, the others go on
        row = dict(error=f"{type(error).__name__}: {str(error)[:600]}")
    for module in (model, *model.blocks):
        module._compiled_call_impl = None
    if handle is not None:
        handle.revert()
    return dict(model="wan-1.3b", grid=grid, tokens=T * H * W, layers=args.layers, window=args.window, system=system,
                compiled="whole" if args.whole else "per block", **row)


if __name__ == "__main__":
    main()
