"""A job of two processes of which one dies: the other stops with it, and the job resumes to the same weights."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_with_plan.py"


def job(folder, *options):
    """torchrun with two ranks; (exit code, output, seconds)."""
    start = time.monotonic()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
               "--rdzv-endpoint=localhost:0", str(EXAMPLE), "--out", str(folder), "--epochs", "1", *options]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done.returncode, done.stdout + done.stderr, time.monotonic() - start


def consumed(folder):
    """{(rank, epoch, step, k): rows}; a microbatch that ran twice must have been the same."""
    found = {}
    for rank in range(2):
        for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines():
            epoch, step, k, rows = json.loads(line)
            assert found.setdefault((rank, epoch, step, k), rows) == rows
    return found


@pytest.mark.nightly
def test_one_rank_dies_and_the_job_resumes_exactly(tmp_path):
    code, straight, whole_s = job(tmp_path / "straight")
    assert code == 0, straight
    code, died, died_s = job(tmp_path / "killed", "--die-at", "4")
    assert code != 0
    assert died_s < whole_s + 60  # the other rank stops within a minute
    assert "exitcode  : 17" in died
    code, resumed, _ = job(tmp_path / "killed")
    assert code == 0, resumed
    assert consumed(tmp_path / "killed") == consumed(tmp_path / "straight")
    weights = [next(x for x in out.splitlines() if x.startswith("sum of all weights")) for out in (straight, resumed)]
    assert weights[0] == weights[1]
