"""Three video models of diffusers, small, with heads that the kernels of sliding attention take."""

from __future__ import annotations

import diffusers
import torch
from torch import nn

import graphopt
from graphopt.dsa import DSAConfig, convert


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


def converted(make, window=(3, 5, 5)) -> tuple[nn.Module, dict, graphopt.dsa.Handle]:
    """In fp32, nothing zero, offsets up to 1.5 tokens and more."""
    torch.manual_seed(0)
    model, inputs, select = make()
    for p in model.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.05)
    handle = convert(model, DSAConfig(window), select=select)
    for p in handle.parameters():
        nn.init.normal_(p, std=0.05)
    for head in handle.layers.values():
        nn.init.uniform_(head.out_bias, -1.5, 1.5)
    return model, inputs, handle
