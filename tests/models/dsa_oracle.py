"""Independent definitions of video attention for tests: dense matrices and explicit sampling, no lattice."""
import math

import torch


def coordinates(grid):
    return torch.stack(torch.meshgrid(*[torch.arange(n) for n in grid], indexing="ij"), -1).reshape(-1, 3)


def cut(window, grid):
    return tuple(min(k, n) for k, n in zip(window, grid))


def starts(offsets, grid, window):
    """[.., N, 3] window starts of shift mode."""
    window = cut(window, grid)
    high = torch.tensor([n - k for n, k in zip(grid, window)], dtype=offsets.dtype)
    fixed = coordinates(grid) - torch.tensor([k // 2 for k in window])
    fixed = torch.minimum(fixed.clamp(min=0).to(offsets.dtype), high)
    return torch.minimum((fixed + offsets).clamp(min=0), high)


def sample(x, at, grid):
    """x [.., N, D] (leading dims L) at coordinates `at` [L, n, K, 3] by 8 explicit corners -> [L, n, K, D]."""
    volume = x.reshape(*x.shape[:-2], *grid, x.shape[-1])
    low = torch.stack([at[..., a].detach().floor().clamp(0, max(grid[a] - 2, 0)) for a in range(3)], -1)
    f = at - low
    lead = tuple(torch.arange(n).view(*[-1 if i == j else 1 for j in range(at.dim() - 1)])
                 for i, n in enumerate(x.shape[:-2]))
    out = 0
    for corner in range(8):
        bits = [(corner >> (2 - a)) & 1 for a in range(3)]
        index = [(low[..., a].long() + bits[a]).clamp(max=grid[a] - 1) for a in range(3)]
        weight = math.prod(f[..., a] if bits[a] else 1 - f[..., a] for a in range(3))
        out = out + weight[..., None] * volume[(*lead, *index)]
    return out


def naive(q, k, v, at, grid, scale):
    """Attention of each query to its sampled taps; at [B, heads, N, K, 3]."""
    kt, vt = sample(k, at, grid), sample(v, at, grid)
    logits = (q[..., None, :] * kt).sum(-1) * scale
    return (logits.softmax(-1)[..., None] * vt).sum(-2), logits.logsumexp(-1)


def shift(q, k, v, offsets, grid, window, scale=None):
    """Shift mode with equal heads everywhere: offsets [B, heads, N, 3]."""
    window = cut(window, grid)
    at = starts(offsets, grid, window)[..., None, :] + coordinates(window).to(offsets.dtype)
    return naive(q, k, v, at, grid, q.shape[-1] ** -0.5 if scale is None else scale)


def natten_mask(grid, window, moved=None):
    """[N, N] boolean: key in query's window.  `moved`: whole offsets [N, 3]."""
    window = cut(window, grid)
    p = coordinates(grid)
    high = torch.tensor(grid) - torch.tensor(window)
    start = torch.minimum((p - torch.tensor(window) // 2).clamp(min=0), high)
    if moved is not None:
        start = torch.minimum((start + moved).clamp(min=0), high)
    r = p[None] - start[:, None]
    return ((r >= 0) & (r < torch.tensor(window))).all(-1)
