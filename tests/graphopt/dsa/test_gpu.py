"""Converted models on a GPU in bf16, with the kernels, against eager fp64: output and gradients, compiled and not."""

from __future__ import annotations

import copy

import diffusers
import pytest
import torch
from torch import nn

import graphopt
from graphopt.dsa import DSAConfig, convert

pytestmark = pytest.mark.gpu


def wan() -> tuple[nn.Module, dict, object]:
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=128, in_channels=16, out_channels=16, text_dim=64, freq_dim=32,
        ffn_dim=256, num_layers=2, rope_max_seq_len=32)
    return model, dict(hidden_states=torch.randn(2, 16, 5, 16, 24), timestep=torch.tensor([500, 20]),
                       encoder_hidden_states=torch.randn(2, 7, 64)), "blocks.*.attn1"


def hunyuan() -> tuple[nn.Module, dict, object]:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=64, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=2, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(16, 24, 24))
    return model, dict(
        hidden_states=torch.randn(2, 4, 5, 16, 24), timestep=torch.tensor([500, 20]),
        encoder_hidden_states=torch.randn(2, 6, 16), encoder_attention_mask=torch.tensor([[1, 1, 1, 0, 0, 0], [1] * 6]),
        pooled_projections=torch.randn(2, 8), guidance=torch.tensor([6000.0, 6000.0]),
    ), ["transformer_blocks.*.attn", "single_transformer_blocks.*.attn"]


def cogvideox() -> tuple[nn.Module, dict, object]:
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=64, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=16,
        num_layers=2, sample_width=24, sample_height=16, sample_frames=17, temporal_compression_ratio=4,
        max_text_seq_length=6)
    return model, dict(hidden_states=torch.randn(2, 5, 4, 16, 24), encoder_hidden_states=torch.randn(2, 6, 16),
                       timestep=torch.tensor([500, 20])), "transformer_blocks.*.attn1"


def run(model: nn.Module, inputs: dict, f=None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    y = (model if f is None else f)(**inputs, return_dict=False)[0]
    y.float().square().mean().backward()
    return y.detach().double(), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def gap(got: torch.Tensor, want: torch.Tensor, floor: float = 0.0) -> float:
    return float((got - want).norm() / max(float(want.norm()), floor, 1e-12))


def assert_close(got, want, output: float, gradient: float) -> None:
    assert gap(got[0], want[0]) <= output
    floor = 1e-2 * max(float(g.norm()) for g in want[1].values())  # gradients that are rounding have no limit of their own
    for name, g in want[1].items():
        assert gap(got[1][name], g, floor) <= gradient, name


@pytest.mark.parametrize("make", [wan, hunyuan, cogvideox])
def test_kernels_in_a_model(make) -> None:
    torch.manual_seed(0)
    model, inputs, select = make()
    for p in model.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.05)
    model.cuda()
    inputs = {k: v.cuda() for k, v in inputs.items()}
    handle = convert(model, DSAConfig((3, 5, 5)), select=select)
    for p in handle.parameters():
        nn.init.normal_(p, std=0.05)
    for head in handle.layers.values():
        nn.init.uniform_(head.out_bias, -1.5, 1.5)
    high = run(copy.deepcopy(model).double(), {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()})
    low = copy.deepcopy(model).bfloat16()
    halved = {k: v.bfloat16() if v.is_floating_point() and k != "guidance" else v for k, v in inputs.items()}
    eager = run(low, halved)
    assert_close(eager, high, 2e-2, 0.15)
    assert all(r.error <= r.limit for r in graphopt.dsa.verify(low, **halved))
    f = torch.compile(low, backend="graphopt", fullgraph=True)
    once, again = run(low, halved, f), run(low, halved, f)
    assert_close(once, high, 2e-2, 0.15)
    assert all(torch.equal(once[1][n], again[1][n]) for n in handle_gradients(once[1])), "bitwise repeatable"
    assert {s.status for s in graphopt.report(f).sites if s.kind == "video_attention"} == {"rewritten"}


def handle_gradients(gradients: dict[str, torch.Tensor]) -> list[str]:
    """Those of the heads: text queries use torch's attention, whose backward need not repeat."""
    return [n for n in gradients if ".dsa." in n]
