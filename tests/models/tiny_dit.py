"""A small diffusion transformer written for tests of streaming: quick to trace, with everything its kin have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, D=16, dropout=0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D, bias=False)
        self.table = nn.Parameter(torch.randn(2, D) * 0.1)
        self.dropout = dropout

    def forward(self, x, temb, rope=None):
        scale, gate = (self.table + temb[:, None]).unbind(1)
        q, k, v = self.qkv(self.norm(x) * (1 + scale[:, None])).chunk(3, -1)
        if rope is not None:
            q, k = q * rope, k * rope
        x = x + gate[:, None] * self.out(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])
        return x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)


class TinyDiT(nn.Module):
    """forward(x[B, S, 8], t[B]) -> [B, S, 8].  `order` says which blocks run; a block may run twice."""

    def __init__(self, layers=4, D=16, dropout=0.0, order=None, seed=0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.time = nn.Linear(8, D), nn.Linear(1, D)
        self.blocks = nn.ModuleList(Block(D, dropout) for _ in range(layers))
        self.head = nn.Linear(D, 8)
        self.register_buffer("rope", torch.rand(1, 1, D) + 0.5)
        self.order = list(range(layers)) if order is None else order
        self.checkpoint = False

    def forward(self, x, t):
        temb = F.silu(self.time(t[:, None]))
        x = self.embed(x)
        for i in self.order:
            if self.checkpoint:
                x = torch.utils.checkpoint.checkpoint(self.blocks[i], x, temb, self.rope, use_reentrant=False)
            else:
                x = self.blocks[i](x, temb, self.rope)
        return self.head(x)


def inputs(B=2, S=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, S, 8, generator=g), torch.rand(B, generator=g)
