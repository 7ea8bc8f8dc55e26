"""What measured steps of a plan say: result rows, and gains over another policy with their intervals."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

from graphopt.schedule.bench import Shape
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.plan import Plan
from graphopt.schedule.simulate import cv, simulate


def warm(steps: int, skip: int = 1) -> slice:
    """The steps that count: by default not the first, which meets a cold loader and the plan's largest microbatch."""
    return slice(skip if steps > 2 else 0, steps)


def rates(plan: Plan, fit: CostFit, steps: int | None = None) -> tuple[float, float]:
    """Tokens/s by the fit, as planned and if no rank ever waited; over the first steps or all (but step 0)."""
    step = plan.column("step").astype(np.int64)
    n = len(plan) if steps is None else min(steps, len(plan))
    cost = np.zeros((len(plan), plan.groups))
    np.add.at(cost, (step, plan.column("rank")), plan.column("cost_s"))
    cost /= np.ones(plan.groups) if plan.manifest["layout"]["speeds"] is None else plan.manifest["layout"]["speeds"]
    tokens = np.bincount(step, plan.column("tokens"), len(plan))
    which = warm(n)
    wall, mean = (x[which].sum() + fit.step_overhead_s * len(x[which]) for x in (cost.max(1), cost.mean(1)))
    return float(tokens[which].sum() / wall), float(tokens[which].sum() / mean)


def gains(policy: str, rows: dict[str, dict], plans: dict[str, Plan], fit: CostFit, skip: int = 1) -> dict:
    """Of a policy over equal_token, measured and as the fit has it, with 95 % intervals over the steps (4,000 draws of
    steps with replacement: measured and simulated gain are of the same steps in each)."""
    bound = rates(plans["step_balanced"], fit)[1] / (planned := rates(plans["equal_token"], fit)[0]) - 1
    random = np.random.default_rng(0)
    drawn = {}  # tokens, wall, planned, level: [4, draws]; the first draw is what was measured
    for p in dict.fromkeys((policy, "equal_token", "step_balanced")):
        x = per_step(rows[p], plans[p], fit, skip)
        pick = random.integers(0, x.shape[1], (4001, x.shape[1]))
        pick[0] = np.arange(x.shape[1])
        drawn[p] = x[:, pick].sum(2)
    one, base, zero = (drawn[p] for p in (policy, "equal_token", "step_balanced"))
    measured = one[0] / one[1] / (base[0] / base[1]) - 1
    steps = zero[0] / zero[3] / (base[0] / base[2]) - 1
    share = measured / np.where(steps == 0, np.nan, steps)
    whole = rates(plans[policy], fit)[0] / planned - 1
    # The whole plan's predicted gain, times what the steps measured had over their own prediction.
    corrected = (1 + whole) * (1 + measured) / (one[0] / one[2] / (base[0] / base[2])) - 1
    interval = lambda x: np.nanquantile(x[1:], [0.025, 0.975]).tolist()
    return {
        "zero_bubble_gain": bound, "planned_gain": whole,
        "planned_gain_corrected": float(corrected[0]), "planned_gain_interval": interval(corrected),
        "share_of_zero_bubble_gain_corrected": float(corrected[0] / bound) if bound else None,
        "gain_same_work": rows[policy]["limit_fraction"] / rows["equal_token"]["limit_fraction"] - 1,
        "gain_over_equal_token": float(measured[0]), "gain_interval": interval(measured),
        "zero_bubble_gain_steps": float(steps[0]),
        "planned_gain_steps": float(one[0, 0] / one[2, 0] / (base[0, 0] / base[2, 0]) - 1),
        "share_of_zero_bubble_gain": float(share[0]), "share_interval": interval(share),
    }  # fmt: skip


def per_step(row: dict, plan: Plan, fit: CostFit, skip: int = 1) -> np.ndarray:
    """(tokens, wall seconds, predicted seconds, predicted seconds if no rank waited) of the measured steps that count,
    float64 [4, steps]."""
    n = len(row["step_s"])
    step = plan.column("step").astype(np.int64)
    mine = step < n
    level = np.bincount(step[mine], plan.column("cost_s")[mine], n) / total_speed(plan) + fit.step_overhead_s
    return np.array([row["step_tokens"], row["step_s"], row["predicted_s"], level])[:, warm(n, skip)]


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
    return means({s: [t for part in parts for t in part.get(s, ())] for s in set().union(*parts)})


def means(every: dict[Shape, list[float]]) -> list[list]:
    """[B, T, H, W, count, mean seconds] of every shape."""
    shapes = sorted(every, key=lambda s: (s.S, s.B))
    return [[s.B, s.T, s.H, s.W, len(every[s]), float(np.mean(every[s]))] for s in shapes]


def without_prediction(rows: list[dict]) -> list[dict]:
    """Rows of steps whose plan came from another system's fit, which predicts nothing here."""
    other = ("mape", "bias", "zero", "share", "planned", "predicted", "simulated")
    kept = {k for r in rows for k in r if k.split("_")[0] not in other}
    return [{**{k: v for k, v in r.items() if k in kept}, "simulated": False, "planned_with": "graphopt's fit"}
            for r in rows]  # fmt: skip


def row_of(plan: Plan, fit: CostFit, wall: np.ndarray, load: np.ndarray, tokens: np.ndarray, skip: int = 1) -> dict:
    """What a result row says of measured steps: wall [steps], load [ranks, steps replayed] in seconds, tokens [steps]
    of all ranks; the first `skip` do not count (where there are more than two)."""
    predicted = plan.step_table.column("max_s").to_numpy()[: len(wall)] + fit.step_overhead_s
    count = warm(len(wall), skip)
    error = predicted[count] / wall[count] - 1
    busy = load[:, count]
    simulated = simulate(plan, fit, noise=0.0)
    return {
        "steps": len(wall[count]), "tokens_per_s": float(tokens[count].sum() / wall[count].sum()),
        "tokens_per_step": float(tokens[count].mean()), "plan_tokens_per_step": simulated.tokens_per_step,
        "limit_fraction": float(busy.mean(0).sum() / wall[: load.shape[1]][count].sum()),
        "bubble": float(1 - busy.mean(0).sum() / busy.max(0).sum()), "replayed": busy.shape[1],
        "load_cv": cv(busy.ravel()), "step_cv": cv(wall[count]), "token_cv": cv(tokens[count]),
        "mape": float(np.abs(error).mean()), "bias": float(error.mean()), "oom": 0,
        "step_s": wall.tolist(), "predicted_s": predicted.tolist(), "busy_s": load.tolist(),
        "step_tokens": tokens.tolist(),
        "simulated_limit_fraction": simulated.limit_fraction, "simulated_tokens_per_s": simulated.tokens_per_s,
        "simulated_bubble": simulated.bubble,
    }  # fmt: skip
