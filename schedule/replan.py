"""A plan in, the plan that follows it: the unconsumed rest for another world size, or the next epoch.

Needs no metadata file: a plan names the shape of every row it holds, drops or carries.  Equal inputs give equal plans,
so every rank of a job can plan for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from graphopt.errors import ConfigError, PlanInfeasible
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.dataset import Samples
from graphopt.schedule.plan import Plan
from graphopt.schedule.planner import plan_batches

log = logging.getLogger(__name__)


def known_samples(plan: Plan) -> Samples:
    """The data set as far as the plan knows it: all of it, unless the plan covers a subset.

    Rows that the plan does not know get shape 0; they must not be planned.
    """
    rows, offsets = plan.samples()
    shape_id = np.zeros(int(plan.manifest["dataset"]["rows"]), np.int32)
    shape_id[rows] = np.repeat(plan.column("shape"), np.diff(offsets))
    for name in ("dropped", "carried"):
        shape_id[plan.manifest[name]] = plan.manifest["left_shapes"][name]
    return Samples(shape_id, plan.shapes, plan.manifest["dataset"]["fingerprint"], f"plan {plan.hash[:12]}")


def owed(plan: Plan, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that steps before `step` have not used, and rows among them that are owed twice or more, int64 each.

    Repeats that only filled the tail are not owed.
    """
    rows, offsets = plan.samples()
    n = int(plan.manifest["dataset"]["rows"])
    first = int(offsets[int(np.searchsorted(plan.column("step"), step))])
    once = np.bincount(rows, minlength=n) - np.bincount(np.asarray(plan.repeated, np.int64), minlength=n)
    left = np.maximum(once - np.bincount(rows[:first], minlength=n), 0)
    again = np.flatnonzero(left > 1)
    return np.flatnonzero(left), np.repeat(again, left[again] - 1)


def replan(
    plan: Plan, *, step: int, ranks: int, tau: float | None = None, speeds: Sequence[float] | None = None
) -> Plan:
    """Plan the rest of an epoch for another number of ranks.

    Args:
        step: optimizer steps of `plan` that are done; 0 <= step < len(plan).
        ranks: processes of the job from now on.
        tau: cost of a rank's step in units of the costliest sample; the plan's by default, so that the global batch
            grows and shrinks with the ranks.
        speeds: relative speed of each data-parallel group; the plan's, if the number of groups stays the same.

    Returns:
        A plan of exactly the samples that `plan` still owes, steps counted from 0.  What `plan` carries to the next
        epoch is carried by it as well.

    Raises:
        PlanInfeasible: too few samples are left for this many ranks. ConfigError: a step outside the plan, or ranks
            that its sequence-parallel groups do not divide.
    """
    if not 0 <= step < len(plan):
        raise ConfigError(f"step {step} is outside the plan's {len(plan)} steps", remedy="plan the next epoch instead")
    rows, twice = owed(plan, step)
    made = plan_batches(
        known_samples(plan), ranks=ranks, epoch=plan.manifest["epoch"], only=rows, carry_in=twice.tolist(),
        **_options(plan, ranks, tau, speeds),
    )  # fmt: skip
    shapes = made.manifest["left_shapes"]["carried"] + plan.manifest["left_shapes"]["carried"]
    carried = sorted(zip(made.carried + plan.carried, shapes))
    made.manifest["carried"] = [row for row, _ in carried]
    made.manifest["left_shapes"]["carried"] = [shape for _, shape in carried]
    made.manifest["replanned"] = {"plan": plan.hash, "step": step, "ranks_before": plan.ranks}
    log.warning(
        "re-planned the rest of the epoch (%d samples) for %d ranks instead of %d: %.0f tokens a step instead of %.0f",
        len(rows) + len(twice), ranks, plan.ranks, *(p.manifest["totals"]["tokens"] / len(p) for p in (made, plan)),
    )  # fmt: skip
    return made


def following(plan: Plan, *, epoch: int, carry_in: Sequence[int], ranks: int | None = None) -> Plan:
    """Plan another epoch of the same data set with the same options.

    Args:
        plan: any plan of the whole data set (not of a subset).
        carry_in: rows owed from the epoch before.
        ranks: the plan's by default.
    """
    if plan.manifest["dataset"]["subset"]:
        raise PlanInfeasible(
            "this plan covers a part of the data set, so it cannot say how another epoch looks",
            where=f"plan {plan.hash[:12]}",
            remedy="give the plan of a whole epoch",
        )
    n = plan.ranks if ranks is None else ranks
    return plan_batches(
        known_samples(plan), ranks=n, epoch=epoch, carry_in=list(carry_in), **_options(plan, n, None, None)
    )


def _options(plan: Plan, ranks: int, tau: float | None, speeds: Sequence[float] | None) -> dict[str, Any]:
    """The options a plan was made with, for `plan_batches`."""
    m = plan.manifest
    layout, limits = m["layout"], m["limits"]
    slots = layout["sync"] == "microbatch"
    if ranks < 1 or ranks % layout["sp"]:
        raise PlanInfeasible(
            f"{ranks} ranks do not form groups of {layout['sp']}, the plan's sequence-parallel size",
            remedy=f"use a multiple of {layout['sp']} ranks, or plan again with another sp",
        )
    if speeds is None and layout["speeds"] is not None:
        if layout["groups"] == ranks // layout["sp"]:
            speeds = layout["speeds"]
        else:
            log.warning("the plan's %d speeds do not fit the new world: all ranks count alike", layout["groups"])
    fit = CostFit.of(m["cost_model"], "the plan's cost model")
    return {
        "fit": fit,
        "policy": m["policy"],
        "seed": m["seed"],
        "tail": m["tail"],
        "tau": limits["tau"] if tau is None else tau,
        "uneven": limits.get("uneven", False),
        "m_mem": limits["m_mem"],
        "m_comp": limits["m_comp"],
        "memory_bytes": limits["memory_bytes"],
        "limits": None if limits["buckets"] is None else np.asarray(limits["buckets"], np.int64),
        "allowed_b": limits["allowed_b"],
        "sync": layout["sync"],
        "microbatches": None if m["policy"] == "step_balanced" and not slots else layout["microbatches"],
        "sp": layout["sp"],
        "sp_efficiency": layout["sp_efficiency"],
        "speeds": speeds,
    }
