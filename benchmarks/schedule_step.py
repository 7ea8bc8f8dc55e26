"""Policies in a real training loop, predicted beside measured, on any number of ranks:

    torchrun --nproc-per-node=N benchmarks/schedule_step.py

A Wan-shaped DiT (diffusers' class, 1.3B widths, a few layers), FSDP2, mixed precision, blocks compiled by graphopt, on
data C (data A capped at 32,760 tokens; `--cap 97200 --checkpoint` for data A).  On the spot: shape benchmark
(collectives off, behind a filled queue), fit, plans of every policy with the same global batch, some steps of each.
Nothing in the loop waits for the GPU; times are the device's.  Per policy: tokens/s, spread of step times and loads,
the mean busy time over ranks (their microbatches again, collectives off) over the wall time of the slowest, mean error
of the predicted step times, graphs compiled (torch counts each that it begins; `graphs_kept` are in use at the end).
The plan of each policy is also simulated, here and for `--plan-ranks`.

`gain_over_equal_token` is of tokens/s; a few steps of two policies hold other samples, so `gain_same_work` compares the
busy shares instead (work done per second).  `zero_bubble_gain` is what the simulator, with the fit and without noise,
gives a plan in which no rank ever waits: over the whole plan, and (`_steps`) over the steps measured.  Steps of the
policies take turns; `share_of_zero_bubble_gain` is the measured gain over the simulated one, with its 95 % interval.

Writes rows of check `step` to benchmarks/results/<machine>/schedule.json, after the first --replay steps and at the
end.  `--compile-only` fills Inductor's caches.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

import _results  # noqa: E402
import schedule_data as data  # noqa: E402
from _turns import wait_for  # noqa: E402
from schedule_fit import (  # noqa: E402
    ROWS,
    cache_hits,
    compile_all,
    data_name,
    fit_here,
    fit_of,
    fit_rows,
    grids_of,
    samples_of,
)
from schedule_gains import gains, rates, row_of, seconds_of_shapes, without_prediction  # noqa: E402
from schedule_job import SYSTEMS, Job, every_rank  # noqa: E402
from schedule_shape import start  # noqa: E402

import graphopt  # noqa: E402
import schedule  # noqa: E402
from graphopt.schedule.costmodel import CostFit, write_json  # noqa: E402
from graphopt.schedule.dataset import Samples  # noqa: E402
from graphopt.schedule.plan import Plan  # noqa: E402
from graphopt.schedule.planner import plan_batches  # noqa: E402
from graphopt.schedule.simulate import simulate  # noqa: E402


class Rows(torch.utils.data.Dataset):
    """Row numbers; latents are made on the device."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> int:
        return row


def plans_of(samples: Samples, fit: CostFit, o: argparse.Namespace, m_mem: int, ranks: int, tau: float,
             speeds: np.ndarray | None = None) -> dict[str, Plan]:
    """Every policy with the global batch of step_balanced at tau: one or more microbatches a step, or both in turn."""
    balanced = plan_batches(samples, fit, ranks=ranks, m_mem=m_mem, tau=tau, seed=o.seed,
                            speeds=None if speeds is None else speeds.tolist())  # fmt: skip
    wanted = balanced.manifest["totals"]["tokens"] / len(balanced)
    plans = {"step_balanced": balanced}
    longest = float(samples.shapes.tokens.max())
    for policy in ("adaptive_load", "equal_token"):
        # The paper's rule at the measured compute limit of the longest sample.
        more = {"m_comp": o.m_comp * longest**fit.p} if policy == "adaptive_load" else {}
        more |= {"ranks": ranks, "m_mem": m_mem, "policy": policy, "seed": o.seed}
        one = plan_batches(samples, fit, **more)
        per = one.manifest["totals"]["tokens"] / len(one)
        plans[policy] = plan_batches(samples, fit, microbatches=max(1.0, wanted / per), **more)
    return plans


def twins(plans: dict[str, Plan]) -> dict[str, str]:
    """The first policy with the same plan as each: where one longest sample fills memory, adaptive_load's limits are
    equal_token's."""
    table = {p: plan.table() for p, plan in plans.items()}
    return {p: next((q for q in plans if q == p or table[p] == table[q]), p) for p in plans}


def run(job: Job, plans: dict[str, Plan], fit: CostFit, count: int, o: argparse.Namespace,
        say: Callable) -> Iterator[dict[str, dict]]:
    """Some steps of each plan in turn (step 0 of all, step 1 of all, ..), so that what the machine does meanwhile
    meets all of them.  The first of them again, the same microbatches in the same order, without the other ranks.
    Yields what is known after those, and at the end."""
    loaders = {p: graphopt.PlanLoader(Rows(), plan, num_workers=o.workers) for p, plan in plans.items()}
    steps = min(count, *(len(plan) for plan in plans.values()))
    todo = {p: [[] for _ in range(steps)] for p in plans}
    for p, loader in loaders.items():
        for mb in loader.sampler.microbatches():
            if mb.plan_step >= steps:
                break
            todo[p][mb.plan_step].append(mb)
    shapes = {p: {mb.shape for step in todo[p] for mb in step} for p in plans}
    for s in sorted(set().union(*shapes.values()), reverse=True, key=lambda s: s.B * s.S):
        job.alone(s)  # libraries choose their kernels at the first call of a shape
    job.clear()
    say(f"first calls of {len(set().union(*shapes.values()))} shapes")
    batches = {p: iter(loader) for p, loader in loaders.items()}
    # Python's collector stops the host for tens of milliseconds, on one rank now and on the other then: what is there
    # already need not be looked through again.
    gc.collect()
    gc.freeze()
    again = min(o.replay or steps, steps)
    walls, leads, took = np.zeros(0), np.zeros(0), {}
    for some in (range(again), range(again, steps)):
        if not some:
            continue
        wall, lead = together(job, todo, batches, some)
        walls, leads = np.r_[walls, wall], np.r_[leads, lead]
        say(f"{some.stop} steps of each")
        took = took or apart(job, todo, some)
        rows = {}
        for n, (p, plan) in enumerate(plans.items()):
            load = every_rank([sum(x) for x in took[p]], job.device)  # [ranks, steps]
            done = every_rank([sum(mb.tokens for mb in step) for step in todo[p][: some.stop]], job.device).sum(0)
            rows[p] = row_of(plan, fit, walls[n :: len(plans)], load, done)
            rows[p] |= {"shapes": len(shapes[p]), "host_ahead_s": leads[n :: len(plans)].tolist(),
                        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if job.device.type == "cuda" else None,
                        "microbatch_s": seconds_of_shapes(todo[p], took[p])}  # fmt: skip
        yield rows


def together(job: Job, todo: dict[str, list], batches: dict[str, Iterator], some: range) -> tuple[np.ndarray, ...]:
    """Seconds of these steps of all policies, in turn, and how far the host was ahead; float64 [steps x policies]."""
    job.meet()
    marks, host = [job.mark()], [time.perf_counter()]
    for i in some:
        for p in todo:
            for mb in todo[p][i]:
                _, travelling = next(batches[p])
                assert travelling.samples == mb.samples, (travelling, mb)
                job.microbatch(travelling)
            marks.append(job.mark())
            host.append(time.perf_counter())
    here = np.cumsum(job.seconds(marks))
    lead = every_rank(here - np.diff(host).cumsum(), job.device).min(0)
    return np.diff(every_rank(here, job.device).max(0), prepend=0.0), lead


def apart(job: Job, todo: dict[str, list], some: range) -> dict[str, list[list[float]]]:
    """Seconds of each microbatch of these steps on this rank, without the others."""
    job.alone(todo[next(iter(todo))][0][0].shape)  # gather the parameters
    job.meet()
    marks = [job.mark()]
    for i in some:
        for p in todo:
            for mb in todo[p][i]:
                job.alone(mb.shape)
                marks.append(job.mark())
    each = iter(job.seconds(marks))
    took: dict[str, list[list[float]]] = {p: [] for p in todo}
    for i in some:
        for p in todo:
            took[p].append([float(next(each)) for _ in todo[p][i]])
    job.clear()
    return took


def graphs() -> int:
    """Graphs that torch has begun to compile in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def measure(job: Job, plans: dict[str, Plan], fit: CostFit, row: dict, steps: int, o: argparse.Namespace,
            say: Callable, *, foreign: bool) -> Iterator[list[dict]]:
    """Result rows of every policy at one tau, anew with more steps; `foreign`: the fit is another system's, and
    predicts nothing here."""
    say(f"planned, tau = {row['tau']}")
    twin = twins(plans)
    try:
        for found in run(job, {p: plans[p] for p in plans if twin[p] == p}, fit, steps, o, say):
            yield rows_of(job, plans, twin, found, fit, row, o, say, foreign=foreign)
    except torch.OutOfMemoryError as e:  # a result; the other ranks are stopped by torchrun
        schedule.save([{**row, "policy": o.policies, "oom": 1, "error": str(e)[:200]}], o.machine, folder=o.out)
        raise


def rows_of(job: Job, plans: dict[str, Plan], twin: dict[str, str], found: dict[str, dict], fit: CostFit, row: dict,
            o: argparse.Namespace, say: Callable, *, foreign: bool) -> list[dict]:
    """Result rows of what was measured."""
    block = job.model.blocks[0]
    kept = len(graphopt.report(getattr(block, "block", block)).graphs) if SYSTEMS[o.system] is not None else 0
    by = {p: {**row, "policy": p, "graphs": graphs(), "graphs_kept": kept, **found[twin[p]],
              "microbatches": None if p == "step_balanced" else plans[p].manifest["layout"]["microbatches"],
              "same_plan_as": twin[p] if twin[p] != p else None} for p in plans}  # fmt: skip
    for p in by:
        by[p] |= gains(p, by, plans, fit) if {"step_balanced", "equal_token"} <= set(by) else {}
        lists = ("step_s", "predicted_s", "busy_s", "step_tokens", "host_ahead_s", "microbatch_s")
        say({k: round(v, 4) if isinstance(v, float) else v for k, v in by[p].items() if k not in lists})
    return without_prediction(list(by.values())) if foreign else list(by.values())


def simulated(fit: CostFit, o: argparse.Namespace, common: dict, say: Callable) -> list[dict]:
    """Rows of every policy for `--plan-ranks`, with 3 % noise."""
    rows, samples = [], samples_of(o)
    for n, tau in itertools.product((int(x) for x in o.plan_ranks.split(",") if x), o.tau):
        plans = plans_of(samples, fit, o, common["m_mem"], n, tau)
        bound = rates(plans["step_balanced"], fit)[1] / rates(plans["equal_token"], fit)[0] - 1
        for policy, plan in plans.items():
            r = simulate(plan, fit, noise=0.03)
            same = [q for q in plans if q != policy and plan.table() == plans[q].table()]
            rows.append({**schedule.row(r, common["data"], tau, "simulated with the fit"), **common,
                         "zero_bubble_gain": bound, "same_plan_as": same[0] if same else None})  # fmt: skip
            say(n, tau, policy, f"{r.limit_fraction:.1%} of the limit, bubble {r.bubble:.1%}")
    return rows


def simulate_only(o: argparse.Namespace) -> None:
    """Plans for `--plan-ranks` from a result file's fits, without a GPU; the file keeps the name of its machine."""
    head = json.loads(o.plans_from.read_text())
    head.pop("rows")
    for fitted in fit_rows(o.plans_from, o.cap):
        common = {k: fitted[k] for k in ("check", "data", "system", "layers", "checkpoint", "m_mem")}
        o.shrink = fitted.get("shrink", 1)
        rows = simulated(fit_of(fitted), o, common, partial(print, fitted["system"], flush=True))
        print(path := schedule.save(rows, o.machine, folder=o.plans_from.parent))
        write_json(path, {**json.loads(path.read_text()), **head})


def numbers(kind: type) -> Callable[[str], list]:
    """A parser of lists."""
    return lambda text: [kind(x) for x in text.split(",")]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--machine", help="name of the results' folder, e.g. h200x2; made from the device by default")
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--width", type=int, default=1536)
    p.add_argument("--text-dim", type=int, default=4096)
    p.add_argument("--cap", type=int, default=data.CAP_C, help="tokens of the longest sample")
    p.add_argument("--shrink", type=int, default=1, help="divide grids, for tests")
    p.add_argument("--m-mem", type=int, help="tokens of a microbatch; the longest sample's by default")
    p.add_argument("--m-comp", type=float, default=1.05, help="adaptive_load's limit over the longest sample's S^p")
    p.add_argument("--tau", type=numbers(float), default=[1.3], help="one or several: 1.3,2")
    p.add_argument("--steps", type=numbers(int), default=[20], help="per policy (and tau: 40,20)")
    p.add_argument("--replay", type=int, help="how many of them again, without collectives; all by default")
    p.add_argument("--shapes", type=int, default=9, help="grids over the whole range, at several B")
    p.add_argument("--sizes", type=int, default=20, help="costliest token counts, measured one by one")
    p.add_argument("--budget", type=float, default=60, help="seconds of the shape benchmark, compilation apart")
    p.add_argument("--speed-calls", type=int, default=12, help="of the longest sample, to compare the ranks' speeds")
    p.add_argument("--speeds", action="store_true", help="plan with the ranks' measured speeds")
    p.add_argument("--system", default="graphopt", choices=list(SYSTEMS))
    p.add_argument("--checkpoint", action="store_true", help="recompute each block")
    p.add_argument("--policies", default="step_balanced,equal_token,adaptive_load")
    p.add_argument("--plan-ranks", default="8,16", help="also simulate plans for these")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--compile-only", action="store_true", help="compile what a run needs, and stop")
    p.add_argument("--compiled", type=Path, help="file to make when everything is compiled")
    p.add_argument("--after", default="", help="files (a,b) to wait for before measuring: other jobs of this machine")
    p.add_argument("--after-seconds", type=float, default=600, help="how long: then it is an error")
    p.add_argument("--plan-with", type=Path, help="a schedule.json: take its fit (this system's, or else another's)")
    p.add_argument("--plans-from", type=Path, help="a schedule.json: only simulate --plan-ranks with its fit")
    p.add_argument("--out", type=Path)
    p.set_defaults(name="schedule_step")
    o = p.parse_args()
    if o.plans_from:
        o.machine = o.machine or o.plans_from.parent.name
        return simulate_only(o)
    logging.basicConfig(level=logging.WARNING)
    device = start()
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    o.machine = o.machine or _results.machine() + (f"x{ranks}" if device.type == "cuda" and ranks > 1 else "")
    begin = time.perf_counter()
    say = lambda *x: print(f"[{time.perf_counter() - begin:.0f} s]", *x, flush=True) if first else None
    samples = samples_of(o)
    m_mem = o.m_mem or int(samples.shapes.tokens.max())
    job = Job(device, system=o.system, layers=o.layers, width=o.width, text_dim=o.text_dim, checkpoint=o.checkpoint)
    grids = grids_of(samples, o.shapes)
    say(f"first calls and compilation: {compile_all(job, grids):.0f} s, {cache_hits()}")
    if o.compile_only:
        dist.destroy_process_group()
        return
    job.meet()
    if o.compiled and first:
        o.compiled.touch()
    wait_for([Path(f) for f in o.after.split(",") if f], o.after_seconds)
    job.meet()
    foreign = False
    if o.plan_with:
        given = sorted(fit_rows(o.plan_with, o.cap), key=lambda r: r["system"] != o.system)[0]
        foreign = given["system"] != o.system
        fit, host, speeds = fit_of(given), given["host_s"], np.array(given["speeds"])
    else:
        fit, host, speeds = fit_here(job, samples, o, m_mem)
    # Rank 0's numbers are everyone's (they are equal, but for rounding of the overhead).
    box = [fit.to_json()]
    dist.broadcast_object_list(box)
    fit = CostFit.of(box[0])
    say(fit.describe(), f"step overhead {fit.step_overhead_s * 1e3:.1f} ms, p = {fit.p:.3f}, graphs {graphs()}, "
        f"the host takes {host * 1e3:.1f} ms, speeds {speeds.round(4).tolist()}")  # fmt: skip
    for e in fit.errors:
        say("  ", {k: round(v, 5) for k, v in e.items()})
    common = {"check": "step", "data": data_name(o.cap), "system": o.system,
              "layers": o.layers, "checkpoint": o.checkpoint, "m_mem": m_mem, "shrink": o.shrink}  # fmt: skip
    rows = [{**common, "ranks": ranks, "policy": None, "tau": None, "mode": "fit", "simulated": False,
             "mape": fit.mape, "max_error": fit.max_error, "r2": fit.r2, "p": fit.p, "floor_s": fit.floor_s,
             "coefficients": fit.coefficients, "anchors": fit.anchors, "step_overhead_s": fit.step_overhead_s,
             "host_s": host, "speeds": speeds.tolist(), "graphs": graphs()}]  # fmt: skip
    if o.plan_with:
        rows = []
    if first:
        schedule.save(rows, o.machine, folder=o.out)
    for i, tau in enumerate(o.tau):
        plans = plans_of(samples, fit, o, m_mem, ranks, tau, speeds if o.speeds else None)
        row = {**common, "ranks": ranks, "tau": tau, "mode": "measured", "simulated": False}
        for rows in measure(job, {p: plans[p] for p in o.policies.split(",")}, fit, row, o.steps[i % len(o.steps)], o,
                            say, foreign=foreign):  # fmt: skip
            if first:
                schedule.save(rows, o.machine, folder=o.out)
    if first:
        rows = simulated(fit, o, common, say)
        say(schedule.save(rows, o.machine, folder=o.out))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    if device.type == "cpu":
        os._exit(0)  # everything is written; torch's threads sometimes abort the process when the interpreter ends


if __name__ == "__main__":
    main()
