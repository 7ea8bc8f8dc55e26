"""The data set, the shape benchmark and the fit of benchmarks/schedule_step.py, made on the spot by all ranks."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import _results
import numpy as np
import schedule_data as data
import torch
import torch.distributed as dist
from schedule_job import CAPTION, Job, every_rank

import graphopt
from graphopt.schedule.bench import Runs, Shape
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.dataset import Samples

ROWS = 16_000


def samples_of(o: argparse.Namespace) -> Samples:
    """Data C (or A) with captions, its grids divided by `--shrink` for tests on a CPU."""
    s = data.data_a(ROWS, o.seed, o.cap)
    table = s.shapes
    h, w = (np.maximum(1, x // o.shrink) for x in (table.h, table.w))
    small = np.stack([table.t, h, w, np.full_like(h, CAPTION)], 1)
    rows, index = np.unique(small, axis=0, return_inverse=True)
    return Samples.of_shapes(index.reshape(-1)[s.shape_id], type(table).of(rows), s.where)


def grids_of(samples: Samples, count: int) -> list[tuple[int, int, int]]:
    """Token grids of the data set over its whole range, smallest first, three images among them."""
    order = np.argsort(samples.shapes.tokens, kind="stable")
    picked = order[np.unique(np.linspace(0, len(order) - 1, count).astype(int))]
    image = order[samples.shapes.t[order] == 1]
    if len(image):
        picked = np.unique(np.r_[picked, image[np.linspace(0, len(image) - 1, 3).astype(int)]])
    picked = picked[np.argsort(samples.shapes.tokens[picked], kind="stable")]
    return [tuple(int(c[i]) for c in (samples.shapes.t, samples.shapes.h, samples.shapes.w)) for i in picked]


def costly(samples: Samples, count: int) -> list[tuple[int, int, int]]:
    """Grids of the token counts that most of the data set's time goes to, by tokens times samples times tokens."""
    shapes = samples.shapes
    work = np.bincount(samples.shape_id, minlength=len(shapes)) * shapes.tokens.astype(float) ** 1.6
    _, first, inverse = np.unique(shapes.tokens, return_index=True, return_inverse=True)
    picked = first[np.argsort(-np.bincount(inverse.reshape(-1), work), kind="stable")[:count]]
    return [tuple(int(c[i]) for c in (shapes.t, shapes.h, shapes.w)) for i in picked]


def compile_all(job: Job, grids: list[tuple[int, int, int]]) -> float:
    """Both graphs of a block, B = 1 and more; seconds.  From a middling shape: what Inductor and the rules decide by
    size then fits most tokens.  Every other rank begins with the other graph, and finds the first one cached."""
    begin = time.perf_counter()
    for b in (1, 2) if dist.get_rank() % 2 == 0 else (2, 1):
        job.alone(Shape(b, *grids[len(grids) * 2 // 3], CAPTION))
        job.sync()
    return time.perf_counter() - begin


def cache_hits() -> str:
    """How many graphs came from Inductor's and AOTAutograd's caches."""
    c = torch._dynamo.utils.counters
    hits = {k: v for part in ("inductor", "aot_autograd") for k, v in c[part].items() if k.endswith(("hit", "miss"))}
    return ", ".join(f"{k} {v}" for k, v in sorted(hits.items())) or "no caches"


def timed(job: Job, call: Callable[[int], None], times: int) -> np.ndarray:
    """Seconds of calls one behind the other, the first third left out, float64 [ranks, calls]."""
    job.meet()
    marks = [job.mark()]
    for i in range(times):
        call(i)
        marks.append(job.mark())
    return every_rank(job.seconds(marks)[times // 3 :], job.device)


def runs_key(o: argparse.Namespace) -> dict:
    """What measured times hold for."""
    return {"layers": o.layers, "system": o.system, "checkpoint": o.checkpoint, "cap": o.cap, "shrink": o.shrink,
            "commit": _results.commit()}  # fmt: skip


def runs_file(o: argparse.Namespace, key: dict) -> Path | None:
    """Where the sweep's runs are kept; runs of another commit are measured again, a second tau takes the first's."""
    if not o.out:
        return None
    path = o.out / f"{o.name}_runs_{o.system}_{o.cap}.json"
    here = {**key, "world_size": dist.get_world_size(), "torch": torch.__version__}
    if dist.get_rank() == 0 and path.exists() and not here.items() <= Runs.load(path).key.items():
        path.unlink()
    dist.barrier()
    return path


def sweep_shapes(samples: Samples, o: argparse.Namespace, m_mem: int) -> list[Shape]:
    """What the shape benchmark measures."""
    grids = grids_of(samples, o.shapes)
    shapes = [Shape(b, *g, CAPTION) for g in grids for b in (1, 2, 4, 8) if b == 1 or b * np.prod(g) <= m_mem / 2]
    often = costly(samples, o.sizes)
    # Alone, and as many as a bucket's batch holds (where these are not very many: their time is little).
    shapes += [Shape(b, *g, CAPTION) for g in (*often, *grids) for b in (1, m_mem // int(np.prod(g))) if b <= 32]
    return list({(s.B, s.S): s for s in shapes}.values())


def sweep(job: Job, samples: Samples, o: argparse.Namespace, m_mem: int) -> tuple[CostFit, list[dict]]:
    """The fit of a shape benchmark of this job, and the benchmark's runs."""
    shapes = sweep_shapes(samples, o, m_mem)
    runs = graphopt.shape_benchmark(job.alone, shapes, budget_s=o.budget, warmup=1, repeats=3, device=job.device,
                                    reset=job.clear, progress=False, queued=True, key=(key := runs_key(o)),
                                    path=runs_file(o, key))  # fmt: skip
    return graphopt.fit_cost(runs, anchored=True, refuse=False), [r for r in runs.rows if r["status"] == "ok"]


def host_seconds(ok: list[dict]) -> float:
    """What the host takes for a microbatch, median over the runs."""
    return float(np.median([r["host_s"] for r in ok if "host_s" in r] or [0.0]))


def fit_here(job: Job, samples: Samples, o: argparse.Namespace, m_mem: int):
    """(fit with the overhead of a step, the host's share, relative speed of each rank)."""
    fit, ok = sweep(job, samples, o, m_mem)
    # How fast each rank is, on work it does at full power.
    long = max((r for r in ok if r["B"] == 1), key=lambda r: r["S"])
    long = Shape(*(long[d] for d in "BTHWL"))
    took = np.median(timed(job, lambda i: job.alone(long), o.speed_calls), 1)
    speeds = took.max() / took
    # What a step takes beside its microbatches (gather, reduce, optimizer), from steps of one and of two in turn.
    job.clear()
    grids = grids_of(samples, o.shapes)
    middle = Shape(1, *grids[len(grids) // 2], CAPTION)
    pairs = timed(job, lambda i: job.step_of([middle] * (1 + i % 2), i), 30).mean(0).reshape(-1, 2)
    overhead = float(np.median(2 * pairs[:, 0] - pairs[:, 1]))
    return CostFit(**{**fit.__dict__, "step_overhead_s": max(0.0, overhead)}), host_seconds(ok), speeds


def fit_of(row: dict) -> CostFit:
    """The fit that a result row tells."""
    fit = CostFit.two_term(**{k: row["coefficients"][k] for k in "abc"}, p=row["p"], source="measured",
                           step_overhead_s=row["step_overhead_s"])  # fmt: skip
    more = {"coefficients": row["coefficients"], "floor_s": row["floor_s"], "anchors": row.get("anchors", [])}
    return CostFit(**{**fit.__dict__, **more})


def fit_rows(path: Path, cap: int) -> list[dict]:
    """Rows of a result file that hold fits for this data."""
    name = data_name(cap)
    rows = json.loads(path.read_text())["rows"]
    found = [r for r in rows if r.get("mode") == "fit" and r["check"] == "step" and r["data"] == name]
    if not found:
        raise SystemExit(f"{path} holds no fit for data {name}: measure one (schedule_step.py without --plan-with)")
    return found


def data_name(cap: int) -> str:
    """The data set's name in result rows."""
    return "C" if cap == data.CAP_C else f"A, cap {cap}"
