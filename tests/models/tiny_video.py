"""A small video transformer that compiles in a second: patch embedding, blocks of self-attention, optional text."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Self-attention over hidden states, text joined before or behind them where it is given."""

    def __init__(self, width: int, heads: int, text: str = "last") -> None:
        super().__init__()
        self.heads, self.text = heads, text
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(width, width) for _ in range(4))
        self.norm_q = nn.RMSNorm(width)

    def forward(self, hidden_states: Tensor, words: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = hidden_states
        if words is not None:
            x = torch.cat([words, x] if self.text == "first" else [x, words], 1)
        split = lambda y: y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q, k, v = split(self.norm_q(self.to_q(x))), split(self.to_k(x)), split(self.to_v(x))
        y = self.to_out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))
        n = hidden_states.shape[1]
        return y[:, -n:] if self.text == "first" else y[:, :n]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Cross(Attention):
    def forward(self, hidden_states: Tensor, words: Tensor) -> Tensor:  # type: ignore[override]
        split = lambda y: y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        y = self.attend(split(self.to_q(hidden_states)), split(self.to_k(words)), split(self.to_v(words)), None)
        return self.to_out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, text: str | None, kind: type[Attention]) -> None:
        super().__init__()
        self.norm, self.attn, self.joint = nn.LayerNorm(width), kind(width, heads, text or "last"), text is not None
        self.ff = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, words: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm(x), words if self.joint else None, mask)
        return x + self.ff(x)


class TinyVideo(nn.Module):
    """latent [B, C, T, H, W] -> the same; patches of 1 x 2 x 2.  text: None, "first" or "last"."""

    def __init__(self, layers: int = 2, width: int = 16, heads: int = 2, channels: int = 3, text: str | None = None,
                 kind: type[Attention] = Attention) -> None:
        super().__init__()
        self.patch = nn.Conv3d(channels, width, (1, 2, 2), (1, 2, 2))
        self.blocks = nn.ModuleList(Block(width, heads, text, kind) for _ in range(layers))
        self.out = nn.Linear(width, channels * 4)
        self.checkpointing = False

    def forward(self, latent: Tensor, words: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = self.patch(latent)
        B, _, T, H, W = x.shape
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = checkpoint(block, x, words, mask, use_reentrant=False) if self.checkpointing else block(x, words, mask)
        return self.out(x).view(B, T, H, W, -1, 2, 2).permute(0, 4, 1, 2, 5, 3, 6).reshape(B, -1, T, 2 * H, 2 * W)


def latent(B: int = 2, T: int = 3, H: int = 4, W: int = 5, channels: int = 3) -> Tensor:
    """A random latent of a T x H x W token grid."""
    return torch.randn(B, channels, T, 2 * H, 2 * W)


# -- attention written out, as models spell it: function and scale ----------------------------------------


def written_matmul(q, k, v, mask=None):
    p = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
    return p @ v


def written_scaled_q(q, k, v, mask=None):
    return torch.matmul(torch.softmax(torch.matmul(q * 0.5, k.mT) / 2, dim=-1), v)


def written_float(q, k, v, mask=None):
    p = F.softmax(torch.matmul(q, k.transpose(2, 3)).float() / math.sqrt(q.shape[-1]), dim=-1).type_as(v)
    return torch.matmul(F.dropout(p, 0.0), v)


def written_einsum(q, k, v, mask=None):
    logits = torch.einsum("bhid,bhjd->bhij", q, k) * 0.25
    return torch.einsum("bhij,bhjd->bhid", logits.softmax(dim=-1), v)


def written_baddbmm(q, k, v, mask=None):
    """diffusers' AttnProcessor: heads in the batch."""
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    logits = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=0.25)
    return torch.bmm(logits.softmax(dim=-1), v).unflatten(0, (-1, 2))


SPELLINGS = {"matmul": (written_matmul, 8**-0.5), "scaled q": (written_scaled_q, 0.25), "float": (written_float, 8**-0.5),
             "einsum": (written_einsum, 0.25), "baddbmm": (written_baddbmm, 0.25)}


def attention_as(attend) -> type:
    """An Attention with another way to attend."""
    return type("Written", (Attention,), {"attend": staticmethod(attend)})
