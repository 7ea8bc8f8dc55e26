"""`video_attention`: checks, picks the operator, and merges the window with text tokens."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from graphopt import _compat, _compat_tensors
from graphopt.codegen.dsa import checks, engines, scatter
from graphopt.errors import ConfigError
from graphopt.passes.video_compose import compose, form_of

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
        attn_mask: boolean [B, 1, 1, N], False hides a text token; a sample that hides video tokens becomes NaN.  Any
            other mask, dropout_p and is_causal are refused, so that a call of scaled_dot_product_attention can be
            replaced.

    Returns:
        [B, heads, N, D] with q's dtype.

    Raises:
        ConfigError: sizes that do not fit, masks, dropout, causal attention, forward-mode AD, transforms of
            torch.func.
    """
    if not torch.compiler.is_compiling():
        checks.tensors(q, k, v, offsets, scale)
        _refuse_transforms(q, k, v, offsets)
        grid, window = checks.sizes(grid, "a grid"), checks.sizes(window, "a window")
    masked = attn_mask is not None and selects_text(attn_mask, q, text)
    checks.refuse_options(None if masked else attn_mask, dropout_p, is_causal)
    checks.check(q, k, v, offsets, grid, window, text, padding, boundary)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    form = form_of(q, k, offsets, grid, window, scale, boundary, text != 0, text_first, masked, padding != 0)
    if form.engine == "reference" and q.device.type == "cuda" and not torch.compiler.is_compiling():
        _tell(_choice(q, offsets, grid, window, boundary).reason)
    return compose(_call, form, q, k, v, offsets, attn_mask, grid, text, padding)


def _refuse_transforms(*tensors: Tensor | None) -> None:
    """ConfigError for forward-mode AD, whose tangents torch would drop without a word, and for torch.func."""
    if _compat.has_tangent(tensors):
        raise ConfigError("forward-mode AD: video attention has reverse-mode derivatives only", where="video_attention",
                          remedy="use backward() or torch.autograd.grad")
    if any(t is not None and _compat_tensors.is_wrapped(t) for t in tensors):
        raise ConfigError("torch.func's grad, vjp and vmap do not go through operators with a derivative of their own",
                          where="video_attention",
                          remedy="use backward() or torch.autograd.grad; a batch instead of vmap")


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def selects_text(mask: Tensor, q: Tensor, text: int) -> bool:
    """Is a mask a boolean one [B, 1, 1, N] over the keys of a sequence with text?"""
    return bool(text) and mask.dtype == torch.bool and mask.shape == (q.shape[0], 1, 1, q.shape[2])


@cache
def _tell(reason: str) -> None:
    """Once per reason: plain torch is right, but a user on a GPU should know why it is slow."""
    log.warning("graphopt: video_attention runs in plain torch, without its kernels: %s", reason)


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
