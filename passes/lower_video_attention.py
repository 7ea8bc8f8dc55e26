"""Attention over a whole video becomes sliding attention, where a mark or the option `graphopt.dsa` asks for it.

before                                             after
    x = video_attention_input(x, offsets, T, H, W)     y, lse = video_attention(q, k, v, offsets, T, H, W, window)
    q, k, v = linear(x) ..                             (with text: merged with attention to the text, by lse)
    y = scaled_dot_product_attention(q, k, v)

A mark comes from a module that `graphopt.dsa.convert` changed; its attention must be found, or the graph is refused.
The option asks for zero offsets: a sliding window without parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from graphopt import _compat
from graphopt.codegen.dsa.marker import MARK
from graphopt.errors import ConfigError
from graphopt.passes import attention_view, match_global_attention, ops_view, source
from graphopt.passes.match_global_attention import GLOBAL
from graphopt.passes.match_global_attention import Site as Attention
from graphopt.passes.pipeline import PassContext, nested
from graphopt.passes.record import PassRecord, Reject, Site
from graphopt.passes.video_compose import Form, compose, form_of

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Request:
    """What `graphopt.dsa` asks for (docs/dsa.md).

    window: (kt, kh, kw).  grid: (T, H, W), or None to take it from the graph.  select: which modules, by name (globs).
    keep_dense: which of the selected layers of the graph stay dense, by position.  boundary: "inside" or "border".
    text: where text tokens stand in a joint sequence, "first" or "last", where the graph does not show it.
    """

    window: Triple = (3, 7, 7)
    grid: Triple | None = None
    select: tuple[str, ...] = ("*",)
    keep_dense: tuple[int, ...] = ()
    boundary: str = "inside"
    text: str = "none"


def has_mark(gm: fx.GraphModule) -> bool:
    """Does a graph, or one nested in it, come from a converted model?"""
    return any(n.target is MARK for g in nested(gm) for n in g.graph.nodes)


class MatchGlobalAttention:
    """Find every attention and note on its node what it is; the graph is not changed."""

    name = "match_global_attention"
    requires = frozenset({"canonical"})
    provides = frozenset({"attention"})
    conflicts: frozenset[str] = frozenset()

    def run(self, gm: fx.GraphModule, context: PassContext) -> PassRecord:
        """See Pass."""
        size = sum(len(g.graph.nodes) for g in nested(gm))
        record = PassRecord(self.name, size, size)
        for site in match_global_attention.find(gm):
            site.node.meta[NOTE] = site
            if site.reason is not None:
                record.rejects.append(_reject(site, site.reason))
        return record


NOTE = "graphopt_attention"


class LowerVideoAttention:
    """Put the operators of sliding attention in the place of the attentions that are asked for."""

    name = "lower_video_attention"
    requires = frozenset({"attention"})
    provides: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()

    def __init__(self, request: Request | None) -> None:
        self.request = request

    def run(self, gm: fx.GraphModule, context: PassContext) -> PassRecord:
        """See Pass.  ConfigError, whatever `on_error` says: a graph that stays dense would be another model."""
        graphs = nested(gm)
        record = PassRecord(self.name, sum(len(g.graph.nodes) for g in graphs))
        noted = {n: n.meta.pop(NOTE) for g in graphs for n in g.graph.nodes if NOTE in n.meta}
        chosen = self._selected(list(noted.values()), record) if self.request is not None else []
        if self.request is not None and noted and not chosen:
            some = next(iter(noted.values()))
            why = some.reason or f"the selection is {', '.join(self.request.select)}"
            context.warn(f"graphopt.dsa selects no attention of this graph; {some.fqn or 'one'} is {some.kind}: {why}")
        for g in graphs:
            here = {n: s for n, s in noted.items() if n.graph is g.graph}
            marked = _marked(g, here)
            for site in here.values():
                mark = marked.get(site.node)
                if mark is not None:
                    record.sites.append(_lower_marked(g, site, mark))
                elif site in chosen:
                    record.sites.append(_lower_requested(g, site, self.request))  # type: ignore[arg-type]
            for mark in [n for n in g.graph.nodes if n.target is MARK]:
                mark.replace_all_uses_with(mark.args[0])
                g.graph.erase_node(mark)
            g.graph.eliminate_dead_code(_is_impure)
            g.graph.lint()
            g.recompile()
        record.nodes_after = sum(len(g.graph.nodes) for g in graphs)
        return record

    def _selected(self, sites: list[Attention], record: PassRecord) -> list[Attention]:
        """The sites the option asks for."""
        request = self.request
        if request is None:
            return []
        named = [s for s in sites if s.kind in GLOBAL and s.reason is None
                 and any(fnmatch(s.fqn, pattern) for pattern in request.select)]
        if request.keep_dense and len({s.fqn for s in named}) == 1:
            raise ConfigError(
                "graphopt.dsa: keep_dense counts the layers of one graph, and this graph holds one",
                where=named[0].fqn,
                remedy="compile the whole model, or leave keep_dense out and compile only the layers that are to slide",
            )
        order = list(dict.fromkeys(s.fqn for s in named))
        beyond = [i for i in request.keep_dense if not -len(order) <= i < len(order)]
        if order and beyond:
            raise ConfigError(
                f"graphopt.dsa: keep_dense names {', '.join(map(str, beyond))}, and {len(order)} layers are selected",
                where=f"{order[0]} .. {order[-1]}", remedy=f"use positions from {-len(order)} to {len(order) - 1}",
            )
        kept = {order[i] for i in request.keep_dense} if order else set()
        record.rejects += [_reject(s, "kept dense (keep_dense)") for s in named if s.fqn in kept]
        return [s for s in named if s.fqn not in kept]


def _is_impure(node: Node) -> bool:
    """Only nodes of ours, or what they leave unread, may go: everything else is the user's."""
    return not node.meta.get(OURS, False)


OURS = "graphopt_video_attention"


def _reject(site: Attention, reason: str) -> Reject:
    return Reject("match_global_attention", site.fqn, site.node.name, f"{site.kind}: {reason}", site.where)


def _marked(gm: fx.GraphModule, sites: dict[Node, Attention]) -> dict[Node, Node]:
    """Attention -> the mark its queries are made from.  Every mark must have one."""
    found: dict[Node, Node] = {}
    used: set[Node] = set()
    marks = {n for n in gm.graph.nodes if n.target is MARK}
    if not marks:
        return found
    for node, site in sites.items():
        reached = _reach(site.attention.q, marks, sites)
        if len(reached) == 1 and site.kind != "cross":
            mark = next(iter(reached))
            if mark in used:
                raise ConfigError("two attentions are made from one converted module's input", where=site.fqn,
                                  remedy="select a module that holds one attention")
            found[node] = mark
            used.add(mark)
    lost = next((m for m in marks if m not in used), None)
    if lost is not None:
        raise ConfigError(
            "the attention of a converted module is not in the graph its input is in: a graph break lies between",
            where=f"{source.fqn(lost) or lost.args[8]} ({source.where(lost)})",
            remedy="TORCH_LOGS=graph_breaks names the break; leave the module out of convert's select, or run it "
            "eagerly (torch.compiler.disable)",
        )
    return found


def _reach(start: Node, marks: set[Node], sites: dict[Node, Attention]) -> set[Node]:
    """The marks a node's values come from, without going through another attention."""
    seen, todo, reached = {start}, [start], set()
    while todo:
        node = todo.pop()
        if node in marks:
            reached.add(node)
            continue
        for up in node.all_input_nodes:
            if up not in seen and up not in sites:
                seen.add(up)
                todo.append(up)
    return reached


def _lower_marked(gm: fx.GraphModule, site: Attention, mark: Node) -> Site:
    _, offsets, T, H, W, window, text, boundary, _owner = mark.args
    # under FSDP2 and dynamic=True Dynamo takes the numbers of a configuration for sizes that may change
    fixed = tuple(_as_int(_number(n)) for n in window)  # type: ignore[union-attr]
    request = Request(fixed, None, boundary=boundary, text=text)  # type: ignore[arg-type]
    reason = site.reason
    if site.kind == "unknown" or _is_whole(site, _number(T) * _number(H) * _number(W)):
        reason = None  # who converted the module said what it is
    elif site.kind not in GLOBAL:
        reason = reason or match_global_attention.REASONS[site.kind]
    if reason is not None:
        raise ConfigError(f"a converted attention cannot slide: {reason}", where=_place(site),
                          remedy="leave it out of convert's select (graphopt.dsa.plan lists what can be converted)")
    shown = None if site.grid is None or len(site.grid) != 3 else tuple(site.grid)
    given = (_number(T), _number(H), _number(W))
    if shown is not None and all(type(n) is int for n in (*shown, *given)) and shown != given:
        raise ConfigError(f"the grid {given} that a converted model was given is not the graph's, {shown}",
                          where=_place(site), remedy="leave graphopt.dsa.video_grid and convert's grid= out, or pass "
                          "the grid after patching")
    return _put(gm, site, request, offsets, (T, H, W))


def _is_whole(site: Attention, video: Any) -> bool:
    """Does attention within a frame, or through a place, see all tokens, because there is one frame, or one place?"""
    if site.kind not in ("spatial", "temporal") or site.attention.mask is not None or site.attention.causal:
        return False
    return bool(site.tokens == video)


def _lower_requested(gm: fx.GraphModule, site: Attention, request: Request) -> Site:
    if request.grid is None and site.grid is None:
        raise ConfigError(
            "graphopt.dsa: the grid of a video is not visible in this graph, and it is never guessed from the tokens",
            where=_place(site),
            remedy="pass it, \"grid\": (T, H, W) after patching; or compile the whole model, if it takes a latent "
            "[B, C, T, H, W]; where each layer is a graph (graphopt.stream, graphopt.regions) use graphopt.dsa.convert",
        )
    if request.grid is None and site.sizes and all(s is not None for s in site.sizes):
        with gm.graph.inserting_before(site.node):
            read = Emitter(gm.graph, site.node)
            sizes = tuple(read(torch.ops.aten.sym_size.int, *s) for s in site.sizes)  # type: ignore[misc]
        return _put(gm, site, request, None, sizes)
    shown = None if site.grid is None else tuple(_as_int(n) for n in site.grid)
    if request.grid is not None and shown is not None and tuple(request.grid) != shown:
        raise ConfigError(f"graphopt.dsa: the grid {tuple(request.grid)} is not the graph's, {shown}",
                          where=_place(site), remedy="leave \"grid\" out, or pass the grid after patching")
    return _put(gm, site, request, None, request.grid or shown)  # type: ignore[arg-type]


def _as_int(size: Any) -> int:
    """A size as a number: inside a checkpoint a symbol cannot be read, and the graph is fixed to its grid."""
    return int(size)


def _place(site: Attention) -> str:
    return f"{site.fqn or 'the compiled module'} ({site.where})"


def _put(gm: fx.GraphModule, site: Attention, request: Request, offsets: Any, grid: tuple[Any, Any, Any]) -> Site:
    """Operators in, attention out."""
    values = [_number(n) for n in grid]
    video = values[0] * values[1] * values[2]
    text, first = _text(site, request, video)
    a = site.attention
    with gm.graph.inserting_before(a.node):
        emit = Emitter(gm.graph, a.node)
        q, k, v = (_four(emit, n, ops_view.dtype_of(a.node)) for n in (a.q, a.k, a.v))
        fake = [ops_view.value(n) for n in (q, k, v, offsets)]
        scale = int(fake[0].shape[-1]) ** -0.5 if a.scale is None else a.scale  # type: ignore[union-attr]
        form = form_of(fake[0], fake[1], fake[3], tuple(values), request.window, scale, request.boundary,  # type: ignore
                       site.kind == "joint" or bool(text is not None and not ops_view.same_size(text, 0)), first,
                       a.mask is not None)
        if form.engine == "dense" and not form.tied:
            return _site(site, form)
        y = compose(emit, form, q, k, v, offsets, a.mask, grid, _node_for(emit, text, site, grid))
        if len(site_shape(a.node)) == 3:
            y = emit(torch.squeeze, y, 1)
    y.meta = {**a.node.meta, "example_value": y.meta["example_value"], OURS: True}
    a.node.replace_all_uses_with(y)
    _drop(gm.graph, a.node)
    return _site(site, form)


def site_shape(node: Node) -> tuple[Any, ...]:
    """The sizes of a node's tensor."""
    v = ops_view.value(node)
    return () if v is None else tuple(v.shape)


def _text(site: Attention, request: Request, video: Any) -> tuple[Any, bool]:
    """(text tokens, do they stand first); ConfigError where grid and tokens do not fit."""
    if ops_view.same_size(site.tokens, video) or bool(site.tokens == video):
        return 0, False
    if site.grid is not None and site.kind == "joint":
        if bool(site.tokens == video + site.text):
            return site.text, site.text_first
    elif site.kind == "joint" and len(site.parts) == 2:
        fits = [i for i, n in enumerate(site.parts) if bool(n == video)]
        if len(fits) == 1:
            return site.parts[1 - fits[0]], fits[0] == 1
        if fits and request.text in ("first", "last"):
            return video, request.text == "first"
    elif request.text in ("first", "last") and bool(site.tokens > video):
        return site.tokens - video, request.text == "first"
    raise ConfigError(
        f"a grid of {video} video tokens does not fit a sequence of {site.tokens}"
        + (f" with {site.text} text tokens" if site.text else ""),
        where=_place(site),
        remedy="pass the grid after patching (graphopt.dsa.video_grid(T, H, W), or \"grid\"); where text tokens are "
        "part of the sequence, say where: text='first' or 'last'",
    )


def _node_for(emit: Emitter, text: Any, site: Attention, grid: tuple[Any, Any, Any]) -> Any:
    """The number of text tokens as a number or a node."""
    if text is None or isinstance(text, int):
        return text
    video = emit(operator.mul, emit(operator.mul, grid[0], grid[1]), grid[2])
    return emit(operator.sub, emit(torch.ops.aten.sym_size.int, site.attention.q, 2), video)


def _number(n: Any) -> Any:
    return n.meta["example_value"] if isinstance(n, Node) else n


def _four(emit: Emitter, node: Node, dtype: torch.dtype | None) -> Node:
    """[B, heads, N, D] with a contiguous last dimension, in the dtype the attention computes in (autocast)."""
    v = ops_view.value(node)
    if v is not None and v.dtype != dtype:
        node = emit(torch.ops.aten.to.dtype, node, dtype)
    if v is not None and v.dim() == 3:
        node = emit(torch.unsqueeze, node, 1)
    if v is not None and not ops_view.same_size(v.stride(-1), 1):
        node = emit(torch.clone, node, memory_format=torch.contiguous_format)
    return node


def _drop(graph: fx.Graph, node: Node) -> None:
    """Erase an attention nothing reads any more, and of one that was written out what stood before it."""
    todo = [node]
    while todo:
        n = todo.pop()
        if n.users or (n is not node and not _of_attention(n)):
            continue
        before = n.all_input_nodes
        graph.erase_node(n)
        todo += [b for b in before if b not in todo]


def _of_attention(node: Node) -> bool:
    """One of the operators between q @ k^T and the product with v."""
    name = ops_view.canonical(node)
    return (name in ("mul", "div", "cast", "add") or node.target in (torch.baddbmm, torch.einsum)
            or attention_view.is_softmax(node) or attention_view.is_matmul(node)
            or node.target in attention_view.DROPOUT or node.target in ("transpose", "masked_fill"))


def _site(site: Attention, form: Form) -> Site:
    sizes = (site.batch, site.heads, site.tokens, site.head_dim)
    shape = tuple(n if isinstance(n, int) else str(n) for n in sizes)
    record = Site("video_attention", "lower_video_attention", site.fqn, site.node.name, site.where, shape,
                  str(site.dtype).removeprefix("torch."), "rewritten")
    if form.engine == "dense":
        return replace(record, status="declined", reason="the window covers the grid: dense attention is the same")
    return record


class Emitter:
    """Computes where everything is a number, else adds a node with its example value."""

    def __init__(self, graph: fx.Graph, like: Node) -> None:
        self.graph, self.like = graph, like

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of the function: a value, or a node."""
        nodes = [n for n in _compat.tree_leaves((args, kwargs)) if isinstance(n, Node)]
        if not nodes:
            return function(*args, **kwargs)
        made = self.graph.call_function(function, args, kwargs)
        values, given = fx.node.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        tensors = [v for v in (n.meta["example_value"] for n in nodes) if isinstance(v, torch.Tensor)]
        with _compat.fake_mode_of(tensors):
            made.meta["example_value"] = function(*values, **given)
        for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
            if key in self.like.meta:
                made.meta[key] = self.like.meta[key]
        made.meta[OURS] = True
        return made
