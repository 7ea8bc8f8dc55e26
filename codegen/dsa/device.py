"""Device functions shared by the video attention kernels: positions of a query tile, window starts, packed words.

Every axis follows the same rule (reference.py): start = clamp(clamp(pos - k // 2, 0, n - k) + offset, 0, n - k), base =
min(floor(start), n - k - 1) and never below 0, fraction = start - base.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# inline PTX cannot run under the interpreter
NATIVE = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def axis_start(position, offset, n, K: tl.constexpr):
    hi = tl.maximum(n - K, 0)
    offset = tl.where(offset == offset, offset, 0.0)  # NaN counts as no offset
    inside = tl.minimum(tl.maximum(position - K // 2, 0), hi).to(tl.float32)
    start = tl.minimum(tl.maximum(inside + offset, 0.0), hi.to(tl.float32))
    base = tl.maximum(tl.minimum(tl.floor(start).to(tl.int32), hi - 1), 0)
    return base, start - base.to(tl.float32)


@triton.jit
def offset_moves(position, offset, n, K: tl.constexpr):
    # does the start follow the offset, or is it clamped (then its gradient is zero)?
    hi = tl.maximum(n - K, 0)
    start = tl.minimum(tl.maximum(position - K // 2, 0), hi).to(tl.float32) + offset
    return (start >= 0.0) & (start <= hi.to(tl.float32))


@triton.jit
def tile_position(pid, T, H, W, BT, BH, BW, M: tl.constexpr):
    # M rows of which BT * BH * BW are a box of queries; the rest repeat its last query and are not stored
    nh = tl.cdiv(H, BH)
    nw = tl.cdiv(W, BW)
    i = tl.arange(0, M)
    j = tl.minimum(i, BT * BH * BW - 1)
    # j, BH * BW <= 128: this quotient is exact, a division would cost 20 instructions in every thread
    t = (j * (65536 // (BH * BW) + 1)) >> 16
    rest = j - t * (BH * BW)
    h = (rest * (65536 // BW + 1)) >> 16
    t += (pid // (nh * nw)) * BT
    w = rest - h * BW + (pid % nw) * BW
    h += ((pid // nw) % nh) * BH
    real = (t < T) & (h < H) & (w < W) & (i < BT * BH * BW)
    return tl.minimum(t, T - 1), tl.minimum(h, H - 1), tl.minimum(w, W - 1), real


@triton.jit
def step_chunk(i, height, reciprocal):
    # i // height; the reciprocal is rounded down, so the quotient is right or one too small
    i = height - height + i  # a loop counter is a plain int under the interpreter
    chunk = tl.umulhi(i.to(tl.uint32), reciprocal).to(tl.int32)
    return tl.where(i - chunk * height >= height, chunk + 1, chunk)


@triton.jit
def pack_pair(low, high, HALF: tl.constexpr):
    # two fp32 values rounded to 16 bits in one 32-bit word; HALF: fp16, else bf16
    if NATIVE:
        if HALF:
            word = tl.inline_asm_elementwise(
                "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=tl.int32, is_pure=True, pack=1)
        else:
            word = tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=tl.int32, is_pure=True, pack=1)
    else:
        word = pack_pair_portable(low, high, HALF)
    return word


@triton.jit
def pack_pair_portable(low, high, HALF: tl.constexpr):
    if HALF:
        a = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        b = high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    else:
        a = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        b = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    return (a & 0xFFFF) | (b << 16)


@triton.jit
def unpack_pair(word, HALF: tl.constexpr):
    # the two 16-bit values of a word
    low = (word & 0xFFFF).to(tl.int16)
    high = (word >> 16).to(tl.int16)
    if HALF:
        return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)
    else:
        return low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True)


@triton.jit
def store_in_place(pointer, word, mask):
    # tl.store would first convert the fragment through shared memory, with a barrier each time
    if NATIVE:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }", "=r,l,r,r",
            [pointer.to(tl.int64), word, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.store(pointer, word, mask=mask)
