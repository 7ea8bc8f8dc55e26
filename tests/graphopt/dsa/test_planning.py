"""The table of `plan`: predictions, and the reasons for leaving an attention alone."""

from __future__ import annotations

import json

import pytest
import tiny_video
import torch

import graphopt
from graphopt.dsa import DSAConfig


def planned(latent: torch.Tensor, window=(3, 7, 7), **options) -> graphopt.dsa.planning.Plan:
    with torch.device("meta"):
        model = tiny_video.TinyVideo(2, width=256, heads=2).to(torch.bfloat16)
    return graphopt.dsa.plan(model, latent.bfloat16(), config=DSAConfig(window), **options)


def test_a_long_video_can_slide_and_the_gain_is_predicted() -> None:
    plan = planned(torch.empty(1, 3, 21, 60, 104, device="meta"))
    row = plan["blocks.0.attn"]
    assert (row.kind, row.tokens, row.heads, row.head_dim, row.grid) == ("video", 32760, 2, 128, (21, 30, 52))
    assert row.reason is None
    # two of twelve heads of the measured row, and the offset head beside
    assert row.dense_ms == pytest.approx((11.4 + 31.1) / 6, rel=0.1)
    assert row.sliding_ms == pytest.approx((0.82 + 3.97) / 6, rel=0.35)
    assert plan.convertible == ["blocks.0.attn", "blocks.1.attn"]
    assert "1 more alike" in str(plan)
    data = json.loads(plan.to_json())
    assert data["rows"][0]["grid"] == [21, 30, 52]


def test_reasons() -> None:
    short = planned(torch.empty(1, 3, 4, 16, 20, device="meta"))["blocks.0.attn"]
    assert "dense is predicted faster" in short.reason
    small = planned(torch.empty(1, 3, 3, 8, 10, device="meta"))["blocks.0.attn"]
    assert "covers the grid" in small.reason


def test_force() -> None:
    plan = planned(torch.empty(1, 3, 4, 16, 20, device="meta"), force=True)
    assert plan.convertible == ["blocks.0.attn", "blocks.1.attn"]
