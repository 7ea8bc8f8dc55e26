"""Sliding attention put together from its operators, once for eager mode and for graphs.

`do(function, *args)` computes, or adds a node to a graph; sizes may be numbers or nodes.  With text the video's window
and the text are two softmaxes, merged by their log-sum-exps; text queries attend to everything.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from graphopt.codegen.dsa import engines, masked_text, operators
from graphopt.codegen.dsa import text as text_keys

Do = Callable[..., Any]


@dataclass(frozen=True)
class Form:
    """What is computed.

    engine: "dense", "reference" or "triton".  grouped: k and v have fewer heads than q.  text, text_first: are there
    text tokens, and do they stand before the video's.  masked: the mask hides some of them.  padding: tokens at the end
    that are neither read nor written.  tied: offsets have no effect but get a zero gradient.
    """

    engine: str
    window: tuple[int, int, int]
    scale: float
    boundary: str = "inside"
    grouped: bool = False
    text: bool = False
    text_first: bool = False
    masked: bool = False
    padding: bool = False
    tied: bool = False
    text_engine: str = "reference"


def form_of(q: Tensor, k: Tensor, offsets: Tensor | None, grid: tuple[Any, Any, Any], window: tuple[int, int, int],
            scale: float | None = None, boundary: str = "inside", text: bool = False, text_first: bool = False,
            masked: bool = False, padding: bool = False) -> Form:
    """The form for tensors (fake ones will do); the operator is picked by device, dtype and the kind of offsets."""
    kind = "none" if offsets is None else "tap" if offsets.dim() == 5 else (
        "shift" if offsets.is_floating_point() else "whole")
    engine = engines.choose(q.shape[-1], q.dtype, q.device.type, None, grid, window, kind, boundary).engine
    engine = engine if engine in ("dense", "reference") else "triton"
    tied = engine == "dense" and offsets is not None and offsets.requires_grad
    words = "triton" if q.device.type == "cuda" and q.dtype.itemsize == 2 else "reference"
    return Form(engine, window, q.shape[-1] ** -0.5 if scale is None else float(scale), boundary,
                q.shape[1] != k.shape[1], text, text_first, masked, padding, tied, words)


def compose(do: Do, form: Form, q: Any, k: Any, v: Any, offsets: Any, mask: Any, grid: tuple[Any, Any, Any], text: Any,
            padding: Any = 0) -> Any:
    """[B, heads, N, D] like q.  mask: [B, 1, 1, N], used where `form.masked`; text, padding: how many tokens."""
    video = do(operator.mul, do(operator.mul, grid[0], grid[1]), grid[2])
    real = do(operator.add, video, text) if form.text else video
    if form.engine == "dense":
        y = _dense(do, form, q, k, v, mask, real)
    elif not form.text and not form.padding:
        return do(operator.getitem, _window(do, form, q, k, v, offsets, grid), 0)
    else:
        y = _merged(do, form, q, k, v, offsets, mask, grid, video, text, real)
    if form.padding:
        y = do(torch.cat, [y, do(zeros_behind, q, padding)], 2)
    return tie(do, y, offsets) if form.tied else y


def _window(do: Do, form: Form, q: Any, k: Any, v: Any, offsets: Any, grid: tuple[Any, Any, Any]) -> Any:
    return do(operators.operator(form.engine), q, k, v, offsets, *grid, *form.window, form.scale, form.boundary)


def _dense(do: Do, form: Form, q: Any, k: Any, v: Any, mask: Any, real: Any) -> Any:
    if form.padding:
        q, k, v = (do(torch.narrow, x, 2, 0, real) for x in (q, k, v))
    return do(scaled_dot_product_attention, q, k, v, attn_mask=_mask(do, form, mask, real), scale=form.scale,
              enable_gqa=form.grouped)


def _mask(do: Do, form: Form, mask: Any, real: Any) -> Any:
    """The mask over the keys that are read, None where nothing is hidden."""
    if not form.masked:
        return None
    return do(torch.narrow, mask, 3, 0, real) if form.padding else mask


def _merged(do: Do, form: Form, q: Any, k: Any, v: Any, offsets: Any, mask: Any, grid: tuple[Any, Any, Any], video: Any,
            text: Any, real: Any) -> Any:
    start = text if form.text and form.text_first else 0
    qv, kv, vv = (do(torch.narrow, x, 2, start, video) for x in (q, k, v))
    both = _window(do, form, qv, kv, vv, offsets, grid)
    y, lse = do(operator.getitem, both, 0), do(operator.getitem, both, 1)
    if not form.text:
        return y
    first = 0 if form.text_first else video
    qt, kt, vt = (do(torch.narrow, x, 2, first, text) for x in (q, k, v))
    if form.masked:
        seen = do(torch.narrow, mask, 3, first, text)
        pair = do(masked_text.attend, qv, kt, vt, do(torch.flatten, seen, 1), form.scale)
        lse2 = do(operator.getitem, pair, 1)
        lse2 = poison(do, lse2, do(torch.narrow, mask, 3, start, video))
    else:
        pair = do(text_keys.operator(form.text_engine), qv, kt, vt, form.scale)
        lse2 = do(operator.getitem, pair, 1)
    y = merge(do, y, lse, do(operator.getitem, pair, 0), lse2)
    keys, values = (do(torch.narrow, x, 2, 0, real) if form.padding else x for x in (k, v))
    of_text = do(scaled_dot_product_attention, qt, keys, values, attn_mask=_mask(do, form, mask, real),
                 scale=form.scale, enable_gqa=form.grouped)
    return do(torch.cat, [of_text, y] if form.text_first else [y, of_text], 2)


def merge(do: Do, y1: Any, lse1: Any, y2: Any, lse2: Any) -> Any:
    """Attention over two sets of keys from the attention over each: y [B, heads, N, D], lse [B, heads, N]."""
    share = do(torch.unsqueeze, do(torch.sigmoid, do(torch.sub, lse1, lse2)), -1)
    both = do(torch.add, do(torch.mul, y1, share), do(torch.mul, y2, do(operator.sub, 1, share)))
    return do(cast_like, both, y1)


def poison(do: Do, lse: Any, seen: Any) -> Any:
    """lse, or NaN for a sample whose mask hides video tokens: a window would read them, so nothing can be right."""
    whole = do(torch.all, do(torch.flatten, seen, 1), 1)
    flag = do(torch.where, whole, 0.0, float("nan"))
    return do(torch.add, lse, do(torch.unsqueeze, do(torch.unsqueeze, flag, -1), -1))


def tie(do: Do, y: Any, offsets: Any) -> Any:
    """y, with a zero gradient for offsets that have no effect: a parameter without a gradient would stop DDP."""
    none = do(torch.nan_to_num, do(torch.mul, do(torch.sum, offsets), 0))
    return do(torch.add, y, do(cast_like, none, y))


# an operator of its own in graphs: caches of compiled graphs do not take Python functions
cast_like = torch.ops.aten.type_as.default


def zeros_behind(q: Tensor, padding: int) -> Tensor:
    """[B, heads, padding, D] of zeros."""
    return q.new_zeros((*q.shape[:2], padding, q.shape[3]))
