"""Which attention of a graph is self-attention over the whole sequence of a video, and what every other one is.

    video      queries and keys are all tokens of a latent video, in raster order
    joint      the video's tokens with text tokens before or behind them
    cross      the keys are another sequence
    text       self-attention of tokens that are not the video's
    spatial    within frames;  temporal: along time at each place
    image      the tokens are an image's, alone or with text
    masked     the video's tokens under a mask;  causal: under a causal one
    unknown    where the tokens come from cannot be followed

The decision is made from the axes of the graph's inputs (axes.py), never from names of classes or modules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from graphopt.passes import attention_view, ops_view, source
from graphopt.passes.attention_view import Attention
from graphopt.passes.axes import Axes
from graphopt.passes.axis_factors import Axis, Dim, Factor, Join, Piece, key, leaves, sequence_of
from graphopt.passes.facts import gather

GLOBAL = ("video", "joint")
Size = Any  # int or SymInt


@dataclass(frozen=True)
class Site:
    """One attention of a graph.

    fqn: the module that owns it.  kind: see above.  tokens: of the queries, text included.  grid: (T, H, W) where the
    graph shows it, else None.  text, text_first: text tokens of a joint sequence (None: not known without the grid) and
    whether they stand before the video's.  text_mask: the mask selects keys alone, of which text ones may be hidden.
    sizes: nodes of its graph, each with the dimension that has the grid's size; None where it cannot be read there.
    reason: why sliding attention cannot take its place, None if it can.
    """

    attention: Attention
    graph: fx.GraphModule
    fqn: str
    where: str | None
    kind: str
    batch: Size
    heads: Size
    tokens: Size
    keys: Size
    head_dim: Size
    dtype: torch.dtype
    grid: tuple[Size, Size, Size] | None = None
    text: Size | None = 0
    text_first: bool = False
    text_mask: bool = False
    reason: str | None = None
    sizes: tuple[tuple[Node, int] | None, ...] = ()
    parts: tuple[Size, ...] = ()  # sizes of the parts of a joint sequence whose grid is not in the graph

    @property
    def node(self) -> Node:
        """The node that yields the attention's result."""
        return self.attention.node


def find(gm: fx.GraphModule) -> list[Site]:
    """Every attention of a graph and of the checkpoints in it, classified."""
    with ops_view.remembered():
        axes = Axes(gm)
        return [_site(a, g, axes) for g in axes.bodies for a in attention_view.attentions(g.graph)]


def _site(a: Attention, gm: fx.GraphModule, axes: Axes) -> Site:
    q, k = ops_view.value(a.q), ops_view.value(a.k)
    if q is None or k is None:
        raise ValueError(f"{a.node.name} has no example values")
    heads = q.shape[1] if q.dim() >= 4 else 1
    site = Site(a, gm, source.fqn(a.node), source.where(a.node), "unknown", q.shape[0], heads, q.shape[-2], k.shape[-2],
                q.shape[-1], q.dtype, reason=a.reason)
    of_q, of_k = (sequence_of(axes.of.get(n) if isinstance(axes.of.get(n), list) else None, -2) for n in (a.q, a.k))
    parts = _parts(site, of_q, axes)
    kind, extra = _kind(site, of_q, of_k, parts, axes.outputs)
    site = replace(site, kind=kind, **extra)
    if site.kind in GLOBAL:
        site = _limits(site)
        if any(not isinstance(n, int) for n in site.grid or ()):
            part = next(p for p in parts if _is_video(p))
            site = replace(site, sizes=tuple(axes.witness(gm.graph, f) for f in part))
    return site if site.reason is not None or site.kind in GLOBAL else replace(site, reason=REASONS[site.kind])


REASONS = {
    "cross": "the keys are another sequence than the queries",
    "text": "its tokens are not the video's",
    "spatial": "it sees one frame at a time, so there is no sequence of a whole video",
    "temporal": "it sees one place at a time, so there is no sequence of a whole video",
    "image": "its tokens are an image's: there is no time axis",
    "masked": "a mask over the video's tokens (padding or packed sequences) has no window",
    "causal": "causal attention is refused",
    "unknown": "the origin of its tokens cannot be followed in the graph",
}


def _parts(site: Site, of_q: Dim, axes: Axes) -> list[Dim]:
    """The sequences that make up the queries; of a video of one frame with the frame axis."""
    parts = of_q[0].parts if len(of_q) == 1 and isinstance(of_q[0].axis, Join) else [of_q] if of_q else []
    return [_with_frame(p, site, axes) for p in parts or []]


def _with_frame(part: Dim, site: Site, axes: Axes) -> Dim:
    """Tokens (H, W) of an input with five dimensions, as (1, H, W) where its frames are one: an image among videos.

    An axis of one is no factor of the tokens.  If frames were more, each a sequence of its own, they would be in the
    batch.
    """
    where = [f.axis for f in part]
    if len(where) != 2 or not all(isinstance(x, Axis) and x.rank == 5 for x in where):
        return part
    h, w = where
    shape = axes.shape_of(h.source)  # type: ignore[union-attr]
    if h.source != w.source or (h.dim, w.dim) != (3, 4) or shape is None:  # type: ignore[union-attr]
        return part
    frames = next((d for d in (2, 1) if ops_view.same_size(shape[d], 1)), None)
    if frames is None or not ops_view.same_size(shape[0], site.batch):
        return part
    return [Factor(Axis(h.source, frames, 5), 1), *part]  # type: ignore[union-attr]


def _kind(site: Site, of_q: Dim, of_k: Dim, parts: list[Dim], outputs: set[Axis]) -> tuple[str, dict[str, Any]]:
    a = site.attention
    if not ops_view.same_size(site.tokens, site.keys) or (of_q and of_k and key(of_q) != key(of_k)):
        return "cross", {}
    if not of_q or not of_k:
        return ("causal" if a.causal else "masked" if a.mask is not None else "unknown"), {}
    video = [i for i, p in enumerate(parts) if _is_video(p)]
    if not video:
        return _other(site, of_q, parts, outputs)
    if len(video) > 1 or len(parts) > 2:
        return "unknown", {"reason": f"its sequence has {len(parts)} parts, {len(video)} of them videos"}
    if a.causal:
        return "causal", {}
    part = parts[video[0]]
    grid = tuple(f.size for f in part)
    if len(parts) == 1:
        return ("masked" if a.mask is not None else "video"), {"grid": grid}
    text: Size = 1
    for f in parts[1 - video[0]]:
        text = text * f.size
    joint = {"grid": grid, "text": text, "text_first": video[0] == 1, "text_mask": a.mask is not None}
    return ("joint" if a.mask is None or _selects_keys(site) else "masked"), joint


def _other(site: Site, of_q: Dim, parts: list[Dim], outputs: set[Axis]) -> tuple[str, dict[str, Any]]:
    """No part is a video for certain: a part of one, text, or tokens whose grid the graph does not show."""
    a = site.attention
    axes = {x for f in of_q for x in leaves(f.axis)}
    if len(parts) == 1 and all(isinstance(f.axis, Axis) and f.axis.rank >= 4 for f in of_q):
        frame = {f.axis.dim - f.axis.rank for f in of_q if isinstance(f.axis, Axis)}
        if frame == {-1, -2}:
            return "spatial", {}
        if len(frame) == 1 and not frame & {-1, -2}:
            return "temporal", {}
        return "unknown", {}
    if None in axes:
        return "unknown", {}
    if any(isinstance(f.axis, Piece) for p in parts for f in p):
        return "unknown", {"reason": "its tokens are a part of a sequence"}
    if any(x.rank == 4 for x in axes if x is not None):
        return "image", {}
    if not axes & outputs:
        return "text", {}
    if a.causal:
        return "causal", {}
    if len(parts) == 1:
        return ("masked" if a.mask is not None else "video"), {}
    if len(parts) == 2:
        sizes = tuple(_product(p) for p in parts)
        kind = "joint" if a.mask is None or _selects_keys(site) else "masked"
        return kind, {"text": None, "parts": sizes, "text_mask": a.mask is not None}
    return "unknown", {"reason": f"its sequence has {len(parts)} parts"}


def _product(dim: Dim) -> Size:
    n: Size = 1
    for f in dim:
        n = n * f.size
    return n


def _is_video(part: Dim) -> bool:
    """Three different dimensions of one input with five."""
    axes = [f.axis for f in part]
    if len(axes) != 3 or not all(isinstance(x, Axis) and x.rank == 5 for x in axes):
        return False
    return len({x.source for x in axes}) == 1 and len({x.dim for x in axes}) == 3  # type: ignore[union-attr]


def _selects_keys(site: Site) -> bool:
    """Is the mask a boolean one over keys alone, [B, 1, 1, N]?"""
    v = ops_view.value(site.attention.mask)
    if v is None or v.dtype != torch.bool or not ops_view.same_size(v.shape[-1], site.keys):
        return False
    return v.dim() == 4 and ops_view.same_size(v.shape[1], 1) and ops_view.same_size(v.shape[2], 1)


def _limits(site: Site) -> Site:
    """What of a global attention forbids a window."""
    a = site.attention
    v = ops_view.value(a.v)
    if a.reason is not None:
        return site
    if a.dropout > 0:
        return replace(site, reason=f"dropout {a.dropout:g} inside the attention has no windowed form here")
    if v is None or not ops_view.same_size(v.shape[-1], site.head_dim):
        return replace(site, reason="keys and values have different head dimensions")
    if a.spelling != "sdpa":
        facts = gather(site.graph)
        write = facts.write_between(min(facts.index[n] for n in (a.q, a.k, a.v)), facts.index[a.node], [a.q, a.k, a.v])
        if write is not None:
            return replace(site, reason=f"an in-place write ({write.name}) inside the attention")
    if a.spelling != "sdpa" and site.kind == "joint" and a.mask is not None:
        return replace(site, reason="a mask in attention that is written out")
    return site
