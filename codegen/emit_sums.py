"""The second stage of a backward: the partial sums of a modulation group, added in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphopt.codegen.emit_base import HEADER, TL


@dataclass(frozen=True)
class Tile:
    """Rows and columns that one program of the second stage adds at a time, and its warps."""

    rows: int
    columns: int
    warps: int


def tile(D: int, P: Any) -> Tile:
    """The tile for P partial rows of one group (measured on an H200).

    Each step over the rows costs one latency of L2, so 132 partials are read in two, and in one where there are fewer,
    as with several groups: taller tiles would only be masked.  Very wide rows have few partials.
    """
    if D > 8192:
        return Tile(16, 256, 8)
    if isinstance(P, int) and P > 256:
        return Tile(256, 32, 4)
    return Tile(64, 32, 4) if isinstance(P, int) and P <= 64 else Tile(128, 32, 4)


def emit_sums(
    name: str, D: int, width: int, results: tuple[tuple[str, int, torch.dtype], ...], shape: Tile
) -> str:
    """Source of the kernel that turns PARTIAL [G * P, width] into one [G, D] tensor per result.

    `results` are (tensor, first column of PARTIAL, dtype).  One program adds a few columns of one result.
    """
    rows, columns = shape.rows, shape.columns
    tiles = (D + columns - 1) // columns
    lines = [
        "@triton.jit",
        f"def {name}(PARTIAL, {', '.join(t.upper() for t, _, _ in results)}, P):",
        f"    tile = tl.program_id(0) % {tiles}",
        f"    which = tl.program_id(0) // {tiles} % {len(results)}",
        f"    group = tl.program_id(0).to(tl.int64) // {tiles * len(results)}",
        f"    c = tile * {columns} + tl.arange(0, {columns})",
        f"    r = tl.arange(0, {rows}).to(tl.int64)",
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
