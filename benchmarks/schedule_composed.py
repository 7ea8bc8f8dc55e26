"""Measured microbatches of the ranks of a plan in, step times and result rows out (benchmarks/schedule_in_turn.py)."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from schedule_gains import gains, means, per_step, row_of
from schedule_job import SYSTEMS
from schedule_step import twins

from graphopt.schedule.bench import Shape
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.plan import Plan

Step = list[list[Shape]]  # microbatches of every rank


@dataclass(frozen=True)
class Case:
    """What to measure: `steps` steps of every policy's plan."""

    ranks: int
    tau: float
    steps: int
    system: str = "graphopt"
    memory: float = 1.0

    @staticmethod
    def of(text: str) -> Case:
        """From ranks:tau:steps[:system[:memory]]."""
        ranks, tau, steps, *more = text.split(":")
        case = Case(int(ranks), float(tau), int(steps), *more[:1], *map(float, more[1:]))
        if case.system not in SYSTEMS:
            raise SystemExit(f"--cases {text}: unknown system {case.system}, known are {', '.join(SYSTEMS)}")
        return case


def steps_of(plan: Plan, count: int) -> list[Step]:
    """The microbatches of the first steps, in the plan's order."""
    shapes = [tuple(x) for x in plan.manifest["shapes"]]
    out: list[Step] = [[[] for _ in range(plan.groups)] for _ in range(min(count, len(plan)))]
    columns = (plan.column(c).tolist() for c in ("step", "rank", "shape", "batch"))
    for step, rank, i, batch in zip(*columns):
        if step >= len(out):
            break
        out[step][rank].append(Shape(batch, *shapes[i]))
    return out


class Lines:
    """Measured steps in a file, one JSON a line: {policy, step, seconds [ranks][microbatches], ..} or {.., oom}.

    Args:
        path: the file; lines of another `key` (its first line) are thrown away.
    """

    def __init__(self, path: Path, key: dict[str, Any]) -> None:
        self.found: list[dict] = []
        # Whoever was killed while it wrote left half a line.
        text = path.read_text() if path.exists() else ""
        whole = [json.loads(x) for x in text[: text.rfind("\n") + 1].splitlines()]
        if whole and whole[0] == json.loads(json.dumps(key)):
            self.found = whole[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(x) + "\n" for x in (key, *self.found)))
        self.file = path.open("a")

    def add(self, line: dict) -> None:
        """Save a step."""
        self.found.append(line)
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def of(self, plan: str, system: str) -> list[dict]:
        """The steps of a plan, from 0 on without a gap."""
        mine = {x["step"]: x for x in self.found if (x["plan"], x["system"]) == (plan, system)}
        return [mine[i] for i in itertools.takewhile(mine.__contains__, itertools.count())]


def composed(plan: Plan, fit: CostFit, found: list[dict]) -> dict:
    """A result row of measured steps of one plan: the wall time of a step is its slowest rank's."""
    fine = [x for x in found if "oom" not in x]
    took = [x["seconds"] for x in fine]
    load = np.array([[sum(rank) for rank in step] for step in took]).T  # [ranks, steps]
    which = plan.column("step") < len(took)
    step, rank = (plan.column(c)[which].astype(np.int64) for c in ("step", "rank"))
    tokens = np.bincount(step, plan.column("tokens")[which], len(took))
    row = row_of(plan, fit, load.max(0), load, tokens, skip=0)
    planned = np.zeros(load.T.shape)
    np.add.at(planned, (step, rank), plan.column("cost_s")[which])
    every: dict[Shape, list[float]] = {}
    for shapes, seconds in zip(steps_of(plan, len(took)), took):
        for s, t in ((s, t) for pair in zip(shapes, seconds) for s, t in zip(*pair)):
            every.setdefault(s, []).append(t)
    spread = [np.std(t, ddof=1) / np.mean(t) for t in every.values() if len(t) > 2]
    _, _, slowest, level = per_step(row, plan, fit, 0)
    return {
        **row, "oom": len(found) - len(fine), "shapes": len(every), "microbatch_s": means(every),
        "noise": float(np.median(spread)) if spread else None,
        "mape_ranks": float(np.abs(planned.T / load - 1).mean()),
        "predicted_limit_fraction_steps": float(level.sum() / slowest.sum()),
        "starved": sum(x["starved"] for x in fine),
        "peak_gib": max((x["peak_gib"] for x in fine if x.get("peak_gib")), default=None),
    }  # fmt: skip


def rows_of(case: Case, plans: dict[str, Plan], lines: Lines, fit: CostFit, common: dict) -> list[dict]:
    """Result rows of what was measured of a case."""
    twin = twins(plans)
    found = {p: lines.of(plans[p].hash, case.system) for p in dict.fromkeys(twin.values())}
    head = {**common, "ranks": case.ranks, "tau": case.tau, "system": case.system, "memory": case.memory,
            "mode": "in turn", "simulated": False}  # fmt: skip
    by = {}
    for p in plans:
        mine = found[twin[p]]
        if any("seconds" in x for x in mine):
            by[p] = {**head, "policy": p, **composed(plans[p], fit, mine),
                     "microbatches": plans[p].manifest["layout"]["microbatches"] if p != "step_balanced" else None,
                     "same_plan_as": twin[p] if twin[p] != p else None}  # fmt: skip
        elif mine:
            by[p] = {**head, "policy": p, "oom": len(mine), "error": mine[0]["oom"]}
    fine = [p for p in by if "step_s" in by[p]]
    for p in fine:
        by[p] |= gains(p, by, plans, fit, skip=0) if {"step_balanced", "equal_token"} <= set(fine) else {}
    return list(by.values())


def beside(rows: list[dict], base: str) -> None:
    """Give rows of other systems their busy time over the base system's on the same microbatches, with its 95 %
    interval over the steps."""
    place = lambda r: tuple(r[k] for k in ("ranks", "tau", "memory", "policy"))
    ours = {place(r): r for r in rows if r["system"] == base and "busy_s" in r}
    for r in rows:
        if r["system"] != base and "busy_s" in r and place(r) in ours:
            here, there = (np.array(x["busy_s"]).sum(0) for x in (r, ours[place(r)]))
            n = min(len(here), len(there))
            pick = np.random.default_rng(0).integers(0, n, (4001, n))
            pick[0] = np.arange(n)
            ratio = here[pick].sum(1) / there[pick].sum(1)
            r["time_over_" + base] = float(ratio[0])
            r["time_over_interval"] = np.quantile(ratio[1:], [0.025, 0.975]).tolist()
