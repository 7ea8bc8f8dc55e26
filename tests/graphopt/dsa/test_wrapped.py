"""A converted model under FSDP2 and DDP in two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("wrapped")
    worker = Path(__file__).with_name("fsdp_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(worker), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((out / "dsa_fsdp.json").read_text())
    return {"machine": result["machine"]} | {row["way"]: row for row in result["rows"]}


@pytest.mark.parametrize(("way", "limit"), [
    ("checkpointed", 1e-5), ("per block", 1e-5), ("ddp", 1e-5), ("mixed", 0.1), ("bf16", 0.15), ("wan", 1e-5), ("hunyuan", 1e-5),
    ("cogvideox", 1e-5)])
def test_gradients_are_those_of_one_process(found: dict, way: str, limit: float) -> None:
    """Those in bf16 against fp32 gradients.  Two GPUs add in another order: 7e-4 at most was seen on H200s, with TF32.
    The models compute in bf16 there."""
    if not found["machine"].startswith("cpu"):
        limit = 0.15 if way in ("wan", "hunyuan", "cogvideox") else max(limit, 2e-3)
    assert found[way]["all"] <= limit
    assert found[way]["heads"] <= limit
