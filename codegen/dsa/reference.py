"""The definition of video attention in plain torch: CPU implementation, slow modes, and oracle of the kernels.

Shift mode, one offset per query and group of heads, per axis of size n with window k (k >= n makes the axis global):

    start = clamp(clamp(pos - k // 2, 0, n - k) + offset, 0, n - k)      taps at start + 0 .. k - 1, always inside
    base  = min(floor(start), n - k - 1), fraction f = start - base      so that base + k is a token as well

A tap's key and value are the trilinear interpolation of 8 tokens; all taps of a query share f.  So the query needs the
scores S of (kt + 1)(kh + 1)(kw + 1) lattice points only; logits = lerp S, weights on the lattice A = lerp^T p.
Derivatives at integer offsets are right-hand ones, at the far border inward.  NaN counts as 0, an infinite offset goes
to the border; where the start is clamped the offset's gradient is 0.

Tap mode, one offset per query, group and tap: coordinate = clamp(window start + j + offset_j, 0, n - 1) per tap, with
the window start moved inside (boundary "inside") or not (boundary "border", as in the paper).  Shift mode with "border"
is tap mode with equal offsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# elements of the largest temporary
CHUNK = 1 << 24
FAR = 1 << 20  # further than any axis is long


def high_precision(*tensors: Tensor) -> torch.dtype:
    """What is computed in: fp64 if any tensor is, else fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def effective_window(window: tuple[int, int, int], grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """The window per axis, cut to the grid."""
    return tuple(min(k, n) for k, n in zip(window, grid))  # type: ignore[return-value]


def whole(values: tuple[int, ...], device: torch.device) -> Tensor:
    """[n] int64, not copied from the host: such a copy waits for the GPU, and a CUDA graph forbids it."""
    return torch.cat([torch.full((1,), n, device=device) for n in values])


def positions(grid: tuple[int, int, int], device: torch.device) -> Tensor:
    """[N, 3] coordinates (t, h, w) of the tokens in raster order."""
    axes = [torch.arange(n, device=device) for n in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)


def finite(offsets: Tensor) -> Tensor:
    """NaN to 0, infinity to far outside."""
    return offsets.nan_to_num(nan=0.0, posinf=float(FAR), neginf=float(-FAR))


def window_starts(offsets: Tensor, where: Tensor, grid: tuple[int, int, int], window: tuple[int, int, int]) -> tuple[
        Tensor, Tensor, Tensor]:
    """(base, fraction, moves) of shift mode, each [..., n, 3], for the tokens at coordinates `where` [n, 3].

    `moves` is 1 where the start follows the offset and 0 where it is clamped.
    """
    high = whole(grid, where.device) - whole(window, where.device)
    half = whole(tuple(k // 2 for k in window), where.device)
    inside = torch.minimum((where - half).clamp(min=0), high).to(offsets.dtype)
    free = inside + finite(offsets)
    start = torch.minimum(free.clamp(min=0), high.to(offsets.dtype))
    base = torch.minimum(start.floor().long(), high - 1).clamp(min=0)
    moves = (free >= 0) & (free <= high) & offsets.isfinite()
    return base, start - base, moves


def lattice_index(base: Tensor, grid: tuple[int, int, int], window: tuple[int, int, int]) -> Tensor:
    """Token of every lattice point, [..., L].  Behind a global axis the last token stands in, with weight 0."""
    sizes = (window[0] + 1, window[1] + 1, window[2] + 1)
    point = base[..., None, :] + positions(sizes, base.device)
    point = torch.minimum(point, whole(grid, base.device) - 1)
    return (point[..., 0] * grid[1] + point[..., 1]) * grid[2] + point[..., 2]


def lerp(x: Tensor, f: Tensor, difference: int | None = None) -> Tensor:
    """Lattice [..., kt+1, kh+1, kw+1] -> taps [..., kt, kh, kw]; along `difference` the forward difference instead."""
    for axis in range(3):
        dim = x.dim() - 3 + axis
        low, up = x.narrow(dim, 0, x.shape[dim] - 1), x.narrow(dim, 1, x.shape[dim] - 1)
        weight = f[..., axis, None, None, None]
        x = up - low if axis == difference else low * (1 - weight) + up * weight
    return x


def lerp_transposed(p: Tensor, f: Tensor) -> Tensor:
    """Taps -> lattice, the transpose of `lerp`."""
    for axis in range(3):
        dim = p.dim() - 3 + axis
        weight = f[..., axis, None, None, None]
        none = torch.zeros_like(p.narrow(dim, 0, 1))
        p = torch.cat([p * (1 - weight), none], dim) + torch.cat([none, p * weight], dim)
    return p


def tap_corners(offsets: Tensor, where: Tensor, grid: tuple[int, int, int], window: tuple[int, int, int],
                boundary: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tap mode: (tokens [..., n, K, 8], weights, slopes [..., n, K, 8, 3], moves [..., n, K, 3])."""
    device, dtype = where.device, offsets.dtype
    size = whole(grid, device)
    start = where - whole(tuple(k // 2 for k in window), device)
    if boundary == "inside":
        start = torch.minimum(start.clamp(min=0), size - whole(window, device))
    free = (start[:, None] + positions(window, device)).to(dtype) + finite(offsets)
    moves = (free >= 0) & (free <= size - 1) & offsets.isfinite()
    at = torch.minimum(free.clamp(min=0), (size - 1).to(dtype))
    base = torch.minimum(at.floor().long(), size - 2).clamp(min=0)
    f = at - base
    corner = positions((2, 2, 2), device)  # [8, 3]
    point = torch.minimum(base[..., None, :] + corner, size - 1)
    tokens = (point[..., 0] * grid[1] + point[..., 1]) * grid[2] + point[..., 2]
    along = torch.where(corner == 1, f[..., None, :], 1 - f[..., None, :])  # [..., 8, 3]
    sign = (corner * 2 - 1).to(dtype)
    slopes = torch.stack([sign[:, a] * along[..., (a + 1) % 3] * along[..., (a + 2) % 3] for a in range(3)], -1)
    return tokens, along.prod(-1), slopes, moves


def chunks(queries: int, per_query: int) -> Iterator[slice]:
    """Slices of the queries whose temporaries stay within CHUNK elements."""
    step = max(1, CHUNK // max(1, per_query))
    return (slice(i, min(i + step, queries)) for i in range(0, queries, step))


def spread_heads(x: Tensor, heads: int) -> Tensor:
    """[B, g, ...] -> [B, heads, ...]: each group serves heads / g heads in a row."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def gather_tokens(x: Tensor, tokens: Tensor) -> Tensor:
    """x [B, h, N, D] at tokens [B, h, n, L] -> [B, h, n, L, D]."""
    B, heads = x.shape[:2]
    b = torch.arange(B, device=x.device)[:, None, None, None]
    h = torch.arange(heads, device=x.device)[None, :, None, None]
    return x[b, h, tokens]


def scatter_tokens(out: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Add values [B, h, n, L, D] to out [B, h, N, D] at tokens, in a fixed order."""
    B, heads, N, D = out.shape
    first = (torch.arange(B * heads, device=out.device) * N).view(B, heads, 1, 1)
    index, flat = (tokens + first).reshape(-1), out.view(-1, D)
    if out.is_cuda:  # index_add_ is atomic there, index_put_ sorts
        flat.index_put_((index,), values.reshape(-1, D), accumulate=True)
    else:
        flat.index_add_(0, index, values.reshape(-1, D))


def few_tokens(N: int, points: int, D: int) -> bool:
    """Whether tap mode multiplies a query with all N tokens and takes scores, instead of `points` vectors of length D.

    Those vectors are written and read several times.
    """
    return points * D >= 8 * N


def on_tokens(tokens: Tensor, N: int, *weights: Tensor) -> list[Tensor]:
    """Each of weights [B, h, n, L], given for tokens [B, h, n, L], as [B, h, n, N]; equal tokens add in a fixed order.
    """
    rows = tokens.shape[:-1]
    first = (torch.arange(rows.numel(), device=tokens.device) * N).view(*rows, 1)
    values = torch.stack([w.flatten() for w in weights], -1)
    out = values.new_zeros((1, 1, rows.numel() * N, len(weights)))
    scatter_tokens(out, (tokens + first).view(1, 1, 1, -1), values.view(1, 1, 1, -1, len(weights)))
    return [x.reshape(*rows, N) for x in out[0, 0].unbind(-1)]


def per_tap(offsets: Tensor, boundary: str, window: tuple[int, int, int]) -> Tensor | None:
    """Offsets [B, g, N, K, 3] of tap mode, or None for shift mode with the window kept inside."""
    if offsets.dim() == 5:
        return offsets
    if boundary == "border":
        return offsets[..., None, :].expand(*offsets.shape[:-1], math.prod(window), 3)
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, grid: tuple[int, int, int],
            window: tuple[int, int, int], scale: float, boundary: str = "inside") -> tuple[Tensor, Tensor]:
    """(y [B, heads, N, D] in q's dtype, lse [B, heads, N] fp32 or fp64)."""
    high = high_precision(q, k, v)
    window = effective_window(window, grid)
    B, heads, N, D = q.shape
    kk, vv = (spread_heads(x, heads).to(high) for x in (k, v))
    place = high_precision(offsets)
    y = torch.empty_like(q)
    lse = torch.empty((B, heads, N), dtype=high, device=q.device)
    where = positions(grid, q.device)
    taps = per_tap(offsets, boundary, window)
    L = math.prod(window) * 8 if taps is not None else math.prod(a + 1 for a in window)
    few = taps is not None and few_tokens(N, L, D)
    for part in chunks(N, B * heads * (max(N, 8 * L) if few else L * D)):
        qq = q[:, :, part].to(high)
        if taps is None:
            base, f, _ = window_starts(spread_heads(offsets[:, :, part], heads).to(place), where[part], grid, window)
            f, tokens = f.to(high), lattice_index(base, grid, window)
            lattice = [a + 1 for a in window]
            scores = (gather_tokens(kk, tokens) @ qq[..., None]).view(B, heads, qq.shape[2], *lattice)
            logits = lerp(scores, f).flatten(3) * scale
            weights = lerp_transposed(logits.softmax(-1).view(B, heads, qq.shape[2], *window), f).flatten(3)
        else:
            tokens, corner, _, _ = tap_corners(
                spread_heads(taps[:, :, part], heads).to(place), where[part], grid, window, boundary)
            corner, tokens = corner.to(high), tokens.flatten(3)
            scores = (qq @ kk.mT).gather(-1, tokens) if few else (gather_tokens(kk, tokens) @ qq[..., None])
            logits = (scores.view(corner.shape) * corner).sum(-1) * scale
            weights = (logits.softmax(-1)[..., None] * corner).flatten(3)
        if few:
            y[:, :, part] = (on_tokens(tokens, N, weights)[0] @ vv).to(y.dtype)
        else:
            y[:, :, part] = (weights[..., None, :] @ gather_tokens(vv, tokens))[..., 0, :].to(y.dtype)
        lse[:, :, part] = logits.logsumexp(-1)
    return y, lse


def backward(dy: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, y: Tensor, lse: Tensor,
             grid: tuple[int, int, int], window: tuple[int, int, int], scale: float,
             boundary: str = "inside") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, doffsets).  With S and P = dy . v on the lattice and ds = p (dp - sum(dy y) + dlse):

    dq = scale sum B k, dk += scale B q, dv += A dy, doffset_a = sum ds (D_a S) scale + sum p (D_a P)
    """
    high = high_precision(q, k, v)
    window = effective_window(window, grid)
    B, heads, N, D = q.shape
    kk, vv = (spread_heads(x, heads).to(high) for x in (k, v))
    place = high_precision(offsets)
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros((B, heads, N, D), dtype=high, device=q.device) for _ in range(2))
    taps = per_tap(offsets, boundary, window)
    each = torch.zeros((B, heads, *offsets.shape[2:]), dtype=high, device=q.device)
    where = positions(grid, q.device)
    L = math.prod(window) * 8 if taps is not None else math.prod(a + 1 for a in window)
    few = taps is not None and few_tokens(N, L, D)
    for part in chunks(N, B * heads * (max(N, 8 * L) if few else L * D) * 2):
        qq, dd = q[:, :, part].to(high), dy[:, :, part].to(high)
        delta = (dd * y[:, :, part].to(high)).sum(-1)
        if dlse is not None:
            delta = delta - dlse[:, :, part].to(high)
        norm = lse[:, :, part, None].to(high)
        if taps is None:
            base, f, moves = window_starts(
                spread_heads(offsets[:, :, part], heads).to(place), where[part], grid, window)
            f, tokens = f.to(high), lattice_index(base, grid, window)
            lattice = [a + 1 for a in window]
            keys = gather_tokens(kk, tokens)
            S = (keys @ qq[..., None]).view(B, heads, qq.shape[2], *lattice)
            P = (gather_tokens(vv, tokens) @ dd[..., None]).view(B, heads, qq.shape[2], *lattice)
            p = (lerp(S, f).flatten(3) * scale - norm).exp()
            ds = (p * (lerp(P, f).flatten(3) - delta[..., None])).view(B, heads, qq.shape[2], *window)
            p = p.view(ds.shape)
            A, Bw = lerp_transposed(p, f).flatten(3), lerp_transposed(ds, f).flatten(3) * scale
            grads = [(ds * lerp(S, f, a) * scale + p * lerp(P, f, a)).flatten(3).sum(-1) for a in range(3)]
            each[:, :, part] = torch.stack(grads, -1) * moves
        else:
            tokens, corner, slopes, moves = tap_corners(
                spread_heads(taps[:, :, part], heads).to(place), where[part], grid, window, boundary)
            corner, slopes, tokens = corner.to(high), slopes.to(high), tokens.flatten(3)
            if few:
                S, P = ((x @ y.mT).gather(-1, tokens).view(corner.shape) for x, y in ((qq, kk), (dd, vv)))
            else:
                keys = gather_tokens(kk, tokens)
                S = (keys @ qq[..., None]).view(corner.shape)
                P = (gather_tokens(vv, tokens) @ dd[..., None]).view(corner.shape)
            p = ((S * corner).sum(-1) * scale - norm).exp()
            ds = p * ((P * corner).sum(-1) - delta[..., None])
            A, Bw = (p[..., None] * corner).flatten(3), (ds[..., None] * corner).flatten(3) * scale
            slope = ds[..., None] * (S[..., None] * slopes).sum(-2) * scale
            slope = (slope + p[..., None] * (P[..., None] * slopes).sum(-2)) * moves
            each[:, :, part] = slope if offsets.dim() == 5 else slope.sum(-2)
        if few:
            A, Bw = on_tokens(tokens, N, A, Bw)
            dq[:, :, part] = (Bw @ kk).to(dq.dtype)
            dv += A.mT @ dd
            dk += Bw.mT @ qq
            continue
        dq[:, :, part] = (Bw[..., None, :] @ keys)[..., 0, :].to(dq.dtype)
        scatter_tokens(dv, tokens, A[..., None] * dd[..., None, :])
        scatter_tokens(dk, tokens, Bw[..., None] * qq[..., None, :])
    kv = k.shape[1]
    dk, dv = (torch.empty_like(t).copy_(x.view(B, kv, heads // kv, N, D).sum(2)) for x, t in ((dk, k), (dv, v)))
    g = offsets.shape[1]
    doffsets = torch.empty_like(offsets).copy_(each.view(B, g, heads // g, *offsets.shape[2:]).sum(2))
    return dq, dk, dv, doffsets
