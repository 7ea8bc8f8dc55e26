"""Flash attention of many video queries to few text keys, with the log-sum-exp as an output that has a gradient.

Few keys and many queries: the key-centric kernel splits the queries and leaves partial sums, added up in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphopt.codegen.dsa.lattice import load_rows


@triton.jit(do_not_specialize=["N", "L", "heads", "share"])
def text_forward(Q, K, V, Y, LSE, N, L, heads, share, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, y_b, y_h, y_n,
                 scale, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr):
    at = tl.program_id(1)
    batch = (at // heads).to(tl.int64)
    head = (at % heads).to(tl.int64)
    row = tl.program_id(0) * M + tl.arange(0, M)
    real = row < N
    q = load_rows(Q + batch * q_b + head * q_h, tl.minimum(row, N - 1), q_n, D, DP)
    K += batch * k_b + head // share * k_h
    V += batch * v_b + head // share * v_h
    acc = tl.zeros([M, DP], tl.float32)
    m = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    d = tl.arange(0, DP)
    for start in range(0, L, BN):
        c = start + tl.arange(0, BN)
        s = tl.dot(q, tl.trans(load_rows(K, tl.minimum(c, L - 1), k_n, D, DP))) * (scale * 1.4426950408889634)
        s = tl.where((c < L)[None, :], s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        decay = tl.exp2(m - new)
        m = new
        p = tl.exp2(s - new[:, None])
        total = total * decay + tl.sum(p, 1)
        v = load_rows(V, tl.minimum(c, L - 1), v_n, D, DP)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None])
    Y += batch * y_b + head * y_h
    tl.store(Y + row.to(tl.int64)[:, None] * y_n + d[None, :], (acc / total[:, None]).to(Y.dtype.element_ty),
             mask=real[:, None] & (d[None, :] < D))
    tl.store(LSE + at.to(tl.int64) * N + row, (m + tl.log2(total)) * 0.6931471805599453, mask=real)


@triton.jit(do_not_specialize=["N", "L", "heads", "share"])
def text_backward_query(Q, K, V, DY, LSE, DELTA, DQ, N, L, heads, share, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
                        dy_b, dy_h, dy_n, y_b, y_h, y_n, scale, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr,
                        BN: tl.constexpr):
    at = tl.program_id(1)
    batch = (at // heads).to(tl.int64)
    head = (at % heads).to(tl.int64)
    row = tl.program_id(0) * M + tl.arange(0, M)
    real = row < N
    safe = tl.minimum(row, N - 1)
    q = load_rows(Q + batch * q_b + head * q_h, safe, q_n, D, DP)
    dy = load_rows(DY + batch * dy_b + head * dy_h, safe, dy_n, D, DP)
    lse = tl.load(LSE + at.to(tl.int64) * N + safe)[:, None] * 1.4426950408889634
    delta = tl.load(DELTA + at.to(tl.int64) * N + safe)[:, None]
    K += batch * k_b + head // share * k_h
    V += batch * v_b + head // share * v_h
    acc = tl.zeros([M, DP], tl.float32)
    d = tl.arange(0, DP)
    for start in range(0, L, BN):
        c = start + tl.arange(0, BN)
        k = load_rows(K, tl.minimum(c, L - 1), k_n, D, DP)
        s = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
        dp = tl.dot(dy, tl.trans(load_rows(V, tl.minimum(c, L - 1), v_n, D, DP)))
        ds = tl.where((c < L)[None, :], tl.exp2(s - lse), 0.0) * (dp - delta)
        acc = tl.dot(ds.to(k.dtype), k, acc)
    DQ += batch * y_b + head * y_h
    tl.store(DQ + row.to(tl.int64)[:, None] * y_n + d[None, :], (acc * scale).to(DQ.dtype.element_ty),
             mask=real[:, None] & (d[None, :] < D))


@triton.jit(do_not_specialize=["N", "L", "heads", "span"])
def text_backward_key(Q, K, V, DY, LSE, DELTA, DK, DV, N, L, heads, span, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
                      dy_b, dy_h, dy_n, scale, SHARE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                      M: tl.constexpr, BN: tl.constexpr):
    # DK, DV [splits, B * key heads, L, D] fp32 from `span` queries each
    first = tl.program_id(1) * SHARE
    batch = (first // heads).to(tl.int64)
    kv = ((first % heads) // SHARE).to(tl.int64)
    key = tl.program_id(0) * M + tl.arange(0, M)
    real = key < L
    k = load_rows(K + batch * k_b + kv * k_h, tl.minimum(key, L - 1), k_n, D, DP)
    v = load_rows(V + batch * v_b + kv * v_h, tl.minimum(key, L - 1), v_n, D, DP)
    dk = tl.zeros([M, DP], tl.float32)
    dv = tl.zeros([M, DP], tl.float32)
    d = tl.arange(0, DP)
    begin = tl.program_id(2) * span
    for member in range(SHARE):
        at = first + member
        head = (at % heads).to(tl.int64)
        q_of = Q + batch * q_b + head * q_h
        dy_of = DY + batch * dy_b + head * dy_h
        for start in range(begin, tl.minimum(begin + span, N), BN):
            row = start + tl.arange(0, BN)
            ok = (row < N) & (row < begin + span)
            row = tl.minimum(row, N - 1)
            q = load_rows(q_of, row, q_n, D, DP)
            dy = load_rows(dy_of, row, dy_n, D, DP)
            lse = tl.load(LSE + at.to(tl.int64) * N + row) * 1.4426950408889634
            delta = tl.load(DELTA + at.to(tl.int64) * N + row)
            s = tl.dot(k, tl.trans(q)) * (scale * 1.4426950408889634)
            p = tl.where(ok[None, :], tl.exp2(s - lse[None, :]), 0.0)
            dv = tl.dot(p.to(dy.dtype), dy, dv)
            ds = p * (tl.dot(v, tl.trans(dy)) - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk)
    place = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * L * D
    at = place + key[:, None] * D + d[None, :]
    mask = real[:, None] & (d[None, :] < D)
    tl.store(DK + at, dk * scale, mask=mask)
    tl.store(DV + at, dv, mask=mask)
