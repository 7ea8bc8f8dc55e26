"""Attention of video queries to text keys of which some are hidden, (y, lse) with both differentiable; plain torch.

    graphopt::masked_text_attention_<hash>

HunyuanVideo pads its prompts and hides the padding by a mask [B, 1, 1, N].  The text is short, so the work is a small
part of an attention's; it is done some queries at a time, so that no [N, L] matrix of a whole video is kept.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphopt.codegen.dsa.reference import chunks, high_precision, spread_heads
from graphopt.codegen.dsa.text import backward_in_chunks


def source_hash() -> str:
    """Twelve hex digits over this file and the one its backward stands in."""
    text = b"".join(Path(__file__).with_name(name).read_bytes() for name in ("masked_text.py", "text.py"))
    return hashlib.sha256(text).hexdigest()[:12]


def _logits(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    return (q @ k.transpose(-1, -2) * scale).masked_fill(~seen[:, None, None, :], float("-inf"))


def forward(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(y [B, heads, N, D], lse [B, heads, N]); where no key is seen y is 0 and lse -inf."""
    high = high_precision(q, k, v)
    kk, vv = (spread_heads(x, q.shape[1]).to(high) for x in (k, v))
    y, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=high, device=q.device)
    for part in chunks(q.shape[2], q.shape[0] * q.shape[1] * k.shape[2]):
        logits = _logits(q[:, :, part].to(high), kk, seen, scale)
        norm = logits.logsumexp(-1)
        lse[:, :, part] = norm
        y[:, :, part] = (_weights(logits, norm) @ vv).to(y.dtype)
    return y, lse


def _weights(logits: Tensor, norm: Tensor) -> Tensor:
    """exp(logits - norm), 0 where nothing is seen."""
    return (logits - norm.masked_fill(norm.isneginf(), 0.0)[..., None]).exp()


def backward(dy: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, y: Tensor, lse: Tensor,
             scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)."""
    return backward_in_chunks(dy, dlse, q, k, v, y, lse, scale, lambda qq, kk, norm: _weights(
        _logits(qq, kk, seen, scale), norm))


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=high_precision(q, k, v))


def _fake_backward(dy: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, y: Tensor,
                   lse: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.scale = inputs[4]


_NAME = f"masked_text_attention_{source_hash()}"
_forward = torch.library.custom_op(f"graphopt::{_NAME}", forward, mutates_args=())
_backward = torch.library.custom_op(f"graphopt::{_NAME}_backward", backward, mutates_args=())
_forward.register_fake(_fake_forward)
_backward.register_fake(_fake_backward)
_HANDLE = getattr(torch.ops.graphopt, f"{_NAME}_backward").default


def _formula(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, seen, y, lse = ctx.saved_tensors
    if dy is None and dlse is None:
        return (None,) * 5
    return (*_HANDLE(torch.zeros_like(y) if dy is None else dy, dlse, q, k, v, seen, y, lse, ctx.scale), None, None)


_forward.register_autograd(_formula, setup_context=_setup_context)
# (q [B, heads, N, D], k, v [B, key heads, L, D], seen [B, L] bool, scale) -> (y, lse)
attend = getattr(torch.ops.graphopt, _NAME).default
