"""A plan and a true cost in, what a job would measure out: tokens/s, bubble, spread over ranks and steps.

A rank's step takes the sum of its microbatches (each with lognormal noise), divided by its speed; a step takes the
slowest rank (or, where every microbatch is a barrier, the sum over k of the slowest), plus the step overhead.  The
zero-bubble limit is sum(tokens) / sum(cost per sample) over all ranks: no overheads, no noise, no waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from graphopt.errors import ConfigError
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.plan import Plan


@dataclass(frozen=True)
class SimResult:
    """What one simulated epoch measures.

    Args:
        tokens_per_s: latent tokens per second of the whole job.
        limit_fraction: tokens_per_s over the zero-bubble limit.
        bubble: 1 - busy time over (wall time x groups).
        load_cv: coefficient of variation of a group's busy time over all (step, rank).
        step_cv: of step times. token_cv: of the token count over steps.
        padding: share of computed tokens that are padding (0 where microbatches hold one shape).
        imbalance: sum of predicted longest over sum of predicted mean, minus 1 (no noise).
        wall_s: simulated seconds.
    """

    policy: str
    ranks: int
    steps: int
    microbatches: int
    tokens_per_step: float
    tokens_per_s: float
    limit_fraction: float
    bubble: float
    load_cv: float
    step_cv: float
    token_cv: float
    padding: float
    imbalance: float
    wall_s: float

    def to_json(self) -> dict[str, float | int | str]:
        """As a dict."""
        return asdict(self)


def cv(x: np.ndarray) -> float:
    """Standard deviation over mean."""
    return float(np.std(x) / np.mean(x)) if len(x) and np.mean(x) else 0.0


def simulate(
    plan: Plan,
    truth: CostFit,
    *,
    noise: float = 0.03,
    seed: int = 0,
    step_overhead_s: float | None = None,
    speeds: Sequence[float] | None = None,
) -> SimResult:
    """Run a plan against a cost model that need not be the one it was planned with.

    Args:
        truth: what microbatches really cost.
        noise: sigma of the lognormal factor on each microbatch.
        step_overhead_s: seconds per step beside microbatches; the truth's own by default.
        speeds: true relative speed of each data-parallel group; the plan's by default.
    """
    if noise < 0:
        raise ConfigError(f"noise must not be negative, not {noise}")
    layout = plan.manifest["layout"]
    fixed, each = truth.affine(plan.shapes)
    scale = layout["sp"] * layout["sp_efficiency"]
    shape, batch = plan.column("shape"), plan.column("batch")
    useful = batch * each[shape] / scale
    predicted = np.maximum(truth.floor_s, fixed[shape] + useful)
    speed = np.ones(plan.groups) if (speeds or layout["speeds"]) is None else np.asarray(speeds or layout["speeds"])
    if len(speed) != plan.groups:
        raise ConfigError(f"{len(speed)} speeds for {plan.groups} data-parallel groups")
    step, rank, k = plan.column("step").astype(np.int64), plan.column("rank"), plan.column("k")
    factor = np.random.default_rng(seed).lognormal(-(noise**2) / 2, noise, len(step)) if noise else np.ones(len(step))
    busy, wall = _times(predicted * factor / speed[rank], step, rank, k, len(plan), plan.groups, layout["sync"])
    _, wall_predicted = _times(predicted / speed[rank], step, rank, k, len(plan), plan.groups, layout["sync"])
    mean_predicted = np.bincount(step, predicted, len(plan)) / speed.sum()
    wall = wall + (truth.step_overhead_s if step_overhead_s is None else step_overhead_s)
    tokens = np.bincount(step, plan.column("tokens"), len(plan))
    limit = tokens.sum() / useful.sum() * speed.sum()
    rate = tokens.sum() / wall.sum()
    return SimResult(
        plan.manifest["policy"],
        plan.ranks,
        len(plan),
        len(step),
        float(tokens.mean()),
        float(rate),
        float(rate / limit),
        float(1 - (busy * speed).sum() / speed.sum() / wall.sum()),
        cv(busy.ravel()),
        cv(wall),
        cv(tokens),
        0.0,
        float(wall_predicted.sum() / mean_predicted.sum() - 1),
        float(wall.sum()),
    )


def _times(
    cost: np.ndarray, step: np.ndarray, rank: np.ndarray, k: np.ndarray, steps: int, groups: int, sync: str
) -> tuple[np.ndarray, np.ndarray]:
    """(busy seconds [steps, groups], seconds of each step without overhead)."""
    busy = np.bincount(step * groups + rank, cost, steps * groups).reshape(steps, groups)
    if sync == "step":
        return busy, busy.max(1)
    slots = int(k.max()) + 1
    slowest = np.zeros(steps * slots)
    np.maximum.at(slowest, step * slots + k, cost)
    return busy, slowest.reshape(steps, slots).sum(1)
