"""What measured steps of a plan say: result rows, and gains over another policy with their intervals."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

from graphopt.schedule.bench import Shape
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.plan import Plan
from graphopt.schedule.simulate import cv, simulate


def rates(plan: Plan, fit: CostFit, steps: int | None = None) -> tuple[float, float]:
    """Tokens/s by the fit, as planned and if no rank ever waited; over the first steps or all (but step 0)."""
    step = plan.column("step").astype(np.int64)
    n = len(plan) if steps is None else min(steps, len(plan))
    cost = np.zeros((len(plan), plan.groups))
    np.add.at(cost, (step, plan.column("rank")), plan.column("cost_s"))
    cost /= np.ones(plan.groups) if plan.manifest["layout"]["speeds"] is None else plan.manifest["layout"]["speeds"]
    tokens = np.bincount(step, plan.column("tokens"), len(plan))
    which = slice(1, n) if n > 2 else slice(0, n)
    wall, mean = (x[which].sum() + fit.step_overhead_s * len(x[which]) for x in (cost.max(1), cost.mean(1)))
    return float(tokens[which].sum() / wall), float(tokens[which].sum() / mean)


def gains(policy: str, rows: dict[str, dict], plans: dict[str, Plan], fit: CostFit) -> dict:
    """Of a policy over equal_token, measured and as the fit has it, with 95 % intervals over the steps (4,000 draws of
    steps with replacement: measured and simulated gain are of the same steps in each)."""
    bound = rates(plans["step_balanced"], fit)[1] / (planned := rates(plans["equal_token"], fit)[0]) - 1
    one, base = rows[policy], rows["equal_token"]
    if one is base:
        return {"zero_bubble_gain": bound, "planned_gain": 0.0, "gain_same_work": 0.0, "gain_over_equal_token": 0.0}
    out = {"zero_bubble_gain": bound, "planned_gain": rates(plans[policy], fit)[0] / planned - 1,
           "gain_same_work": one["limit_fraction"] / base["limit_fraction"] - 1}  # fmt: skip
    draw = np.random.default_rng(0)
    ours, theirs, zero = (per_step(r, plans[p], fit) for r, p in
                          ((one, policy), (base, "equal_token"), (rows["step_balanced"], "step_balanced")))  # fmt: skip
    pick = lambda x: x[:, draw.integers(0, x.shape[1], (4001, x.shape[1]))]
    drawn = []
    for x in (ours, theirs, zero):
        y = pick(x)
        y[:, 0] = x  # the first draw is what was measured
        drawn.append(y.sum(2))  # tokens, wall, planned, level: [4, draws]
    a, b, z = drawn if policy != "step_balanced" else (drawn[0], drawn[1], drawn[0])
    measured = a[0] / a[1] / (b[0] / b[1]) - 1
    steps = z[0] / z[3] / (b[0] / b[2]) - 1
    interval = lambda x: np.quantile(x[1:], [0.025, 0.975]).tolist()
    share = measured / np.where(steps == 0, np.nan, steps)
    return out | {
        "gain_over_equal_token": float(measured[0]), "gain_interval": interval(measured),
        "zero_bubble_gain_steps": float(steps[0]), "share_of_zero_bubble_gain": float(share[0]),
        "share_interval": interval(share),
        "planned_gain_steps": float(a[0, 0] / a[2, 0] / (b[0, 0] / b[2, 0]) - 1),
    }  # fmt: skip


def per_step(row: dict, plan: Plan, fit: CostFit) -> np.ndarray:
    """(tokens, wall seconds, predicted seconds, predicted seconds if no rank waited) of the measured steps without the
    first, float64 [4, steps]."""
    n = len(row["step_s"])
    step = plan.column("step").astype(np.int64)
    mine = step < n
    level = np.bincount(step[mine], plan.column("cost_s")[mine], n) / total_speed(plan) + fit.step_overhead_s
    return np.array([row["step_tokens"], row["step_s"], row["predicted_s"], level])[:, 1 if n > 2 else 0 :]


def total_speed(plan: Plan) -> float:
    """Ranks' relative speeds, added up."""
    speeds = plan.manifest["layout"]["speeds"]
    return float(plan.groups if speeds is None else sum(speeds))


def seconds_of_shapes(steps: list[list], took: list[list[float]]) -> list[list]:
    """[B, T, H, W, count, mean seconds] of every shape, over all ranks' replays."""
    mine: dict[Shape, list[float]] = {}
    for step, seconds in zip(steps, took):
        for mb, t in zip(step, seconds):
            mine.setdefault(mb.shape, []).append(t)
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    shapes = sorted(set().union(*parts), key=lambda s: (s.S, s.B))
    every = {s: [t for part in parts for t in part.get(s, ())] for s in shapes}
    return [[s.B, s.T, s.H, s.W, len(every[s]), float(np.mean(every[s]))] for s in shapes]


def row_of(plan: Plan, fit: CostFit, wall: np.ndarray, load: np.ndarray, tokens: np.ndarray) -> dict:
    """What a result row says of measured steps: wall [steps], load [ranks, steps replayed] in seconds, tokens [steps]
    of all ranks."""
    predicted = plan.step_table.column("max_s").to_numpy()[: len(wall)] + fit.step_overhead_s
    # The first step meets a cold loader, and the plan's largest microbatch.
    warm = slice(1, None) if len(wall) > 2 else slice(None)
    error = predicted[warm] / wall[warm] - 1
    busy = load[:, warm]
    simulated = simulate(plan, fit, noise=0.0)
    return {
        "steps": len(wall[warm]), "tokens_per_s": float(tokens[warm].sum() / wall[warm].sum()),
        "tokens_per_step": float(tokens[warm].mean()), "plan_tokens_per_step": simulated.tokens_per_step,
        "limit_fraction": float(busy.mean(0).sum() / wall[: load.shape[1]][warm].sum()),
        "bubble": float(1 - busy.mean(0).sum() / busy.max(0).sum()), "replayed": busy.shape[1],
        "load_cv": cv(busy.ravel()), "step_cv": cv(wall[warm]), "token_cv": cv(tokens[warm]),
        "mape": float(np.abs(error).mean()), "bias": float(error.mean()), "oom": 0,
        "step_s": wall.tolist(), "predicted_s": predicted.tolist(), "busy_s": load.tolist(),
        "step_tokens": tokens.tolist(),
        "simulated_limit_fraction": simulated.limit_fraction, "simulated_tokens_per_s": simulated.tokens_per_s,
        "simulated_bubble": simulated.bubble,
    }  # fmt: skip
