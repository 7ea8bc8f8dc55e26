"""Checkpoints, copies, and the way back to the dense model."""

from __future__ import annotations

import copy
import json

import pytest
import tiny_video
import torch
from torch import nn

import graphopt
from graphopt.dsa import DSAConfig, convert, handle_of
from graphopt.errors import ConfigError

SELECT = "blocks.*.attn"


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, steps: int) -> list[float]:
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        x = tiny_video.latent()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_convert_train_save_load_resume_is_bitwise(tmp_path) -> None:
    torch.manual_seed(3)
    dense = tiny_video.TinyVideo(3)
    straight = copy.deepcopy(dense)
    handle = convert(straight, DSAConfig((1, 3, 3)), select=SELECT, keep_dense=(0,))
    optimizer = torch.optim.AdamW(handle.param_groups(1e-2, weight_decay=0.1))
    trained(straight, optimizer, 0, 10)
    torch.save({"model": straight.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    handle.save(tmp_path)
    want = trained(straight, optimizer, 1, 5)
    assert any(h.out_weight.any() for h in handle.layers.values())

    resumed = tiny_video.TinyVideo(3)
    again = convert(resumed, tmp_path)  # the configuration that was saved, layer by layer
    assert list(again.layers) == ["blocks.1.attn", "blocks.2.attn"]
    state = torch.load(tmp_path / "state.pt")
    assert resumed.load_state_dict(state["model"]) == nn.modules.module._IncompatibleKeys([], [])
    optimizer = torch.optim.AdamW(again.param_groups(1e-2, weight_decay=0.1))
    optimizer.load_state_dict(state["optimizer"])
    assert trained(resumed, optimizer, 1, 5) == want
    for (n, a), b in zip(straight.state_dict().items(), resumed.state_dict().values()):
        assert torch.equal(a, b), n


def test_new_keys_are_those_of_the_heads_and_a_dense_checkpoint_loads() -> None:
    dense = tiny_video.TinyVideo(2)
    before = dense.state_dict()
    model = tiny_video.TinyVideo(2)
    handle = convert(model, DSAConfig((1, 3, 3)), select=SELECT)
    new = set(model.state_dict()) - set(before)
    assert new == {f"blocks.{i}.attn.dsa.{p}" for i in (0, 1) for p in ("conv_weight", "conv_bias", "out_weight", "out_bias")}
    result = model.load_state_dict(before, strict=False)
    assert set(result.missing_keys) == new
    assert result.unexpected_keys == []
    assert {id(p) for p in handle.parameters()} == {id(p) for n, p in model.named_parameters() if ".dsa." in n}
    x = tiny_video.latent()
    with handle.dense():
        assert torch.equal(model(x), dense(x))
    assert not torch.equal(model(x), dense(x))


def test_param_groups() -> None:
    model = tiny_video.TinyVideo(2)
    handle = convert(model, DSAConfig((1, 3, 3)), select=SELECT)
    rest, heads = handle.param_groups(1e-3, weight_decay=0.1)
    assert (heads["lr"], heads["weight_decay"], rest["weight_decay"]) == (1e-4, 0.0, 0.1)
    assert len(rest["params"]) + len(heads["params"]) == len(list(model.parameters()))
    assert [g["lr"] for g in handle.param_groups(1e-3, head_lr=1e-2)] == [1e-3, 1e-2]


def test_revert_gives_the_model_back() -> None:
    model, x = tiny_video.TinyVideo(2), tiny_video.latent()
    before, kinds = {k: v.clone() for k, v in model.state_dict().items()}, [type(m) for m in model.modules()]
    want = model(x)
    handle = convert(model, DSAConfig((1, 3, 3)), select=SELECT)
    assert type(model).__name__ == "TinyVideo"
    assert isinstance(model, tiny_video.TinyVideo)
    assert graphopt.dsa.revert(model) is model
    assert [type(m) for m in model.modules()] == kinds
    assert set(model.state_dict()) == set(before)
    assert torch.equal(model(x), want)
    with pytest.raises(ConfigError, match="not converted"):
        handle_of(model)
    for use in (handle.revert, handle.parameters, lambda: handle.param_groups(1e-3), lambda: handle.save("nowhere"),
                lambda: handle.verify(x), lambda: handle.probe(x), handle.dense().__enter__,
                handle.distilling().__enter__):
        with pytest.raises(ConfigError, match="the model was reverted"):
            use()
    convert(model, DSAConfig((1, 3, 3)), select=SELECT)


def test_a_copy_is_a_model_of_its_own() -> None:
    model, x = tiny_video.TinyVideo(2), tiny_video.latent()
    handle = convert(model, DSAConfig((1, 3, 3)), select=SELECT)
    twin = copy.deepcopy(model)
    other = handle_of(twin)
    assert other is not handle
    assert other.model is twin
    assert {id(p) for p in other.parameters()} == {id(p) for n, p in twin.named_parameters() if ".dsa." in n}
    with other.dense():
        assert not torch.equal(twin(x), model(x))
    assert torch.equal(twin(x), model(x))


def test_the_model_inside_another_is_named() -> None:
    outer = nn.Sequential(tiny_video.TinyVideo(2))
    convert(outer[0], DSAConfig((1, 3, 3)), select=SELECT)
    with pytest.raises(ConfigError, match="give that one"):
        graphopt.dsa.parameters(outer)


def test_configuration_files(tmp_path) -> None:
    model = tiny_video.TinyVideo(2)
    configs = {"blocks.0.attn": DSAConfig((1, 3, 3), groups=1), "blocks.1.attn": DSAConfig((3, 3, 3), max_offset=2.0)}
    handle = convert(model, configs)
    path = handle.save(tmp_path / "deep" / "folder")
    assert {n: h.config for n, h in convert(tiny_video.TinyVideo(2), path).layers.items()} == configs
    with pytest.raises(ConfigError, match="no configuration"):
        convert(tiny_video.TinyVideo(2), tmp_path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        convert(tiny_video.TinyVideo(2), path)
    path.write_text(json.dumps({"version": 1, "layers": {"blocks.0.attn": {"windows": [1, 1, 1]}}}))
    with pytest.raises(ConfigError, match="unknown keys"):
        convert(tiny_video.TinyVideo(2), path)
