"""`verify`, `probe`, and distillation: on data with a known answer."""

from __future__ import annotations

import json

import pytest
import tiny_video
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import graphopt
from graphopt.dsa import DSAConfig, convert, measure
from graphopt.errors import ConfigError, VerifyError

SELECT = "blocks.*.attn"


def converted(window=(1, 3, 3), std: float = 0.3, text: str | None = None, **config):
    model = tiny_video.TinyVideo(2, text=text)
    handle = convert(model, DSAConfig(window, **config), select=SELECT)
    for p in handle.parameters():
        nn.init.normal_(p, std=std)
    return model, handle


@pytest.mark.parametrize("config", [
    {}, {"offsets": "tap"}, {"offsets": "zero"}, {"boundary": "border"}, {"groups": 1}, {"max_offset": 0.5},
    {"offsets": "tap", "boundary": "border"}])
def test_every_mode_is_its_definition_in_fp64(config) -> None:
    model, handle = converted(**config)
    for result in handle.verify(tiny_video.latent()):
        assert result.error <= 1e-6
        assert result.grid == (3, 4, 5)


def test_text_and_a_padded_prompt() -> None:
    for text in ("first", "last"):
        model, handle = converted(text=text)
        seen = torch.ones(2, 1, 1, 66, dtype=torch.bool)
        seen[0, ..., (0 if text == "first" else 65)] = False
        assert max(r.error for r in handle.verify(tiny_video.latent(), torch.randn(2, 6, 16), seen)) <= 1e-6


def test_a_wrong_result_is_found(monkeypatch) -> None:
    from graphopt.dsa import layer

    model, handle = converted()
    right = layer.video_attention
    monkeypatch.setattr(layer, "video_attention", lambda q, k, v, o, **kw: right(q, k, v, o * 1.01, **kw))
    with pytest.raises(VerifyError, match="differs from fp64") as caught:
        graphopt.dsa.verify(model, tiny_video.latent())
    assert "blocks.0.attn" in str(caught.value)


def test_the_definition_against_dense_attention() -> None:
    q, k, v = (torch.randn(1, 2, 60, 8, dtype=torch.float64) for _ in range(3))
    got = measure.definition(q, k, v, torch.randn(1, 2, 60, 3), (3, 4, 5), (3, 4, 5), torch.arange(60), None, "inside", 0,
                             None)
    torch.testing.assert_close(got, scaled_dot_product_attention(q, k, v), rtol=0, atol=1e-12)


def test_probe_of_uniform_attention() -> None:
    """With equal logits a window holds its share of the tokens, by counting; so do moved ones, and text its own."""
    model, handle = converted(window=(1, 3, 3), text="last")
    for block in model.blocks:
        nn.init.zeros_(block.attn.norm_q.weight)
    probe = handle.probe(tiny_video.latent(), torch.randn(2, 6, 16))
    for layer in probe.layers.values():
        assert layer.inside == pytest.approx([9 / 66] * 2, abs=1e-5)
        assert layer.inside_fixed == pytest.approx([9 / 66] * 2, abs=1e-5)
        assert layer.text == pytest.approx([6 / 66] * 2, abs=1e-5)
        assert sum(layer.histogram["h"][1]) == 2 * 60
        assert 0 < layer.offset_mean[1] <= layer.offset_max[1]
    assert json.loads(probe.to_json())["blocks.0.attn"]["window"] == [1, 3, 3]
    assert "blocks.1.attn" in str(probe)


def test_probe_runs_dense_and_changes_nothing() -> None:
    model, handle = converted()
    x = tiny_video.latent()
    before = model(x)
    with handle.dense():
        first = graphopt.dsa.probe(model, x)
    again = graphopt.dsa.probe(model, x)
    assert first.to_json() == again.to_json(), "a layer behind a sliding one must see dense activations"
    assert torch.equal(model(x), before)


def test_boxes_and_clamped_offsets() -> None:
    model, handle = converted(window=(1, 3, 3))
    for head in handle.layers.values():
        for p in (head.out_weight, head.out_bias):
            nn.init.zeros_(p)
        head.out_bias.data[1::3] = 100.0  # everything to the lower border
    layer = next(iter(handle.probe(tiny_video.latent()).layers.values()))
    assert layer.box_fixed > 3 * 9
    assert layer.box < layer.box_fixed
    assert layer.offset_mean == pytest.approx([0, 100, 0])
    assert layer.clamped > 0.3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_distillation(checkpointing: bool) -> None:
    """Zero where the window covers the grid; else positive, with gradients for the heads."""
    model, handle = converted(window=(9, 9, 9))
    with handle.distilling():
        model(tiny_video.latent())
    assert graphopt.dsa.distill_loss(model).item() == 0
    model, handle = converted(window=(1, 3, 3), std=0.05)
    model.checkpointing = checkpointing
    optimizer = torch.optim.Adam(handle.parameters(), lr=1e-2)
    x, losses = tiny_video.latent(), []
    for _ in range(15):
        with handle.distilling():
            model(x)
            loss = handle.distill_loss()
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    model(x)
    with pytest.raises(ConfigError, match="no layer recorded"):
        handle.distill_loss()
