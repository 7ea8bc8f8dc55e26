"""The ranks of a plan in turn on one GPU, and the step time that this gives without communication:

    python benchmarks/schedule_in_turn.py --cases 8:1.3:6,2:1.3:12,8:2:3,2:2:6,2:1.3:5:inductor

The job of benchmarks/schedule_step.py (Wan-shaped DiT, FSDP2, mixed precision, blocks compiled by graphopt) in one
process.  Of a step of a plan for R ranks it runs rank 0's microbatches, then rank 1's, and so on, without collectives
and without the optimizer.  Times are the device's, of each microbatch, behind a filled queue.  A rank's time is the sum
of its microbatches; the step's wall time is composed, not run: the largest over ranks.  So rows say what the plan and
the shapes do.  What communication, the optimizer, unequal GPUs and hosts add, only a run on R GPUs says.

On the spot: shape benchmark, fit, plans of every policy with the same global batch.  A case is
`ranks:tau:steps[:system[:memory]]`: `system` runs the same plans with other kernels, `memory` is the limit of a
microbatch in units of the longest sample.  Cases and policies take turns, step by step, so that drift meets all.
Microbatches are saved after each step; the same command goes on where it stopped (or, with `--rows`, makes the rows of
what is there, without a GPU).  `--seconds` ends the measurement early, `--compile-only` fills Inductor's caches.

Writes benchmarks/results/<machine>/schedule_in_turn.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

import _results  # noqa: E402
import schedule_data as data  # noqa: E402
from schedule_composed import Case, Lines, Step, beside, rows_of, steps_of  # noqa: E402
from schedule_fit import (  # noqa: E402
    cache_hits,
    compile_all,
    data_name,
    fit_of,
    grids_of,
    host_seconds,
    samples_of,
    sweep,
    sweep_shapes,
)
from schedule_gains import without_prediction  # noqa: E402
from schedule_job import Job  # noqa: E402
from schedule_step import graphs, plans_of, twins  # noqa: E402

from graphopt.schedule.bench import Shape  # noqa: E402
from graphopt.schedule.costmodel import write_json  # noqa: E402
from graphopt.schedule.gpu_queue import GpuQueue  # noqa: E402
from graphopt.schedule.plan import Plan  # noqa: E402

NAME = "schedule_in_turn"
KEYS = ("data", "ranks", "policy", "tau", "mode", "system", "memory", "checkpoint")


class Turn(NamedTuple):
    """A step of one policy whose kernels are queued."""

    job: Job
    line: dict
    marks: list
    counts: list[int]  # microbatches of every rank


def launch(job: Job, step: Step, line: dict) -> Turn:
    """Queue a step's microbatches, rank by rank; the host does not wait.

    Raises:
        torch.OutOfMemoryError: a microbatch does not fit.
    """
    marks = [job.mark()]
    starved = 0
    for rank in step:
        for s in rank:
            # The GPU has nothing left to do: the host's time shows in this microbatch's.
            starved += isinstance(marks[-1], torch.cuda.Event) and marks[-1].query()
            job.alone(s)
            marks.append(job.mark())
    return Turn(job, {**line, "starved": starved}, marks, [len(rank) for rank in step])


def collect(turn: Turn | None, lines: Lines) -> None:
    """Wait for a step, and save it."""
    if turn is not None:
        each = iter(turn.job.seconds(turn.marks).tolist())
        lines.add({**turn.line, "seconds": [[next(each) for _ in range(n)] for n in turn.counts]})


def measure(todo: Iterable[tuple[Job, Step, dict]], lines: Lines, queue: Callable[[], None],
            counted: dict[str, int]) -> None:  # fmt: skip
    """Run steps one behind the other; while one is queued, the one before is saved, so that the GPU never waits."""
    before: Turn | None = None
    queue()
    for job, step, line in todo:
        begun = graphs()
        cuda = job.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            turn = launch(job, step, line)
        except torch.OutOfMemoryError as e:
            collect(before, lines)
            lines.add({**line, "oom": str(e)[:200]})
            before = None
            job.clear()
            torch.cuda.empty_cache()
            queue()
            continue
        finally:
            counted[line["system"]] = counted.get(line["system"], 0) + graphs() - begun
        turn.line["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
        collect(before, lines)
        before = turn
    collect(before, lines)


def in_turn(cases: dict[Case, dict[str, list[Step]]], hashes: dict[Case, dict[str, str]], jobs: dict[str, Job],
            lines: Lines, time_for: Callable[[Case, int], bool]) -> Iterator[tuple[Job, Step, dict]]:
    """Step 0 of every case and policy, then step 1, .., without what is there and what has no time."""
    over = {(c, p) for c, plans in hashes.items() for p, h in plans.items()
            if any("oom" in x for x in lines.of(h, c.system))}  # fmt: skip
    for i in range(max(c.steps for c in cases)):
        for case, plans in cases.items():
            policies = [p for p in plans if i < len(plans[p]) and (case, p) not in over
                        and len(lines.of(hashes[case][p], case.system)) <= i]
            if not policies or not time_for(case, i):
                continue
            for p in policies:
                line = {"plan": hashes[case][p], "system": case.system, "policy": p, "step": i}
                yield jobs[case.system], plans[p][i], line
                if lines.found and "oom" in lines.found[-1] and lines.found[-1]["plan"] == line["plan"]:
                    over.add((case, p))


def alone_in_a_world() -> torch.device:
    """A process group of this process, for FSDP2, and the device."""
    cuda = torch.cuda.is_available()
    store = dist.TCPStore("localhost", 0, 1, is_master=True)  # any free port
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=0, world_size=1)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def options() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--machine", help="name of the results' folder; made from the device by default")
    p.add_argument("--cases", default="8:1.3:6,2:1.3:12,8:2:3,2:2:6,2:1.3:5:inductor",
                   type=lambda text: [Case.of(x) for x in text.split(",")])  # fmt: skip
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--width", type=int, default=1536)
    p.add_argument("--text-dim", type=int, default=4096)
    p.add_argument("--cap", type=int, default=data.CAP_C, help="tokens of the longest sample")
    p.add_argument("--shrink", type=int, default=1, help="divide grids, for tests")
    p.add_argument("--m-comp", type=float, default=1.05, help="adaptive_load's limit over the longest sample's S^p")
    p.add_argument("--shapes", type=int, default=9, help="grids over the whole range, at several B")
    p.add_argument("--sizes", type=int, default=20, help="costliest token counts, measured one by one")
    p.add_argument("--budget", type=float, default=30, help="seconds of the shape benchmark, compilation apart")
    p.add_argument("--seconds", type=float, default=1e9, help="begin no step that would end later than this")
    p.add_argument("--checkpoint", action="store_true", help="recompute each block")
    p.add_argument("--policies", default="step_balanced,equal_token,adaptive_load")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--compile-only", action="store_true", help="compile what a run needs, and stop")
    p.add_argument("--rows", action="store_true", help="only make the rows of what was measured; needs no GPU")
    p.add_argument("--join", type=Path, nargs="+", help="only add the rows of these files to those of --out")
    p.add_argument("--out", type=Path)
    p.set_defaults(name=NAME)
    o = p.parse_args()
    o.system, o.machine = o.cases[0].system, o.machine or _results.machine()
    o.out = o.out or _results.results_folder() / o.machine
    return o


def join(files: list[Path], folder: Path) -> Path:
    """Add rows of other result files to this folder's; each row keeps its commit, the file has the last head."""
    path = folder / f"{NAME}.json"
    rows: dict[str, dict] = {}
    head: dict = {}
    for found in (json.loads(f.read_text()) for f in (*([path] if path.exists() else []), *files)):
        rows |= {json.dumps([r.get(k) for k in KEYS]): r for r in found["rows"]}
        head = found
    write_json(path, {**head, "rows": list(rows.values())})
    return path


def fit_row(o: argparse.Namespace, common: dict, layers: dict) -> dict | None:
    """The fit of an earlier run of the same commit and settings, to go on with its plans."""
    path = o.out / f"{NAME}.json"
    wanted = {**common, **layers, "system": o.system, "commit": _results.commit()}
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return next((r for r in rows if r["mode"] == "fit" and wanted.items() <= r.items()), None)


def main() -> None:
    o = options()
    if o.join:
        return print(join(o.join, o.out))
    begin = time.perf_counter()
    say = lambda *x: print(f"[{time.perf_counter() - begin:.0f} s]", *x, flush=True)
    samples = samples_of(o)
    longest = int(samples.shapes.tokens.max())
    common = {"check": "in turn", "data": data_name(o.cap), "checkpoint": o.checkpoint}
    size = {"layers": o.layers, "width": o.width, "shrink": o.shrink}
    jobs: dict[str, Job] = {}
    counted: dict[str, int] = {}  # graphs compiled
    called: set[Shape] = set()
    if not o.rows:
        device = alone_in_a_world()
        torch._dynamo.config.recompile_limit *= len({c.system for c in o.cases})  # they share the model's code
        grids = grids_of(samples, o.shapes)
        for system in dict.fromkeys(c.system for c in o.cases):
            begun = graphs()
            jobs[system] = Job(device, system=system, layers=o.layers, width=o.width, text_dim=o.text_dim,
                               checkpoint=o.checkpoint)  # fmt: skip
            say(f"{system}: first calls and compilation {compile_all(jobs[system], grids):.0f} s, {cache_hits()}")
            if o.compile_only:  # single images are a graph of their own
                m_mem = int(longest * max(c.memory for c in o.cases))
                first_calls(jobs[system], sweep_shapes(samples, o, m_mem), say)
            jobs[system].clear()
            counted[system] = graphs() - begun
    if o.compile_only:
        say("compiled", counted)
        return done(0)
    told = fit_row(o, common, size)
    if o.rows and told is None:
        raise SystemExit(f"{o.out} holds no fit of this commit and these settings: nothing was measured")
    if told is None:
        begun = graphs()
        m_mem = int(longest * max(c.memory for c in o.cases))
        first_calls(jobs[o.system], sweep_shapes(samples, o, m_mem), say)  # not on the sweep's budget
        fit, ok = sweep(jobs[o.system], samples, o, m_mem)
        jobs[o.system].clear()
        counted[o.system] += graphs() - begun
        called = {Shape(*(r[d] for d in "BTHWL")) for r in ok}
        told = {**common, **size, "ranks": 1, "system": o.system, "policy": None, "tau": None, "memory": None,
                "mode": "fit", "simulated": False, "mape": fit.mape, "max_error": fit.max_error, "r2": fit.r2,
                "p": fit.p, "floor_s": fit.floor_s, "coefficients": fit.coefficients, "anchors": fit.anchors,
                "step_overhead_s": 0.0, "host_s": host_seconds(ok), "shapes": len(ok)}  # fmt: skip
        _results.save(NAME, [told], KEYS, {}, o.out, o.machine)
    fit = fit_of(told)  # as a later run reads it
    say(fit.describe(), f"p = {fit.p:.3f}, {told['shapes']} shapes, the host takes {told['host_s'] * 1e3:.1f} ms")
    plans: dict[Case, dict[str, Plan]] = {}
    for case in o.cases:
        like = next((c for c in plans if replace(c, steps=0, system="") == replace(case, steps=0, system="")), None)
        some = plans[like] if like else plans_of(samples, fit, o, int(longest * case.memory), case.ranks, case.tau)
        plans[case] = {p: some[p] for p in o.policies.split(",")}
    key = {**common, **size, "commit": _results.commit(), "fit": told["coefficients"]}
    lines = Lines(o.out / f"{NAME}_steps_{o.cap}.jsonl", key)
    say("planned, steps there:", len(lines.found))

    def finish() -> None:
        rows: list[dict] = []
        for case in o.cases:
            more = {**common, **size, "m_mem": int(longest * case.memory)}
            more |= {"graphs": counted[case.system]} if case.system in counted else {}
            found = rows_of(case, plans[case], lines, fit, more)
            rows += without_prediction(found) if case.system != o.system else found
        beside(rows, o.system)
        for r in rows:
            say({k: round(v, 4) if isinstance(v, float) else v for k, v in r.items() if not isinstance(v, list)})
        say(_results.save(NAME, rows, KEYS, {}, o.out, o.machine))

    try:
        if not o.rows:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a time limit: the rows of what is there
            run(jobs, plans, lines, o, counted, {o.system: called}, begin, say)
    finally:
        finish()
    done(0)


def run(jobs: dict[str, Job], plans: dict[Case, dict[str, Plan]], lines: Lines, o: argparse.Namespace,
        counted: dict[str, int], called: dict[str, set[Shape]], begin: float, say: Callable) -> None:  # fmt: skip
    """Measure what is not there yet; `called`: shapes that each system has run."""
    own = {c: dict.fromkeys(twins(plans[c]).values()) for c in plans}
    steps = {c: {p: steps_of(plans[c][p], c.steps) for p in own[c]} for c in plans}
    hashes = {c: {p: plans[c][p].hash for p in own[c]} for c in plans}
    planned = {c: sum(p.column("cost_s").sum() / len(p) for p in (plans[c][q] for q in own[c])) for c in plans}
    device = next(iter(jobs.values())).device
    for system, job in jobs.items():
        begun = graphs()
        shapes = {s for c in plans if c.system == system for p in steps[c].values() for x in p for r in x for s in r}
        shapes -= called.get(system, set())
        first_calls(job, shapes, say)
        counted[system] += graphs() - begun
    gc.collect()
    gc.freeze()
    filler = GpuQueue(device) if device.type == "cuda" else None
    queue = lambda: filler.fill(0.3) if filler else None
    skipped: set[Case] = set()

    def time_for(case: Case, step: int) -> bool:
        late = time.perf_counter() - begin + 1.1 * planned[case] > o.seconds
        if late and case not in skipped:
            skipped.add(case)
            say(f"no time for step {step} of {case}")
        return not late

    measure(in_turn(steps, hashes, jobs, lines, time_for), lines, queue, counted)
    say("measured")


def first_calls(job: Job, shapes: Iterable[Shape], say: Callable) -> None:
    """Every shape once: Triton compiles sizes that 16 divides apart, libraries choose their kernels."""
    begin, slow = time.perf_counter(), []
    for s in sorted(shapes, key=lambda s: -s.B * s.S):
        start = time.perf_counter()
        try:
            job.alone(s)
            job.sync()
        except torch.OutOfMemoryError:  # what measures it says so
            job.clear()
            torch.cuda.empty_cache()
        slow.append((round(time.perf_counter() - start, 1), s.B, s.S))
    slow.sort(reverse=True)
    took = time.perf_counter() - begin
    say(f"first calls of {len(slow)} shapes: {took:.0f} s, the slowest (s, B, tokens): {slow[:4]}")


def done(code: int) -> None:
    """Leave; torch's threads sometimes abort the process when the interpreter ends."""
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    if not torch.cuda.is_available():
        os._exit(code)


if __name__ == "__main__":
    main()
