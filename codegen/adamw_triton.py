"""The AdamW update of adamw.py on a GPU: all parameters of a kind in one launch, nothing but the state in memory.

A table in device memory holds the addresses; a program finds its parameter and its part of it there.  Formula and
order of operations are those of the C++ loop (adamw_cpp.py); rounding may differ from it and from torch by an ulp.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl

from graphopt.codegen.adamw import Hyper, Piece

BLOCK = 4096


@triton.jit
def _toward(x, to, weight):
    return tl.where(weight < 0.5, x + weight * (to - x), to - (to - x) * (1.0 - weight))


# table: a row per parameter with the addresses of weight, residual, gradient, moments, average, and its elements;
# numbers: a row with its settings; blocks: for every program, a row of the table and a block of that parameter
@triton.jit
def _adamw(table, numbers, blocks, scale, SPLIT: tl.constexpr, BF16_GRAD: tl.constexpr, CLIP: tl.constexpr,
           EMA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.load(blocks + 2 * tl.program_id(0)).to(tl.int64)
    first = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK
    t = table + row * 7
    n = tl.load(t + 6)
    g_address, m_address, v_address = tl.load(t + 2), tl.load(t + 3), tl.load(t + 4)
    h = numbers + row * 8
    decay, b1w, b2, b2w = tl.load(h), tl.load(h + 1), tl.load(h + 2), tl.load(h + 3)
    root2, eps, size, emaw = tl.load(h + 4), tl.load(h + 5), tl.load(h + 6), tl.load(h + 7)
    at = first + tl.arange(0, BLOCK)
    inside = at < n
    if BF16_GRAD:
        g = tl.load(g_address.to(tl.pointer_type(tl.bfloat16)) + at, inside, other=0.0).to(tl.float32)
    else:
        g = tl.load(g_address.to(tl.pointer_type(tl.float32)) + at, inside, other=0.0)
    if CLIP:
        g = g * tl.load(scale)
    m_at = m_address.to(tl.pointer_type(tl.float32)) + at
    v_at = v_address.to(tl.pointer_type(tl.float32)) + at
    m = _toward(tl.load(m_at, inside, other=0.0), g, b1w)
    v = tl.load(v_at, inside, other=0.0) * b2 + b2w * g * g
    tl.store(m_at, m, inside)
    tl.store(v_at, v, inside)
    if SPLIT:
        w_at = tl.load(t).to(tl.pointer_type(tl.int16)) + at
        r_at = tl.load(t + 1).to(tl.pointer_type(tl.int16)) + at
        bits = (tl.load(w_at, inside, other=0).to(tl.int32) << 16) + tl.load(r_at, inside, other=0).to(tl.int32)
        p = bits.to(tl.float32, bitcast=True)
    else:
        f_at = tl.load(t).to(tl.pointer_type(tl.float32)) + at
        p = tl.load(f_at, inside, other=0.0)
    p = p * decay + size * m / (tl.sqrt(v) * root2 + eps)
    if SPLIT:
        bits = p.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        tl.store(w_at, high.to(tl.int16), inside)
        tl.store(r_at, (bits - (high << 16)).to(tl.int16), inside)
    else:
        tl.store(f_at, p, inside)
    if EMA:
        e_at = tl.load(t + 5).to(tl.pointer_type(tl.float32)) + at
        tl.store(e_at, _toward(tl.load(e_at, inside, other=0.0), p, emaw), inside)


def update_all(pieces: Sequence[Piece]) -> None:
    """One AdamW update of several parameters on one device; tensors are 1-d and contiguous (see adamw.update_).

    hyper.scale: a number, or a 0-d fp32 tensor on that device, the same for all that have one; or None.
    """
    kinds: dict[tuple[Any, ...], list[Piece]] = {}
    for p in pieces:
        if p.weight.numel():
            ema = p.average is not None and p.hyper.ema is not None
            key = p.residual is not None, p.gradient.dtype == torch.bfloat16, id(p.hyper.scale), ema
            kinds.setdefault(key, []).append(p)
    for (split, bf16, _, ema), group in kinds.items():
        _launch(group, split, bf16, ema)


def _launch(group: Sequence[Piece], split: bool, bf16: bool, ema: bool) -> None:
    device = group[0].weight.device
    rows = [[0 if t is None else t.data_ptr() for t in (p.weight, p.residual, p.gradient, p.exp_avg, p.exp_avg_sq,
                                                        p.average)] + [p.weight.numel()] for p in group]
    blocks = _blocks(tuple(p.weight.numel() for p in group), device)
    scale = group[0].hyper.scale
    given = isinstance(scale, torch.Tensor)
    # neither torch's default device nor its default dtype counts here
    factor = scale if given else torch.tensor(1.0 if scale is None else scale, dtype=torch.float32, device="cpu")
    numbers = torch.tensor([_numbers(p.hyper) for p in group], dtype=torch.float32, device="cpu")
    _adamw[(len(blocks),)](
        *(_sent(t, device) for t in (torch.tensor(rows, dtype=torch.int64, device="cpu"), numbers)), blocks,
        factor if given else _sent(factor, device),
        SPLIT=split, BF16_GRAD=bf16, CLIP=scale is not None, EMA=ema, BLOCK=BLOCK, num_warps=8)


@lru_cache(maxsize=16)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 [programs, 2]: a parameter's place and a block of it; the same in every step."""
    counts = torch.tensor([-(-n // BLOCK) for n in sizes], device="cpu")
    made = torch.empty((int(counts.sum()), 2), dtype=torch.int32, device="cpu")
    made[:, 0] = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), counts)
    starts = torch.tensor([0, *accumulate(counts.tolist())][:-1], device="cpu")
    made[:, 1] = torch.arange(len(made), device="cpu") - torch.repeat_interleave(starts, counts)
    return made.to(device)


def _sent(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, without a wait; torch keeps the pinned memory until the copy is done."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t


def _numbers(h: Hyper) -> list[float]:
    return [1 - h.lr * h.weight_decay, 1 - h.beta1, h.beta2, 1 - h.beta2, 1 / (1 - h.beta2**h.step) ** 0.5, h.eps,
            -(h.lr / (1 - h.beta1**h.step)), 0.0 if h.ema is None else 1 - h.ema]
