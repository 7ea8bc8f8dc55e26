"""Kernels of the offset head: the depthwise 3x3x3 convolution and GELU over channels-last video tokens.

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


TAPS = [(dt, dh, dw) for dt in (-1, 0, 1) for dh in (-1, 0, 1) for dw in (-1, 0, 1)]
HEADER = """import triton
import triton.language as tl

from graphopt.codegen.dsa.head_kernels import gelu, gelu_slope


"""


def convolution_source() -> str:
    """Kernel `head_convolve`: X -> Z = gelu(u), u the convolution; BACKWARD: X, DZ -> Z, DU = DZ gelu'(u).

    A thread has two channels, so that its 54 weights stay in registers.
    """
    index = {tap: i for i, tap in enumerate(TAPS)}
    lines = [f"    w{i} = tl.load(WEIGHT + {i} * C + c, mask=c < C, other=0.0)[None, :]" for i in index.values()]
    body = []
    for dh in (-1, 0, 1):
        for dw in (-1, 0, 1):
            body += [
                f"ok = inside & (h >= {-dh}) & (h < H - ({dh})) & (w >= {-dw}) & (w < W - ({dw}))",
                f"x = tl.load(X + (t * HW + p + ({dh}) * W + ({dw})).to(tl.int64)[:, None] * x_n + c[None, :], "
                "mask=ok[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)",
                # plane t is the last neighbour of plane t - 1 and the first one of plane t + 1
                f"above += x * w{index[1, dh, dw]}", f"here += x * w{index[0, dh, dw]}",
                f"below += x * w{index[-1, dh, dw]}"]
    text = HEADER + """@triton.jit(do_not_specialize=["T", "H", "W", "steps"])
def head_convolve(X, WEIGHT, BIAS, DZ, Z, DU, T, H, W, C, steps, x_b, x_n, BM: tl.constexpr, BC: tl.constexpr,
                  BACKWARD: tl.constexpr):
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    batch = tl.program_id(2).to(tl.int64)
    HW = H * W
    N = (T * HW).to(tl.int64)
    X += batch * x_b
    bias = tl.load(BIAS + c, mask=c < C, other=0.0)[None, :]
"""
    text += "\n".join(lines) + """
    for step in range(0, steps):
        p = (tl.program_id(0) * steps + step) * BM + tl.arange(0, BM)
        h = p // W
        w = p % W
        above = tl.zeros([BM, BC], tl.float32)
        here = tl.zeros([BM, BC], tl.float32)
        for t in range(0, T + 1):
            inside = (t < T) & (p < HW)
            below = tl.zeros([BM, BC], tl.float32)
"""
    text += "".join("            " + line + "\n" for line in body)
    return text + """            # plane t - 1 is complete
            at = (batch * N + (t - 1) * HW + p)[:, None] * C + c[None, :]
            real = ((t > 0) & (p < HW))[:, None] & (c < C)[None, :]
            if BACKWARD:
                z, slope = gelu_slope(above + bias)
                du = tl.load(DZ + at, mask=real, other=0.0).to(tl.float32) * slope
                tl.store(DU + at, du.to(DU.dtype.element_ty), mask=real)
            else:
                z = gelu(above + bias)
            tl.store(Z + at, z.to(Z.dtype.element_ty), mask=real)
            above = here
            here = below
"""


def backward_input_source() -> str:
    """Kernel `head_backward_input`: DU, X -> DX, and partial sums of DWEIGHT [programs, 27, C].

    Every du loaded serves both: dx(m) += weight(tap) du(m - tap) and dweight(tap) += x(m) du(m - tap).  The 27 sums and
    the 27 weights of a thread's two channels stay in registers.
    """
    index = {tap: i for i, tap in enumerate(TAPS)}
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
    text = HEADER + """@triton.jit(do_not_specialize=["T", "H", "W", "steps"])
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
