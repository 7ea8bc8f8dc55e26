"""`video_attention`: checks, picks the operator, and merges the window with text tokens."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from graphopt.codegen.dsa import checks, engines, operators, scatter
from graphopt.codegen.dsa import text as text_keys

Grid = tuple[int, int, int]
log = logging.getLogger(__name__)


def video_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None = None, *, grid: Grid, window: Grid = (3, 7, 7),
    text: int = 0, text_first: bool = False, padding: int = 0, scale: float | None = None, boundary: str = "inside",
    attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
) -> Tensor:
    """3D deformable sliding attention over the tokens of a video.

    A video token at position p of the grid attends to the kt * kh * kw taps of a window that starts, per axis, at
    clamp(clamp(p - k // 2, 0, n - k) + offset, 0, n - k); keys and values between tokens are interpolated linearly.
    Zero offsets give a sliding window with the rule of NATTEN's na3d; a window as large as the grid gives full
    attention whatever the offsets.

    Args:
        q: [B, heads, N, D], any strides; bf16 or fp16 (kernels), fp32 or fp64 (plain torch).
        k, v: [B, key heads, N, D]; key heads divide heads.
        offsets: None (fixed window); [B, groups, T*H*W, 3] fp32 in token units (t, h, w), groups divide heads; or
            [B, groups, T*H*W, taps, 3], one vector per tap (the paper's form, plain torch).  Integer dtypes are whole
            offsets without gradient.  NaN counts as 0, infinity goes to the border, both with zero gradient.
        grid: (T, H, W) of the video tokens, in raster order.
        window: (kt, kh, kw), odd or even; an axis at least as long as the grid's becomes global.
        text: tokens that every video token sees as well; text tokens attend to everything.
        text_first: the text tokens stand before the video's, not behind them.
        padding: tokens at the end that are neither read nor written (their output is 0).
        scale: of the logits; default D ** -0.5.
        boundary: "inside", or "border": the window is not moved inside the grid, each tap clamps instead.
        attn_mask, dropout_p, is_causal: refused, so that a call of scaled_dot_product_attention can be replaced.

    Returns:
        [B, heads, N, D] with q's dtype.

    Raises:
        ConfigError: sizes that do not fit, masks, dropout, causal attention.
    """
    checks.refuse_options(attn_mask, dropout_p, is_causal)
    checks.check(q, k, v, offsets, grid, window, text, padding, boundary)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    video = grid[0] * grid[1] * grid[2]
    if _choice(q, offsets, grid, window, boundary).engine == "dense":
        y = _dense(q, k, v, video + text, scale)
        return y if offsets is None or not offsets.requires_grad else _tie(y, offsets)
    if not text and not padding:
        return attend(q, k, v, offsets, grid, window, scale, boundary)[0]
    first = text if text_first else 0
    part = slice(first, first + video)
    y, lse = attend(q[:, :, part], k[:, :, part], v[:, :, part], offsets, grid, window, scale, boundary)
    pieces = [y]
    if text:
        words = slice(0, text) if text_first else slice(video, video + text)
        y2, lse2 = text_keys.attend(q[:, :, part], k[:, :, words], v[:, :, words], scale)
        pieces = [merge(y, lse, y2, lse2)]
        real = slice(0, video + text)
        of_text = scaled_dot_product_attention(
            q[:, :, words], k[:, :, real], v[:, :, real], scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        pieces = [of_text, *pieces] if text_first else [*pieces, of_text]
    if padding:
        pieces.append(q.new_zeros((*q.shape[:2], padding, q.shape[3])))
    return torch.cat(pieces, 2)


def _dense(q: Tensor, k: Tensor, v: Tensor, real: int, scale: float) -> Tensor:
    """Full attention among the first `real` tokens, 0 behind them."""
    y = scaled_dot_product_attention(
        q[:, :, :real], k[:, :, :real], v[:, :, :real], scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    if real == q.shape[2]:
        return y
    return torch.cat([y, q.new_zeros((*q.shape[:2], q.shape[2] - real, q.shape[3]))], 2)


def _tie(y: Tensor, offsets: Tensor) -> Tensor:
    """y, with a zero gradient for offsets that have no effect: a parameter without a gradient would stop DDP."""
    return y + (offsets.sum() * 0).nan_to_num().to(y.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, grid: Grid, window: Grid, scale: float,
           boundary: str = "inside") -> tuple[Tensor, Tensor]:
    """(y, lse) of the video tokens alone, both differentiable; the operator is picked by device, dtype and mode."""
    choice = _choice(q, offsets, grid, window, boundary)
    if choice.engine != "reference":
        return operators.operator("triton")(q, k, v, offsets, *grid, *window, scale, boundary)
    if q.device.type == "cuda" and not torch.compiler.is_compiling():
        _tell(choice.reason)
    return operators.operator("reference")(q, k, v, offsets, *grid, *window, scale, boundary)


@cache
def _tell(reason: str) -> None:
    """Once per reason: plain torch is right, but a user on a GPU should know why it is slow."""
    log.warning("graphopt: video_attention runs in plain torch, without its kernels: %s", reason)


def merge(y1: Tensor, lse1: Tensor, y2: Tensor, lse2: Tensor) -> Tensor:
    """Attention over two sets of keys from the attention over each: y [B, heads, N, D], lse [B, heads, N]."""
    share = torch.sigmoid(lse1 - lse2)[..., None]
    return (y1 * share + y2 * (1 - share)).to(y1.dtype)


def explain(q: Tensor, offsets: Tensor | None = None, *, grid: Grid, window: Grid = (3, 7, 7),
            boundary: str = "inside") -> engines.Choice:
    """Which engine a call would use, and why: `.engine`, `.reason`.

    No attention is computed and q may be a meta tensor.  Offsets with values are measured: the reason tells how far
    they pull the windows of neighbouring queries apart, which is what makes a field of offsets slow.
    """
    choice = _choice(q, offsets, grid, window, boundary, engines.target_of(q.device))
    real = offsets is not None and type(offsets) in (Tensor, torch.nn.Parameter) and not offsets.is_meta
    if offsets is not None and real and choice.engine in ("fused", "lattice"):
        return engines.Choice(choice.engine, f"{choice.reason}; {scatter.measure(offsets, grid, window)}")
    return choice


def _choice(q: Tensor, offsets: Tensor | None, grid: Grid, window: Grid, boundary: str,
            target: str | None = None) -> engines.Choice:
    # without a target the operator is right and only the engine within it open: Dynamo traces through here
    kind: Any = "none" if offsets is None else "tap" if offsets.dim() == 5 else (
        "whole" if checks.integer_offsets(offsets) else "shift")
    return engines.choose(q.shape[-1], q.dtype, q.device.type, target, grid, window, kind, boundary)
