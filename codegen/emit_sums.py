"""The second stage of a backward: the partial sums of a modulation group, added in a fixed order."""

from __future__ import annotations

import torch

from graphopt.codegen.emit_base import HEADER, TL

# warps of a program
WARPS = 8


def tile(D: int) -> tuple[int, int]:
    """Rows and columns that one program adds at a time: many partials of narrow rows, few of very wide ones.

    Each step costs one latency of L2, so the partials of 132 programs are read in one.
    """
    return (256, 16) if D <= 2048 else (256, 32) if D <= 8192 else (16, 256)


def emit_sums(
    name: str, D: int, width: int, results: tuple[tuple[str, int, torch.dtype], ...],
    shape: tuple[int, int] | None = None,
) -> str:
    """Source of the kernel that turns PARTIAL [G * P, width] into one [G, D] tensor per result.

    `results` are (tensor, first column of PARTIAL, dtype).  One program adds a few columns of one result; `shape` are
    the rows and columns it adds at a time.
    """
    rows, columns = shape or tile(D)
    tiles = (D + columns - 1) // columns
    lines = [
        "@triton.jit",
        f"def {name}(PARTIAL, {', '.join(t.upper() for t, _, _ in results)}, P):",
        f"    tile = tl.program_id(0) % {tiles}",
        f"    which = tl.program_id(0) // {tiles} % {len(results)}",
        f"    group = tl.program_id(0).to(tl.int64) // {tiles * len(results)}",
        f"    c = tile * {columns} + tl.arange(0, {columns})",
        f"    r = tl.arange(0, {rows})",
    ]
    start = str(results[0][1])
    for k, (_, first, _) in enumerate(results[1:], 1):
        start = f"tl.where(which == {k}, {first}, {start})"
    lines += [
        f"    start = PARTIAL + group * P * {width} + {start}",
        f"    total = tl.zeros([{rows}, {columns}], tl.float32)",
        f"    for first in range(0, P, {rows}):",
        f"        inside = (first + r < P)[:, None] & (c < {D})[None, :]",
        f"        total += tl.load(start + (first + r)[:, None] * {width} + c[None, :], mask=inside, other=0.0)",
        "    value = tl.sum(total, 0)",
    ]
    for k, (t, _, dtype) in enumerate(results):
        lines += [
            f"    if which == {k}:",
            f"        tl.store({t.upper()} + group * {D} + c, value.to({TL[dtype]}), mask=c < {D})",
        ]
    return HEADER + "\n".join(lines) + "\n"
