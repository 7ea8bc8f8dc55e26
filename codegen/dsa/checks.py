"""What video attention refuses, each with what is wrong, where, and the remedy."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from graphopt.errors import ConfigError

BOUNDARIES = ("inside", "border")


def sizes(values: Any, what: str) -> tuple[int, int, int]:
    """Three whole numbers of at least 1 as a tuple; ConfigError for anything else (a fraction is not cut off)."""
    try:
        triple = tuple(operator.index(n) for n in values) if not isinstance(values, (str, bytes)) else ()
    except TypeError:
        triple = ()
    if len(triple) != 3 or min(triple) < 1 or any(isinstance(n, bool) for n in values):
        raise ConfigError(f"{what} needs three sizes of at least 1, not {values!r}", where="video_attention",
                          remedy="window=(3, 7, 7), for example" if "window" in what else
                          "pass the latent grid (T, H, W) after patching, in tokens")
    return triple  # type: ignore[return-value]


def tensors(q: Any, k: Any, v: Any, offsets: Any, scale: Any) -> None:
    """ConfigError for what is no tensor, lies on another device, or has a dtype that is no number of tokens."""
    for name, x in (("q", q), ("k", k), ("v", v), ("offsets", offsets)):
        if x is None and name == "offsets":
            continue
        if not isinstance(x, Tensor):
            raise ConfigError(f"{name} is a {type(x).__name__}, no tensor", where="video_attention",
                              remedy="q, k, v: [B, heads, N, D]; offsets: [B, groups, T*H*W, 3] or None")
        if x.device != q.device:
            raise ConfigError(f"{name} is on {x.device}, q on {q.device}", where="video_attention",
                              remedy="move them to one device")
    if offsets is not None and (offsets.is_complex() or offsets.dtype == torch.bool):
        raise ConfigError(f"offsets in {offsets.dtype} are no numbers of tokens", where="video_attention",
                          remedy="float32, or an integer dtype for whole offsets without gradient")
    if isinstance(scale, Tensor):
        raise ConfigError("scale is a tensor; it would get no gradient", where="video_attention",
                          remedy="pass a number; multiply q by a learned scale")


def check(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, grid: tuple[Any, Any, Any],
          window: tuple[int, int, int], text: Any, padding: Any, boundary: str) -> None:
    """Raise ConfigError for the first thing that cannot be right."""
    where = f"video_attention(q {list(q.shape)}, k {list(k.shape)}, grid {grid}, window {window})"

    def refuse(what: str, remedy: str) -> None:
        raise ConfigError(what, where=where, remedy=remedy)

    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        refuse("q, k and v must be [B, heads, N, D]",
               "move the heads before the tokens: x.unflatten(-1, (heads, D)).transpose(1, 2)")
    if q.dtype != k.dtype or q.dtype != v.dtype:
        refuse(f"dtypes differ: q {q.dtype}, k {k.dtype}, v {v.dtype}", "cast them to one dtype")
    if not q.dtype.is_floating_point or q.dtype.itemsize < 2:
        refuse(f"{q.dtype} is not supported", "use bfloat16, float16, float32 or float64")
    if len(window) != 3 or any(int(w) < 1 for w in window):
        refuse(f"a window needs three sizes of at least 1, not {window}", "for example window=(3, 7, 7)")
    if len(grid) != 3 or any(n < 1 for n in grid):
        refuse(f"a grid needs three sizes of at least 1, not {grid}", "pass the latent grid (T, H, W) after patching")
    tokens = grid[0] * grid[1] * grid[2] + text + padding
    if text < 0 or padding < 0 or tokens != q.shape[2]:
        refuse(
            f"T * H * W + text + padding = {grid[0]} * {grid[1]} * {grid[2]} + {text} + {padding} = {tokens}, but q "
            f"has {q.shape[2]} tokens",
            "pass the grid after patching, and how many text and padding tokens the sequence holds")
    if k.shape[2] != q.shape[2] or v.shape[2] != q.shape[2]:
        refuse(f"k has {k.shape[2]} and v {v.shape[2]} tokens, q {q.shape[2]}",
               "video attention is self-attention; leave cross-attention as it is")
    if q.shape[1] < 1 or k.shape[1] < 1 or q.shape[3] < 1:
        refuse("there is no head, or a head without dimensions", "leave an empty attention out")
    if q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2] or q.shape[1] % k.shape[1]:
        refuse("the heads of k and v must be equal and divide those of q, at one batch size",
               "repeat or reshape the key heads")
    if q.shape[3] != k.shape[3] or q.shape[3] != v.shape[3]:
        refuse(f"head dimensions differ: {q.shape[3]}, {k.shape[3]}, {v.shape[3]}", "use one head dimension")
    if boundary not in BOUNDARIES:
        refuse(f"unknown boundary {boundary!r}",
               'use "inside" (the window moves inside the grid) or "border" (taps clamp)')
    if offsets is None:
        return
    if offsets.dim() not in (4, 5) or offsets.shape[-1] != 3:
        refuse(f"offsets {list(offsets.shape)} must be [B, groups, T*H*W, 3], or [B, groups, T*H*W, taps, 3] per tap",
               "one vector (t, h, w) in token units per token and head or group of heads")
    video = grid[0] * grid[1] * grid[2]
    if offsets.shape[1] < 1:
        refuse(f"offsets {list(offsets.shape)} have no group", "one vector per token and head or group of heads")
    if offsets.shape[0] != q.shape[0] or q.shape[1] % offsets.shape[1] or offsets.shape[2] != video:
        refuse(f"offsets {list(offsets.shape)} do not fit q {list(q.shape)}: groups must divide heads, tokens be T*H*W",
               "offsets belong to video tokens only, without text and padding")
    if offsets.dim() == 5:
        taps = 1
        for k_axis, n in zip(window, grid):
            taps = taps * min(k_axis, n)
        if offsets.shape[3] != taps:
            refuse(f"offsets for {offsets.shape[3]} taps, but the window has {taps} inside this grid",
                   "make one vector per tap, t slowest and w fastest")
    if offsets.is_floating_point() and offsets.dtype.itemsize < 4:
        refuse(f"offsets in {offsets.dtype} misplace a token by up to 0.13 at position 80",
               "compute and keep offsets in float32")


def refuse_options(attn_mask: Tensor | None, dropout_p: float, is_causal: bool) -> None:
    """Options of scaled_dot_product_attention that have no windowed meaning here."""
    where = "video_attention"
    if attn_mask is not None:
        raise ConfigError("a mask is not supported", where=where,
                          remedy="leave masked attention dense, or declare padded tokens with padding=")
    if dropout_p:
        raise ConfigError(f"dropout_p = {dropout_p} is not supported", where=where, remedy="set dropout to 0")
    if is_causal:
        raise ConfigError("causal attention is not supported", where=where, remedy="leave causal attention dense")


def integer_offsets(offsets: Tensor | None) -> bool:
    """Are the offsets whole tokens by dtype, and so without gradient?"""
    return offsets is not None and not offsets.is_floating_point() and offsets.dtype != torch.bool
