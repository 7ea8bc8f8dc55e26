"""Work that test_drills.py kills: python drill_worker.py WHAT FOLDER.  Each finishes what an earlier life of it began."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch

import graphopt
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.dataset import Samples

SHAPES = [(b, t, 8, 8) for t in range(1, 16) for b in (1, 2)]
COST = CostFit.two_term(1e-3, 1e-5, 1e-8)


def samples() -> Samples:
    return Samples.of_tokens(np.random.default_rng(0).choice([16, 64, 256, 1024], 60_000))


def sweep(folder: Path) -> None:
    def step(shape: graphopt.schedule.bench.Shape) -> None:
        with (folder / "measured.txt").open("a") as f:
            f.write(f"{tuple(shape)}\n")
        x = torch.randn(shape.B * shape.S, 16)
        (x @ x.T).sum()

    runs = graphopt.shape_benchmark(step, SHAPES, budget_s=1e6, warmup=0, repeats=2, most_repeats=2, device="cpu",
                                    path=folder / "runs.json", progress=False)
    assert runs.complete


def slow_step():
    """What `graphopt fit` measures: a step function that takes its time."""
    return lambda shape: time.sleep(0.1)


def plan(folder: Path) -> None:
    graphopt.plan_batches(samples(), COST, ranks=8, m_mem=4096, tau=4, window_steps=20, out=folder / "plan", overwrite=True)


def kernels(folder: Path) -> None:
    """Emit and import the kernels of six widths, as a compile does, and load the C++ AdamW."""
    from graphopt.codegen import adamw_cpp, store
    from graphopt.codegen.examples import example, units

    for d in range(256, 1792, 256):
        for unit in units(example("gate_norm_modulate", d)):
            store.load(unit.function, unit.source)
    adamw_cpp.load(1)


def compile_(folder: Path) -> None:
    """A step of a compiled tiny Wan, through Inductor, with its caches in the folder."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
                                  freq_dim=32, ffn_dim=32, num_layers=1)
    model.compile(backend="graphopt", options={"graphopt.select": "all"})
    x = torch.randn(1, 4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    y = model(x, torch.tensor([3]), torch.ones(1, 8, 16), return_dict=False)[0]
    y.square().mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    (folder / "norm.txt").write_text(repr(norm.item()))


if __name__ == "__main__":
    {"sweep": sweep, "plan": plan, "kernels": kernels, "compile": compile_}[sys.argv[1]](Path(sys.argv[2]))
