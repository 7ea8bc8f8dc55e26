"""Kernels of the offset head: depthwise 3x3x3 convolution, GELU and a linear layer over channels-last video tokens.

Each program owns consecutive tokens of one plane and a block of channels and walks along t.  A plane of x is loaded
once per neighbour in (h, w), 9 times instead of 27, and adds to the running sums of three planes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gelu(u):
    # tanh form: u / (1 + exp(-2 sqrt(2 / pi) (u + 0.044715 u^3))), exponent in base 2
    return u / (1.0 + tl.exp2(u * (-2.302208198 - 0.1029432397 * u * u)))


@triton.jit
def gelu_slope(u):
    # (gelu, its derivative)
    s = 1.0 / (1.0 + tl.exp2(u * (-2.302208198 - 0.1029432397 * u * u)))
    return u * s, s + u * s * (1.0 - s) * (1.595769122 + 0.2140644488 * u * u)


@triton.jit
def plane_rows(T, H, W, C, BM: tl.constexpr, BC: tl.constexpr):
    # this program's tokens in a plane, their (h, w), and its channels
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    return p, p // W, p % W, c


@triton.jit
def convolve(X, WEIGHT, t, p, h, w, c, above, here, T, H, W, C, x_n):
    # add plane t of X to the sums of planes t - 1 (above), t (here) and t + 1 (returned as below)
    below = tl.zeros_like(here)
    HW = H * W
    for dh in tl.static_range(-1, 2):
        for dw in tl.static_range(-1, 2):
            ok = (t < T) & (p < HW) & (h + dh >= 0) & (h + dh < H) & (w + dw >= 0) & (w + dw < W)
            at = (t * HW + p + dh * W + dw).to(tl.int64)[:, None]
            x = tl.load(X + at * x_n + c[None, :], mask=ok[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
            tap = (dh + 1) * 3 + dw + 1
            # plane t is the last neighbour of plane t - 1 and the first one of plane t + 1
            weight = WEIGHT + tap * C + c
            above += x * tl.load(weight + 18 * C, mask=c < C, other=0.0)[None, :]
            here += x * tl.load(weight + 9 * C, mask=c < C, other=0.0)[None, :]
            below += x * tl.load(weight, mask=c < C, other=0.0)[None, :]
    return above, here, below


@triton.jit(do_not_specialize=["T", "H", "W"])
def head_forward(X, WEIGHT, BIAS, LINEAR, PARTIAL, T, H, W, C, x_b, x_n,
                 OUT: tl.constexpr, OP: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    # WEIGHT [27, C] and BIAS fp32, LINEAR [C, OP] in x's dtype; PARTIAL [channel blocks, B, N, OUT] fp32
    p, h, w, c = plane_rows(T, H, W, C, BM, BC)
    N = (T * H * W).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    X += batch * x_b
    o = tl.arange(0, OP)
    linear = tl.load(LINEAR + c[:, None] * OP + o[None, :], mask=(c < C)[:, None], other=0.0)
    bias = tl.load(BIAS + c, mask=c < C, other=0.0)[None, :]
    PARTIAL += (tl.program_id(1).to(tl.int64) * tl.num_programs(2) + batch) * N * OUT
    above = tl.zeros([BM, BC], tl.float32)
    here = tl.zeros([BM, BC], tl.float32)
    for t in range(0, T + 1):
        above, here, below = convolve(X, WEIGHT, t, p, h, w, c, above, here, T, H, W, C, x_n)
        # above is plane t - 1, complete now
        z = gelu(above + bias).to(LINEAR.dtype.element_ty)
        y = tl.dot(z, linear)
        at = ((t - 1) * (H * W) + p).to(tl.int64)
        real = (t > 0) & (p < H * W)
        tl.store(PARTIAL + at[:, None] * OUT + o[None, :], y, mask=real[:, None] & (o < OUT)[None, :])
        above = here
        here = below


@triton.jit(do_not_specialize=["T", "H", "W"])
def head_backward(X, WEIGHT, BIAS, LINEAR, DY, DU, DLINEAR, DBIAS, T, H, W, C, x_b, x_n,
                  OUT: tl.constexpr, OP: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    # recompute u; DU = (dy . linear) gelu'(u); partial sums of DLINEAR [programs, OP, C] and DBIAS [programs, C]
    p, h, w, c = plane_rows(T, H, W, C, BM, BC)
    N = (T * H * W).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    X += batch * x_b
    o = tl.arange(0, OP)
    linear = tl.load(LINEAR + c[:, None] * OP + o[None, :], mask=(c < C)[:, None], other=0.0)
    bias = tl.load(BIAS + c, mask=c < C, other=0.0)[None, :]
    above = tl.zeros([BM, BC], tl.float32)
    here = tl.zeros([BM, BC], tl.float32)
    dlinear = tl.zeros([OP, BC], tl.float32)
    dbias = tl.zeros([BC], tl.float32)
    DY += batch * N * OUT
    DU += batch * N * C
    for t in range(0, T + 1):
        above, here, below = convolve(X, WEIGHT, t, p, h, w, c, above, here, T, H, W, C, x_n)
        at = ((t - 1) * (H * W) + p).to(tl.int64)
        real = (t > 0) & (p < H * W)
        dy = tl.load(DY + at[:, None] * OUT + o[None, :], mask=real[:, None] & (o < OUT)[None, :], other=0.0)
        dy = dy.to(LINEAR.dtype.element_ty)
        z, slope = gelu_slope(above + bias)
        du = tl.dot(dy, tl.trans(linear)) * slope
        tl.store(DU + at[:, None] * C + c[None, :], du.to(DU.dtype.element_ty), mask=real[:, None] & (c < C)[None, :])
        dlinear = tl.dot(tl.trans(dy), z.to(dy.dtype), dlinear)
        dbias += tl.sum(du, 0)
        above = here
        here = below
    program = (batch * tl.num_programs(0) + tl.program_id(0))
    tl.store(DLINEAR + program * OP * C + o[:, None] * C + c[None, :], dlinear, mask=(c < C)[None, :])
    tl.store(DBIAS + program * C + c, dbias, mask=c < C)


def backward_input_source() -> str:
    """Kernel `head_backward_input`: DU, X -> DX, and partial sums of DWEIGHT [programs, 27, C].

    Every du loaded serves both: dx(m) += weight(tap) du(m - tap) and dweight(tap) += x(m) du(m - tap).  The 27 sums and
    the 27 weights of a thread's two channels stay in registers.
    """
    taps = [(dt, dh, dw) for dt in (-1, 0, 1) for dh in (-1, 0, 1) for dw in (-1, 0, 1)]
    index = {tap: i for i, tap in enumerate(taps)}
    lines = [f"    w{i} = tl.load(WEIGHT + {i} * C + c, mask=c < C, other=0.0)[None, :]" for i in index.values()]
    lines += [f"    s{i} = tl.zeros([BM, BC], tl.float32)" for i in index.values()]
    body = []
    for dh in (-1, 0, 1):
        for dw in (-1, 0, 1):
            body += [
                f"ok = inside & (h >= {dh}) & (h < H + {dh}) & (w >= {dw}) & (w < W + {dw})",
                f"d = tl.load(DU + (t * HW + p - ({dh}) * W - ({dw})).to(tl.int64)[:, None] * C + c[None, :], "
                "mask=ok[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)",
                f"above += d * w{index[-1, dh, dw]}", f"here += d * w{index[0, dh, dw]}",
                f"below += d * w{index[1, dh, dw]}", f"s{index[-1, dh, dw]} += d * x_before",
                f"s{index[0, dh, dw]} += d * x_here", f"s{index[1, dh, dw]} += d * x_after"]
    text = """import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "H", "W", "steps"])
def head_backward_input(X, DU, WEIGHT, DX, DWEIGHT, T, H, W, C, steps, x_b, x_n, BM: tl.constexpr, BC: tl.constexpr):
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    batch = tl.program_id(2).to(tl.int64)
    HW = H * W
    N = (T * HW).to(tl.int64)
    X += batch * x_b
    DU += batch * N * C
    DX += batch * N * C
"""
    text += "\n".join(lines) + """
    for step in range(0, steps):
        p = (tl.program_id(0) * steps + step) * BM + tl.arange(0, BM)
        h = p // W
        w = p % W
        above = tl.zeros([BM, BC], tl.float32)
        here = tl.zeros([BM, BC], tl.float32)
        x_before = tl.zeros([BM, BC], tl.float32)
        real = (p < HW)[:, None] & (c < C)[None, :]
        x_here = tl.load(X + p.to(tl.int64)[:, None] * x_n + c[None, :], mask=real, other=0.0).to(tl.float32)
        for t in range(0, T + 1):
            inside = (t < T) & (p < HW)
            below = tl.zeros([BM, BC], tl.float32)
            x_after = tl.load(X + ((t + 1) * HW + p).to(tl.int64)[:, None] * x_n + c[None, :], mask=real & (t + 1 < T),
                              other=0.0).to(tl.float32)
"""
    text += "".join("            " + line + "\n" for line in body)
    text += """            out = DX + ((t - 1) * HW + p).to(tl.int64)[:, None] * C + c[None, :]
            tl.store(out, above.to(DX.dtype.element_ty), mask=real & (t > 0))
            above = here
            here = below
            x_before = x_here
            x_here = x_after
    sums = DWEIGHT + (batch * tl.num_programs(0) + tl.program_id(0)) * 27 * C + c
"""
    return text + "".join(f"    tl.store(sums + {i} * C, tl.sum(s{i}, 0), mask=c < C)\n" for i in index.values())
