"""Runs examples/train_video_dit.py, drill_worker.py or the command line in processes forked from one that has imported
everything: a second, not half a minute.

Used by test_train_video_dit.py and test_drills.py.  A job can be killed at any moment like one started by hand.  The
process that is forked is `python example_jobs.py`: it reads a request a line (JSON) and answers a line.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_video_dit.py"
WORKER = Path(__file__).with_name("drill_worker.py")
COMMAND = "graphopt"


def serve() -> None:
    """Import everything, then fork a job for each request; `poll` asks for an exit code, as subprocess counts them."""
    import faulthandler

    import peft.tuners.lora  # noqa: F401
    import torch
    import torch._dynamo
    import torch.utils.tensorboard
    from diffusers import WanTransformer3DModel  # noqa: F401

    import graphopt.backend
    import graphopt.checkpoint
    import graphopt.cli
    import graphopt.loading.loader
    import graphopt.schedule.planner
    import graphopt.weights  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        pid = os.fork()
        if pid:
            with contextlib.suppress(PermissionError, ProcessLookupError):  # the child does the same; whoever is first
                os.setpgid(pid, pid)
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(request["output"], "ab", buffering=0) as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.setpgid(0, 0)
        os.environ.update(request["environment"])
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        sys.argv = [request["run"], *request["arguments"]]
        if request["run"] == COMMAND:
            runpy.run_module(COMMAND, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(request["run"], run_name="__main__")
        return


@functools.cache
def _server() -> subprocess.Popen:
    hidden = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_MIXED_PRECISION")
    env = {k: v for k, v in os.environ.items() if k not in hidden} | {
        "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # asking the driver itself would spoil forked processes
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    atexit.register(server.kill)
    return server


def _ask(request: dict) -> int | None:
    server = _server()
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


class Job:
    """One process or several (gloo) of the example, or of another script; what they print is in `folder`."""

    def __init__(self, folder: Path, *options: str, ranks: int = 1, environment: dict[str, str] | None = None,
                 run: Path | str = EXAMPLE) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        self.logs = [folder / f"output-{r}.txt" for r in range(ranks)]
        self.codes: dict[int, int | None] = {}
        for rank, log in enumerate(self.logs):
            env = dict(environment or {})
            if ranks > 1:
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost",
                        "MASTER_PORT": str(port)}
            log.write_bytes(b"")
            arguments = ["--out", str(folder), *options] if run == EXAMPLE else list(options)
            pid = _ask({"run": str(run), "arguments": arguments, "environment": env, "output": str(log)})
            self.codes[pid] = None

    def running(self) -> list[int]:
        for pid, code in self.codes.items():
            self.codes[pid] = _ask({"poll": pid}) if code is None else code
        return [pid for pid, code in self.codes.items() if code is None]

    def wait(self, seconds: float = 240) -> list[int | None]:
        """Exit codes; negative after a signal.  One failed rank ends the others; a job that hangs says where."""
        end = time.monotonic() + seconds
        while running := self.running():
            if any(code not in (None, 0) for code in self.codes.values()) or time.monotonic() > end:
                for pid in running:
                    os.kill(pid, signal.SIGUSR1)
                time.sleep(0.5)
                self.kill()
            time.sleep(0.02)
        return list(self.codes.values())

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to the whole foreground group."""
        for pid in self.running():
            os.killpg(pid, signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL, workers of its loaders included."""
        for pid in self.running():
            os.killpg(pid, signal.SIGKILL)
        while self.running():
            time.sleep(0.01)

    def kill_when(self, reached: Callable[[], bool], seconds: float = 240) -> None:
        """SIGKILL every process once `reached`."""
        end = time.monotonic() + seconds
        while not reached() and self.running():
            assert time.monotonic() < end, self.output()
            time.sleep(0.002)
        self.kill()

    def output(self, rank: int = 0) -> str:
        return self.logs[rank].read_text(errors="replace")


def finished(folder: Path, *options: str, ranks: int = 1, environment: dict[str, str] | None = None,
             seconds: float = 240) -> Job:
    """A job that must end well."""
    job = Job(folder, *options, ranks=ranks, environment=environment)
    codes = job.wait(seconds)
    assert codes == [0] * ranks, "\n".join(job.output(r)[-3000:] for r in range(ranks))
    return job


def refused(folder: Path, *options: str, ranks: int = 1) -> str:
    """What a job says that must end with an error of graphopt (exit code 1), without a traceback."""
    job = Job(folder, *options, ranks=ranks)
    codes = job.wait()
    text = job.output(codes.index(1)) if 1 in codes else job.output()
    assert 1 in codes, text
    assert "Traceback" not in text, text
    return text


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, logs of the jobs apart: to see that nothing was touched."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*"))
            if p.is_file() and not p.name.startswith("output-")}


def lines(folder: Path) -> Sequence[str]:
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    serve()
