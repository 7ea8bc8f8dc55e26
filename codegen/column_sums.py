"""A kernel that sums a matrix over its rows, and makes the matrix on the way: the gradient of a bias.

    value = program(inputs)          elementwise, fp32, rounded once to the matrix's dtype
    OUT[m, n] = value                only where the matrix is made here
    PARTIAL[p, n] = sum of value over the rows of program p

A second kernel adds the partials in a fixed order (emit_sums.py).  The gradient of what a linear layer returns is read
by two matmuls, so it is in memory anyway; its sum over rows costs nothing where it is made and a pass of its own where
not.  The program is straight-line code over `in0`, `in1`, .., one assignment a line (passes/column_sums.py writes it).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from graphopt.codegen import store
from graphopt.codegen.compiler import Unit
from graphopt.codegen.emit_base import HEADER, TL

TILE = 2048  # elements of one step of a program
WARPS = 4
PROGRAMS_PER_SM = 4


@dataclass(frozen=True)
class ColumnSums:
    """One kernel: width N; dtypes of the inputs ("full" [M, N] or "vector" [N]); the program; the matrix's dtype.

    makes: is the matrix written (else it is in0 itself and only read)?
    """

    N: int
    inputs: tuple[tuple[str, torch.dtype], ...]
    program: tuple[str, ...]
    result: str
    dtype: torch.dtype
    makes: bool

    @property
    def columns(self) -> int:
        """Columns of one program: the widest power of two that divides N, at least 128 and at most 512."""
        return next((c for c in (512, 256, 128) if self.N % c == 0), 512)

    @property
    def tiles(self) -> int:
        """Programs side by side in a row."""
        return -(-self.N // self.columns)

    @property
    def stages(self) -> int:
        """Depth of the ring: about 16 KB a program on their way."""
        moved = TILE * sum(dtype.itemsize for kind, dtype in self.inputs if kind == "full")
        return 1 + min(4, max(2, round(16384 / moved)))

    def parts(self, M: int, multiprocessors: int) -> int:
        """Partial sums of each column."""
        rows = TILE // self.columns
        return max(1, min(multiprocessors * PROGRAMS_PER_SM // self.tiles, -(-M // (4 * rows))))


def emit(spec: ColumnSums) -> str:
    """The source of the kernel."""
    N, C = spec.N, spec.columns
    R = TILE // C
    names = [f"IN{i}" for i in range(len(spec.inputs))]
    arguments = [*names, *(["OUT"] if spec.makes else []), "PARTIAL", "M", "P"]
    edge = "" if N % C == 0 else f" & (c < {N})[None, :]"
    column = "" if N % C == 0 else f", mask=c < {N}"
    lines = [
        "@triton.jit",
        f"def column_sums({', '.join(arguments)}):",
        f"    part = tl.program_id(0) // {spec.tiles}",
        f"    c = tl.program_id(0) % {spec.tiles} * {C} + tl.arange(0, {C})",
    ]
    for i, (kind, _) in enumerate(spec.inputs):
        if kind == "vector":
            other = f"{column}, other=0.0" if column else ""
            lines.append(f"    in{i} = tl.load(IN{i} + c{other}).to(tl.float32)[None, :]")
    lines += [
        f"    total = tl.zeros([{R}, {C}], tl.float32)",
        f"    for step in tl.range(part * {R}, M, P * {R}, num_stages={spec.stages}):",
        f"        r = step + tl.arange(0, {R})",
        f"        at = r.to(tl.int64)[:, None] * {N} + c[None, :]",
        f"        inside = (r < M)[:, None]{edge}",
    ]
    lines += [f"        in{i} = tl.load(IN{i} + at, mask=inside, other=0.0).to(tl.float32)"
              for i, (kind, _) in enumerate(spec.inputs) if kind == "full"]
    lines += [f"        {line}" for line in spec.program]
    value = f"({spec.result}).to({TL[spec.dtype]})"
    if spec.makes:
        lines += [f"        value = {value}", "        tl.store(OUT + at, value, mask=inside)"]
        value = "value"
    lines += [
        f"        total += tl.where(inside, {value}.to(tl.float32), 0.0)",
        f"    tl.store(PARTIAL + part.to(tl.int64) * {N} + c, tl.sum(total, 0){column})",
    ]
    return HEADER + "\n".join(lines) + "\n"


def unit(spec: ColumnSums) -> Unit:
    """The kernel as the compiler needs it."""
    pointers = [(f"IN{i}", dtype) for i, (_, dtype) in enumerate(spec.inputs)]
    pointers += [("OUT", spec.dtype), ("PARTIAL", torch.float32)]
    return Unit("column_sums", spec.N, emit(spec), tuple(pointers), (), WARPS)


@cache
def kernel_of(spec: ColumnSums) -> Any:
    """The compiled-on-first-use kernel."""
    return store.load("column_sums", emit(spec)).column_sums
