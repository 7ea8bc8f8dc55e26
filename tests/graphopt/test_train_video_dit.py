"""examples/train_video_dit.py, as people run it: one process, several, under accelerate, killed and resumed, bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

sys.path.insert(0, str(Path(__file__).parent))
from example_jobs import EXAMPLE, Job, files, finished, lines, refused

EAGER = ("--backend", "eager")
COMPILED = ("--compiler", "eager")  # captured and rewritten by graphopt, compiled by nothing


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Samples and a finished eager run of six steps."""
    folder = tmp_path_factory.mktemp("runs")
    finished(folder / "straight", "--make-data", "24", "--data", str(folder / "data"), "--steps", "6", "--save-every", "2", *EAGER)
    return folder / "data"


@pytest.fixture
def common(data) -> tuple[str, ...]:
    return ("--data", str(data), "--steps", "6", "--save-every", "2")


def losses(folder: Path) -> list[float]:
    steps = [json.loads(line) for line in lines(folder)]
    assert [s["step"] for s in steps] == list(range(6))
    return [s["loss"] for s in steps]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def close(a: list[float], b: list[float], tolerance: float) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= tolerance * abs(x) for x, y in zip(a, b))


def test_under_200_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 200


def test_one_process_leaves_what_diffusers_reads(data: Path) -> None:
    straight = data.parent / "straight"
    model = WanTransformer3DModel.from_pretrained(straight / "transformer")
    assert same(model.state_dict(), weights(straight))
    assert sorted(p.name for p in (straight / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    assert list((straight / "tensorboard").glob("events.*"))
    assert not list(straight.rglob("*.part*"))


@pytest.mark.parametrize("options", [COMPILED, pytest.param(("--compiler", "inductor"), marks=pytest.mark.nightly),
                                     ("--compiler", "eager", "--regions"),
                                     pytest.param(("--compiler", "aot_eager", "--checkpointing"), marks=pytest.mark.nightly)])
def test_compiled_by_graphopt_it_learns_the_same(data: Path, common, tmp_path: Path, options) -> None:
    job = finished(tmp_path, *common, *options)
    assert close(losses(data.parent / "straight"), losses(tmp_path), 1e-5)
    assert "10 modulate sites (10 rewritten), 8 gate sites (8 rewritten)" in job.output()  # images and video: two graphs


def test_killed_and_resumed_is_uninterrupted_bit_by_bit(data: Path, common, tmp_path: Path) -> None:
    job = Job(tmp_path, *common, *EAGER)
    job.kill_when(lambda: len(lines(tmp_path)) >= 4)
    assert not (tmp_path / "transformer").exists()
    job = finished(tmp_path, *common, *EAGER, "--resume")
    assert losses(data.parent / "straight") == losses(tmp_path)
    assert same(weights(data.parent / "straight"), weights(tmp_path))


def test_no_checkpoints_but_the_last(data: Path, tmp_path: Path) -> None:
    finished(tmp_path, "--data", str(data), "--steps", "2", "--save-every", "0", *EAGER)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_finished_run_resumed_has_nothing_to_do(data: Path, common, run: Path) -> None:
    before = files(run)
    finished(run, *common, *COMPILED, "--resume")
    after = files(run)
    assert {k: v for k, v in after.items() if "tensorboard" not in k} == {k: v for k, v in before.items() if "tensorboard" not in k}


ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "true"}  # what `accelerate launch` sets


@pytest.mark.parametrize(("environment", "how"), [
    ({}, EAGER), (ACCELERATE, EAGER), pytest.param(ACCELERATE, COMPILED, marks=pytest.mark.nightly)])
def test_two_processes_learn_the_same(data: Path, tmp_path: Path, environment: dict, how: tuple[str, ...]) -> None:
    """FSDP2, or accelerate's DDP, over gloo; every step the whole epoch, so that one process has the same steps."""
    options = ("--data", str(data), "--steps", "6", "--tau", "16")
    finished(tmp_path / "two", *options, *how, ranks=2, environment=environment)
    finished(tmp_path / "one", *options, *EAGER)
    assert close(losses(tmp_path / "one"), losses(tmp_path / "two"), 1e-5)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all((one[k] - two[k]).abs().max() <= 1e-4 for k in one)  # of six steps of 1e-4 each
    config = json.loads((tmp_path / "two" / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "WanTransformer3DModel"


def test_under_autocast_it_learns_the_same_but_for_rounding(data: Path, common, tmp_path: Path) -> None:
    finished(tmp_path, *common, *COMPILED, "--bf16")
    assert close(losses(data.parent / "straight"), losses(tmp_path), 5e-3)
    assert losses(data.parent / "straight") != losses(tmp_path)


def test_sliding_attention_under_accelerate(data: Path, common, tmp_path: Path) -> None:
    window = ("--dsa", "1", "3", "3")
    finished(tmp_path / "plain", *common, *EAGER, *window)
    finished(tmp_path / "wrapped", *common, *COMPILED, *window, environment=ACCELERATE)
    assert close(losses(tmp_path / "plain"), losses(tmp_path / "wrapped"), 1e-5)
    assert weights(tmp_path / "plain").keys() == weights(tmp_path / "wrapped").keys()


def test_accelerate_wraps_what_was_compiled_before(data: Path, common, tmp_path: Path) -> None:
    job = finished(tmp_path, *common, *COMPILED, environment=ACCELERATE)
    assert close(losses(data.parent / "straight"), losses(tmp_path), 1e-5)
    assert "10 modulate sites (10 rewritten)" in job.output()
    assert weights(tmp_path).keys() == weights(data.parent / "straight").keys()


def test_lora_trains_adapters_under_stock_names(data: Path, common, tmp_path: Path) -> None:
    finished(tmp_path, *common, *EAGER, "--lora", "4")
    saved = load_file(tmp_path / "transformer" / "pytorch_lora_weights.safetensors")
    assert set(k.split(".lora_")[0] for k in saved) == {
        f"transformer.blocks.{b}.attn{a}.{p}" for b in range(2) for a in (1, 2) for p in ("to_q", "to_k", "to_v", "to_out.0")}
    assert all(saved[k].abs().sum() > 0 for k in saved)
    model = WanTransformer3DModel.from_pretrained(data.parent / "straight" / "transformer")
    model.load_lora_adapter(saved, prefix="transformer")
    assert sum("lora_" in n for n, _ in model.named_parameters()) == len(saved)
    kept = FileSystemReader(tmp_path / "checkpoints" / "step-00000006").read_metadata().state_dict_metadata
    assert kept
    assert all("lora_" in k or "param_groups" in k for k in kept)  # the frozen base is elsewhere


def test_dsa_trains_offset_heads_and_saves_them(data: Path, common, tmp_path: Path) -> None:
    import graphopt

    finished(tmp_path, *common, *EAGER, "--dsa", "1", "3", "3")
    saved = weights(tmp_path)
    heads = {k for k in saved if ".dsa." in k}
    assert heads
    assert saved.keys() - heads == weights(data.parent / "straight").keys()
    assert losses(tmp_path) != losses(data.parent / "straight")
    model = WanTransformer3DModel.from_config(WanTransformer3DModel.load_config(tmp_path / "transformer"))
    graphopt.dsa.convert(model, tmp_path / "transformer")
    model.load_state_dict(saved)
    finished(tmp_path / "compiled", *common, *COMPILED, "--dsa", "1", "3", "3")  # images and videos, each a graph
    assert close(losses(tmp_path), losses(tmp_path / "compiled"), 1e-5)
    finished(tmp_path / "lora", *common, *EAGER, "--dsa", "1", "3", "3", "--lora", "2")
    assert load_file(tmp_path / "lora" / "transformer" / "graphopt_dsa_heads.safetensors").keys() == heads


@pytest.mark.parametrize(("compiler", "environment"), [
    ("eager", {}), pytest.param("inductor", {}, marks=pytest.mark.nightly), pytest.param("eager", ACCELERATE, marks=pytest.mark.nightly)])
def test_streamed_it_learns_the_same(data: Path, common, tmp_path: Path, compiler: str, environment: dict) -> None:
    finished(tmp_path, *common, "--compiler", compiler, "--stream", environment=environment, seconds=600)
    assert close(losses(data.parent / "straight"), losses(tmp_path), 1e-5)
    index = json.loads((tmp_path / "transformer" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights(data.parent / "straight"))


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Path:
    """A finished run to spoil."""
    shutil.copytree(data.parent / "straight", tmp_path / "run")
    shutil.copy(data / "manifest.parquet", tmp_path / "run")
    return tmp_path / "run"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def another_plan(run: Path) -> None:
    import graphopt
    from graphopt.schedule.costmodel import CostFit

    graphopt.plan_batches(run / "manifest.parquet", CostFit.two_term(1e-3, 1e-5, 1e-9), ranks=1, m_mem=999, tau=3, out=run / "plan", overwrite=True)


BAD = {
    "no --resume": ((), None, "CheckpointError: the folder holds a run of 6 steps", "--resume"),
    "another model": (("--resume", "--lora", "2"), None, "CheckpointError: the run was started with another lora: None, now 2",
                      "another folder"),
    "another seed": (("--resume", "--seed", "3"), None, "another seed: 0, now 3", "give the same seed"),
    "cut short": (("--resume",), lambda run: cut(run / "checkpoints" / "step-00000006" / "__0_0.distcp"),
                  "the checkpoint is cut short: __0_0.distcp has", "remove it to go on from step-00000004"),
    "no index": (("--resume",), lambda run: (run / "checkpoints" / "step-00000006" / ".metadata").unlink(),
                 "the checkpoint is cut short: .metadata is missing", "step-00000004"),
    "state cut short": (("--resume",), lambda run: cut(run / "checkpoints" / "step-00000006" / "state.json"),
                        "state.json cannot be read", "step-00000004"),
    "another plan": (("--resume",), another_plan, "CheckpointError: the run was started with another plan", "same plan"),
    "plan cut short": (("--resume",), lambda run: cut(run / "plan" / "part-00000.parquet"), "PlanInfeasible", "part-00000.parquet"),
    "no manifest": (("--resume", "--data", "nowhere"), None, "metadata file does not exist", "nowhere"),
}


LATER = {"another model", "another seed", "no index", "state cut short"}  # in CI by test_checkpoint.py


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.nightly if c in LATER else ()) for c in BAD])
def test_bad_input_is_named_before_anything_is_overwritten(data: Path, run: Path, case: str) -> None:
    options, spoil, what, remedy = BAD[case]
    if spoil:
        spoil(run)
    before = files(run)
    text = refused(run, "--data", str(data), *EAGER, *options)
    assert what in text
    assert remedy in text
    assert files(run) == before


def test_another_world_is_refused_and_replanned_when_asked(data: Path, run: Path) -> None:
    before = files(run)
    text = refused(run, "--data", str(data), "--steps", "8", *EAGER, "--resume", ranks=2)
    assert "number of processes: 1, now 2" in text
    assert "--replan" in text
    assert files(run) == before
    finished(run, "--data", str(data), "--steps", "8", *EAGER, "--resume", "--replan", ranks=2)
    assert [json.loads(x)["step"] for x in lines(run)] == list(range(8))


def launched(*command: str, timeout: float = 400) -> str:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=timeout, check=False,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE))


def test_torchrun_stopped_and_resumed_is_uninterrupted_bit_by_bit(data: Path, common, tmp_path: Path) -> None:
    """FSDP2 on two processes over gloo, by the command line of docs/training_run.md."""
    finished(tmp_path / "straight", *common, *EAGER, ranks=2)
    options = ("--out", str(tmp_path / "stopped"), *common, *EAGER, "--resume")
    with subprocess.Popen([sys.executable, "-m", *TORCHRUN, *options], stderr=subprocess.PIPE, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"}) as first:
        end = time.monotonic() + 300
        while len(lines(tmp_path / "stopped")) < 3 and first.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        first.terminate()
        text = first.communicate(timeout=120)[1]
    assert len(lines(tmp_path / "stopped")) >= 3, text[-3000:]
    assert not (tmp_path / "stopped" / "transformer").exists()
    launched(*TORCHRUN, *options)
    assert losses(tmp_path / "straight") == losses(tmp_path / "stopped")
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "stopped"))


@pytest.mark.nightly
def test_torchrun_compiled(data: Path, common, tmp_path: Path) -> None:
    text = launched(*TORCHRUN, "--out", str(tmp_path), *common, "--compiler", "aot_eager")
    found = re.search(r"([0-9]+) modulate sites \(([0-9]+) rewritten\)", text)
    assert found, text  # FSDP2's hooks skip the frame above the blocks, and with it the last norm
    assert int(found[1]) == int(found[2]) >= 4
    assert weights(tmp_path).keys() == weights(data.parent / "straight").keys()


@pytest.mark.nightly
def test_accelerate_launch(data: Path, common, tmp_path: Path) -> None:
    """One process: for several on CPUs, accelerate wants MPI."""
    how = ("--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    text = launched("accelerate.commands.launch", *how, str(EXAMPLE), "--out", str(tmp_path), *common, "--compiler", "aot_eager")
    assert "10 modulate sites (10 rewritten)" in text
    assert weights(tmp_path).keys() == weights(data.parent / "straight").keys()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs"))])
def test_on_gpus_killed_and_resumed(tmp_path: Path, ranks: int) -> None:
    """Compiled by Inductor, bf16: as on a CPU, the resumed run has the bits of the uninterrupted one."""
    options = ("--data", str(tmp_path / "data"), "--make-data", "24", "--steps", "8", "--save-every", "2", "--tau", "8")
    finished(tmp_path / "straight", *options, ranks=ranks, seconds=600)
    job = Job(tmp_path / "killed", *options, ranks=ranks)
    job.kill_when(lambda: len(lines(tmp_path / "killed")) >= 5, seconds=600)
    finished(tmp_path / "killed", *options, "--resume", ranks=ranks, seconds=600)
    assert lines(tmp_path / "straight")[:3]
    assert [json.loads(x)["loss"] for x in lines(tmp_path / "straight")] == [json.loads(x)["loss"] for x in lines(tmp_path / "killed")]
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "killed"))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [
    ("--stream",), ("--layers", "2", "--dsa", "3", "7", "7"), ("--layers", "2"), ("--layers", "2", "--lora", "16"),
    ("--layers", "3", "--stream", "--dsa", "3", "7", "7"), ("--layers", "2", "--checkpointing")], ids=" ".join)
def test_on_a_gpu_at_the_width_of_wan_1_3b(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Streamed, all 30 layers are one compile; resident, each is compiled, which takes minutes."""
    job = finished(tmp_path, "--make-data", "8", "--size", "1.3b", "--steps", "3", *options, seconds=900)
    print(*lines(tmp_path), job.output()[-1500:], sep="\n")
    assert [json.loads(x)["step"] for x in lines(tmp_path)] == [0, 1, 2]
    assert all(json.loads(x)["loss"] < 4 for x in lines(tmp_path))


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")


@two_gpus
@pytest.mark.gpu
@pytest.mark.parametrize("accelerate", [False, True])
def test_two_gpus_learn_what_one_learns(tmp_path: Path, accelerate: bool) -> None:
    """FSDP2, or accelerate's DDP, over NCCL in fp32, compiled; every step the whole epoch of 24 samples."""
    options = ("--data", str(tmp_path / "data"), "--make-data", "24", "--steps", "6", "--tau", "16", "--no-bf16")
    finished(tmp_path / "one", *options, seconds=600)
    finished(tmp_path / "two", *options, ranks=2, environment={"ACCELERATE_MIXED_PRECISION": "no"} if accelerate else {},
             seconds=600)
    assert close(losses(tmp_path / "one"), losses(tmp_path / "two"), 1e-5)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all((one[k] - two[k]).abs().max() <= 1e-4 for k in one)


@two_gpus
@pytest.mark.gpu
@pytest.mark.parametrize("launcher", [
    ("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "bf16",
     "--dynamo_backend", "no", "--main_process_port", "29611")], ids=lambda x: x[0])
def test_launched_on_two_gpus_at_the_width_of_wan_1_3b(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """The command lines of docs/training_run.md: started, and gone on with to step 5 by a second start."""
    options = ("--out", str(tmp_path), "--make-data", "8", "--size", "1.3b", "--layers", "2", "--resume")
    launched(*launcher, str(EXAMPLE), *options, "--steps", "3", timeout=600)
    print(launched(*launcher, str(EXAMPLE), *options, "--steps", "5", timeout=600)[-1500:], *lines(tmp_path), sep="\n")
    assert [json.loads(x)["step"] for x in lines(tmp_path)] == [0, 1, 2, 3, 4]
    assert all(json.loads(x)["loss"] < 4 for x in lines(tmp_path))
    config = json.loads((tmp_path / "transformer" / "config.json").read_text())
    assert config["num_layers"] == 2
