"""examples/train_video_dit.py as people start it on GPUs: plain, killed and resumed, streamed, dsa, LoRA, two GPUs.

    python benchmarks/example.py [--runs plain,killed,..] [--together 4] [--seconds 400]

Up to --together runs go at once, one GPU each in turn (two for those that need two), because they mostly compile.  A
run with a partner begins behind it and finds its code in Inductor's cache.  A row each: exit codes, losses, seconds of
the first step (compilation) and of the later ones beside the others, and where it has a partner, the largest distance
of the losses (relative) and of the weights (absolute: AdamW moves one by 1e-4 a step).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from _results import ROOT, save

EXAMPLE = ROOT.parent / "examples" / "train_video_dit.py"
GPUS = torch.cuda.device_count()
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
              "--mixed_precision", "bf16", "--dynamo_backend", "no", "--main_process_port", "29611")
ONCE = ("--make-data", "24", "--steps", "8", "--save-every", "2", "--tau", "8")
WHOLE = ("--make-data", "24", "--steps", "6", "--tau", "16", "--no-bf16")  # every step the whole epoch
WIDE = ("--make-data", "8", "--size", "1.3b", "--steps", "3")


@dataclass(frozen=True)
class Run:
    """Options of the example, and how it is started.

    Attributes:
        options: of the script.
        launcher: what stands between python and the script.
        kill: after so many steps every process is killed, and the run resumed.
        more: a second start with --resume up to so many steps.
        partner: the run whose losses and weights it must have.
    """

    options: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    kill: int = 0
    more: int = 0
    partner: str = ""


RUNS = {
    "plain": Run(ONCE),
    "killed": Run(ONCE, kill=5, partner="plain"),
    "fp32": Run(WHOLE),
    "torchrun fp32": Run(WHOLE, TORCHRUN, partner="fp32"),
    "torchrun killed": Run(ONCE, TORCHRUN, kill=5, partner="torchrun"),
    "torchrun": Run(ONCE, TORCHRUN),
    "torchrun 1.3b": Run((*WIDE, "--layers", "2"), TORCHRUN, more=5),
    "stream 1.3b": Run((*WIDE, "--layers", "8", "--stream")),
    "dsa 1.3b": Run((*WIDE, "--layers", "2", "--dsa", "3", "7", "7")),
    "lora 1.3b": Run((*WIDE, "--layers", "2", "--lora", "16")),
    "plain 1.3b": Run((*WIDE, "--layers", "2"), more=5),
    "accelerate 1.3b": Run((*WIDE, "--layers", "2"), ACCELERATE, more=5),
}


def metrics(folder: Path) -> list[dict]:
    """Rows of its log so far; a row that is being written is left out."""
    path = folder / "metrics.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines() if x.endswith("}")] if path.exists() else []


def family(pid: int) -> list[int]:
    """A process and all below it: torchrun gives each rank a session of its own."""
    found = [pid]
    for p in found:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{p}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def send(pids: list[int], what: signal.Signals) -> None:
    """A signal to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def start(run: Run, folder: Path, gpus: str, seconds: float, kill: int, *more: str) -> int:
    """Its exit code; 124 where time was over."""
    line = [sys.executable, *run.launcher, str(EXAMPLE), "--out", str(folder), *run.options, *more]
    env = os.environ | {"PYTHONFAULTHANDLER": "1"} | ({"CUDA_VISIBLE_DEVICES": gpus} if GPUS else {})
    end = time.monotonic() + seconds
    with open(folder / "output.txt", "ab") as out:
        child = subprocess.Popen(line, stdout=out, stderr=out, env=env, start_new_session=True)
        while child.poll() is None:
            over = time.monotonic() > end
            if over or (kill and len(metrics(folder)) >= kill):
                if over:  # each says where it stood
                    send(family(child.pid), signal.SIGABRT)
                    time.sleep(2)
                send(family(child.pid), signal.SIGKILL)
                child.wait()
                return 124 if over else -9
            time.sleep(0.05)
    return child.returncode


def carry_out(name: str, folder: Path, gpus: str, end: float) -> dict:
    """Run it, once or twice; its row."""
    run = RUNS[name]
    folder.mkdir(parents=True)
    codes = [start(run, folder, gpus, end - time.monotonic(), run.kill)]
    if (run.kill and codes == [-9]) or (run.more and codes == [0]):
        more = ("--resume", *(("--steps", str(run.more)) if run.more else ()))
        codes.append(start(run, folder, gpus, end - time.monotonic(), 0, *more))
    rows = metrics(folder)
    steps = [r["seconds"] for r in rows]
    print(f"--- {name}: {codes}, losses {[r['loss'] for r in rows]}", flush=True)
    if codes[-1]:
        print((folder / "output.txt").read_text(errors="replace")[-4000:], flush=True)
    return dict(figure="example", name=name, gpus=2 if run.launcher else 1, codes=codes, options=" ".join(run.options),
                steps=[r["step"] for r in rows], losses=[r["loss"] for r in rows],
                first_step_s=steps[0] if steps else None,
                later_step_s=statistics.median(steps[1:]) if steps[1:] else None)


def in_turn(names: list[str]) -> list[str]:
    """The same names, partners before those that need them: a pool that starts them so never waits in vain."""
    return sorted(names, key=lambda n: bool(RUNS[n].partner))


def behind(partner: Future | None, name: str, folder: Path, gpus: str, end: float) -> dict:
    """`carry_out`, once the partner is through: beside it, both would compile the same code."""
    if partner is not None:
        wait([partner])
    return carry_out(name, folder, gpus, end)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")


def compare(row: dict, other: dict, folder: Path, partner: Path) -> dict:
    """Distances to its partner."""
    a, b = weights(folder), weights(partner)
    assert a.keys() == b.keys()
    apart = max((a[k] - b[k]).abs().max().item() for k in a)
    losses = max(abs(x / y - 1) for x, y in zip(row["losses"], other["losses"], strict=True))
    return dict(partner=other["name"], losses_apart=losses, weights_apart=apart)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--runs", default=",".join(RUNS), help="default: all that the GPUs here suffice for")
    p.add_argument("--together", type=int, default=len(RUNS), help="how many at once; compiling, each fills 3 cores")
    p.add_argument("--seconds", type=float, default=400, help="what is not over then is killed")
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    names = in_turn([n for n in a.runs.split(",") if GPUS >= 2 or not RUNS[n].launcher])
    end, rows = time.monotonic() + a.seconds, {}
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(max(1, a.together)) as pool:
        place = lambda n: Path(temporary) / n.replace(" ", "-")
        gpu = lambda i, n: ",".join(map(str, range(2))) if RUNS[n].launcher else str(i % max(1, GPUS))
        waiting: dict[str, Future] = {}
        for i, n in enumerate(names):
            waiting[n] = pool.submit(behind, waiting.get(RUNS[n].partner), n, place(n), gpu(i, n), end)
        while waiting:
            time.sleep(0.2)
            for name in [n for n, w in waiting.items() if w.done()]:
                rows[name] = waiting.pop(name).result()
                save("example", [rows[name]], ("name",), {}, a.out)
                for n, row in rows.items():
                    other = rows.get(RUNS[n].partner)
                    if other and name in (n, other["name"]) and not row["codes"][-1] and not other["codes"][-1]:
                        row |= compare(row, other, place(n), place(other["name"]))
                        print(n, {k: row[k] for k in ("partner", "losses_apart", "weights_apart")}, flush=True)
                        save("example", [row], ("name",), {}, a.out)
    sys.exit(max(abs(r["codes"][-1]) for r in rows.values()))


if __name__ == "__main__":
    main()
