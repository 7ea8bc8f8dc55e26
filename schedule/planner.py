"""`plan_batches`: a data set's metadata and a cost model in, a plan of whole optimizer steps out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from graphopt.errors import ConfigError, PlanInfeasible
from graphopt.schedule import buckets, dealing, slots, step_balanced
from graphopt.schedule.collect import collect
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.dataset import Samples, read_samples
from graphopt.schedule.plan import Plan
from graphopt.schedule.problem import Problem, positive
from graphopt.schedule.shapes import LatentLayout

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
    uneven: bool = True,
    sync: str = "step",
    microbatches: float | None = None,
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
        uneven: where steps of equal cost and composition would leave ranks waiting (few samples per rank and step, many
            of them costly), form level steps of unlike cost; `tau` is then their mean, and the plan says so.
        sync: "step" (ranks meet once a step: DDP, FSDP2 in ZeRO-1 style), or "microbatch" (ZeRO-3, pipelines: K equal).
        microbatches: K for sync="microbatch" (4 by default) and for the two bucket policies (1 by default); the latter
            also take a mean such as 1.6, for the global batch of another plan: K is then 1 or 2, the same on all ranks.
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
        window_steps: steps balanced at a time (16 to 64 at least, where they may be uneven); bounds memory, not
            quality.
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
    return collect(problem, fit, more, windows, left, steps, out, overwrite, progress)


def _problem(samples: Samples, fit: CostFit, o: dict[str, Any]) -> tuple[Problem, dict[str, Any]]:
    """Check the options; return the planning problem and what the manifest records of it."""
    if o["policy"] not in POLICIES:
        raise ConfigError(f"unknown policy {o['policy']!r}", remedy=f"use one of {', '.join(POLICIES)}")
    for name, values in (("sync", ("step", "microbatch")), ("tail", ("carry", "drop", "pad"))):
        if o[name] not in values:
            raise ConfigError(f"unknown {name} {o[name]!r}", remedy=f"use one of {', '.join(values)}")
    _check_whole(o, ("seed", "epoch"), None)
    _check_whole(o, ("window_steps",), 1)
    ranks, sp = o["ranks"], o["sp"]
    if not (isinstance(ranks, int) and isinstance(sp, int) and ranks >= 1 and sp >= 1 and ranks % sp == 0):
        raise ConfigError(f"ranks = {ranks} and sp = {sp}: both must be positive, and sp must divide ranks")
    if not 0 < o["sp_efficiency"] <= 1:
        raise ConfigError(f"sp_efficiency must be in (0, 1], not {o['sp_efficiency']}")
    if not positive(o["tau"]):
        raise ConfigError(f"tau must be positive and finite, not {o['tau']!r}")
    groups = ranks // sp
    speeds = None if o["speeds"] is None else np.asarray(o["speeds"], dtype=np.float64)
    if speeds is not None and (len(speeds) != groups or not (np.isfinite(speeds) & (speeds > 0)).all()):
        raise ConfigError(f"speeds must be {groups} positive numbers, one per data-parallel group, not {o['speeds']!r}")
    allowed = None if o["allowed_b"] is None else tuple(sorted(set(o["allowed_b"])))
    if allowed is not None and (not allowed or not all(isinstance(b, (int, np.integer)) for b in allowed)
                                or allowed[0] < 1 or any(b % allowed[0] for b in allowed)):  # fmt: skip
        raise ConfigError(
            f"allowed_b = {o['allowed_b']!r} cannot be used",
            remedy="give positive sizes, each a multiple of the "
            "smallest (leave out 1 to avoid the extra graph of B = 1)",
        )
    slots_mode = o["sync"] == "microbatch"
    microbatches = o["microbatches"] or (4 if slots_mode and o["policy"] == "step_balanced" else 1)
    if not positive(microbatches) or microbatches < 1:
        raise ConfigError(f"microbatches must be at least 1, not {o['microbatches']}")
    if microbatches != int(microbatches) and o["policy"] == "step_balanced":
        raise ConfigError(f"microbatches must be a whole number, not {microbatches}, where each one is a barrier")
    microbatches = int(microbatches) if microbatches == int(microbatches) else float(microbatches)
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
    costliest = max(fit.floor_s, float((fixed + each)[np.unique(samples.shape_id[order])].max()))
    problem = Problem(
        samples,
        order,
        fixed,
        each,
        fit.floor_s,
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
        _advice(fit, o),
        o["uneven"],
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
        "uneven": o["uneven"],
        "ranks": ranks,
        "sp": sp,
        "sp_efficiency": o["sp_efficiency"],
        "policy": o["policy"],
        "memory_bytes": o["memory_bytes"],
        "buckets": None if o["limits"] is None else np.asarray(o["limits"], dtype=np.int64),
        "carried_in": carry.tolist(),
        "subset": o["only"] is not None,
    }
    return problem, more


def _check_whole(o: dict[str, Any], names: Sequence[str], least: int | None) -> None:
    """Raise ConfigError unless these options are whole numbers (or None)."""
    for name in names:
        value = o[name]
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if value is not None and (not whole or (least is not None and value < least)):
            up = "" if least is None else f" from {least} up"
            raise ConfigError(f"{name} must be a whole number{up}, not {value!r}")


def _advice(fit: CostFit, o: dict[str, Any]) -> str:
    """Where the memory goes, if most of it is not the samples'."""
    if fit.memory is None or o["memory_bytes"] is None or fit.memory.m0 < 0.3 * o["memory_bytes"]:
        return ""
    share = f"; {fit.memory.m0 / 2**30:.0f} of {o['memory_bytes'] / 2**30:.0f} GiB are parameters, gradients and state"
    if fit.source == "symbolic" and o["sync"] == "step":
        share += ', which sync="microbatch" (ZeRO-3) and more ranks spread out'
    return share


def _limits(
    samples: Samples, fit: CostFit, o: dict[str, Any], sp: int
) -> tuple[np.ndarray, float | None, float | None]:
    """(largest B per shape by memory, m_mem, m_comp)."""
    shapes = samples.shapes
    m_mem, m_comp = o["m_mem"], o["m_comp"]
    for name in ("m_mem", "m_comp", "memory_bytes"):
        if o[name] is not None and not positive(o[name]):
            raise ConfigError(f"{name} must be positive and finite, not {o[name]!r}",
                              remedy="leave it out where there is no such limit")
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
