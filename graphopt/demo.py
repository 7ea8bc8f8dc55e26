"""The demo: a small Wan transformer (diffusers' class) trains twice, eager and with graphopt.

On a CPU every site runs the reference operator (`select="all"`), to show that the gradients are right; speed is a
matter for a GPU.  On a GPU the model is larger, and step times and peak memory stand beside Inductor's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

SMALL: dict[str, Any] = dict(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
                             freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32)
LARGE: dict[str, Any] = dict(num_attention_heads=12, attention_head_dim=128, in_channels=16, out_channels=16,
                             text_dim=4096, freq_dim=256, ffn_dim=8960, num_layers=4, rope_max_seq_len=1024)
# largest accepted relative gap between the loss curves: fp32 rounding over 30 steps on a CPU, bf16's on a GPU
TOLERANCE = {"cpu": 1e-4, "cuda": 2e-2}


@dataclass
class Run:
    """One training run."""

    name: str
    losses: list[float] = field(default_factory=list)
    first_s: float = 0.0
    step_ms: float = 0.0
    peak_gib: float = 0.0
    step: Callable[..., Any] | None = None


def build(device: str) -> torch.nn.Module:
    """The model, always with the same weights; on a GPU in bf16, tables and norms in fp32 as diffusers keeps them."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    with torch.device(device):
        model = WanTransformer3DModel(**(LARGE if device == "cuda" else SMALL))
    if device == "cuda":
        for name, p in model.named_parameters():
            if not ("scale_shift" in name or "norm" in name):
                p.data = p.data.bfloat16()
    return model.train()


def batch(device: str, step: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Inputs and target of one step, the same for every run: (forward keyword arguments, target)."""
    generator = torch.Generator().manual_seed(step)
    channels, text = (16, 4096) if device == "cuda" else (4, 16)
    shape = (1, channels, 9, 60, 104) if device == "cuda" else (2, channels, 2, 8, 8)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    latent, noise = (torch.randn(shape, generator=generator) for _ in range(2))
    time_ = torch.randint(0, 1000, (shape[0],), generator=generator)
    words = torch.randn(shape[0], 64, text, generator=generator)
    mix = (time_ / 1000).view(-1, 1, 1, 1, 1)
    noisy = (1 - mix) * latent + mix * noise
    kwargs = dict(hidden_states=noisy.to(device, dtype), timestep=time_.to(device),
                  encoder_hidden_states=words.to(device, dtype), return_dict=False)
    return kwargs, (noise - latent).to(device)


def train(name: str, device: str, steps: int, compile_: Callable[[torch.nn.Module], Any], progress: Progress) -> Run:
    """Flow-matching steps with AdamW."""
    run = Run(name)
    model = build(device)
    run.step = compile_(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4 if device == "cuda" else 3e-3)
    task = progress.add_task(name, total=steps)
    times = []
    for i in range(steps):
        kwargs, target = batch(device, i)
        if device == "cuda":
            torch.cuda.synchronize()
        if i == 1 and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = (run.step(**kwargs)[0].float() - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        times.append(time.perf_counter() - start)
        progress.advance(task)
    run.first_s = times[0]
    run.step_ms = 1e3 * sorted(times[1:] or times)[len(times[1:] or times) // 2]
    if device == "cuda":
        run.peak_gib = torch.cuda.max_memory_allocated() / 2**30
    return run


def main(steps: int = 30, device: str | None = None, compiler: str | None = None) -> int:
    """Run the demo; returns the exit code: 0 if the loss curves agree and sites were rewritten."""
    import graphopt

    console = Console()
    try:
        import diffusers
    except ImportError:
        console.print("The demo needs diffusers: pip install 'graphopt[diffusers]'")
        return 2
    diffusers.utils.logging.set_verbosity_error()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    options: dict[str, Any] = {"graphopt.compiler": compiler or "inductor"}
    if device == "cpu":
        options["graphopt.select"] = "all"
        console.print("No GPU: every site runs its reference operator, to show that the gradients are right.\n"
                      "Speed is a matter for a GPU; the first compiled step takes a minute or two here.")
    systems: list[tuple[str, Callable[[torch.nn.Module], Any]]] = [("eager", lambda m: m)]
    if device == "cuda":
        systems.append(("inductor", lambda m: torch.compile(m, options={"triton.mix_order_reduction": False})))
    systems.append(("graphopt", lambda m: torch.compile(m, backend="graphopt", options=options)))
    columns = (TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    runs = []
    with Progress(*columns, console=console) as progress:
        for name, compile_ in systems:
            torch._dynamo.reset()
            runs.append(train(name, device, steps, compile_, progress))
    report = graphopt.report(runs[-1].step)
    console.print(_table(runs, device))
    gap = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(runs[0].losses, runs[-1].losses))
    console.print(f"largest relative gap between the loss curves of eager and graphopt: {gap:.2e}")
    console.print(str(report), highlight=False, markup=False, soft_wrap=True)
    finite = all(math.isfinite(x) for r in runs for x in r.losses)
    if not finite or gap > TOLERANCE[device]:
        console.print(f"[red]the curves differ by more than {TOLERANCE[device]:.0e}")
        return 1
    if report.count("modulate", "rewritten") == 0:
        console.print("[red]no site was rewritten")
        return 1
    return 0


def _table(runs: list[Run], device: str) -> Table:
    table = Table()
    for heading in ("", "loss at step 1", "loss at the end", "first step, s", "median step, ms"):
        table.add_column(heading, justify="right" if heading else "left")
    if device == "cuda":
        table.add_column("peak, GiB", justify="right")
    for r in runs:
        cells = [r.name, f"{r.losses[0]:.6f}", f"{r.losses[-1]:.6f}", f"{r.first_s:.1f}", f"{r.step_ms:.1f}"]
        table.add_row(*cells, *([f"{r.peak_gib:.2f}"] if device == "cuda" else []))
    return table
