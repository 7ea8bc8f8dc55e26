"""Jobs of two processes: one dies, the other stops with it, and the job resumes to the same weights; accelerate."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_with_plan.py"


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


@pytest.mark.nightly
def test_without_an_agent_the_other_rank_ends_with_an_error_too(tmp_path):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    ranks = []
    for r in range(2):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": "2",
               "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}  # fmt: skip
        command = [sys.executable, str(EXAMPLE), "--out", str(tmp_path), "--epochs", "1", "--die-at", "4"]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        ranks[1].communicate(timeout=240)
        died = time.monotonic()
        out, _ = ranks[0].communicate(timeout=60)  # within a minute
    finally:
        for p in ranks:
            p.kill()
    assert (ranks[1].returncode, time.monotonic() - died < 60) == (17, True)
    assert ranks[0].returncode != 0
    assert "Error" in out


ACCELERATE = """
import json, sys
import numpy as np, torch
from accelerate import Accelerator
import graphopt
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.dataset import Samples

tokens = np.random.default_rng(0).choice([16, 64, 240], 60)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, row):
        return torch.randn(int(tokens[row]), 8, generator=torch.Generator().manual_seed(row)), row


torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 8)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
cost = CostFit.two_term(1e-3, 1e-5, 1e-8)
plan = graphopt.plan_batches(Samples.of_tokens(tokens), cost, ranks=accelerator.num_processes, m_mem=512, tau=3)
loader = graphopt.PlanLoader(Data(), plan, num_workers=1)
model, opt, same = accelerator.prepare(model, opt, loader)
assert same is loader
rows, counts = [], []
for (x, row), mb in loader:
    with graphopt.accumulate(model, mb):
        accelerator.backward((model(x) - x).square().mean(-1).sum() * mb.loss_scale)
    rows += row.tolist()
    counts.append(mb.K)
    if mb.last:
        opt.step()
        opt.zero_grad()
weights = torch.cat([p.flatten() for p in model.parameters()]).tolist()
json.dump([rows, counts, weights], open(f"{sys.argv[1]}/{accelerator.process_index}.json", "w"))
"""


@pytest.mark.nightly
def test_accelerate_runs_a_plan_with_unequal_counts(tmp_path):
    pytest.importorskip("accelerate")
    script = tmp_path / "train.py"
    script.write_text(ACCELERATE)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
               "--rdzv-endpoint=localhost:0", str(script), str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    (rows_a, counts_a, weights_a), (rows_b, counts_b, weights_b) = (
        json.loads((tmp_path / f"{r}.json").read_text()) for r in range(2)
    )
    assert sorted(rows_a + rows_b) == list(range(60))
    assert counts_a != counts_b
    assert weights_a == weights_b
