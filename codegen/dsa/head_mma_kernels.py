"""Tensor core steps of the offset head, on values that each thread holds one of: tensors [32 * warps], element i in
thread i.  Each has a plain form for the interpreter, where 32 neighbours of a tensor are the warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphopt.codegen.dsa.head_kernels import unpack_channels


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
        d0, d1 = product(square(a0, HALF), square(b0, HALF))
        d2, d3 = product(square(a1, HALF), square(b0, HALF))
        e0, e1 = product(square(a2, HALF), square(b1, HALF))
        e2, e3 = product(square(a3, HALF), square(b1, HALF))
        return c0 + d0 + e0, c1 + d1 + e1, c2 + d2 + e2, c3 + d3 + e3


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
def prefetch(at, inside, PTX: tl.constexpr):
    # into L2, where `inside` is not 0
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l,r",
            [at.to(tl.int64), inside], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def sum_of_two(a, b, thread, MASK: tl.constexpr, PTX: tl.constexpr):
    # each pair of threads adds its a in the one and its b in the other
    upper = (thread & MASK) != 0
    return tl.where(upper, b, a) + from_thread(tl.where(upper, a, b), MASK, PTX)
