"""Command-line text in, objects out: what `plan`, `fit` and `simulate` share."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from graphopt.errors import ConfigError
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.hardware import analytic_fit, hardware
from graphopt.schedule.models import model_cost
from graphopt.schedule.shapes import LatentLayout


def triple(text: str, name: str) -> tuple[int, int, int]:
    """Three integers."""
    try:
        a, b, c = (int(x) for x in text.split(","))
    except ValueError as e:
        raise ConfigError(f"--{name} must be three integers like 4,8,8, not {text!r}") from e
    return a, b, c


def numbers(text: str | None, name: str, kind: type) -> list[Any] | None:
    """A list of numbers."""
    if text is None:
        return None
    try:
        return [kind(x) for x in text.split(",")]
    except ValueError as e:
        raise ConfigError(f"--{name} must be numbers like 1,2,4, not {text!r}") from e


def pairs(text: str | None, name: str) -> dict[str, str] | None:
    """From `frames=nf,height=h`."""
    if text is None:
        return None
    found = [part.partition("=") for part in text.split(",")]
    if any(not (key.strip() and value.strip()) for key, _, value in found):
        raise ConfigError(f"--{name} must be pairs like frames=nf,height=h, not {text!r}")
    return {key.strip(): value.strip() for key, _, value in found}


def layout(vae: str, patch: str) -> LatentLayout:
    """From `4,8,8` and `1,2,2`."""
    return LatentLayout(triple(vae, "vae"), triple(patch, "patch"))


def cost(
    fit_file: Path | None,
    model: str | None,
    gpu: str,
    remat: str,
    ranks: int,
    m_mem: float | None,
    memory_gib: float | None,
    *,
    compiled: bool = True,
    sharded: bool = False,
) -> tuple[CostFit, float | None]:
    """(cost model, memory limit in bytes)."""
    limit = None if memory_gib is None else memory_gib * 2**30
    if (fit_file is None) == (model is None):
        raise ConfigError(
            "give either --fit or --model", remedy="`graphopt fit` makes a fit; --model needs no measurement"
        )
    if fit_file is not None:
        return CostFit.load(fit_file), limit
    device = hardware(gpu)
    model_fit = analytic_fit(
        model_cost(str(model)), device, remat=remat, data_parallel=ranks, compiled=compiled, sharded=sharded
    )
    # A tenth is left for fragmentation and what the trace does not see.
    return model_fit, limit if limit is not None or m_mem is not None else 0.9 * device.memory


def measured(source: str, tokens: str, caption: int, budget_s: float, runs: Path) -> Any:
    """Runs from a file, or measured now."""
    from graphopt.schedule.bench import Runs, shape_benchmark, sweep

    if Path(source).is_file():
        return Runs.load(source)
    module, _, name = source.partition(":")
    if not name:
        raise ConfigError(
            f"{source!r} is neither a file nor pkg.module:factory",
            remedy="give runs.json, or a factory of your step function",
        )
    sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise ConfigError(
            f"the factory cannot be imported: {e}", where=source, remedy="run from the folder that holds the module"
        ) from e
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return shape_benchmark(
        factory(), sweep(numbers(tokens, "tokens", int) or [], caption=caption), budget_s=budget_s, path=runs
    )
