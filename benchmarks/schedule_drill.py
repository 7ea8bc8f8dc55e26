"""One rank of two dies in the middle of a step, the job resumes: `python benchmarks/schedule_drill.py`.

Runs examples/train_with_plan.py (FSDP2, unequal counts of microbatches) on two processes: NCCL where there are two
GPUs, else gloo.  Once under torchrun, whose agent ends the other rank; once without an agent, where the other rank sees
it at the next collective, within the process group's timeout.  Measured: seconds from the death until the last process
has ended, and whether the resumed job consumed the same rows in the same steps and ended with the same weights as a job
that nothing happened to.

Writes rows of check `drill` to benchmarks/results/<machine>/schedule.json.  Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

import _results  # noqa: E402

import schedule  # noqa: E402

EXAMPLE = ROOT / "examples" / "train_with_plan.py"
DIED, STEP = 17, "4"


class Job:
    """Two processes of the example, under torchrun or alone."""

    def __init__(self, folder: Path, *options: str, agent: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = (folder / "log.txt").open("a+")
        more = [str(EXAMPLE), "--out", str(folder), "--epochs", "1", *options]
        if agent:
            commands = [[sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
                         "--rdzv-endpoint=localhost:0", *more]]  # fmt: skip
            places: list[dict[str, str]] = [{}]
        else:
            commands, places = [[sys.executable, *more]] * 2, _places()
        self.ranks = [
            subprocess.Popen(c, stdout=self.log, stderr=self.log, env={**os.environ, "OMP_NUM_THREADS": "1", **p})
            for c, p in zip(commands, places)
        ]

    def wait(self, seconds: float) -> tuple[list[int], float]:
        """(exit codes, seconds from the last rank's last microbatch to the last process's end)."""
        end = time.time() + seconds
        try:
            codes = [p.wait(max(0.1, end - time.time())) for p in self.ranks]
        finally:
            ended = time.time()
            for p in self.ranks:
                p.kill()
        return codes, ended - (self.folder / "rank-1.jsonl").stat().st_mtime

    @property
    def output(self) -> str:
        """What the processes printed."""
        self.log.seek(0)
        return self.log.read()

    def weights(self) -> str:
        """The example's last line."""
        return next(x for x in reversed(self.output.splitlines()) if x.startswith("sum of all weights"))

    def consumed(self) -> dict[tuple[int, ...], list[int]]:
        """{(rank, epoch, step, k): rows}; what ran twice must be the same."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(2):
            for line in (self.folder / f"rank-{rank}.jsonl").read_text().splitlines():
                *place, rows = json.loads(line)
                if found.setdefault((rank, *place), rows) != rows:
                    raise SystemExit(f"rank {rank}, {place}: {found[rank, *place]} and then {rows}")
        return found


def _places() -> list[dict[str, str]]:
    """Environment of each process without an agent."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return [{**common, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--machine", help="name of the results' folder, e.g. h200x2; made from the device by default")
    p.add_argument("--modes", default="torchrun,no agent")
    p.add_argument("--timeout", type=float, default=40, help="of the process group, seconds")
    p.add_argument("--out", type=Path)
    o = p.parse_args()
    if not EXAMPLE.exists():
        raise SystemExit(f"{EXAMPLE} is not there: the drill runs from a source tree")
    gpus = torch.cuda.device_count()
    machine = o.machine or _results.machine() + ("x2" if gpus > 1 else "")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        common = ("--timeout", str(o.timeout))
        straight = Job(top / "straight", *common)
        jobs = {m: Job(top / m, "--die-at", STEP, *common, agent=m == "torchrun") for m in o.modes.split(",")}
        with ThreadPoolExecutor() as pool:
            ends = {m: pool.submit(job.wait, 280) for m, job in jobs.items()}
            if straight.wait(280)[0] != [0]:
                raise SystemExit(straight.output)
        for mode, job in jobs.items():
            codes, seconds = ends[mode].result()
            died = job.output
            again = Job(top / mode, *common)
            resumed = again.wait(280)[0] == [0]
            row = {
                "check": "drill", "data": "a rank dies in step 4", "ranks": 2, "mode": mode, "simulated": False,
                "system": "nccl" if gpus > 1 else "gloo", "exit_codes": codes, "seconds_to_stop": seconds,
                "timeout_s": o.timeout, "resumed": resumed,
                "same_rows": resumed and again.consumed() == straight.consumed(),
                "same_weights": resumed and again.weights() == straight.weights(),
            }  # fmt: skip
            if not (resumed and row["same_rows"] and row["same_weights"] and seconds < 60 and 0 not in codes):
                failed = True
                print(died[-3000:], again.output[-3000:], straight.weights(), flush=True)
            print(row, flush=True)
            schedule.save([row], machine, folder=o.out)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
