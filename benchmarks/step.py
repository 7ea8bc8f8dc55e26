"""One training step of a model at its real width, side by side: eager, Inductor with and without mix-order, graphopt.

    python benchmarks/step.py [--models wan-1.3b,flux-dev,...] [--systems eager,graphopt] [--profile graphopt]
    python benchmarks/step.py --warm ...                  compiles and runs one step of each, so that caches are filled

Models and sizes are those of step_models.py.  Every system has a process of its own; they compile beside one another
(`--together`) and are timed in turns, one at a time, so that a drifting clock meets all of them.  A row, saved after
every turn: forward_ms (no_grad) and step_ms (forward + backward, gradients freed after each), medians over all turns;
peak_gib of a step; grad_norm over all parameters; grad_gap: the largest relative L2 distance of one parameter's
gradient from eager's in the same dtype.
`--profile` writes each kernel's time in one step to step_<model>_b<batch>_<system>.txt.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _processes import Child
from _results import copy_tb_per_s, save
from step_models import CONFIGS, SIZES, Size, build, inputs, layers, shrink

SYSTEMS = ("eager", "inductor", "inductor_no_mix_order", "graphopt")
KEYS = ("model", "grid", "batch", "layers", "system")
# cuDNN's attention faults on it (torch 2.11, Inductor alone as well): FlashAttention for every system
WITHOUT_CUDNN = {"flux-dev"}
# the passes beside the sites
BESIDE = ("norm_rotate", "column_sums", "gradient_addends", "stack_gradients", "joint_launch",
          "head_norm_rotate")


def compiled(model: torch.nn.Module, system: str):
    """The model as a system runs it.  graphopt_sites: without the passes beside the sites; graphopt-NAME and
    graphopt+NAME: without a pass, with one that must be asked for."""
    if system == "eager":
        return model
    if system.startswith("graphopt"):
        off = list(BESIDE) if system == "graphopt_sites" else [p.split("+")[0] for p in system.split("-")[1:]]
        on = [p.split("-")[0] for p in system.split("+")[1:]]
        options = {"graphopt.disable": off, "graphopt.experimental": on}
        return torch.compile(model, backend="graphopt", options=options)
    return torch.compile(model, options={"triton.mix_order_reduction": system == "inductor"})


class System:
    """A model under one system, in a process of its own."""

    def __init__(self, name: str, size: Size, system: str, device: str) -> None:
        self.device, self.system = device, system
        torch.backends.cuda.enable_cudnn_sdp(name not in WITHOUT_CUDNN)
        self.model = build(name, device)
        self.kw = inputs(name, size, device)
        self.f = compiled(self.model, system)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def step(self) -> None:
        self.f(**self.kw)[0].float().square().mean().backward()

    def clear(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def first(self, gradients: Path | None, reference: Path | None) -> dict[str, Any]:
        """Compile by one step; its gradients are written to, or compared with, a file."""
        start = time.perf_counter()
        self.step()
        self.synchronize()
        row: dict[str, Any] = {"compile_s": time.perf_counter() - start}
        grads = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        row["grad_norm"] = torch.stack([g.float().norm() for g in grads.values()]).norm().item()
        if gradients is not None:
            torch.save(grads, gradients)
        if reference is not None and reference.exists():
            wanted = torch.load(reference, map_location=self.device)
            row["grad_gap"] = max(((grads[n].float() - g.float()).norm() / g.float().norm().clamp_min(1e-12)).item()
                                  for n, g in wanted.items())
        del grads
        self.clear()
        with torch.no_grad():
            self.f(**self.kw)
        self.rest()
        if self.system.startswith("graphopt"):
            import graphopt

            report = graphopt.report(self.f)
            print(report, flush=True)
            row |= {f"{k}_{w}": report.count(k, w) for k in ("modulate", "gate") for w in ("matched", "rewritten")}
        return row

    def peak(self) -> dict[str, Any]:
        """Memory of one step at its peak."""
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.step()
        self.synchronize()
        row = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if self.device == "cuda" else {}
        self.clear()
        return row

    def rest(self) -> None:
        """Leave the GPU's memory to others."""
        self.clear()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def times(self, seconds: float) -> dict[str, list[float]]:
        """Milliseconds of forwards and of steps, about `seconds` of them in all."""
        def forward() -> None:
            with torch.no_grad():
                self.f(**self.kw)

        def step() -> None:
            self.step()
            self.clear()

        return {"forward_ms": self.series(forward, seconds / 4), "step_ms": self.series(step, seconds)}

    def series(self, call: Any, seconds: float) -> list[float]:
        """Milliseconds of call after call, the first left out."""
        start = time.perf_counter()
        call()
        self.synchronize()
        count = max(2, round(seconds / (time.perf_counter() - start)))
        if self.device != "cuda":
            return [1e3 * timed(call) for _ in range(count)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        for mark in marks[:-1]:
            mark.record()
            call()
        marks[-1].record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]

    def profile(self, path: Path) -> None:
        """Each kernel's time in one step, as a table."""
        from torch.profiler import ProfilerActivity, profile

        on = ProfilerActivity.CUDA if self.device == "cuda" else ProfilerActivity.CPU
        self.step()
        self.clear()
        self.synchronize()
        with profile(activities=[on]) as prof:
            self.step()
            self.synchronize()
        sort = "self_cuda_time_total" if self.device == "cuda" else "self_cpu_time_total"
        table = prof.key_averages().table(sort_by=sort, row_limit=120, max_name_column_width=110)
        keep = [line for line in table.splitlines() if line.strip()]
        spans = [e.time_range for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        if spans:
            busy, whole = sum(t.elapsed_us() for t in spans), max(t.end for t in spans) - min(t.start for t in spans)
            keep.append(f"{busy / 1e3:.2f} ms busy of {whole / 1e3:.2f} ms")
        path.write_text("\n".join(keep) + "\n")
        self.clear()


def timed(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def make(name: str, size: Size, system: str, device: str, tiny: bool) -> System:
    """A system in its process."""
    if tiny:
        shrink()
    return System(name, size, system, device)


class Measured:
    """One system of one size: its process, and what is known of it."""

    def __init__(self, name: str, size: Size, system: str, args: argparse.Namespace) -> None:
        self.name, self.size, self.system = name, size, system
        self.child = Child(make, name, size, system, args.device, args.tiny)
        self.row: dict[str, Any] = {}

    @property
    def alive(self) -> bool:
        return "error" not in self.row

    def ask(self, *message: Any) -> None:
        self.child.ask(*message)

    def answer(self) -> Any:
        found = self.child.answer()
        if isinstance(found, dict) and "error" in found:
            self.row["error"] = found["error"]
        return found


def groups(args: argparse.Namespace) -> list[list[tuple[str, Size, str]]]:
    """What is compiled together: whole sizes, at most `together` processes."""
    batches = None if args.batches is None else [int(b) for b in args.batches.split(",")]
    found: list[list[tuple[str, Size, str]]] = [[]]
    for name in args.models.split(","):
        for size in SIZES[name]:
            if batches is None or size.batch in batches:
                one = [(name, size, system) for system in args.systems.split(",")]
                if found[-1] and len(found[-1]) + len(one) > args.together:
                    found.append([])
                found[-1] += one
    return [g for g in found if g]


def run(group: list[Measured], args: argparse.Namespace, ceilings: dict[str, float], scratch: Path) -> None:
    """Compile a group at once, then measure its sizes one after the other, in turns."""
    file = lambda c: scratch / f"{c.name}_{c.size.grid}_{c.size.batch}.pt"
    with_eager = any(c.system == "eager" for c in group) and not args.warm
    for first in (True, False):  # eager first: the others compare their gradients with its
        turn = [c for c in group if (c.system == "eager") == first]
        for i in range(0, len(turn), args.together):
            for c in turn[i:i + args.together]:
                c.ask("first", file(c) if first and with_eager else None, None if first or not with_eager else file(c))
            for c in turn[i:i + args.together]:
                c.row |= c.answer()
    for c in [c for c in group if c.alive]:
        c.ask("peak")
        c.row |= c.answer()
        if args.warm:
            print(c.name, c.size, c.system, c.row, flush=True)
            c.ask("rest")
            c.answer()
    if args.warm:
        return
    for key in dict.fromkeys((c.name, c.size) for c in group):
        mine = [c for c in group if (c.name, c.size) == key]
        series: dict[str, dict[str, list[float]]] = {c.system: {} for c in mine}
        for turn in range(args.rounds):
            for c in [c for c in mine if c.alive][::-1 if turn % 2 else 1]:
                c.ask("times", args.seconds / args.rounds)
                state = clocks(args.device)
                found = c.answer()
                for what, values in found.items() if c.alive else ():
                    series[c.system].setdefault(what, []).extend(values)
                    print(f"{c.system} {what} {statistics.median(values):.3f} {state}", flush=True)
            for c in [c for c in mine if c.alive]:  # after every turn: a run that is cut off keeps its rows
                c.row |= {what: statistics.median(v) for what, v in series[c.system].items()}
                steps = series[c.system]["step_ms"]
                c.row |= {"step_ms_range": [min(steps), max(steps)], "turns": turn + 1}
                save("step", [whole_row(c)], KEYS, ceilings, args.out)
        for c in mine:
            row = whole_row(c)
            print({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            save("step", [row], KEYS, ceilings, args.out)  # those that were never timed, too
        for c in [c for c in mine if c.system in args.profile.split(",") and c.alive]:
            c.ask("profile", (args.out or Path()) / f"step_{c.name}_b{c.size.batch}_{c.system}.txt")
            c.answer()
        for c in [c for c in mine if c.alive]:
            c.ask("rest")
            c.answer()


def whole_row(c: Measured) -> dict[str, Any]:
    """What was measured so far, with what it is of."""
    return dict(model=c.name, grid=c.size.grid, batch=c.size.batch, layers=layers(c.name), system=c.system) | c.row


def clocks(device: str) -> str:
    """Clock, power and what holds the clock down, 0.3 s into a turn: a GPU at its power limit slows down."""
    if device != "cuda":
        return ""
    time.sleep(0.3)
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,clocks_throttle_reasons.active", "--format=csv,noheader"]
    here = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    done = subprocess.run([*query, *(["-i", here] if here else [])], capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--batches", help="only sizes with these batch sizes, as 1,2")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--seconds", type=float, default=4.0, help="timed steps per system")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each system")
    parser.add_argument("--together", type=int, default=6, help="processes that compile at once, each with its model "
                        "on the GPU; 1: Inductor tunes its kernels undisturbed")
    parser.add_argument("--warm", action="store_true", help="only fill the compilers' caches")
    parser.add_argument("--profile", default="", help="systems of which each kernel's time in one step is written too")
    parser.add_argument("--tiny", action="store_true", help="small widths and grids, to try the script")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.tiny:
        shrink()
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    ceilings = {} if args.warm or args.device != "cuda" else {"copy_tb_per_s": copy_tb_per_s()}
    started = [[Measured(*one, args) for one in group] for group in groups(args)]  # imports take a while
    with tempfile.TemporaryDirectory() as scratch:
        for group in started:
            run(group, args, ceilings, Path(scratch))
            for c in group:
                c.child.end()


if __name__ == "__main__":
    main()
