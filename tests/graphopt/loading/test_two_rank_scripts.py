"""The scripts that run on several GPUs, on two processes over gloo with tiny models."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def torchrun(script, *options, seconds=300):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
               "--rdzv-endpoint=localhost:0", str(BENCHMARKS / script), *options]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env)


def rows(folder):
    return json.loads((folder / "schedule.json").read_text())["rows"]


def test_one_against_three_microbatches_of_a_rewritten_wan_block(tmp_path):
    done = torchrun("schedule_grads.py", "--quick", "--small=64", "--text-dim=16", "--batches=2", "--cases=fsdp2:fp32:1,3",
                    "--system=rewritten", "--out", str(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = rows(tmp_path)
    assert (row["mode"], row["data"], row["ranks"]) == ("fsdp2 fp32", "1 and 3 microbatches", 2)
    assert 0 < row["error"] <= 1e-6


def test_a_job_does_not_wait_for_ever(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    wait_for = importlib.import_module("schedule_step").wait_for
    (tmp_path / "there").touch()
    wait_for([tmp_path / "there"], 0)
    with pytest.raises(SystemExit, match="missing not there after 0 s.*without --after"):
        wait_for([tmp_path / "there", tmp_path / "missing"], 0.3)


@pytest.mark.nightly
def test_every_policy_in_a_real_loop(tmp_path):
    done = torchrun("schedule_step.py", "--machine=here", "--layers=1", "--width=128", "--text-dim=32", "--shrink=12",
                    "--system=aot_eager", "--budget=90", "--shapes=3", "--sizes=2", "--steps=6,3", "--replay=4", "--tau=1.3,2",
                    "--workers=1", "--plan-ranks=4", "--speed-calls=3", "--speeds", "--out", str(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path)
    assert {(r["tau"], len(r["step_s"])) for r in found if r["mode"] == "measured"} == {(1.3, 6), (2, 3)}
    measured = {r["policy"]: r for r in found if r["mode"] == "measured" and r["tau"] == 1.3}
    assert set(measured) == {"step_balanced", "equal_token", "adaptive_load"}
    for r in measured.values():
        assert (r["oom"], r["ranks"]) == (0, 2)
        assert 0 < r["limit_fraction"] <= 1.05
        assert len(r["step_s"]) == len(r["predicted_s"]) == len(r["host_ahead_s"]) == 6
        assert [len(x) for x in r["busy_s"]] == [4, 4]
        assert r["graphs"] <= 4
        assert {"gain_over_equal_token", "zero_bubble_gain", "zero_bubble_gain_steps", "share_interval"} <= set(r)
        assert sum(n for *_, n, _ in r["microbatch_s"]) >= 8  # of both ranks, at least one a step
        assert r["gain_interval"][0] <= r["gain_over_equal_token"] <= r["gain_interval"][1]
    assert measured["equal_token"]["gain_over_equal_token"] == 0
    # the same global batch over the whole plan, to the last samples of the epoch, if it is one microbatch or more
    batch = measured["step_balanced"]["plan_tokens_per_step"]
    for r in (measured["equal_token"], measured["adaptive_load"]):
        assert abs(r["plan_tokens_per_step"] / batch - 1) < 0.02 or r["microbatches"] == 1
    assert {(r["policy"], r["tau"]) for r in found if r["ranks"] == 4} == {(p, t) for p in measured for t in (1.3, 2)}
    again = [sys.executable, str(BENCHMARKS / "schedule_step.py"), "--plans-from", str(tmp_path / "schedule.json"), "--plan-ranks=2"]
    subprocess.run(again, check=True)
    assert {r["policy"] for r in rows(tmp_path) if r["mode"] == "simulated with the fit" and r["ranks"] == 2} == set(measured)


@pytest.mark.nightly
def test_recomputed_blocks_are_compiled_once(tmp_path):
    done = torchrun("schedule_step.py", "--machine=here", "--layers=1", "--width=128", "--text-dim=32", "--shrink=6",
                    "--system=aot_eager", "--checkpoint", "--cap=32760", "--budget=60", "--shapes=3", "--sizes=2", "--steps=3",
                    "--workers=1", "--plan-ranks=", "--speed-calls=3", "--policies=step_balanced", "--out", str(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    fitted, measured = rows(tmp_path)
    assert (fitted["mode"], measured["policy"], measured["checkpoint"]) == ("fit", "step_balanced", True)
    assert measured["graphs"] == 2  # B = 1, and more
