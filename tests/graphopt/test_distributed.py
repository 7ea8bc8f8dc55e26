"""DDP in both wrap orders and FSDP2, per block and whole: two processes (gloo, CPU) train as one process does.

One launch runs every way (distributed_worker.py) and writes what happened; the tests read it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("distributed_worker.py")
DDP = ["ddp(compile)", "ddp(in place)", "compile(ddp)"]
WHOLE = ["fsdp whole, before", "fsdp whole, after"]
PER_BLOCK = ["fsdp per block, before", "fsdp per block, after"]
BLOCKS = ["fsdp per block, blocks", "fsdp whole, blocks"]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("distributed") / "found.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("way", [*DDP, "compile(ddp), buckets", *WHOLE, *PER_BLOCK, *BLOCKS])
def test_gradients_are_those_of_one_process(found: dict, way: str) -> None:
    assert found[way]["gap"] <= 1e-5
    assert (found[way]["modulate"], found[way]["gate"]) == (4, 4)
    assert found[way]["rejects"] == []


@pytest.mark.parametrize("way", [*DDP, *WHOLE])
def test_one_graph_fuses_across_blocks(found: dict, way: str) -> None:
    assert (found[way]["graphs"], found[way]["forward_kernels"]) == (1, 5)
    assert found[way]["missed"] == []


def test_graphs_cut_at_buckets(found: dict) -> None:
    """torch's DDPOptimizer hands over one graph per bucket; nothing is fused across the cut."""
    way = found["compile(ddp), buckets"]
    assert (way["graphs"], way["forward_kernels"], way["missed"]) == (2, 6, [])


@pytest.mark.parametrize("way", BLOCKS)
def test_blocks_compiled_one_by_one(found: dict, way: str) -> None:
    assert (found[way]["graphs"], found[way]["forward_kernels"]) == (2, 6)
    assert found[way]["missed"] == []


@pytest.mark.parametrize("way", PER_BLOCK)
def test_the_hooks_of_fsdp_skip_the_frame_above_the_blocks(found: dict, way: str) -> None:
    """Each block is still compiled, with plain parameters inside; `check` names the frame that was not."""
    assert (found[way]["graphs"], found[way]["forward_kernels"]) == (2, 6)
    (lost,) = found[way]["missed"]
    assert lost.startswith("skipped: forward (")
    assert "blocks.py" in lost


def test_operands_that_stay_dtensors(found: dict) -> None:
    assert found["dtensor"]["gap"] == 0
    assert (found["dtensor"]["modulate"], found["dtensor"]["gate"]) == (0, 0)
    assert found["dtensor"]["rejects"] == ["l_x_ is a DTensor: a fused operator has no sharding rule for it"]
