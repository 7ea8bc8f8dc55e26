"""Kernels around the fused ones: they work on lattice words and run on any target Triton compiles for.

A query's lattice is the (KT + 1) x (KH + 1) x (KW + 1) grid points its window touches.  Its words hold two 16-bit
weights per point: A (low, from the probabilities) and B (high, from the score gradients).

row_sums      delta = sum(dy * y) - dlse
spread        dq = sum over lattice points of B k; or y = sum of A v
gather        dv = sum over queries of A dy, dk = sum of B q: one program per tile of keys, no atomics
tile_reach, query_boxes
              for each tile of keys the smallest box of queries that touch it
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphopt.codegen.dsa.device import axis_start, tile_position, unpack_pair


@triton.jit
def split_rows(r, RH):
    # row r of a box -> (t, h); multiply-high instead of division, which costs 20 instructions an element.
    # The factor is rounded down, so a quotient is right or one too small
    u = r.to(tl.uint32)
    t = tl.umulhi(u, tl.zeros_like(u) + (0xFFFFFFFF // RH.to(tl.uint32)).to(tl.uint32)).to(tl.int32)
    h = r - t * RH
    return tl.where(h >= RH, t + 1, t), tl.where(h >= RH, h - RH, h)


@triton.jit
def load_rows(X, row, stride, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)[None, :]
    if D == DP:
        return tl.load(X + row.to(tl.int64)[:, None] * stride + d)
    else:
        return tl.load(X + row.to(tl.int64)[:, None] * stride + d, mask=d < D, other=0.0)


@triton.jit
def near(difference):
    # a difference of coordinates as a 10-bit field with its guard bit free: what is far stays far
    return tl.minimum(tl.maximum(difference, -128), 383)


@triton.jit
def touches_wide(t, h, w, bt, bh, bw, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr):
    # the same for axes of any length
    ok = (t >= bt) & (t <= bt + KT)
    ok &= (h >= bh) & (h <= bh + KH)
    return ok & (w >= bw) & (w <= bw + KW)


@triton.jit
def touches(difference, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr):
    # 0 <= d_a <= K_a on all three packed axes
    guards: tl.constexpr = (512 << 20) | (512 << 10) | 512
    window: tl.constexpr = (KT << 20) + (KH << 10) + KW
    return ((difference | (window - difference)) & guards) == 0


@triton.jit(do_not_specialize=["N", "heads", "first"])
def row_sums(DY, Y, DLSE, DELTA, N, heads, first, dy_b, dy_h, dy_n, y_b, y_h, y_n,
             D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, HAS_DLSE: tl.constexpr):
    at = first + tl.program_id(1)
    batch = (at // heads).to(tl.int64)
    head = (at % heads).to(tl.int64)
    row = tl.program_id(0) * BQ + tl.arange(0, BQ)
    d = tl.arange(0, DP)[None, :]
    real = row < N
    mask = real[:, None] & (d < D)
    wide = row.to(tl.int64)[:, None]
    dy = tl.load(DY + batch * dy_b + head * dy_h + wide * dy_n + d, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(Y + batch * y_b + head * y_h + wide * y_n + d, mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(dy * y, 1)
    if HAS_DLSE:
        delta -= tl.load(DLSE + at.to(tl.int64) * N + row, mask=real, other=0.0)
    tl.store(DELTA + at.to(tl.int64) * N + row, delta, mask=real)


@triton.jit(do_not_specialize=["T", "H", "W", "BT", "BH", "BW", "heads", "group", "first", "o_b", "o_g", "o_n"])
def tile_reach(OFFSETS, REACH, T, H, W, BT, BH, BW, heads, group, first, o_b, o_g, o_n,
               KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, M: tl.constexpr):
    # first lattice point (t, h, w) and last one of each tile of queries: REACH [heads, tiles, 8]
    local = tl.program_id(1)
    batch = ((first + local) // heads).to(tl.int64)
    head = (((first + local) % heads) // group).to(tl.int64)
    pt, ph, pw, _real = tile_position(tl.program_id(0), T, H, W, BT, BH, BW, M)
    offset = OFFSETS + batch * o_b + head * o_g + ((pt * H + ph) * W + pw).to(tl.int64) * o_n
    bt, _ft = axis_start(pt, tl.load(offset), T, KT)
    bh, _fh = axis_start(ph, tl.load(offset + 1), H, KH)
    bw, _fw = axis_start(pw, tl.load(offset + 2), W, KW)
    out = REACH + (local.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * 8
    tl.store(out, tl.min(bt))
    tl.store(out + 1, tl.min(bh))
    tl.store(out + 2, tl.min(bw))
    tl.store(out + 3, tl.max(bt) + KT)
    tl.store(out + 4, tl.max(bh) + KH)
    tl.store(out + 5, tl.max(bw) + KW)


@triton.jit(do_not_specialize=[
    "T", "H", "W", "BT", "BH", "BW", "CT", "CH", "CW", "tiles", "heads", "group", "first", "o_b", "o_g", "o_n"])
def query_boxes(OFFSETS, BASES, REACH, BOXES, T, H, W, BT, BH, BW, CT, CH, CW, tiles,
                heads, group, first, o_b, o_g, o_n, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
                BLOCK: tl.constexpr, WIDE: tl.constexpr):
    # for the tile of CT x CH x CW keys: first the tiles of queries that can touch it, then the queries in their hull
    pid = tl.program_id(0)
    local = tl.program_id(1)
    batch = ((first + local) // heads).to(tl.int64)
    head = (((first + local) % heads) // group).to(tl.int64)
    nh = tl.cdiv(H, CH)
    nw = tl.cdiv(W, CW)
    kt = (pid // (nh * nw)) * CT
    kh = ((pid // nw) % nh) * CH
    kw = (pid % nw) * CW
    lt = tl.minimum(kt + CT, T) - 1
    lh = tl.minimum(kh + CH, H) - 1
    lw = tl.minimum(kw + CW, W) - 1
    qh = tl.cdiv(H, BH)
    qw = tl.cdiv(W, BW)
    FAR: tl.constexpr = 1 << 30
    t0 = tl.full([BLOCK], FAR, tl.int32)
    h0 = t0
    w0 = t0
    t1 = tl.full([BLOCK], -1, tl.int32)
    h1 = t1
    w1 = t1
    reach = REACH + local.to(tl.int64) * tiles * 8
    for start in range(0, tiles, BLOCK):
        i = start + tl.arange(0, BLOCK)
        ok = i < tiles
        r = reach + tl.minimum(i, tiles - 1) * 8
        ok &= (tl.load(r) <= lt) & (tl.load(r + 1) <= lh) & (tl.load(r + 2) <= lw)
        ok &= (tl.load(r + 3) >= kt) & (tl.load(r + 4) >= kh) & (tl.load(r + 5) >= kw)
        t = (i // (qh * qw)) * BT
        h = ((i // qw) % qh) * BH
        w = (i % qw) * BW
        t0 = tl.minimum(t0, tl.where(ok, t, FAR))
        h0 = tl.minimum(h0, tl.where(ok, h, FAR))
        w0 = tl.minimum(w0, tl.where(ok, w, FAR))
        t1 = tl.maximum(t1, tl.where(ok, tl.minimum(t + BT, T) - 1, -1))
        h1 = tl.maximum(h1, tl.where(ok, tl.minimum(h + BH, H) - 1, -1))
        w1 = tl.maximum(w1, tl.where(ok, tl.minimum(w + BW, W) - 1, -1))
    ct = tl.min(t0)
    ch = tl.min(h0)
    cw = tl.min(w0)
    RT = tl.max(t1) + 1 - ct
    RH = tl.max(h1) + 1 - ch
    RW = tl.max(w1) + 1 - cw
    inside = tl.where(RT > 0, RT * RH * RW, 0)
    RH = tl.maximum(RH, 1)
    RW = tl.maximum(RW, 1)
    t0 = tl.full([BLOCK], FAR, tl.int32)
    h0 = t0
    w0 = t0
    t1 = tl.full([BLOCK], -1, tl.int32)
    h1 = t1
    w1 = t1
    offset = OFFSETS + batch * o_b + head * o_g
    bases = BASES + local.to(tl.int64) * (T * H * W)
    for start in range(0, inside, BLOCK):
        c = start + tl.arange(0, BLOCK)
        ok = c < inside
        line, w = split_rows(c, RW)
        t, h = split_rows(line, RH)
        t = tl.minimum(ct + t, T - 1)
        h = tl.minimum(ch + h, H - 1)
        w = tl.minimum(cw + w, W - 1)
        row = (t * H + h) * W + w
        if WIDE:
            o = offset + row.to(tl.int64) * o_n
            bt, _ft = axis_start(t, tl.load(o), T, KT)
            bh, _fh = axis_start(h, tl.load(o + 1), H, KH)
            bw, _fw = axis_start(w, tl.load(o + 2), W, KW)
        else:
            base = tl.load(bases + row)
            bt = base >> 20
            bh = (base >> 10) & 1023
            bw = base & 1023
        ok &= (bt <= lt) & (bh <= lh) & (bw <= lw) & (bt + KT >= kt) & (bh + KH >= kh) & (bw + KW >= kw)
        t0 = tl.minimum(t0, tl.where(ok, t, FAR))
        h0 = tl.minimum(h0, tl.where(ok, h, FAR))
        w0 = tl.minimum(w0, tl.where(ok, w, FAR))
        t1 = tl.maximum(t1, tl.where(ok, t, -1))
        h1 = tl.maximum(h1, tl.where(ok, h, -1))
        w1 = tl.maximum(w1, tl.where(ok, w, -1))
    # a tile of keys that no query touches gets an empty box
    empty = tl.max(t1) < 0
    out = BOXES + (local.to(tl.int64) * tl.num_programs(0) + pid) * 8
    tl.store(out, tl.where(empty, 0, tl.min(t0)))
    tl.store(out + 1, tl.where(empty, 0, tl.min(h0)))
    tl.store(out + 2, tl.where(empty, 0, tl.min(w0)))
    tl.store(out + 3, tl.where(empty, 0, tl.max(t1) + 1 - tl.min(t0)))
    tl.store(out + 4, tl.where(empty, 1, tl.max(h1) + 1 - tl.min(h0)))
    tl.store(out + 5, tl.where(empty, 1, tl.max(w1) + 1 - tl.min(w0)))


@triton.jit(do_not_specialize=[
    "T", "H", "W", "BT", "BH", "BW", "heads", "share", "group", "first", "o_b", "o_g", "o_n"])
def spread(WORDS, X, OFFSETS, OUT, T, H, W, BT, BH, BW, heads, share, group, first,
           x_b, x_h, x_n, o_b, o_g, o_n, y_b, y_h, y_n, scale, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
           D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, ALONG: tl.constexpr,
           HALF: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr):
    # per tile of queries: OUT = scale * sum over lattice points of a weight (HIGH: B, else A) times X
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
    WORDS += local.to(tl.int64) * (T * H * W).to(tl.int64) * L
    word = row * L - (((bt - t0) * LH + bh - h0) * LW + bw - w0)
    X += batch * x_b + (head // share).to(tl.int64) * x_h
    acc = tl.zeros([M, DP], tl.float32)
    c = tl.arange(0, BN)
    d = tl.arange(0, DP)
    for wc in range(0, RW, ALONG):
        w = wc + c % ALONG
        for start in range(0, RT * RH, BN // ALONG):
            t, h = split_rows(start + c // ALONG, RH)
            token = (tl.minimum(t0 + t, T - 1) * H + tl.minimum(h0 + h, H - 1)) * W + tl.minimum(w0 + w, W - 1)
            x = load_rows(X, token, x_n, D, DP)
            if WIDE:
                ok = touches_wide(t[None, :] + t0, h[None, :] + h0, w[None, :] + w0, bt[:, None], bh[:, None],
                                  bw[:, None], KT, KH, KW)
            else:
                ok = touches(((t << 20) + (h << 10) + w)[None, :] - base[:, None], KT, KH, KW)
            ok &= real[:, None]
            words = tl.load(WORDS + (word[:, None] + ((t * LH + h) * LW + w)[None, :]), mask=ok, other=0)
            low, high = unpack_pair(words, HALF)
            if HIGH:
                acc = tl.dot(high.to(x.dtype), x, acc)
            else:
                acc = tl.dot(low.to(x.dtype), x, acc)
    OUT += batch * y_b + head.to(tl.int64) * y_h
    tl.store(OUT + row.to(tl.int64)[:, None] * y_n + d[None, :], (acc * scale).to(OUT.dtype.element_ty),
             mask=real[:, None] & (d[None, :] < D))


@triton.jit(do_not_specialize=["T", "H", "W", "CT", "CH", "CW", "heads", "group", "first", "o_b", "o_g", "o_n"])
def gather(WORDS, BASES, Q, DY, OFFSETS, BOXES, DK, DV, T, H, W, CT, CH, CW, heads, group, first,
           q_b, q_h, q_n, dy_b, dy_h, dy_n, o_b, o_g, o_n, k_b, k_h, k_n, v_b, v_h, v_n,
           SHARE: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, D: tl.constexpr,
           DP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, ALONG: tl.constexpr, HALF: tl.constexpr,
           WIDE: tl.constexpr):
    # per tile of keys of one key head: all queries of its box, of each of the SHARE query heads that read it
    pid = tl.program_id(0)
    tiles = tl.num_programs(0)
    gt, gh, gw, real = tile_position(pid, T, H, W, CT, CH, CW, M)
    key = (gt * H + gh) * W + gw
    LH: tl.constexpr = KH + 1
    LW: tl.constexpr = KW + 1
    L: tl.constexpr = (KT + 1) * LH * LW
    N = T * H * W
    d = tl.arange(0, DP)
    kt = 0
    kh = 0
    kw = 0
    if WIDE:  # coordinates relative to the tile's first key
        kt = tl.min(gt)
        kh = tl.min(gh)
        kw = tl.min(gw)
    point = ((gt - kt) << 20) + ((gh - kh) << 10) + (gw - kw)
    offset_in = ((gt - kt) * LH + gh - kh) * LW + gw - kw
    dk = tl.zeros([M, DP], tl.float32)
    dv = tl.zeros([M, DP], tl.float32)
    c = tl.arange(0, BN)
    at = first + tl.program_id(1) * SHARE
    batch = (at // heads).to(tl.int64)
    for member in range(SHARE):
        local = tl.program_id(1) * SHARE + member
        head = (at + member) % heads
        box = BOXES + (local.to(tl.int64) * tiles + pid) * 8
        t0 = tl.load(box)
        h0 = tl.load(box + 1)
        w0 = tl.load(box + 2)
        RH = tl.load(box + 4)
        RW = tl.load(box + 5)
        RT = tl.load(box + 3)
        words_of = WORDS + local.to(tl.int64) * N.to(tl.int64) * L
        bases = BASES + local.to(tl.int64) * N.to(tl.int64)
        offset = OFFSETS + batch * o_b + (head // group).to(tl.int64) * o_g
        q_of = Q + batch * q_b + head.to(tl.int64) * q_h
        dy_of = DY + batch * dy_b + head.to(tl.int64) * dy_h
        for wc in range(0, RW, ALONG):
            w = tl.minimum(w0 + wc + c % ALONG, W - 1)
            in_w = wc + c % ALONG < RW
            for start in range(0, RT * RH, BN // ALONG):
                t, h = split_rows(start + c // ALONG, RH)
                ok = in_w & (t < RT)
                t = tl.minimum(t0 + t, T - 1)
                h = tl.minimum(h0 + h, H - 1)
                row = (t * H + h) * W + w
                if WIDE:  # coordinates do not fit in 10 bits: relative ones do
                    o = offset + row.to(tl.int64) * o_n
                    bt, _ft = axis_start(t, tl.load(o), T, KT)
                    bh, _fh = axis_start(h, tl.load(o + 1), H, KH)
                    bw, _fw = axis_start(w, tl.load(o + 2), W, KW)
                    base = (near(bt - kt) << 20) + (near(bh - kh) << 10) + near(bw - kw)
                    word = row * L - (((bt - kt) * LH + bh - kh) * LW + bw - kw)
                else:
                    base = tl.load(bases + row)
                    word = row * L - (((base >> 20) * LH + ((base >> 10) & 1023)) * LW + (base & 1023))
                q = load_rows(q_of, row, q_n, D, DP)
                dy = load_rows(dy_of, row, dy_n, D, DP)
                hit = touches(point[None, :] - base[:, None], KT, KH, KW) & ok[:, None] & real[None, :]
                words = tl.load(words_of + (word[:, None] + offset_in[None, :]), mask=hit, other=0)
                low, high = unpack_pair(words, HALF)
                dv = tl.dot(tl.trans(low.to(q.dtype)), dy, dv)
                dk = tl.dot(tl.trans(high.to(q.dtype)), q, dk)
    kv = ((at % heads) // SHARE).to(tl.int64)
    wide = key.to(tl.int64)[:, None]
    mask = real[:, None] & (d[None, :] < D)
    tl.store(DK + batch * k_b + kv * k_h + wide * k_n + d[None, :], dk.to(DK.dtype.element_ty), mask=mask)
    tl.store(DV + batch * v_b + kv * v_h + wide * v_n + d[None, :], dv.to(DV.dtype.element_ty), mask=mask)
