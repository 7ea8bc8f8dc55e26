"""Portable kernels before the softmax: scores on each query's lattice, and from them the words of its taps.

Used where a fused kernel is not: on GPUs other than Hopper the registers of an accumulator do not hold neighbours of a
lattice, so the interpolation goes through memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphopt.codegen.dsa.device import axis_start, offset_moves, pack_pair_portable, tile_position
from graphopt.codegen.dsa.lattice import load_rows, split_rows, touches, touches_wide


@triton.jit(do_not_specialize=[
    "T", "H", "W", "BT", "BH", "BW", "heads", "share", "group", "first", "o_b", "o_g", "o_n"])
def score(Q, X, OFFSETS, S, T, H, W, BT, BH, BW, heads, share, group, first, q_b, q_h, q_n, x_b, x_h, x_n,
          o_b, o_g, o_n, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
          M: tl.constexpr, BN: tl.constexpr, ALONG: tl.constexpr, WIDE: tl.constexpr):
    # S [heads of the chunk, N, lattice] = q . x at the lattice points; every slot is written exactly once
    pid = tl.program_id(0)
    local = tl.program_id(1)
    batch = ((first + local) // heads).to(tl.int64)
    head = (first + local) % heads
    pt, ph, pw, real = tile_position(pid, T, H, W, BT, BH, BW, M)
    row = (pt * H + ph) * W + pw
    offset = OFFSETS + batch * o_b + (head // group).to(tl.int64) * o_g + row.to(tl.int64) * o_n
    bt, _ft = axis_start(pt, tl.load(offset), T, KT)
    bh, _fh = axis_start(ph, tl.load(offset + 1), H, KH)
    bw, _fw = axis_start(pw, tl.load(offset + 2), W, KW)
    LH: tl.constexpr = KH + 1
    LW: tl.constexpr = KW + 1
    L: tl.constexpr = (KT + 1) * LH * LW
    t0 = tl.min(bt)
    h0 = tl.min(bh)
    w0 = tl.min(bw)
    RT = tl.max(bt) + KT + 1 - t0
    RH = tl.max(bh) + LH - h0
    RW = tl.max(bw) + LW - w0
    base = ((bt - t0) << 20) + ((bh - h0) << 10) + bw - w0
    S += local.to(tl.int64) * (T * H * W).to(tl.int64) * L
    slot = row * L - (((bt - t0) * LH + bh - h0) * LW + bw - w0)
    q = load_rows(Q + batch * q_b + head.to(tl.int64) * q_h, row, q_n, D, DP)
    X += batch * x_b + (head // share).to(tl.int64) * x_h
    c = tl.arange(0, BN)
    for wc in range(0, RW, ALONG):
        w = wc + c % ALONG
        for start in range(0, RT * RH, BN // ALONG):
            t, h = split_rows(start + c // ALONG, RH)
            token = (tl.minimum(t0 + t, T - 1) * H + tl.minimum(h0 + h, H - 1)) * W + tl.minimum(w0 + w, W - 1)
            x = load_rows(X, token, x_n, D, DP)
            s = tl.dot(q, tl.trans(x))
            if WIDE:
                ok = touches_wide(t[None, :] + t0, h[None, :] + h0, w[None, :] + w0, bt[:, None], bh[:, None],
                                  bw[:, None], KT, KH, KW)
            else:
                ok = touches(((t << 20) + (h << 10) + w)[None, :] - base[:, None], KT, KH, KW)
            ok &= real[:, None]
            tl.store(S + (slot[:, None] + ((t * LH + h) * LW + w)[None, :]), s, mask=ok)


@triton.jit
def corner_row(S, at, here, fw):
    # a lattice row interpolated along w, and its difference along w
    low = tl.load(S + at, mask=here, other=0.0)
    high = tl.load(S + at + 1, mask=here, other=0.0)
    return low + fw * (high - low), high - low


@triton.jit
def tap_row(S, row, t, h, here, ft, fh, fw, KH: tl.constexpr, KW: tl.constexpr):
    # the taps (t, h, all w) of S and their derivatives along t, h, w
    LH: tl.constexpr = KH + 1
    LW: tl.constexpr = KW + 1
    at = row + (t * LH + h) * LW
    a, da = corner_row(S, at, here, fw)
    b, db = corner_row(S, at + LW, here, fw)
    c, dc = corner_row(S, at + LH * LW, here, fw)
    d, dd = corner_row(S, at + (LH + 1) * LW, here, fw)
    low = a + fh * (b - a)
    high = c + fh * (d - c)
    along_h = (b - a) + ft * ((d - c) - (b - a))
    low_w = da + fh * (db - da)
    high_w = dc + fh * (dd - dc)
    return low + ft * (high - low), high - low, along_h, low_w + ft * (high_w - low_w)


@triton.jit(do_not_specialize=["T", "H", "W", "heads", "group", "first", "pitch", "o_b", "o_g", "o_n"])
def soften(S, P, OFFSETS, LSE, DELTA, TAPS, DOFFSETS, T, H, W, heads, group, first, pitch, o_b, o_g, o_n, scale,
           KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, WP: tl.constexpr, BQ: tl.constexpr,
           HALF: tl.constexpr, BACKWARD: tl.constexpr, WITH_OFFSETS: tl.constexpr):
    # forward: S -> LSE and words (p | 0); backward: S, P, LSE, DELTA -> words (p | ds) and DOFFSETS
    local = tl.program_id(1)
    batch = ((first + local) // heads).to(tl.int64)
    head = (((first + local) % heads) // group).to(tl.int64)
    N = T * H * W
    q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    real = q < N
    q = tl.minimum(q, N - 1)
    offset = OFFSETS + batch * o_b + head * o_g + q.to(tl.int64) * o_n
    pt = q // (H * W)
    ph = (q // W) % H
    pw = q % W
    _bt, ft = axis_start(pt, tl.load(offset), T, KT)
    _bh, fh = axis_start(ph, tl.load(offset + 1), H, KH)
    _bw, fw = axis_start(pw, tl.load(offset + 2), W, KW)
    ft = ft[:, None]
    fh = fh[:, None]
    fw = fw[:, None]
    w = tl.arange(0, WP)[None, :]
    here = real[:, None] & (w < KW)
    line = (local.to(tl.int64) * N + q)[:, None]
    row = line * ((KT + 1) * (KH + 1) * (KW + 1)) + w
    words = TAPS + line * (KT * KH * pitch) + w
    place = (first + local).to(tl.int64) * N + q
    if BACKWARD:
        lse = tl.load(LSE + place)
        delta = tl.load(DELTA + place)[:, None]
    else:
        m = tl.full([BQ], float("-inf"), tl.float32)
        total = tl.zeros([BQ], tl.float32)
        for i in range(KT * KH):
            z, _zt, _zh, _zw = tap_row(S, row, i // KH, i % KH, here, ft, fh, fw, KH, KW)
            z = tl.where(w < KW, z * scale, float("-inf"))
            new = tl.maximum(m, tl.max(z, 1))
            total = total * tl.exp(m - new) + tl.sum(tl.exp(z - new[:, None]), 1)
            m = new
        lse = m + tl.log(total)
        tl.store(LSE + place, lse, mask=real)
    gt = tl.zeros([BQ, WP], tl.float32)
    gh = tl.zeros([BQ, WP], tl.float32)
    gw = tl.zeros([BQ, WP], tl.float32)
    for i in range(KT * KH):
        z, zt, zh, zw = tap_row(S, row, i // KH, i % KH, here, ft, fh, fw, KH, KW)
        p = tl.where(here, tl.exp(z * scale - lse[:, None]), 0.0)
        if BACKWARD:
            o, ot, oh, ow = tap_row(P, row, i // KH, i % KH, here, ft, fh, fw, KH, KW)
            ds = p * (o - delta) * scale
            gt += ds * zt + p * ot
            gh += ds * zh + p * oh
            gw += ds * zw + p * ow
        else:
            ds = p
        tl.store(words + i * pitch, pack_pair_portable(p, ds, HALF), mask=here)
    if WITH_OFFSETS:
        out = DOFFSETS + place * 3
        tl.store(out, tl.where(offset_moves(pt, tl.load(offset), T, KT), tl.sum(gt, 1), 0.0), mask=real)
        tl.store(out + 1, tl.where(offset_moves(ph, tl.load(offset + 1), H, KH), tl.sum(gh, 1), 0.0), mask=real)
        tl.store(out + 2, tl.where(offset_moves(pw, tl.load(offset + 2), W, KW), tl.sum(gw, 1), 0.0), mask=real)
