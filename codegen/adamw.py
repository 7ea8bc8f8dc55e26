"""AdamW on flat buffers: the plain torch kernel, and the split master it keeps.

A bf16 weight is the upper half of its fp32 master, rounded half away from zero; an int16 residual holds the rest:

    high = (bits + 0x8000) >> 16        residual = bits - (high << 16)        bits = (high << 16) + residual

The master is rebuilt bit by bit, so 4 bytes (weight + residual) replace 6 (weight + fp32 master) without changing one
result.  `high` differs from round-to-nearest-even on exact ties only.

The order of operations is that of `torch.optim.AdamW` for one tensor, so its results are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# elements per sweep: temporaries stay in cache-sized pieces, a multiple of every vector width
CHUNK = 1 << 22


@dataclass(frozen=True)
class Hyper:
    """Numbers of one update of one parameter.

    step: 1 for the first update.  scale: what the gradient is multiplied by first (from clipping), in fp32; a number,
    or for tensors on a device a 0-d fp32 tensor there.
    ema: decay of the moving average, or None.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    scale: float | torch.Tensor | None = None
    ema: float | None = None


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An fp32 tensor as (bf16 upper half, int16 residual), both of its shape."""
    bits = master.contiguous().view(torch.int32)
    high = (bits + 0x8000) >> 16
    residual = (bits - (high << 16)).to(torch.int16)
    return high.to(torch.int16).view(torch.bfloat16), residual


def join(high: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The fp32 tensor that `split` took apart."""
    bits = (high.contiguous().view(torch.int16).to(torch.int32) << 16) + residual.to(torch.int32)
    return bits.view(torch.float32)


def update_(
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    hyper: Hyper,
    average: torch.Tensor | None = None,
) -> None:
    """One AdamW update in place, on 1-d tensors of equal length.

    weight: fp32 (then residual is None), or bf16 with its int16 residual.  gradient: any floating dtype, read only.
    exp_avg, exp_avg_sq, average: fp32; average is the moving average of the master.
    Formula: Loshchilov and Hutter 2019, algorithm 2, as torch.optim.AdamW computes it.
    """
    n = weight.numel()
    for a in range(0, n, CHUNK):
        part = slice(a, min(n, a + CHUNK))
        _sweep(weight[part], None if residual is None else residual[part], gradient[part], exp_avg[part],
               exp_avg_sq[part], hyper, None if average is None else average[part])


class Piece(NamedTuple):
    """One parameter of an update: the arguments of `update_`."""

    weight: torch.Tensor
    residual: torch.Tensor | None
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    hyper: Hyper
    average: torch.Tensor | None = None


def update_all(pieces: Sequence[Piece]) -> None:
    """One AdamW update of several parameters."""
    for piece in pieces:
        update_(*piece)


def _sweep(
    weight: torch.Tensor, residual: torch.Tensor | None, gradient: torch.Tensor, exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor, hyper: Hyper, average: torch.Tensor | None,
) -> None:
    master = weight if residual is None else join(weight, residual)
    g = gradient.to(torch.float32)
    if hyper.scale is not None:
        scale = hyper.scale
        g = g * (scale if isinstance(scale, torch.Tensor) else torch.tensor(scale, dtype=torch.float32, device="cpu"))
    if hyper.weight_decay:
        master.mul_(1 - hyper.lr * hyper.weight_decay)
    exp_avg.lerp_(g, 1 - hyper.beta1)
    exp_avg_sq.mul_(hyper.beta2).addcmul_(g, g, value=1 - hyper.beta2)
    correction1 = 1 - hyper.beta1**hyper.step
    correction2 = 1 - hyper.beta2**hyper.step
    denominator = (exp_avg_sq.sqrt() / correction2**0.5).add_(hyper.eps)
    master.addcdiv_(exp_avg, denominator, value=-(hyper.lr / correction1))
    if residual is not None:
        high, rest = split(master)
        weight.copy_(high)
        residual.copy_(rest)
    if average is not None and hyper.ema is not None:
        average.lerp_(master, 1 - hyper.ema)
