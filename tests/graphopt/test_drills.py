"""Failure drills: killed at random moments, disturbed caches, Ctrl-C.  The table of docs/drills.md names them.

A few kills each in CI; `--nightly` kills twenty times.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from drill_worker import SHAPES, samples
from example_jobs import COMMAND, WORKER, Job, files, finished, lines

import graphopt
from graphopt.codegen import adamw_cpp
from graphopt.schedule.bench import Runs
from graphopt.schedule.plan import Plan

TWENTY = pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.nightly)])


def killed_often(kills: int, start: Callable[[], Job], check: Callable[[], None], longest: float) -> None:
    """Start and kill a job `kills` times, `check` after each; then let it finish.

    Moments are random over `longest` seconds (doubled as long as jobs outlive them, halved where they end first).
    """
    rng, died = random.Random(kills), 0
    while died < kills:
        job = start()
        end = time.monotonic() + rng.uniform(0, longest)
        while time.monotonic() < end and job.running():
            time.sleep(0.002)
        if job.running():
            died += 1
        else:
            assert list(job.codes.values()) == [0], job.output()
            longest *= 0.7
        job.kill()
        check()
    job = start()
    assert job.wait() == [0], job.output()
    check()


@TWENTY
def test_a_sweep_killed_is_resumed_where_it_stopped(tmp_path: Path, kills: int) -> None:
    path = tmp_path / "runs.json"

    def check() -> None:
        if path.exists():
            rows = Runs.load(path).rows
            assert len({tuple(r[d] for d in "BTHWL") for r in rows}) == len(rows)

    killed_often(kills, lambda: Job(tmp_path, "sweep", str(tmp_path), run=WORKER), check, longest=0.6)
    runs = Runs.load(path)
    assert runs.complete
    assert len(runs.rows) == len(SHAPES)
    often = Counter((tmp_path / "measured.txt").read_text().splitlines())
    assert sum(often.values()) <= 2 * len(SHAPES) + 2 * (kills + 1)  # what was measured is not measured again


@TWENTY
def test_planning_killed_leaves_a_whole_plan_or_none(tmp_path: Path, kills: int) -> None:
    straight = tmp_path / "straight"
    straight.mkdir()
    assert Job(straight, "plan", str(straight), run=WORKER).wait() == [0]
    want = files(straight / "plan")

    def check() -> None:
        if (tmp_path / "plan").exists():
            assert files(tmp_path / "plan") == want
            assert Plan.load(tmp_path / "plan").hash == Plan.load(straight / "plan").hash

    killed_often(kills, lambda: Job(tmp_path, "plan", str(tmp_path), run=WORKER), check, longest=1.0)
    assert files(tmp_path / "plan") == want
    assert len(samples()) == 60_000


@TWENTY
def test_emitting_kernels_killed_leaves_whole_files(tmp_path: Path, kills: int) -> None:
    def check() -> None:
        for path in (tmp_path / "kernels").glob("*.py"):
            compile(path.read_text(), str(path), "exec")
            assert path.stem.split("_")[-1] == __import__("hashlib").sha256(path.read_bytes()).hexdigest()[:12]
        for path in tmp_path.glob("*.so"):
            assert adamw_cpp._whole(path.read_bytes())

    environment = {"GRAPHOPT_CACHE_DIR": str(tmp_path)}
    killed_often(kills, lambda: Job(tmp_path, "kernels", str(tmp_path), run=WORKER, environment=environment), check, longest=1.5)
    assert len(list((tmp_path / "kernels").glob("*.py"))) >= 6
    assert len(list(tmp_path.glob("*.so"))) == 1


@pytest.mark.nightly
def test_a_compile_killed_twenty_times_compiles(tmp_path: Path) -> None:
    """Inductor's caches are its own; ours hold nothing half-written, and the gradient is the same."""
    straight = tmp_path / "straight"
    straight.mkdir()
    caches = lambda folder: {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "GRAPHOPT_CACHE_DIR": str(folder)}
    assert Job(straight, "compile", str(straight), run=WORKER, environment=caches(straight)).wait(600) == [0]
    killed_often(20, lambda: Job(tmp_path, "compile", str(tmp_path), run=WORKER, environment=caches(tmp_path)), lambda: None, 30)
    assert (tmp_path / "norm.txt").read_text() == (straight / "norm.txt").read_text()


def trained(run: Path) -> dict[str, torch.Tensor]:
    """Weights of a finished run; a streamed one has several files."""
    return {k: x for path in (run / "transformer").glob("*.safetensors") for k, x in load_file(path).items()}


EAGER, STREAMED = ("--backend", "eager"), ("--stream", "--compiler", "eager")


@pytest.mark.parametrize(("how", "kills", "steps", "longest"), [
    pytest.param(EAGER, 3, 8, 2.0, id="eager-3"), pytest.param(STREAMED, 2, 5, 8.0, id="streamed-2"),
    pytest.param(EAGER, 20, 40, 2.0, id="eager-20", marks=pytest.mark.nightly),
    pytest.param(STREAMED, 20, 40, 20.0, id="streamed-20", marks=pytest.mark.nightly),
    pytest.param((*STREAMED, "--bf16", "--lora", "2"), 5, 12, 15.0, id="streamed-lora-5", marks=pytest.mark.nightly)])
def test_training_killed_at_any_moment_is_training_uninterrupted(
        tmp_path: Path, how: tuple[str, ...], kills: int, steps: int, longest: float) -> None:
    """Checkpoints at every step, so that most kills fall into one."""
    options = ("--data", str(tmp_path / "data"), "--make-data", "16", "--steps", str(steps), "--save-every", "1", *how)
    finished(tmp_path / "straight", *options)
    run = tmp_path / "run"

    def check() -> None:
        for folder in (run / "checkpoints").glob("step-*"):
            state = json.loads((folder / "state.json").read_text())
            assert {p.name: p.stat().st_size for p in folder.iterdir() if p.name != "state.json"} == state["files"]

    def start() -> Job:
        if (run / "transformer").exists():  # it finished: once more, from the middle
            shutil.rmtree(run)
        return Job(run, *options, "--resume")

    killed_often(kills, start, check, longest)
    if not (run / "transformer").exists():
        finished(run, *options, "--resume")
    a, b = trained(tmp_path / "straight"), trained(run)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)
    losses = [[json.loads(x)["loss"] for x in lines(f)] for f in (tmp_path / "straight", run)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == steps
    assert not list((run / "checkpoints").glob(".*"))


# ---- caches: the AdamW library here, generated kernels in tests/codegen/test_store.py


@pytest.fixture
def library(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("GRAPHOPT_CACHE_DIR", str(tmp_path / "cache"))
    return adamw_cpp.build("portable")


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None])
def test_a_corrupt_library_is_compiled_again(library: Path, damage: bytes | None, caplog) -> None:
    whole = library.read_bytes()
    spoilt = whole[:-5000] + b"\0" * 4000 + whole[-1000:]  # of the right length
    library.write_bytes(spoilt if damage is None else damage)
    assert adamw_cpp.build("portable") == library
    assert library.read_bytes() == whole
    assert "corrupt" in caplog.text
    adamw_cpp.library("portable")


def test_a_library_folder_that_cannot_be_written(tmp_path: Path, monkeypatch, caplog) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("GRAPHOPT_CACHE_DIR", str(tmp_path / "file"))
    assert adamw_cpp.library("portable")
    assert "cannot be used" in caplog.text
    if os.geteuid():
        (tmp_path / "locked").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
        monkeypatch.setenv("GRAPHOPT_CACHE_DIR", str(tmp_path / "locked"))
        assert adamw_cpp.library("portable")


def test_eight_jobs_at_once_share_a_cache(tmp_path: Path) -> None:
    environment = {"GRAPHOPT_CACHE_DIR": str(tmp_path / "cache")}
    jobs = [Job(tmp_path / str(i), "kernels", str(tmp_path), run=WORKER, environment=environment) for i in range(8)]
    assert [job.wait() for job in jobs] == [[0]] * 8
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.name.startswith(".")]


# ---- Ctrl-C


def interrupted(job: Job, ready: Callable[[], bool]) -> str:
    """Send SIGINT once `ready`; what the job printed.  Exit code 130, within half a minute."""
    end = time.monotonic() + 120
    while not ready():
        assert job.running(), job.output()
        assert time.monotonic() < end, job.output()
        time.sleep(0.01)
    job.interrupt()
    code = job.wait(30)[0]
    # interrupted inside exec() of a string, Python ends as if by the signal itself; a shell says 130 to both
    assert code in (130, -signal.SIGINT), job.output()
    assert "Traceback" not in job.output(), job.output()
    return job.output()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"tokens": torch.randint(1, 40, (1_000_000,)).numpy() * 16}), tmp_path / "tokens.parquet")
    graphopt.CostFit.two_term(1e-3, 1e-5, 1e-8, p=1.5, m_comp=1e5).save(tmp_path / "fit.json")
    return tmp_path


def test_ctrl_c_while_simulating(tokens: Path) -> None:
    arguments = ("simulate", "--manifest", str(tokens / "tokens.parquet"), "--fit", str(tokens / "fit.json"), "--ranks", "8",
                 "--m-mem", "4096", "--out", str(tokens / "out.json"))
    job, begun = Job(tokens, *arguments, run=COMMAND), time.monotonic()
    interrupted(job, lambda: time.monotonic() > begun + 3)
    assert not (tokens / "out.json").exists()


def test_ctrl_c_while_planning(tokens: Path) -> None:
    arguments = ("plan", "--manifest", str(tokens / "tokens.parquet"), "--fit", str(tokens / "fit.json"), "--ranks", "8", "--m-mem", "4096",
                 "--out", str(tokens / "plan"))
    job = Job(tokens, *arguments, run=COMMAND)
    interrupted(job, lambda: any(p.name.startswith(".plan.") for p in tokens.iterdir()) or "plan" in job.output())
    assert not (tokens / "plan").exists()
    assert not [p for p in tokens.iterdir() if p.name.startswith(".plan")]


def test_ctrl_c_while_measuring_keeps_the_runs(tmp_path: Path) -> None:
    runs = tmp_path / "runs.json"
    arguments = ("fit", "drill_worker:slow_step", "--tokens", "256,512,1024,2048", "--runs", str(runs), "--out", str(tmp_path / "fit.json"))
    interrupted(Job(tmp_path, *arguments, run=COMMAND), lambda: runs.exists() and len(Runs.load(runs).rows) >= 2)
    assert 2 <= len(Runs.load(runs).rows) < 8
    assert not Runs.load(runs).complete
    assert not (tmp_path / "fit.json").exists()


def test_ctrl_c_while_training_keeps_the_checkpoints(tmp_path: Path) -> None:
    options = ("--data", str(tmp_path / "data"), "--make-data", "16", "--steps", "100000", "--save-every", "2", "--backend", "eager")
    job = Job(tmp_path, *options)
    interrupted(job, lambda: len(lines(tmp_path)) > 5)
    steps = [int(p.name[5:]) for p in (tmp_path / "checkpoints").glob("step-*")]
    assert max(steps) >= 4
    assert not list((tmp_path / "checkpoints").glob(".part*"))
    finished(tmp_path, *options[:4], "--steps", str(max(steps) + 1), "--backend", "eager", "--resume")


def test_ctrl_c_while_compiling_kernels_prints_those_done(tmp_path: Path) -> None:
    job = Job(tmp_path, "kernels", "compile", "--widths", "256,512,768,1024,1280,1536,2048,3072,5120", "--target",
              "sm80,sm90,sm100", "--jobs", "1", "--json", str(tmp_path / "table.json"), run=COMMAND)
    text = interrupted(job, lambda: "compiling " in job.output())
    assert "kernels were not compiled" in text
    assert isinstance(json.loads((tmp_path / "table.json").read_text()), list)


# (`doctor` takes 0.6 s in a process that has imported torch)
@pytest.mark.parametrize(("arguments", "seconds"), [
    (("demo", "--compiler", "aot_eager"), 0.7), (("doctor",), 0.2),
    pytest.param(("bench", "match"), 0.7, marks=pytest.mark.nightly)])
def test_ctrl_c_in_other_commands(tmp_path: Path, arguments: tuple[str, ...], seconds: float) -> None:
    job, begun = Job(tmp_path, *arguments, run=COMMAND), time.monotonic()
    interrupted(job, lambda: time.monotonic() > begun + seconds)
