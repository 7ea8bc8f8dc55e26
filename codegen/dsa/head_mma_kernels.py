"""Tensor core steps of the offset head, on values that each thread holds one of: tensors [32 * warps], element i in
thread i.  Each has a plain form for the interpreter, where 32 neighbours of a tensor are the warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphopt.codegen.dsa.head_kernels import unpack_channels


@triton.jit
def low_halves(a, b, PTX: tl.constexpr):
    # the lower 16 bits of a, below those of b
    if PTX:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True,
                                         pack=1)
    else:
        return (a & 0xFFFF) | (b << 16)


@triton.jit
def high_halves(a, b, PTX: tl.constexpr):
    # the upper 16 bits of a, below those of b
    if PTX:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True,
                                         pack=1)
    else:
        return ((a >> 16) & 0xFFFF) | (b & -65536)


@triton.jit
def square(word, HALF: tl.constexpr):
    # 8 x 8 values per warp: thread 4 i + j holds row i, columns 2 j and 2 j + 1
    low, high = unpack_channels(word, HALF)
    return tl.reshape(tl.join(low, high), [word.shape[0] // 32, 8, 8])


@triton.jit
def product(a, b):
    # rows times rows: [warps, 8, 8] each -> two values per thread, row i, columns 2 j and 2 j + 1
    c = tl.sum(tl.expand_dims(a, 2) * tl.expand_dims(b, 1), 3)
    return tl.split(tl.reshape(c, [c.shape[0] * 32, 2]))


@triton.jit
def multiply_8(a0, a1, b, c0, c1, c2, c3, HALF: tl.constexpr, PTX: tl.constexpr):
    # C [16, 8] += A [16, 8] B [8, 8]; A's upper and lower rows, B transposed
    if PTX:
        if HALF:
            return tl.inline_asm_elementwise(
                "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5}, {$6}, {$7,$8,$9,$10};",
                "=f,=f,=f,=f,r,r,r,f,f,f,f", [a0, a1, b, c0, c1, c2, c3], dtype=(tl.float32,) * 4, is_pure=True, pack=1)
        else:
            return tl.inline_asm_elementwise(
                "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5}, {$6}, {$7,$8,$9,$10};",
                "=f,=f,=f,=f,r,r,r,f,f,f,f", [a0, a1, b, c0, c1, c2, c3], dtype=(tl.float32,) * 4, is_pure=True, pack=1)
    else:
        d0, d1 = product(square(a0, HALF), square(b, HALF))
        d2, d3 = product(square(a1, HALF), square(b, HALF))
        return c0 + d0, c1 + d1, c2 + d2, c3 + d3


@triton.jit
def multiply_16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, HALF: tl.constexpr, PTX: tl.constexpr):
    # C [16, 8] += A [16, 16] B [16, 8]: a0, a1 and b0 of the first eight columns of A, a2, a3 and b1 of the others
    if PTX:
        if HALF:
            return tl.inline_asm_elementwise(
                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, "
                "{$10,$11,$12,$13};", "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
                dtype=(tl.float32,) * 4, is_pure=True, pack=1)
        else:
            return tl.inline_asm_elementwise(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, "
                "{$10,$11,$12,$13};", "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
                dtype=(tl.float32,) * 4, is_pure=True, pack=1)
    else:
        c0, c1, c2, c3 = multiply_8(a0, a1, b0, c0, c1, c2, c3, HALF, PTX)
        return multiply_8(a2, a3, b1, c0, c1, c2, c3, HALF, PTX)


@triton.jit
def transpose(word, HALF: tl.constexpr, PTX: tl.constexpr):
    # 8 x 8 values of 16 bits per warp, transposed
    if PTX:
        return tl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [word],
                                         dtype=tl.int32, is_pure=True, pack=1)
    else:
        low, high = word & 0xFFFF, (word >> 16) & 0xFFFF
        turned = tl.permute(tl.reshape(tl.join(low, high), [word.shape[0] // 32, 8, 8]), [0, 2, 1])
        low, high = tl.split(tl.reshape(turned, [word.shape[0], 2]))
        return low | (high << 16)


@triton.jit
def from_thread(x, MASK: tl.constexpr, PTX: tl.constexpr):
    # the value of the thread whose number differs in the bits of MASK, a power of two
    if PTX:
        return tl.inline_asm_elementwise("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,n", [x, MASK],
                                         dtype=tl.float32, is_pure=True, pack=1)
    else:
        pairs = tl.permute(tl.reshape(x, [x.shape[0] // (2 * MASK), 2, MASK]), [0, 2, 1])
        first, second = tl.split(pairs)
        return tl.reshape(tl.permute(tl.join(second, first), [0, 2, 1]), [x.shape[0]])


@triton.jit
def scaled_pair(word, by, HALF: tl.constexpr, PTX: tl.constexpr):
    # two 16-bit values times two: a select that the fma units do
    if PTX:
        if HALF:
            return tl.inline_asm_elementwise("mul.f16x2 $0, $1, $2;", "=r,r,r", [word, by], dtype=tl.int32,
                                             is_pure=True, pack=1)
        else:
            # sm80 has no product of two alone; a negative zero changes nothing
            return tl.inline_asm_elementwise(
                "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }", "=r,r,r", [word, by],
                dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.where(by == 0, 0, word)


@triton.jit
def load_four(at, inside, BIT: tl.constexpr, PTX: tl.constexpr):
    # four words from where each thread points, 16 bytes at once; zeros where BIT is not in `inside`
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; and.b32 t, $5, $6; setp.ne.s32 p, t, 0; mov.b32 $0, 0; mov.b32 $1, 0; "
            "mov.b32 $2, 0; mov.b32 $3, 0; @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }", "=&r,=&r,=&r,=&r,l,r,n",
            [at.to(tl.int64), inside, BIT], dtype=(tl.int32,) * 4, is_pure=True, pack=1)
    else:
        inside = (inside & BIT) != 0
        return (tl.load(at, mask=inside, other=0), tl.load(at + 1, mask=inside, other=0),
                tl.load(at + 2, mask=inside, other=0), tl.load(at + 3, mask=inside, other=0))


@triton.jit
def store_four(at, a, b, c, d, inside, BIT: tl.constexpr, PTX: tl.constexpr):
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; and.b32 t, $6, $7; setp.ne.s32 p, t, 0; "
            "@p st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }",
            "=r,l,r,r,r,r,r,n", [at.to(tl.int64), a, b, c, d, inside, BIT], dtype=tl.int32, is_pure=False, pack=1)
    else:
        inside = (inside & BIT) != 0
        tl.store(at, a, mask=inside)
        tl.store(at + 1, b, mask=inside)
        tl.store(at + 2, c, mask=inside)
        tl.store(at + 3, d, mask=inside)


@triton.jit
def prefetch(at, inside, PTX: tl.constexpr):
    # into L2, where `inside` is not 0
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l,r",
            [at.to(tl.int64), inside], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def from_lane(x, lane, PTX: tl.constexpr):
    # the word of another thread of the warp
    if PTX:
        return tl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r", [x, lane],
                                         dtype=tl.int32, is_pure=True, pack=1)
    else:
        shape: tl.constexpr = [x.shape[0] // 32, 32]
        return tl.reshape(tl.gather(tl.reshape(x, shape), tl.reshape(lane, shape), 1), [x.shape[0]])


@triton.jit
def swap_words(x, MASK: tl.constexpr, PTX: tl.constexpr):
    # the word of the thread whose number differs in the bits of MASK, at most 3
    if MASK == 0:
        return x
    elif PTX:
        return tl.inline_asm_elementwise("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,n", [x, MASK],
                                         dtype=tl.int32, is_pure=True, pack=1)
    else:
        y = x.to(tl.float32, bitcast=True)
        if MASK % 2 == 1:
            y = from_thread(y, 1, PTX)
        if MASK >= 2:
            y = from_thread(y, 2, PTX)
        return y.to(tl.int32, bitcast=True)


@triton.jit
def sum_of_two(a, b, thread, MASK: tl.constexpr, PTX: tl.constexpr):
    # each pair of threads adds its a in the one and its b in the other
    upper = (thread & MASK) != 0
    return tl.where(upper, b, a) + from_thread(tl.where(upper, a, b), MASK, PTX)
