"""`graphopt bench`: the benchmarks behind every published figure, by name.

The scripts stand in `benchmarks/` of the source tree and are installed with the package; each runs in a process of its
own, so that one that runs out of memory or is interrupted takes no other with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from graphopt._inspect_cli import reported
from graphopt.errors import ConfigError


@dataclass(frozen=True)
class Benchmark:
    """A script of `benchmarks/`.

    Attributes:
        script: its file, without `.py`.
        measures: what its result file holds, in one line.
        gpus: GPUs it needs; with two and more it is started by torchrun.
        minutes: about how long it takes on an H200 (or, with gpus=0, on two cores).
        arguments: what `--all` and a plain call pass.
    """

    script: str
    measures: str
    gpus: int
    minutes: int
    arguments: tuple[str, ...] = ()


BENCHMARKS = {
    "adaln": Benchmark("adaln", "fused AdaLN operators against Inductor and eager, forward and backward", 1, 8),
    "adaln-errors": Benchmark("adaln_errors", "their errors at full size against fp64, and whether they repeat", 1, 3),
    "bias-gradient": Benchmark("bias_gradient", "gradients of biases against Inductor and eager", 1, 2),
    "joint-launch": Benchmark("joint_launch", "image and text streams of a joint block in one launch or two", 1, 1),
    "rotary": Benchmark("rotary", "RMS norm and rotary embedding of queries against Inductor and eager", 1, 2),
    "step": Benchmark("step", "a training step: eager, Inductor, graphopt; time, memory, gradients", 1, 6),
    "verify": Benchmark("verify", "graphopt.verify on a model of real width: what it finds and costs", 1, 2),
    "dsa": Benchmark("dsa", "3D deformable sliding attention against cuDNN and FlexAttention", 1, 8),
    "dsa-step": Benchmark("dsa_step", "a training step of Wan with sliding attention, against the dense model", 1, 4),
    "stream": Benchmark("stream_step", "streamed steps against resident ones, and the bound of this machine", 1, 6),
    "stream-peers": Benchmark("stream_peers", "the same steps by FSDP2 (or DeepSpeed) with weights on the host", 1, 2,
                              ("--system", "fsdp2")),
    "stream-adamw": Benchmark("stream_adamw", "the CPU optimizer's loop against memory and torch's AdamW", 0, 1),
    "stream-adamw-ahead": Benchmark("stream_adamw_ahead", "its loop with prefetches of several distances", 0, 1),
    "stream-compile": Benchmark("stream_compile", "time of the backend: a streamed class, the whole graph", 0, 10,
                                ("--system", "stream")),
    "stream-hosts": Benchmark("stream_hosts", "planned steps of 14, 33 and 105 B on other hosts", 0, 2),
    "papers": Benchmark("papers", "the first paper's norm and longest sequence, here", 1, 6),
    "papers-stream": Benchmark("papers_stream", "MFU of streamed steps with the second paper's three set-ups; forwards",
                               1, 4, ("mfu", "forward")),
    "papers-clips": Benchmark("papers_clips", "the largest clip at 1080p that trains on one GPU: three systems", 1, 6),
    "shape": Benchmark("schedule_shape", "step time over batch and sequence length, and its fit", 1, 4),
    "schedule": Benchmark("schedule", "batch plans, simulated: limits, speed, cost model", 0, 10),
    "schedule-step": Benchmark("schedule_step", "batch plans in a real loop, predicted beside measured", 2, 8),
    "schedule-in-turn": Benchmark("schedule_in_turn", "the ranks of a plan in turn on one GPU, steps composed", 1, 3),
    "schedule-grads": Benchmark("schedule_grads", "unequal counts of microbatches over ranks: gradients, memory", 2, 3),
    "schedule-drill": Benchmark("schedule_drill", "a rank dies: time until the others stop, exact resume", 0, 2),
    "same-loss": Benchmark("same_loss", "300 steps, eager and with graphopt on the same data: losses", 0, 10),
    "match": Benchmark("match", "time of matching and rewriting a deep model", 0, 2),
}


def folder() -> Path:
    """Where the scripts are: the installed package's, or the source tree's."""
    spec = find_spec("graphopt.benchmarks")
    places = list(spec.submodule_search_locations or ()) if spec else []
    places.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    for place in places:
        if (Path(place) / "_results.py").is_file():
            return Path(place)
    raise ConfigError("the benchmark scripts are not installed", where=", ".join(places),
                      remedy="install graphopt from its wheel or source tree, which hold benchmarks/*.py")


def gpu_count() -> int:
    """GPUs torch can use in this process."""
    import torch

    return torch.cuda.device_count()


def command(name: str, arguments: list[str]) -> list[str]:
    """The command line of one benchmark.

    Raises:
        ConfigError: unknown name (with the nearest), or too few GPUs.
    """
    if name not in BENCHMARKS:
        from difflib import get_close_matches

        near = get_close_matches(name, BENCHMARKS, 1)
        raise ConfigError(f"unknown benchmark {name!r}", remedy=(f"did you mean {near[0]!r}? " if near else "")
                          + f"known are {', '.join(BENCHMARKS)}")
    entry = BENCHMARKS[name]
    if "--help" not in arguments and entry.gpus and entry.gpus > gpu_count():  # counting imports torch
        raise ConfigError(f"{name} needs {entry.gpus} GPU(s), torch sees {gpu_count()}",
                          remedy="`graphopt bench` lists those that need none; `graphopt doctor` examines this machine")
    runner = [sys.executable, str(Path(__file__).with_name("_script.py"))]
    launcher = [*runner, "-m", "torch.distributed.run", f"--nproc-per-node={gpu_count()}", "--no-python"]
    script = str(folder() / f"{entry.script}.py")
    return [*(launcher if entry.gpus > 1 else ()), *runner, script, *(arguments or entry.arguments)]


def call(line: list[str], output: IO[str] | None = None) -> int:
    """Run it; Ctrl-C reaches it, and its rows so far stay.  Returns its exit code, 130 after Ctrl-C."""
    held = {signal.SIGINT} if hasattr(signal, "pthread_sigmask") else set()
    if held:
        signal.pthread_sigmask(signal.SIG_BLOCK, held)  # the child's too, until _script.py can catch it
    try:
        child = subprocess.Popen(line, stdout=output)
    finally:
        if held:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            child.kill()
        return 130


def results(since: float) -> list[dict[str, Any]]:
    """Result files written since a time (seconds since the epoch)."""
    places = {folder() / "results", Path(os.environ.get("GRAPHOPT_RESULTS", "graphopt-results"))}
    files = [f for p in places if p.is_dir() for f in p.glob("*/*.json") if f.stat().st_mtime >= since]
    return [{"file": str(f), **json.loads(f.read_text())} for f in sorted(files)]


def table() -> str:
    """Every benchmark: name, GPUs, minutes, what it measures."""
    lines = [f"{'name':14} {'GPUs':>4} {'min':>4}  measures"]
    return "\n".join([*lines, *(f"{n:14} {b.gpus:4} {b.minutes:4}  {b.measures}" for n, b in BENCHMARKS.items())])


@reported
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A benchmark; without one, they are listed.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Every benchmark this machine has the GPUs for.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print nothing but the result files written, as JSON; the "
                                                       "scripts' own output goes to stderr.")] = False,
) -> None:
    """Run a benchmark and write its result file; all other arguments are the script's own.

    Results go to benchmarks/results/<machine>/ in a source tree, else to graphopt-results/ here (GRAPHOPT_RESULTS).
    A newer run replaces the rows it measured and keeps the rest.  Exit codes: the script's, 130 after Ctrl-C.  What a
    script takes: graphopt bench step -- --help

    Example: graphopt bench step --models wan-1.3b
    """
    if not (name or everything):
        typer.echo(table())
        return
    if everything and (name or context.args):
        raise ConfigError("--all takes neither a name nor arguments of a script", remedy="run that benchmark alone")
    names = [n for n, b in BENCHMARKS.items() if b.gpus <= gpu_count()] if everything else [name]
    start, failed = time.time(), 0
    for i, chosen in enumerate(names):
        line = command(chosen, list(context.args))
        about = f"[{i + 1}/{len(names)}] {chosen}, about {BENCHMARKS[chosen].minutes} min"
        typer.echo(f"{about}: {' '.join(line[1:])}", err=True)
        code = call(line, sys.stderr if json_ else None)
        if code == 130:
            raise KeyboardInterrupt
        if code:
            typer.echo(f"{chosen} ended with exit code {code}", err=True)
            failed = failed or code
    if json_:
        typer.echo(json.dumps(results(start), indent=1))
    raise typer.Exit(failed)
