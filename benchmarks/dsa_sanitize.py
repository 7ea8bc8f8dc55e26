"""Every kernel of video attention and of the offset head at small odd shapes, for compute-sanitizer.

    compute-sanitizer --tool memcheck python benchmarks/dsa_sanitize.py [fused] [lattice] [rest] [head]

Set PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each tensor is an allocation of its own.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import torch

from graphopt.codegen.dsa import head, head_launch, kernels, portable, reference, text, window

BF, HALF = torch.bfloat16, torch.float16
# grid, window, head dimension, dtype, heads, key heads, batch
CASES = [((3, 5, 7), (3, 3, 3), 64, BF, 2, 2, 1), ((1, 9, 11), (3, 7, 7), 128, BF, 4, 2, 2),
         ((5, 7, 6), (2, 4, 5), 96, HALF, 2, 1, 1), ((7, 3, 19), (3, 3, 3), 64, BF, 2, 2, 2)]
HEADS = [((3, 5, 7), 80, 9, BF), ((1, 4, 13), 144, 36, HALF), ((5, 3, 6), 64, 3, BF), ((2, 9, 17), 200, 12, BF),
         ((3, 2, 5), 70, 36, HALF)]


def attention(parts: list[str]) -> None:
    """Forward and backward of each engine, with offsets that are NaN, infinite and far too."""
    for grid, size, D, dtype, heads, kv, B in CASES:
        N, cut = math.prod(grid), reference.effective_window(size, grid)
        q, dy = (torch.randn(B, heads, N, D, device="cuda", dtype=dtype) for _ in range(2))
        k, v = (torch.randn(B, kv, N, D, device="cuda", dtype=dtype) for _ in range(2))
        for spread in (1.0, 30.0):
            offsets = torch.randn(B, kv, N, 3, device="cuda") * spread
            offsets[0, 0, 0, 0], offsets[0, 0, 1, 1] = math.nan, math.inf
            for name, module in (("fused", kernels), ("lattice", portable)):
                if name in parts:
                    y, lse = module.forward(q, k, v, offsets, grid, cut, D**-0.5)
                    module.backward(dy, torch.randn_like(lse), q, k, v, offsets, y, lse, grid, cut, D**-0.5, True)
        if "rest" in parts:
            for whole in (None, torch.randint(-3, 4, (B, 1, N, 3), device="cuda")):
                y, lse = window.forward(q, k, v, whole, grid, cut, D**-0.5)
                window.backward(dy, None, q, k, v, whole, y, lse, grid, cut, D**-0.5)
            words, values = k[:, :, :13], v[:, :, :13]
            y, lse = text.triton_forward(q, words, values, 0.1)
            text.triton_backward(dy, torch.randn_like(lse), q, words, values, y, lse, 0.1)
        torch.cuda.synchronize()
        print("ok", grid, flush=True)


def heads() -> None:
    """Both directions of both engines, one tile of a plane per program and several."""
    for grid, C, out, dtype in HEADS:
        make = lambda *s, dtype=dtype: torch.randn(*s, device="cuda", dtype=dtype)
        x, weight, bias = make(2, math.prod(grid), C), make(C, 1, 3, 3, 3), make(C)
        matrix, last = make(out, C), make(out)
        for engine, programs in [(e, n) for e in ("mma", "dot") if e == "dot" or C % 16 == 0 for n in (96, 2)]:
            head_launch.engine_of = lambda *_a, engine=engine: engine
            head_launch.BACKWARD = replace(head_launch.BACKWARD, programs=programs)
            head_launch.MMA_SLOPE = replace(head_launch.MMA_SLOPE, programs=programs)
            y, u = head.triton_forward(x, weight, bias, matrix, last, *grid)
            head.triton_backward(torch.randn_like(y), x, u, weight, bias, matrix, *grid)
        torch.cuda.synchronize()
        print("ok offset head", grid, C, flush=True)


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["fused", "lattice", "rest", "head"]
    if set(wanted) - {"head"}:
        attention(wanted)
    if "head" in wanted:
        heads()
