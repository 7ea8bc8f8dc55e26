"""Attention of video queries to a short list of text keys, with a differentiable log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from graphopt.codegen.dsa.reference import high_precision, spread_heads


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(y [B, heads, N, D], lse [B, heads, N]) of q [B, heads, N, D] over k, v [B, key heads, L, D]."""
    high = high_precision(q, k, v)
    kk, vv = (spread_heads(x, q.shape[1]) for x in (k, v))
    logits = (q @ kk.transpose(-1, -2)).to(high) * scale
    lse = logits.logsumexp(-1)
    return torch.exp(logits - lse[..., None]).to(q.dtype) @ vv, lse
