"""`plan_batches`: a data set's metadata and a cost model in, a plan of whole optimizer steps out."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from graphopt.errors import ConfigError, PlanInfeasible

from . import buckets, dealing, slots, step_balanced
from .costmodel import CostFit
from .dataset import Samples, read_samples
from .plan import PART, SCHEMA_VERSION, STEPS, Plan, PlanWriter
from .problem import OVER_MEMORY, Leftover, Problem, Window
from .shapes import LatentLayout

log = logging.getLogger(__name__)
POLICIES = ("step_balanced", "adaptive_load", "equal_token")


def plan_batches(
    manifest: str | Path | pa.Table | Samples,
    fit: CostFit,
    *,
    ranks: int,
    m_mem: float | None = None,
    m_comp: float | None = None,
    memory_bytes: float | None = None,
    policy: str = "step_balanced",
    seed: int = 0,
    epoch: int = 0,
    tau: float = 1.3,
    sync: str = "step",
    microbatches: int | None = None,
    allowed_b: Sequence[int] | None = None,
    limits: np.ndarray | None = None,
    speeds: Sequence[float] | None = None,
    sp: int = 1,
    sp_efficiency: float = 1.0,
    tail: str = "carry",
    carry_in: Sequence[int] = (),
    only: np.ndarray | None = None,
    layout: LatentLayout | None = None,
    caption_bin: int = 512,
    columns: dict[str, str] | None = None,
    window_steps: int | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Plan one epoch.

    Args:
        manifest: metadata of the data set (dataset.py lists the formats).
        fit: predicted seconds, and bytes if it has a memory model.
        ranks: processes of the job.
        m_mem: memory limit per rank in latent tokens of a microbatch (B * S).
        memory_bytes: memory limit per rank in bytes, with a fit that has a memory model; both limits hold if both are
            given.
        m_comp: compute limit per microbatch, B * S^p with `fit.p`.  `adaptive_load` takes `fit.m_comp` by default;
            `step_balanced` has none by default, and with one flags single samples that exceed it.
        policy: "step_balanced", "adaptive_load" (the published rule to the letter: it never drops below B = 1, so
            batches over the memory limit are flagged) or "equal_token" (B = floor(M_mem / S)).
        seed, epoch: the order; equal inputs give equal bytes.
        tau: wanted cost of a rank's step, in units of the costliest sample.  It sets the global batch; below about 1.3
            no planner can balance, and the plan says so.
        sync: "step" (ranks meet once a step: DDP, FSDP2 in ZeRO-1 style), or "microbatch" (ZeRO-3, pipelines: K equal).
        microbatches: K for sync="microbatch" (4 by default) and for the two bucket policies (1 by default).
        allowed_b: the only batch sizes to use, e.g. (1, 2, 4, 8), to bound the number of compiled graphs.
        limits: largest B of each shape of the data set, int64 [shapes] (a bucket table's: tables.py), beside the
            memory limit.
        speeds: relative speed of each data-parallel group.
        sp: ranks per sequence-parallel group; a sample's cost and memory are divided by it.
        sp_efficiency: speed-up of sp ranks over sp times one rank's, in (0, 1].
        tail: what to do with samples that fill no whole step (or no allowed batch): "carry" to the next epoch, "drop",
            or "pad" with repeats.  Always listed in the plan.
        carry_in: rows that the epoch before carried over.
        only: rows to plan instead of all (to re-plan what another world size has left).
        window_steps: steps balanced at a time; bounds memory, not quality.
        out: write the plan here window by window, and return it as loaded; for data sets of many million rows.
        progress: called with (steps done, steps).

    Returns:
        The plan.  `len(plan)` optimizer steps on every rank, each with at least one microbatch per rank.

    Raises:
        PlanInfeasible: samples over the memory limit, or too few samples. ConfigError: an option that cannot be used.
    """
    samples = read_samples(manifest, layout=layout, caption_bin=caption_bin, columns=columns)
    problem, more = _problem(samples, fit, locals())
    first = np.asarray(sorted(carry_in), dtype=np.int64)
    if policy == "step_balanced":
        windows, left, steps = (
            slots.plan(problem) if problem.slots else step_balanced.plan(problem, window_steps=window_steps)
        )
    elif policy == "equal_token":
        problem.refuse_oversize()
        none = np.zeros(len(problem.cap), np.uint8)
        windows, left, steps = buckets.plan(problem, np.maximum(problem.cap, 1), none, first)
    else:
        batch, flags = buckets.adaptive_batch(problem.tokens, more["m_mem"] * sp, more["m_comp"], fit.p)
        windows, left, steps = buckets.plan(problem, batch, flags, first)
    if not steps:
        raise PlanInfeasible(
            f"no whole step: {len(problem.rows)} samples for {problem.groups} data-parallel groups, and "
            f"tail={tail!r} leaves none",
            where=samples.where,
            remedy='use fewer ranks, or tail="pad"',
        )
    return _collect(problem, fit, more, windows, left, steps, out, overwrite, progress)


def _problem(samples: Samples, fit: CostFit, o: dict[str, Any]) -> tuple[Problem, dict[str, Any]]:
    """Check the options; return the planning problem and what the manifest records of it."""
    if o["policy"] not in POLICIES:
        raise ConfigError(f"unknown policy {o['policy']!r}", remedy=f"use one of {', '.join(POLICIES)}")
    for name, values in (("sync", ("step", "microbatch")), ("tail", ("carry", "drop", "pad"))):
        if o[name] not in values:
            raise ConfigError(f"unknown {name} {o[name]!r}", remedy=f"use one of {', '.join(values)}")
    ranks, sp = o["ranks"], o["sp"]
    if not (isinstance(ranks, int) and isinstance(sp, int) and ranks >= 1 and sp >= 1 and ranks % sp == 0):
        raise ConfigError(f"ranks = {ranks} and sp = {sp}: both must be positive, and sp must divide ranks")
    if not 0 < o["sp_efficiency"] <= 1:
        raise ConfigError(f"sp_efficiency must be in (0, 1], not {o['sp_efficiency']}")
    if not o["tau"] > 0:
        raise ConfigError(f"tau must be positive, not {o['tau']}")
    groups = ranks // sp
    speeds = None if o["speeds"] is None else np.asarray(o["speeds"], dtype=np.float64)
    if speeds is not None and (len(speeds) != groups or not (np.isfinite(speeds) & (speeds > 0)).all()):
        raise ConfigError(f"speeds must be {groups} positive numbers, one per data-parallel group, not {o['speeds']!r}")
    allowed = None if o["allowed_b"] is None else tuple(sorted({int(b) for b in o["allowed_b"]}))
    if allowed is not None and (not allowed or allowed[0] < 1 or any(b % allowed[0] for b in allowed)):
        raise ConfigError(
            f"allowed_b = {o['allowed_b']!r} cannot be used",
            remedy="give positive sizes, each a multiple of the "
            "smallest (leave out 1 to avoid the extra graph of B = 1)",
        )
    slots_mode = o["sync"] == "microbatch"
    microbatches = o["microbatches"] or (4 if slots_mode and o["policy"] == "step_balanced" else 1)
    if microbatches < 1:
        raise ConfigError(f"microbatches must be positive, not {o['microbatches']}")
    if o["microbatches"] and o["policy"] == "step_balanced" and not slots_mode:
        raise ConfigError(
            'microbatches is not used by step_balanced with sync="step": each rank has its own number',
            remedy='set tau, or sync="microbatch"',
        )
    shapes = samples.shapes
    fixed, each = fit.affine(shapes)
    cap, m_mem, m_comp = _limits(samples, fit, o, sp)
    order = dealing.permutation(len(samples), o["seed"], o["epoch"])
    carry = np.asarray(sorted(o["carry_in"]), dtype=np.int64)
    if o["only"] is not None:
        wanted = np.zeros(len(samples), bool)
        wanted[_checked_rows(o["only"], samples, "only")] = True
        order = order[wanted[order]]
    if len(carry):
        order = np.concatenate([_checked_rows(carry, samples, "carry_in"), order])
    if not len(order):
        raise PlanInfeasible("there are no samples to plan", where=samples.where, remedy="the epoch is finished")
    each = each / (sp * o["sp_efficiency"])
    target = None if m_comp is None else buckets.compute_target(shapes.tokens, m_comp * sp, fit.p)
    costliest = float((fixed + each)[np.unique(samples.shape_id[order])].max())
    problem = Problem(
        samples,
        order,
        fixed,
        each,
        cap,
        target if o["policy"] == "step_balanced" else None,
        allowed,
        groups,
        speeds,
        o["tau"] * costliest,
        microbatches,
        slots_mode,
        o["tail"],
        o["seed"],
        o["epoch"],
    )
    warnings = []
    if o["policy"] == "step_balanced" and not slots_mode and o["tau"] < 1.3:
        warnings.append(
            f"tau = {o['tau']} is below 1.3: the costliest sample fills a rank's step, so ranks cannot be level"
        )
    if fit.source == "symbolic":
        warnings.append(
            "the cost model comes from a model trace and a hardware description; nothing was measured "
            "(sharpen it with `graphopt fit`)"
        )
    for w in warnings:
        log.warning(w)
    more = {
        "m_mem": m_mem,
        "m_comp": m_comp,
        "warnings": warnings,
        "tau": o["tau"],
        "ranks": ranks,
        "sp": sp,
        "sp_efficiency": o["sp_efficiency"],
        "policy": o["policy"],
        "memory_bytes": o["memory_bytes"],
        "carried_in": carry.tolist(),
        "subset": o["only"] is not None,
    }
    return problem, more


def _limits(
    samples: Samples, fit: CostFit, o: dict[str, Any], sp: int
) -> tuple[np.ndarray, float | None, float | None]:
    """(largest B per shape by memory, m_mem, m_comp)."""
    shapes = samples.shapes
    m_mem, m_comp = o["m_mem"], o["m_comp"]
    for name in ("m_mem", "m_comp", "memory_bytes"):
        if o[name] is not None and not o[name] > 0:
            raise ConfigError(f"{name} must be positive, not {o[name]}")
    if o["limits"] is not None and np.shape(o["limits"]) != (len(shapes),):
        raise ConfigError(
            f"limits has shape {np.shape(o['limits'])}; the data set has {len(shapes)} shapes",
            remedy="make it from this data set's shapes",
        )
    if m_mem is None and o["memory_bytes"] is None and o["limits"] is None:
        raise ConfigError(
            "a plan needs a memory limit",
            remedy="give m_mem (tokens per microbatch), memory_bytes with a fit that has a memory model, or limits",
        )
    cap = np.full(len(shapes), np.iinfo(np.int64).max)
    if m_mem is not None:
        cap = np.floor(m_mem * sp / shapes.tokens * (1 + 1e-12)).astype(np.int64)
    if o["memory_bytes"] is not None:
        if fit.memory is None:
            raise ConfigError(
                "memory_bytes needs a fit with a memory model; this one has none",
                remedy="give m_mem, or fit runs that recorded peak bytes",
            )
        m = fit.memory
        split = type(m)(m.m0, m.m1 / sp, m.m2, m.max_error)
        cap = np.minimum(cap, split.cap(shapes, o["memory_bytes"]))
    if o["limits"] is not None:
        cap = np.minimum(cap, np.asarray(o["limits"], dtype=np.int64))
    if o["policy"] == "adaptive_load":
        m_mem = buckets.required(m_mem, "m_mem", "adaptive_load", "give m_mem in tokens: its formula is in tokens")
        m_comp = buckets.required(
            m_comp if m_comp is not None else fit.m_comp,
            "m_comp",
            "adaptive_load",
            "give m_comp, or a fit that has one",
        )
    return cap, m_mem, m_comp


def _checked_rows(rows: Any, samples: Samples, name: str) -> np.ndarray:
    """Row numbers, in range."""
    rows = np.asarray(rows, dtype=np.int64)
    if len(rows) and (rows.min() < 0 or rows.max() >= len(samples)):
        raise ConfigError(
            f"{name} holds row {int(rows.min() if rows.min() < 0 else rows.max())}; the data set has rows 0 to "
            f"{len(samples) - 1}",
            where=samples.where,
            remedy="it belongs to another data set",
        )
    return rows


def _collect(
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
    parts: list[pa.Table] = []
    tables: list[pa.Table] = []
    digest = hashlib.sha256()
    writer = None if out is None else PlanWriter(out, overwrite=overwrite)
    totals = {"microbatches": 0, "samples": 0, "tokens": 0, "over_memory": 0}
    used: set[tuple[int, int]] = set()
    try:
        if writer:
            writer.__enter__()
        for window in windows:
            part, step_table = _tables(p, fit, window)
            for name in ("step", "rank", "shape", "batch", "flags"):
                digest.update(np.ascontiguousarray(part.column(name).to_numpy()).tobytes())
            digest.update(window.rows.astype("<u4").tobytes())
            tables.append(step_table)
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
                writer.add(part)
            else:
                parts.append(part)
            if progress:
                progress(int(window.step[-1]) + 1, steps)
        step_table = pa.concat_tables(tables)
        manifest = _manifest(p, fit, more, left, steps, totals, len(used), step_table, digest.hexdigest())
        if writer:
            manifest = writer.finish(manifest, step_table)
    finally:
        if writer:
            writer.__exit__()
    return Plan(manifest, parts, step_table) if out is None else Plan.load(out)


def _tables(p: Problem, fit: CostFit, w: Window) -> tuple[pa.Table, pa.Table]:
    """A window as Arrow tables: microbatches, and one row per step."""
    size = w.size
    tokens = size * p.tokens[w.shape]
    cost = p.fixed[w.shape] + size * p.each[w.shape]
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
    from importlib.metadata import version

    mean, longest = step_table.column("mean_s").to_numpy(), step_table.column("max_s").to_numpy()
    imbalance = longest / mean - 1
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
            "step_cost_s": p.step_cost,
            "allowed_b": None if p.allowed is None else list(p.allowed),
        },
        "cost_model": model,
        "shapes": p.samples.shapes.to_json(),
        "tail": p.tail,
        "dropped": left.dropped.tolist(),
        "carried": left.carried.tolist(),
        "repeated": left.repeated.tolist(),
        "carried_in": more["carried_in"],
        "warnings": more["warnings"],
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
