"""Kernels of the window engine: no offsets, or whole ones.  A window is then K keys without interpolation, so these are
flash attention kernels whose key loop runs over the box that a tile of queries reads, and whose query loop runs over
the box of queries that read a tile of keys.  Nothing but y and the log-sum-exp is kept for the backward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphopt.codegen.dsa.device import tile_position
from graphopt.codegen.dsa.lattice import load_rows, split_rows


@triton.jit
def whole_start(position, offset, n, K: tl.constexpr):
    # reference.py's start for a whole offset
    hi = tl.maximum(n - K, 0)
    inside = tl.minimum(tl.maximum(position - K // 2, 0), hi)
    return tl.minimum(tl.maximum(inside + tl.minimum(tl.maximum(offset, -n), n), 0), hi)


@triton.jit
def starts(OFFSETS, batch, group_head, t, h, w, T, H, W, o_b, o_g, o_n, KT: tl.constexpr, KH: tl.constexpr,
           KW: tl.constexpr, MOVED: tl.constexpr):
    # first key of each query's window
    if MOVED:
        offset = OFFSETS + batch * o_b + group_head * o_g + ((t * H + h) * W + w).to(tl.int64) * o_n
        return (whole_start(t, tl.load(offset), T, KT), whole_start(h, tl.load(offset + 1), H, KH),
                whole_start(w, tl.load(offset + 2), W, KW))
    else:
        return whole_start(t, 0, T, KT), whole_start(h, 0, H, KH), whole_start(w, 0, W, KW)


@triton.jit
def in_window(t, h, w, bt, bh, bw, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr):
    # is the key (t, h, w) one of the K after the start?  Unsigned: one comparison an axis
    ok = (t - bt).to(tl.uint32) < KT
    ok &= (h - bh).to(tl.uint32) < KH
    return ok & ((w - bw).to(tl.uint32) < KW)


@triton.jit(do_not_specialize=["T", "H", "W", "BT", "BH", "BW", "heads", "share", "group", "o_b", "o_g", "o_n"])
def window_forward(Q, K, V, OFFSETS, Y, LSE, T, H, W, BT, BH, BW, heads, share, group, q_b, q_h, q_n, k_b, k_h, k_n,
                   v_b, v_h, v_n, o_b, o_g, o_n, y_b, y_h, y_n, scale, KT: tl.constexpr, KH: tl.constexpr,
                   KW: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, MOVED: tl.constexpr, M: tl.constexpr,
                   BN: tl.constexpr, ALONG: tl.constexpr):
    # scale in base 2
    at = tl.program_id(1)
    batch = (at // heads).to(tl.int64)
    head = (at % heads).to(tl.int64)
    pt, ph, pw, real = tile_position(tl.program_id(0), T, H, W, BT, BH, BW, M)
    row = (pt * H + ph) * W + pw
    bt, bh, bw = starts(OFFSETS, batch, head // group, pt, ph, pw, T, H, W, o_b, o_g, o_n, KT, KH, KW, MOVED)
    t0 = tl.min(bt)
    h0 = tl.min(bh)
    w0 = tl.min(bw)
    RT = tl.max(bt) + KT - t0
    RH = tl.max(bh) + KH - h0
    RW = tl.max(bw) + KW - w0
    q = load_rows(Q + batch * q_b + head * q_h, row, q_n, D, DP)
    K += batch * k_b + head // share * k_h
    V += batch * v_b + head // share * v_h
    acc = tl.zeros([M, DP], tl.float32)
    m = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    c = tl.arange(0, BN)
    d = tl.arange(0, DP)
    for wc in range(0, RW, ALONG):
        w = w0 + wc + c % ALONG
        for start in range(0, RT * RH, BN // ALONG):
            t, h = split_rows(start + c // ALONG, RH)
            t += t0
            h += h0
            token = (tl.minimum(t, T - 1) * H + tl.minimum(h, H - 1)) * W + tl.minimum(w, W - 1)
            s = tl.dot(q, tl.trans(load_rows(K, token, k_n, D, DP))) * scale
            ok = in_window(t[None, :], h[None, :], w[None, :], bt[:, None], bh[:, None], bw[:, None], KT, KH, KW)
            s = tl.where(ok, s, float("-inf"))
            new = tl.maximum(m, tl.max(s, 1))
            decay = tl.exp2(m - new)
            m = new
            p = tl.exp2(s - new[:, None])
            total = total * decay + tl.sum(p, 1)
            v = load_rows(V, token, v_n, D, DP)
            acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None])
    Y += batch * y_b + head * y_h
    tl.store(Y + row.to(tl.int64)[:, None] * y_n + d[None, :], (acc / total[:, None]).to(Y.dtype.element_ty),
             mask=real[:, None] & (d[None, :] < D))
    tl.store(LSE + at.to(tl.int64) * (T * H * W) + row, (m + tl.log2(total)) * 0.6931471805599453, mask=real)


@triton.jit(do_not_specialize=["T", "H", "W", "BT", "BH", "BW", "heads", "share", "group", "o_b", "o_g", "o_n"])
def window_backward_query(Q, K, V, DY, OFFSETS, LSE, DELTA, DQ, T, H, W, BT, BH, BW, heads, share, group,
                          q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dy_b, dy_h, dy_n, o_b, o_g, o_n,
                          y_b, y_h, y_n, scale, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
                          D: tl.constexpr, DP: tl.constexpr, MOVED: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
                          ALONG: tl.constexpr):
    # DQ = scale sum ds k; scale is natural here
    at = tl.program_id(1)
    batch = (at // heads).to(tl.int64)
    head = (at % heads).to(tl.int64)
    pt, ph, pw, real = tile_position(tl.program_id(0), T, H, W, BT, BH, BW, M)
    row = (pt * H + ph) * W + pw
    bt, bh, bw = starts(OFFSETS, batch, head // group, pt, ph, pw, T, H, W, o_b, o_g, o_n, KT, KH, KW, MOVED)
    t0 = tl.min(bt)
    h0 = tl.min(bh)
    w0 = tl.min(bw)
    RT = tl.max(bt) + KT - t0
    RH = tl.max(bh) + KH - h0
    RW = tl.max(bw) + KW - w0
    q = load_rows(Q + batch * q_b + head * q_h, row, q_n, D, DP)
    dy = load_rows(DY + batch * dy_b + head * dy_h, row, dy_n, D, DP)
    place = at.to(tl.int64) * (T * H * W) + row
    lse = tl.load(LSE + place)[:, None] * 1.4426950408889634
    delta = tl.load(DELTA + place)[:, None]
    K += batch * k_b + head // share * k_h
    V += batch * v_b + head // share * v_h
    acc = tl.zeros([M, DP], tl.float32)
    c = tl.arange(0, BN)
    d = tl.arange(0, DP)
    for wc in range(0, RW, ALONG):
        w = w0 + wc + c % ALONG
        for start in range(0, RT * RH, BN // ALONG):
            t, h = split_rows(start + c // ALONG, RH)
            t += t0
            h += h0
            token = (tl.minimum(t, T - 1) * H + tl.minimum(h, H - 1)) * W + tl.minimum(w, W - 1)
            k = load_rows(K, token, k_n, D, DP)
            s = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
            dp = tl.dot(dy, tl.trans(load_rows(V, token, v_n, D, DP)))
            ok = in_window(t[None, :], h[None, :], w[None, :], bt[:, None], bh[:, None], bw[:, None], KT, KH, KW)
            ds = tl.where(ok, tl.exp2(s - lse), 0.0) * (dp - delta)
            acc = tl.dot(ds.to(k.dtype), k, acc)
    DQ += batch * y_b + head * y_h
    tl.store(DQ + row.to(tl.int64)[:, None] * y_n + d[None, :], (acc * scale).to(DQ.dtype.element_ty),
             mask=real[:, None] & (d[None, :] < D))


@triton.jit
def readers(first, last, n, K: tl.constexpr):
    # without offsets: the first query whose window holds a key of first .. last, and how many follow
    low = tl.where(first < K, 0, first - K + 1 + K // 2)
    high = tl.where(last >= n - K, n - 1, last + K // 2)
    return low, high + 1 - low


@triton.jit(do_not_specialize=["T", "H", "W", "CT", "CH", "CW", "heads", "group", "o_b", "o_g", "o_n"])
def window_backward_key(Q, K, V, DY, OFFSETS, BOXES, LSE, DELTA, DK, DV, T, H, W, CT, CH, CW, heads, group,
                        q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, dy_b, dy_h, dy_n, o_b, o_g, o_n,
                        gk_b, gk_h, gk_n, gv_b, gv_h, gv_n, scale, SHARE: tl.constexpr, KT: tl.constexpr,
                        KH: tl.constexpr, KW: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, MOVED: tl.constexpr,
                        M: tl.constexpr, BN: tl.constexpr, ALONG: tl.constexpr):
    # DV = sum p dy, DK = scale sum ds q over the queries that read this tile of keys
    pid = tl.program_id(0)
    gt, gh, gw, real = tile_position(pid, T, H, W, CT, CH, CW, M)
    key = (gt * H + gh) * W + gw
    first = tl.program_id(1) * SHARE
    batch = (first // heads).to(tl.int64)
    kv = ((first % heads) // SHARE).to(tl.int64)
    k = load_rows(K + batch * k_b + kv * k_h, key, k_n, D, DP)
    v = load_rows(V + batch * v_b + kv * v_h, key, v_n, D, DP)
    dk = tl.zeros([M, DP], tl.float32)
    dv = tl.zeros([M, DP], tl.float32)
    c = tl.arange(0, BN)
    d = tl.arange(0, DP)
    N = T * H * W
    for member in range(SHARE):
        at = first + member
        head = (at % heads).to(tl.int64)
        if MOVED:
            box = BOXES + (at.to(tl.int64) * tl.num_programs(0) + pid) * 8
            t0 = tl.load(box)
            h0 = tl.load(box + 1)
            w0 = tl.load(box + 2)
            RT = tl.load(box + 3)
            RH = tl.load(box + 4)
            RW = tl.load(box + 5)
        else:
            t0, RT = readers(tl.min(gt), tl.max(gt), T, KT)
            h0, RH = readers(tl.min(gh), tl.max(gh), H, KH)
            w0, RW = readers(tl.min(gw), tl.max(gw), W, KW)
        q_of = Q + batch * q_b + head * q_h
        dy_of = DY + batch * dy_b + head * dy_h
        for wc in range(0, RW, ALONG):
            w = tl.minimum(w0 + wc + c % ALONG, W - 1)
            in_w = wc + c % ALONG < RW
            for start in range(0, RT * RH, BN // ALONG):
                t, h = split_rows(start + c // ALONG, RH)
                ok = in_w & (t < RT)
                t = tl.minimum(t0 + t, T - 1)
                h = tl.minimum(h0 + h, H - 1)
                row = (t * H + h) * W + w
                bt, bh, bw = starts(OFFSETS, batch, head // group, t, h, w, T, H, W, o_b, o_g, o_n, KT, KH, KW, MOVED)
                q = load_rows(q_of, row, q_n, D, DP)
                dy = load_rows(dy_of, row, dy_n, D, DP)
                place = at.to(tl.int64) * N + row
                lse = tl.load(LSE + place) * 1.4426950408889634
                delta = tl.load(DELTA + place)
                s = tl.dot(k, tl.trans(q)) * (scale * 1.4426950408889634)
                hit = in_window(gt[:, None], gh[:, None], gw[:, None], bt[None, :], bh[None, :], bw[None, :],
                                KT, KH, KW) & ok[None, :]
                p = tl.where(hit, tl.exp2(s - lse[None, :]), 0.0)
                dv = tl.dot(p.to(dy.dtype), dy, dv)
                ds = p * (tl.dot(v, tl.trans(dy)) - delta[None, :])
                dk = tl.dot(ds.to(q.dtype), q, dk)
    wide = key.to(tl.int64)[:, None]
    mask = real[:, None] & (d[None, :] < D)
    tl.store(DK + batch * gk_b + kv * gk_h + wide * gk_n + d[None, :], (dk * scale).to(DK.dtype.element_ty), mask=mask)
    tl.store(DV + batch * gv_b + kv * gv_h + wide * gv_n + d[None, :], dv.to(DV.dtype.element_ty), mask=mask)
