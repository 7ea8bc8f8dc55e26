"""Windows of microbatches in, a plan out: Arrow tables, totals, and the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.plan import PART, SCHEMA_VERSION, STEPS, Plan, PlanWriter
from graphopt.schedule.problem import OVER_MEMORY, Leftover, Problem, Window
from graphopt.schedule.worst_first import worst_first


def collect(
    p: Problem,
    fit: CostFit,
    more: dict[str, Any],
    windows: Any,
    left: Leftover,
    steps: int,
    out: str | Path | None,
    overwrite: bool,
    progress: Callable[[int, int], None] | None,
) -> Plan:
    """Turn windows into parts, in memory or on disk, and describe them."""
    parts: dict[int, pa.Table] = {}
    tables: dict[int, pa.Table] = {}
    digests: dict[int, bytes] = {}
    writer = None if out is None else PlanWriter(out, overwrite=overwrite)
    totals = {"microbatches": 0, "samples": 0, "tokens": 0, "over_memory": 0}
    used: set[tuple[int, int]] = set()
    try:
        if writer:
            writer.__enter__()
        done = 0
        for i, window in _ordered(p, fit, more, windows):
            part, tables[i] = _tables(p, fit, window)
            digest = hashlib.sha256()
            for name in ("step", "rank", "shape", "batch", "flags"):
                digest.update(np.ascontiguousarray(part.column(name).to_numpy()).tobytes())
            digest.update(window.rows.astype("<u4").tobytes())
            digests[i] = digest.digest()
            totals["microbatches"] += len(window)
            totals["samples"] += len(window.rows)
            totals["tokens"] += int(np.sum(part.column("tokens").to_numpy()))
            totals["over_memory"] += int((window.flags & OVER_MEMORY > 0).sum())
            used.update(
                zip(
                    *(x.tolist() for x in np.divmod(np.unique(window.shape * np.int64(1 << 32) + window.size), 1 << 32))
                )
            )
            if writer:
                writer.add(part, i)
            else:
                parts[i] = part
            done += int(window.step[-1]) + 1 - int(window.step[0])
            if progress:
                progress(done, steps)
        step_table = pa.concat_tables([tables[i] for i in sorted(tables)])
        content = hashlib.sha256(b"".join(digests[i] for i in sorted(digests))).hexdigest()
        manifest = _manifest(p, fit, more, left, steps, totals, len(used), step_table, content)
        if writer:
            manifest = writer.finish(manifest, step_table)
    finally:
        if writer:
            writer.__exit__()
    return Plan(manifest, [parts[i] for i in sorted(parts)], step_table) if out is None else Plan.load(out)


def _ordered(p: Problem, fit: CostFit, more: dict[str, Any], windows: Any) -> Iterator[tuple[int, Window]]:
    """Numbered windows, the largest microbatch of the whole plan moved into the first step."""
    if more["carried_in"] and more["policy"] != "step_balanced":
        return enumerate(windows)  # there, what an earlier epoch owes comes first

    def memory(w: Window) -> np.ndarray:
        if fit.memory is not None:
            return fit.memory.bytes(p.samples.shapes, w.shape, w.size)
        return w.size * p.tokens[w.shape]

    return worst_first(windows, memory, together=p.slots)


def _tables(p: Problem, fit: CostFit, w: Window) -> tuple[pa.Table, pa.Table]:
    """A window as Arrow tables: microbatches, and one row per step."""
    size = w.size
    tokens = size * p.tokens[w.shape]
    cost = p.cost(w.shape, size)
    first = np.flatnonzero(np.r_[True, w.k[1:] == 0])
    count = np.diff(np.r_[first, len(w)])
    peak = None if fit.memory is None else fit.memory.bytes(p.samples.shapes, w.shape, size)
    lists = pa.ListArray.from_arrays(pa.array(w.offsets.astype(np.int32)), pa.array(w.rows.astype(np.uint32)))
    part = pa.table(
        [
            w.step,
            w.rank,
            w.k,
            np.repeat(count, count).astype(np.int32),
            w.shape.astype(np.int32),
            size.astype(np.int32),
            tokens,
            cost,
            pa.nulls(len(w), pa.int64()) if peak is None else pa.array(peak),
            w.flags,
            lists,
        ],
        schema=PART,
    )
    low = int(w.step[0])
    steps = int(w.step[-1]) - low + 1
    step = w.step - low
    speed = np.ones(p.groups) if p.speeds is None else p.speeds
    cell = step.astype(np.int64) * p.groups + w.rank
    busy = np.bincount(cell, cost, steps * p.groups).reshape(steps, p.groups) / speed
    starts = np.searchsorted(step, np.arange(steps))
    if p.slots:  # every microbatch is a barrier: the step lasts the sum over k of the slowest
        slot = step.astype(np.int64) * (int(w.k.max()) + 1) + w.k
        slowest = np.zeros((steps, int(w.k.max()) + 1))
        np.maximum.at(slowest.reshape(-1), slot, cost / speed[w.rank])
        longest = slowest.sum(1)
    else:
        longest = busy.max(1)
    table = pa.table(
        [
            np.arange(low, low + steps, dtype=np.int32),
            np.add.reduceat(tokens, starts),
            np.add.reduceat(size, starts),
            np.diff(np.r_[starts, len(w)]).astype(np.int32),
            busy.sum(1) / speed.sum() if p.speeds is None else (busy * speed).sum(1) / speed.sum(),
            longest,
            pa.nulls(steps, pa.int64()) if peak is None else pa.array(np.maximum.reduceat(peak, starts)),
        ],
        schema=STEPS,
    )
    return part, table


def _manifest(
    p: Problem,
    fit: CostFit,
    more: dict[str, Any],
    left: Leftover,
    steps: int,
    totals: dict[str, int],
    graphs: int,
    step_table: pa.Table,
    digest: str,
) -> dict[str, Any]:
    """What the plan says about itself."""
    mean, longest = step_table.column("mean_s").to_numpy(), step_table.column("max_s").to_numpy()
    imbalance = longest / mean - 1
    spread = float(mean.std() / mean.mean())
    tokens = step_table.column("tokens").to_numpy().astype(np.float64)
    model = {k: v for k, v in fit.to_json().items() if k not in ("errors", "intervals")}
    return {
        "schema_version": SCHEMA_VERSION,
        "graphopt": version("graphopt"),
        "policy": more["policy"],
        "dataset": {
            "rows": len(p.samples),
            "planned": len(p.rows),
            "subset": more["subset"],
            "fingerprint": p.samples.fingerprint,
        },
        "seed": p.seed,
        "epoch": p.epoch,
        "steps": steps,
        "layout": {
            "ranks": more["ranks"],
            "sp": more["sp"],
            "sp_efficiency": more["sp_efficiency"],
            "groups": p.groups,
            "sync": "microbatch" if p.slots else "step",
            "microbatches": p.microbatches,
            "speeds": None if p.speeds is None else p.speeds.tolist(),
        },
        "limits": {
            "m_mem": more["m_mem"],
            "m_comp": more["m_comp"],
            "memory_bytes": more["memory_bytes"],
            "tau": more["tau"],
            "uneven": more["uneven"],
            "step_cost_s": p.step_cost,
            "buckets": None if more["buckets"] is None else more["buckets"].tolist(),
            "allowed_b": None if p.allowed is None else list(p.allowed),
        },
        "cost_model": model,
        "shapes": p.samples.shapes.to_json(),
        "tail": p.tail,
        "dropped": left.dropped.tolist(),
        "carried": left.carried.tolist(),
        "repeated": left.repeated.tolist(),
        "left_shapes": {k: p.samples.shape_id[getattr(left, k)].tolist() for k in ("dropped", "carried")},
        "carried_in": more["carried_in"],
        "warnings": more["warnings"]
        + ([f"steps of equal cost would leave ranks waiting, so these differ by {spread:.0%} (standard deviation); "
            f"tau = {more['tau']:g} is their mean, and a larger one makes them alike"] if p.unlike else []),
        "totals": {**totals, "shape_batch_pairs": graphs},
        "predicted": {
            "imbalance_mean": float(longest.sum() / mean.sum() - 1),
            "imbalance_worst": float(imbalance.max()),
            "bubble": float(1 - mean.sum() / longest.sum()),
            "token_cv": float(tokens.std() / tokens.mean()),
            "step_s_mean": float(longest.mean()),
            "step_cv": float(longest.std() / longest.mean()),
            "epoch_s": float(longest.sum() + steps * fit.step_overhead_s),
        },
        "content_sha256": digest,
    }
