"""What converted layers do on a user's own data: held against the definition (`verify`), and measured (`probe`)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphopt.codegen.dsa.reference import effective_window, positions
from graphopt.codegen.dsa.spec import query_tile
from graphopt.dsa.grid import Grid
from graphopt.dsa.handle import Handle
from graphopt.errors import ConfigError, VerifyError

LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4, torch.float64: 1e-10}


@dataclass(frozen=True)
class Verified:
    """One layer: relative L2 error of its output against fp64, over the sampled queries, and the limit."""

    layer: str
    grid: Grid
    window: Grid
    tokens: int
    queries: int
    error: float
    limit: float


@contextmanager
def _recording(handle: Handle, recorder: Callable[..., None], dense: bool) -> Any:
    scope = handle.scope
    before = scope.recorder, scope.dense
    scope.recorder, scope.dense = recorder, dense
    try:
        yield
    finally:
        scope.recorder, scope.dense = before


def _run(handle: Handle, args: tuple[Any, ...], kwargs: dict[str, Any], found: dict[str, Any]) -> None:
    with torch.no_grad():
        handle.model(*args, **kwargs)
    lost = [n for n in handle.layers if n not in found]
    if lost:
        raise ConfigError(f"{len(lost)} converted layers did not run in this forward", where=lost[0],
                          remedy="call it with inputs that reach them, on the model itself and not its compiled form")


def _sample(grid: Grid, queries: int) -> Tensor:
    """Token numbers: the corners, then some at random (the same at every call)."""
    T, H, W = grid
    n = T * H * W
    corners = [(t * H + h) * W + w for t in (0, T - 1) for h in (0, H - 1) for w in (0, W - 1)]
    rest = torch.randperm(n, generator=torch.Generator().manual_seed(0))[: max(0, queries - 8)].tolist()
    return torch.tensor(list(dict.fromkeys([*corners, *rest]))[: max(queries, 1)])


def verify(handle: Handle, args: tuple[Any, ...], kwargs: dict[str, Any], queries: int = 64) -> list[Verified]:
    """See graphopt.dsa.verify."""
    found: dict[str, Verified] = {}

    def check(head: Any, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, grid: Grid, text: int, first: bool,
              scale: float | None, mask: Tensor | None, y: Tensor) -> None:
        video = math.prod(grid)
        at = _sample(grid, queries).to(q.device)
        start = text if first else 0
        expected = definition(
            q[:1, :, start : start + video], k[:1], v[:1], None if offsets is None else offsets[:1], grid,
            head.config.window, at, scale, head.config.boundary, start, None if mask is None else mask[:1])
        got = y[:1, :, start : start + video][:, :, at].double()
        error = ((got - expected).norm() / expected.norm().clamp_min(1e-300)).item()
        found[head.fqn] = Verified(head.fqn, grid, head.config.window, video + text, len(at), error, LIMITS[q.dtype])

    with _recording(handle, check, dense=False):
        _run(handle, args, kwargs, found)
    for result in found.values():
        if not result.error <= result.limit:
            raise VerifyError(f"the output differs from fp64 by {result.error:.2e}, the limit is {result.limit:.1e}",
                              where=f"{result.layer}, grid {result.grid}, window {result.window}",
                              remedy="report it with graphopt doctor's output; handle.dense() leaves the layers dense")
    return [found[n] for n in handle.layers]


def definition(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, grid: Grid, window: Grid, at: Tensor,
               scale: float | None, boundary: str, start: int, mask: Tensor | None) -> Tensor:
    """Video attention of the tokens `at`, in fp64, by 8 corners per tap; written for clearness, shared with no kernel.

    q: [B, heads, T*H*W, D].  k, v: of the whole sequence, the video's tokens from `start` on.  Returns [B, heads, n,
    D].
    """
    device, heads = q.device, q.shape[1]
    video = math.prod(grid)
    cut = torch.tensor(effective_window(window, grid), device=device)
    size = torch.tensor(grid, device=device)
    k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    here = positions(grid, device)[at]
    first = here - cut // 2
    if boundary == "inside":
        first = torch.minimum(first.clamp(min=0), size - cut)
    taps = positions(tuple(cut.tolist()), device)  # type: ignore[arg-type]
    move = torch.zeros(q.shape[0], heads, len(at), 1, 3, device=device, dtype=torch.float64)
    if offsets is not None:
        each = offsets.double().repeat_interleave(heads // offsets.shape[1], 1)[:, :, at].nan_to_num(0.0)
        move = each if each.dim() == 5 else each[..., None, :]
    base = first[:, None].double() + (move if boundary == "inside" and move.shape[3] == 1 else 0.0)
    if boundary == "inside" and move.shape[3] == 1:
        base = torch.minimum(base.clamp(min=0), (size - cut).double())
        place = base + taps
    else:
        place = (first[:, None] + taps).double() + move
    place = torch.minimum(place.clamp(min=0), (size - 1).double())
    low = place.floor().long()
    part = place - low
    keys = values = torch.zeros((), dtype=torch.float64, device=device)
    for corner in positions((2, 2, 2), device):
        point = torch.minimum(low + corner, size - 1)
        weight = torch.where(corner.bool(), part, 1 - part).prod(-1)[..., None]
        token = start + (point[..., 0] * grid[1] + point[..., 1]) * grid[2] + point[..., 2]
        token = token.expand(q.shape[0], heads, len(at), -1)
        pick = lambda x, token=token: torch.stack([  # noqa: E731
            torch.stack([x[b, h][token[b, h]] for h in range(heads)]) for b in range(q.shape[0])])
        keys, values = keys + weight * pick(k), values + weight * pick(v)
    qq = q[:, :, at].double()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = (keys @ qq[..., None])[..., 0] * scale
    other = torch.ones(k.shape[2], dtype=torch.bool, device=device)
    other[start : start + video] = False
    if other.any():
        words = qq @ k[:, :, other].transpose(-1, -2) * scale
        if mask is not None:
            words = words.masked_fill(~mask[..., other], float("-inf"))
        logits = torch.cat([logits, words], -1)
    p = logits.softmax(-1)
    n = keys.shape[3]
    y = (p[..., None, :n] @ values)[..., 0, :]
    return y + p[..., n:] @ v[:, :, other] if other.any() else y


@dataclass
class LayerProbe:
    """One layer, by head where a list: parts of the dense attention mass of sampled queries, and the offsets.

    inside, inside_fixed: on the window's tokens, with the learned offsets and with none.  text: on text tokens.
    offset_mean, offset_max: |offset| per axis in tokens.  clamped: part of offsets the border stops.  histogram: per
    axis (edges, counts).  box: tokens a tile of queries reads on average, box_fixed the same without offsets.
    """

    grid: Grid
    window: Grid
    inside: list[float]
    inside_fixed: list[float]
    text: list[float]
    offset_mean: list[float] = field(default_factory=list)
    offset_max: list[float] = field(default_factory=list)
    clamped: float = 0.0
    histogram: dict[str, tuple[list[float], list[int]]] = field(default_factory=dict)
    box: float = 0.0
    box_fixed: float = 0.0


class Probe:
    """What `probe` measured; `layers`: name -> LayerProbe; `print` shows a line per layer."""

    def __init__(self, layers: dict[str, LayerProbe]) -> None:
        self.layers = layers

    def to_json(self, indent: int | None = 1) -> str:
        """Plain data."""
        return json.dumps({n: asdict(p) for n, p in self.layers.items()}, indent=indent)

    def __str__(self) -> str:
        lines = ["layer".ljust(44) + "mass inside  fixed   (worst head)  text    |offset| t, h, w      box / fixed"]
        for name, p in self.layers.items():
            def mean(x: list[float]) -> float:
                return sum(x) / len(x)
            offsets = ", ".join(f"{x:.2f}" for x in p.offset_mean) or "none"
            lines.append(f"{name:<44}{mean(p.inside):>10.3f} {mean(p.inside_fixed):>7.3f} {min(p.inside):>10.3f} "
                         f"{mean(p.text):>10.3f}    {offsets:<20} {p.box:.0f} / {p.box_fixed:.0f}")
        return "\n".join(lines)


def probe(handle: Handle, args: tuple[Any, ...], kwargs: dict[str, Any], queries: int = 128) -> Probe:
    """One forward with dense attention; of the first sample of the batch, `queries` tokens per layer are looked at."""
    found: dict[str, LayerProbe] = {}

    def look(head: Any, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, grid: Grid, text: int, first: bool,
             scale: float | None, mask: Tensor | None, y: Tensor) -> None:
        window = effective_window(head.config.window, grid)
        video, start = math.prod(grid), text if first else 0
        at = _sample(grid, queries).to(q.device)
        heads = q.shape[1]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        kk = k[0].float().repeat_interleave(heads // k.shape[1], 0)
        move = None
        if offsets is not None:
            move = offsets[0].float().repeat_interleave(heads // offsets.shape[1], 0)
            move = move.mean(2) if move.dim() == 4 else move
        inside, fixed, words = [], [], []
        for h in range(heads):
            logits = q[0, h, start + at].float() @ kk[h].T * scale
            if mask is not None:
                logits = logits.masked_fill(~mask[0].reshape(-1, mask.shape[-1])[:1], float("-inf"))
            p = logits.softmax(-1)
            on_video = p[:, start : start + video].view(-1, *grid)
            fixed.append(_covered(on_video, _starts(at, None, grid, window), window))
            moved = fixed[-1] if move is None else _covered(
                on_video, _starts(at, move[h, at], grid, window), window)
            inside.append(moved)
            words.append(float((1 - p[:, start : start + video].sum(-1)).mean()) if text else 0.0)
        layer = LayerProbe(grid, window, inside, fixed, words)
        _offsets(layer, move, grid, window)
        found[head.fqn] = layer

    with _recording(handle, look, dense=True):
        _run(handle, args, kwargs, found)
    return Probe({n: found[n] for n in handle.layers})


def _starts(at: Tensor | None, move: Tensor | None, grid: Grid, window: Grid, device: Any = None) -> Tensor:
    """Where windows start, [.., n, 3] float."""
    device = at.device if at is not None else device
    here = positions(grid, device)
    here = here if at is None else here[at]
    high = torch.tensor(grid, device=device) - torch.tensor(window, device=device)
    first = torch.minimum((here - torch.tensor(window, device=device) // 2).clamp(min=0), high).float()
    return first if move is None else torch.minimum((first + move.nan_to_num()).clamp(min=0), high.float())


def _covered(p: Tensor, start: Tensor, window: Grid) -> float:
    """The part of p [n, T, H, W] on the tokens of windows; a token between two taps counts in part."""
    weights = []
    for axis in range(3):
        r = torch.arange(p.shape[axis + 1], device=p.device)[None] - start[:, axis : axis + 1]
        weights.append(torch.minimum((r + 1).clamp(0, 1), (window[axis] - r).clamp(0, 1)))
    return float(torch.einsum("nthw,nt,nh,nw->n", p, *weights).mean())


def _offsets(layer: LayerProbe, move: Tensor | None, grid: Grid, window: Grid) -> None:
    """Statistics of the offsets of all tokens, [heads, N, 3]."""
    tile = query_tile(window, grid)
    device = None if move is None else move.device
    fixed = _starts(None, None, grid, window, device)
    layer.box_fixed = layer.box = _box(fixed[None], grid, window, tile)
    if move is None:
        return
    layer.offset_mean = move.abs().mean((0, 1)).tolist()
    layer.offset_max = move.abs().amax((0, 1)).tolist()
    moved = _starts(None, move, grid, window, device)
    free = torch.tensor([k < n for k, n in zip(window, grid)], device=device)
    layer.clamped = float(((moved - fixed - move).abs() > 1e-4)[..., free].float().mean()) if free.any() else 0.0
    for axis, name in enumerate("thw"):
        reach = max(1.0, layer.offset_max[axis])
        counts = torch.histc(move[..., axis].cpu(), 20, -reach, reach)
        edges = [reach * (i / 10 - 1) for i in range(21)]
        layer.histogram[name] = (edges, [int(c) for c in counts])
    layer.box = _box(moved, grid, window, tile)


def _box(starts: Tensor, grid: Grid, window: Grid, tile: Grid) -> float:
    """Tokens the queries of a tile read between them, mean over tiles and heads; starts [heads, N, 3]."""
    heads = starts.shape[0]
    field_ = starts.view(heads, *grid, 3).permute(0, 4, 1, 2, 3).reshape(heads * 3, 1, *grid)
    high = torch.nn.functional.max_pool3d(field_, tile, tile, ceil_mode=True).view(heads, 3, -1)
    low = -torch.nn.functional.max_pool3d(-field_, tile, tile, ceil_mode=True).view(heads, 3, -1)
    size = (high.ceil() - low.floor()) + torch.tensor(window, device=starts.device)[None, :, None]
    limit = torch.tensor(grid, device=starts.device)[None, :, None]
    return float(torch.minimum(size, limit).prod(1).mean())
