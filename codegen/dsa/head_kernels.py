"""Kernels of the offset head around its convolution: GELU with the linear layer, and their gradients.

Both are matrix products that GELU's arithmetic is folded into, so that z = gelu(u) is never written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphopt.codegen.dsa.device import pack_pair, pack_pair_portable, unpack_pair


@triton.jit
def unpack_channels(word, HALF: tl.constexpr):
    # the two channels of a word in fp32; a bf16 value is the upper half of its fp32
    if HALF:
        a, b = unpack_pair(word, HALF)
        return a.to(tl.float32), b.to(tl.float32)
    else:
        return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pack_channels(a, b, HALF: tl.constexpr, PTX: tl.constexpr):
    if PTX:
        return pack_pair(a, b, HALF)
    else:
        return pack_pair_portable(a, b, HALF)


@triton.jit
def sigmoid(x, beside, PTX: tl.constexpr):
    # 1 / (1 + 2^x) in two approximate instructions, each right to about 2^-22; infinite x is right.  `beside` is not
    # read: it keeps Triton from doing this in two layouts where x meets a product
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; ex2.approx.ftz.f32 t, $1; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }", "=f,f,f",
            [x, beside], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / (1.0 + tl.exp2(x))


@triton.jit
def tanh_of(x, beside):
    # one approximate instruction, right to about 2^-11: finer than bf16, coarser than fp16
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f,f", [x, beside], dtype=tl.float32, is_pure=True,
                                     pack=1)


@triton.jit
def gelu(u, HALF: tl.constexpr, PTX: tl.constexpr):
    # tanh form: u / (1 + exp(-2 sqrt(2 / pi) (u + 0.044715 u^3))), exponent in base 2
    if PTX and not HALF:
        half = 0.5 * u
        return half + half * tanh_of(u * (0.7978845608 + 0.0356774081 * u * u), u)
    else:
        return u * sigmoid(u * (-2.302208198 - 0.1029432397 * u * u), u, PTX)


@triton.jit
def gelu_slope(u, beside, HALF: tl.constexpr, PTX: tl.constexpr):
    # (gelu, its derivative)
    square = u * u
    if PTX and not HALF:
        t = tanh_of(u * (0.7978845608 + 0.0356774081 * square), beside)
        half = 0.5 * u
        z = half + half * t
        return z, (0.5 + 0.5 * t) + (half - half * t * t) * (0.7978845608 + 0.1070322243 * square)
    else:
        s = sigmoid(u * (-2.302208198 - 0.1029432397 * square), beside, PTX)
        z = u * s
        return z, s + (z - z * s) * (1.595769122 + 0.2140644488 * square)


@triton.jit(do_not_specialize=["rows"])
def head_linear(U, WEIGHT, BIAS, Y, rows, C: tl.constexpr, OUT: tl.constexpr, OP: tl.constexpr, BM: tl.constexpr,
                BC: tl.constexpr, HALF: tl.constexpr, PTX: tl.constexpr):
    # Y [rows, OUT] = gelu(U) @ WEIGHT^T + BIAS
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.arange(0, OP)
    start = tl.minimum(r, rows - 1).to(tl.int64)[:, None] * C
    acc = tl.zeros([BM, OP], tl.float32)
    for k in range(0, C, BC):
        c = k + tl.arange(0, BC)
        if C % BC == 0:
            u = tl.load(U + start + c[None, :])
            w = tl.load(WEIGHT + o[None, :] * C + c[:, None], mask=(o < OUT)[None, :], other=0.0)
        else:
            u = tl.load(U + start + c[None, :], mask=(c < C)[None, :], other=0.0)
            w = tl.load(WEIGHT + o[None, :] * C + c[:, None], mask=(o < OUT)[None, :] & (c < C)[:, None], other=0.0)
        acc = tl.dot(gelu(u.to(tl.float32), HALF, PTX).to(w.dtype), w, acc)
    acc += tl.load(BIAS + o, mask=o < OUT, other=0.0).to(tl.float32)[None, :]
    tl.store(Y + r.to(tl.int64)[:, None] * OUT + o[None, :], acc, mask=(r < rows)[:, None] & (o < OUT)[None, :])


@triton.jit(do_not_specialize=["rows", "steps"])
def head_slope(U, DY, WEIGHT, DU, SUMS, rows, steps, C: tl.constexpr, OUT: tl.constexpr, OP: tl.constexpr,
               BM: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr, HALF: tl.constexpr, PTX: tl.constexpr):
    # DU = (DY @ WEIGHT) gelu'(U); of this program's rows: SUMS [OUT + 1, C] = DY^T gelu(U), and the sum of DU below it
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    o = tl.arange(0, OP)
    in_c = (c < C)[None, :]
    w = tl.load(WEIGHT + o[:, None] * C + c[None, :], mask=(o < OUT)[:, None] & in_c, other=0.0)
    dlinear = tl.zeros([OP, BC], tl.float32)
    total = tl.zeros([BM, BC], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):  # given here, it also pipelines what feeds no product directly
        r = (tl.program_id(0) * steps + step) * BM + tl.arange(0, BM)
        real = (r < rows)[:, None]
        at = r.to(tl.int64)[:, None] * C + c[None, :]
        dy = tl.load(DY + r.to(tl.int64)[:, None] * OP + o[None, :], mask=real, other=0.0)
        u = tl.load(U + at, mask=real & in_c, other=0.0)
        dz = tl.dot(dy, w)
        z, slope = gelu_slope(u.to(tl.float32), dz, HALF, PTX)
        du = dz * slope
        total += du
        tl.store(DU + at, du.to(DU.dtype.element_ty), mask=real & in_c)
        dlinear = tl.dot(tl.trans(dy), z.to(w.dtype), dlinear)
    sums = SUMS + tl.program_id(0).to(tl.int64) * (OUT + 1) * C + c[None, :]
    tl.store(sums + o[:, None] * C, dlinear, mask=(o < OUT)[:, None] & in_c)
    tl.store(sums + OUT * C, tl.sum(total, 0, keep_dims=True), mask=in_c)


@triton.jit(do_not_specialize=["rows", "steps"])
def head_narrow(DY, LOW, SUMS, rows, steps, OUT: tl.constexpr, PITCH: tl.constexpr, OP: tl.constexpr,
                BM: tl.constexpr):
    # DY [rows, OUT] -> LOW [rows, PITCH], rounded and padded with zeros; of this program's rows: SUMS [OUT]
    o = tl.arange(0, OP)[None, :]
    total = tl.zeros([BM, OP], tl.float32)
    for step in range(0, steps):
        r = ((tl.program_id(0) * steps + step) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
        dy = tl.load(DY + r * OUT + o, mask=(r < rows) & (o < OUT), other=0.0)
        total += dy.to(tl.float32)
        tl.store(LOW + r * PITCH + o, dy.to(LOW.dtype.element_ty), mask=(r < rows) & (o < PITCH))
    tl.store(SUMS + tl.program_id(0) * OUT + o, tl.sum(total, 0, keep_dims=True), mask=o < OUT)


@triton.jit
def add_up(PARTS, TOTAL, block, n, stride, size, BK: tl.constexpr, BN: tl.constexpr):
    # TOTAL [size] = sum over PARTS [n, stride]
    i = block * BN + tl.arange(0, BN)[None, :]
    total = tl.zeros([BK, BN], tl.float32)
    for first in range(0, n, BK):
        k = (first + tl.arange(0, BK))[:, None]
        total += tl.load(PARTS + k.to(tl.int64) * stride + i, mask=(k < n) & (i < size), other=0.0)
    tl.store(TOTAL + i, tl.sum(total, 0, keep_dims=True).to(TOTAL.dtype.element_ty), mask=i < size)


@triton.jit(do_not_specialize=["taps", "slopes", "rows"])
def head_add(TAPS, SLOPES, ROWS, DWEIGHT, DBIAS, DMATRIX, DLAST, taps, slopes, rows, C: tl.constexpr, OUT: tl.constexpr,
             BK: tl.constexpr, BN: tl.constexpr):
    # the weights' gradients from the programs' sums: TAPS [taps, C * 27], SLOPES [slopes, OUT + 1, C], ROWS [rows, OUT]
    FIRST: tl.constexpr = (C * 27 + BN - 1) // BN
    SECOND: tl.constexpr = FIRST + (OUT * C + BN - 1) // BN
    THIRD: tl.constexpr = SECOND + (C + BN - 1) // BN
    block = tl.program_id(0)
    if block < FIRST:
        add_up(TAPS, DWEIGHT, block, taps, C * 27, C * 27, BK, BN)
    elif block < SECOND:
        add_up(SLOPES, DMATRIX, block - FIRST, slopes, (OUT + 1) * C, OUT * C, BK, BN)
    elif block < THIRD:
        add_up(SLOPES + OUT * C, DBIAS, block - SECOND, slopes, (OUT + 1) * C, C, BK, BN)
    else:
        add_up(ROWS, DLAST, block - THIRD, rows, OUT, OUT, BK, BN)
