"""Checkpoints, weights and metrics of a training job: whole or absent, and refused where they do not belong."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import graphopt
from graphopt.errors import CheckpointError, ConfigError
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.dataset import Samples

COST = CostFit.two_term(1e-3, 1e-5, 1e-8)


def job(width: int = 4, **about):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, opt, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()


def loader(m_mem: int = 64, ranks: int = 1) -> graphopt.PlanLoader:
    tokens = [8, 16, 8, 16, 24, 8] * 3
    plan = graphopt.plan_batches(Samples.of_tokens(tokens), COST, ranks=ranks, m_mem=m_mem, tau=2)
    return graphopt.PlanLoader(list(range(len(tokens))), plan)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Checkpoints of steps 2 and 3."""
    model, opt = job()
    store = graphopt.Checkpoints(tmp_path / "c", about={"seed": 0})
    for step in (1, 2, 3):
        train(model, opt, step - 1, step)
        store.save(step, model, opt, loader(), {"note": step})
    return tmp_path / "c"


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_going_on_is_never_having_stopped(saved: Path) -> None:
    straight, opt = job()
    train(straight, opt, 0, 5)
    torch.manual_seed(7)
    model, opt = job()
    torch.nn.init.zeros_(model[0].weight)
    store = graphopt.Checkpoints(saved, about={"seed": 0})
    assert store.restore(model, opt, loader()) == 3
    assert store.state == {"note": 3}
    train(model, opt, 3, 5)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), straight.parameters()))


def test_the_newest_stay(saved: Path) -> None:
    assert sorted(p.name for p in saved.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_first_start(tmp_path: Path) -> None:
    store = graphopt.Checkpoints(tmp_path / "none")
    assert store.restore(*job(), resume=True) == 0
    assert store.restore(*job(), resume=False) == 0
    assert not (tmp_path / "none").exists()


def test_a_run_is_not_started_over(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="holds a run of 3 steps(.|\n)*--resume"):
        graphopt.Checkpoints(saved).restore(*job(), resume=False)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGE = {
    "data cut short": (lambda p: cut(p / "__0_0.distcp"), "cut short: __0_0.distcp has [0-9]+ of [0-9]+ bytes"),
    "data missing": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "index missing": (lambda p: (p / ".metadata").unlink(), ".metadata is missing"),
    "state cut short": (lambda p: cut(p / "state.json"), "state.json cannot be read"),
    "state missing": (lambda p: (p / "state.json").unlink(), "state.json cannot be read"),
    "state of another kind": (lambda p: (p / "state.json").write_text("[]"), "state.json cannot be read"),
    "newer version": (lambda p: (p / "state.json").write_text((p / "state.json").read_text().replace('"version": 1', '"version": 9')),
                      "version 9"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_before_anything_is_loaded(saved: Path, damage: str) -> None:
    spoil, message = DAMAGE[damage]
    spoil(saved / "step-00000003")
    before, (model, opt) = files(saved), job()
    weights = [p.clone() for p in model.parameters()]
    with pytest.raises(CheckpointError, match=message) as e:
        graphopt.Checkpoints(saved, about={"seed": 0}).restore(model, opt, loader())
    assert "step-00000002" in str(e.value) or "newer" in damage
    assert files(saved) == before
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), weights))
    shutil.rmtree(saved / "step-00000003")  # the remedy
    assert graphopt.Checkpoints(saved, about={"seed": 0}).restore(model, opt, loader()) == 2


@pytest.mark.parametrize(("change", "message"), [
    ({"width": 5}, r"another model: 1 of 4 tensors differ, the first is 0.weight: \(8, 4\) in the checkpoint, \(8, 5\) in the model"),
    ({"about": {"seed": 1}}, "another seed: 0, now 1"),
    ({"about": {}}, "another seed: 0, now None"),
    ({"about": {"seed": 0, "lora": 4}}, "another lora: None, now 4"),
    ({"m_mem": 32}, "another plan"),
    ({"ranks": 2}, "another number of processes: 1, now 2(.|\n)*replan=True"),
])
def test_another_job_is_refused(saved: Path, change: dict, message: str) -> None:
    before = files(saved)
    store = graphopt.Checkpoints(saved, about=change.get("about", {"seed": 0}))
    given = loader(change.get("m_mem", 64), change.get("ranks", 1))
    with pytest.raises(CheckpointError, match=message):
        store.restore(*job(change.get("width", 4)), given)
    assert files(saved) == before


def test_a_full_disk_keeps_the_last_one(saved: Path, monkeypatch) -> None:
    before, (model, opt) = files(saved), job()
    real = dcp.filesystem.FileSystem.create_stream

    def full(self, path, mode):
        if mode == "wb" and "distcp" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(self, path, mode)

    monkeypatch.setattr(dcp.filesystem.FileSystem, "create_stream", full)
    with pytest.raises(CheckpointError, match="step 4 could not be written(.|\n)*the last complete one is step-00000003"):
        graphopt.Checkpoints(saved, about={"seed": 0}).save(4, model, opt, None)
    assert files(saved) == before


def test_ctrl_c_while_saving_is_ctrl_c(saved: Path, monkeypatch) -> None:
    """torch hands it over as one of a rank's failures."""
    before, (model, opt) = files(saved), job()
    monkeypatch.setattr(dcp.filesystem.FileSystem, "create_stream", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        graphopt.Checkpoints(saved, about={"seed": 0}).save(4, model, opt, None)
    assert files(saved) == before


def test_state_that_is_no_json_is_refused_before_writing(saved: Path) -> None:
    before = files(saved)
    with pytest.raises(TypeError):
        graphopt.Checkpoints(saved).save(4, *job(), None, {"x": torch.zeros(1)})
    assert files(saved) == before


def test_leftovers_of_a_killed_save_are_removed_by_the_next(saved: Path) -> None:
    for name in (".part-9", ".old-step-00000001"):
        (saved / name).mkdir()
        (saved / name / "x").write_text("half")
    graphopt.Checkpoints(saved, about={"seed": 0}).save(4, *job(), None)
    assert sorted(p.name for p in saved.iterdir()) == ["step-00000003", "step-00000004"]


def test_the_same_step_again_replaces_it(saved: Path) -> None:
    model, opt = job()
    torch.nn.init.ones_(model[0].weight)
    graphopt.Checkpoints(saved, about={"seed": 0}).save(3, model, opt, loader())
    other, opt = job()
    assert graphopt.Checkpoints(saved, about={"seed": 0}).restore(other, opt, loader()) == 3
    assert bool((other[0].weight == 1).all())


def test_keep_must_keep_something() -> None:
    with pytest.raises(ConfigError, match="keep"):
        graphopt.Checkpoints("x", keep=0)


def test_weights_are_whole_or_absent(tmp_path: Path, monkeypatch) -> None:
    model, _ = job()
    path = graphopt.save_weights(model, tmp_path / "w")
    assert load_file(path).keys() == model.state_dict().keys()
    before = files(tmp_path)
    import safetensors.torch

    def full(tensors, path, metadata=None):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        graphopt.save_weights(model, tmp_path / "w")
    assert files(tmp_path) == before
    with pytest.raises(ConfigError, match="no adapters"):
        graphopt.save_weights(model, tmp_path / "w", adapter=True)


def test_metrics_hold_every_step_once(tmp_path: Path) -> None:
    with graphopt.MetricsLog(tmp_path, tensorboard=False) as log:
        for step in range(5):
            log.write(step, loss=float(step))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 5, "lo')  # killed while writing
    with graphopt.MetricsLog(tmp_path, 3, total=5, tensorboard=False) as log:
        log.write(3, loss=33.0)
    assert [json.loads(x) for x in path.read_text().splitlines()] == [
        {"step": 0, "loss": 0.0}, {"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 33.0}]
    graphopt.MetricsLog(tmp_path / "other", enabled=False).write(0, loss=1.0)
    assert not (tmp_path / "other").exists()


def test_noise_depends_on_the_sample_and_the_epoch_alone() -> None:
    one, *_ = (mb for _, mb in loader(ranks=1))
    draws = {row: torch.randn(2, generator=g).tolist() for row, g in zip(one.samples, one.generators(0))}
    again = {row: torch.randn(2, generator=g).tolist() for row, g in zip(one.samples, one.generators(0))}
    assert draws == again
    assert len({tuple(x) for x in draws.values()}) == len(one.samples)
    import dataclasses

    for other in (dataclasses.replace(one, epoch=1).generators(0), one.generators(1)):
        assert torch.randn(2, generator=other[0]).tolist() != draws[one.samples[0]]


def test_adapters_with_a_scale_come_back_through_diffusers(tmp_path: Path) -> None:
    """lora_alpha != rank: the file says so, and the loaded model computes the same."""
    from diffusers import WanTransformer3DModel
    from peft import LoraConfig

    size = dict(num_attention_heads=2, attention_head_dim=24, ffn_dim=96, num_layers=2, in_channels=4, out_channels=4, text_dim=16,
                freq_dim=32)
    model = WanTransformer3DModel(**size)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k"]))
    for name, p in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p)
    file = graphopt.save_weights(model, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [file.name] == ["pytorch_lora_weights.safetensors"]
    other = WanTransformer3DModel(**size)
    other.load_state_dict({k.replace(".base_layer", ""): v for k, v in model.state_dict().items() if "lora_" not in k})
    other.load_lora_adapter(str(tmp_path), prefix="transformer", weight_name=file.name)
    inputs = dict(hidden_states=torch.randn(1, 4, 1, 8, 8), timestep=torch.tensor([3]), encoder_hidden_states=torch.randn(1, 4, 16),
                  return_dict=False)
    assert torch.equal(model(**inputs)[0], other(**inputs)[0])
