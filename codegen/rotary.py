"""Kernels of an RMS norm over all heads with a rotary embedding behind it (queries and keys of Wan's family).

    n      = x * rstd * weight                           x [B, N, H * d], rstd over H * d
    y_2i   = n_2i * cos_2i - n_2i+1 * sin_2i+1           y [B, N, H, d]; cos, sin [1, N, 1, d], the same for all heads
    y_2i+1 = n_2i * sin_2i+1 + n_2i+1 * cos_2i

One row is cut into sub-blocks of whole heads, [heads, d] tiles: cos and sin are read once per row and broadcast.  The
backward walks rows with persistent programs through a ring, and sums the weight's gradient in registers; one pass each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphopt.codegen.compiler import Unit
from graphopt.codegen.configure import RING_BYTES, cut, ring_limit
from graphopt.codegen.emit_heads import HeadLines

MAX_D = 8192


@dataclass(frozen=True)
class Rotary:
    """One kernel: direction, heads, channels per head (a power of two), eps, is there a weight, dtypes, GPU."""

    direction: str
    heads: int
    d: int
    eps: float
    weighted: bool
    x_dtype: torch.dtype
    y_dtype: torch.dtype
    target: str = "sm90"

    @property
    def D(self) -> int:
        """Channels of a row."""
        return self.heads * self.d

    @property
    def function(self) -> str:
        """Name of the kernel's function."""
        return f"norm_rotate_{self.direction}"

    @property
    def warps(self) -> int:
        """Warps of a program."""
        if self.direction == "forward":
            return 1 if self.D <= 512 else 2 if self.D <= 2048 else 4
        return 1 if self.D <= 512 else 2 if self.D < 1400 else 4 if self.D <= 5120 else 8

    @property
    def blocks(self) -> tuple[int, ...]:
        """Heads of every sub-block: eight channels a thread."""
        return cut(self.heads, max(1, self.warps * 256 // self.d))

    @property
    def programs_per_sm(self) -> int:
        """Of the backward, as for F1 (configure.py)."""
        return 4 if self.D <= 1400 else 3 if self.D < 2048 else 2 if self.D < 2560 else 1

    @property
    def stages(self) -> int:
        """Depth of the backward's ring; 0 where a target forms none."""
        row = self.D * (self.x_dtype.itemsize + self.y_dtype.itemsize) * self.programs_per_sm
        stages = 1 + min(5, max(2, int(RING_BYTES / row + 0.5)))
        return stages if (stages - 1) * row <= ring_limit(self.target) else 0


def emit(spec: Rotary) -> str:
    """The source of one kernel."""
    return _forward(spec) if spec.direction == "forward" else _backward(spec)


def unit(spec: Rotary, table: torch.dtype, weight: torch.dtype) -> Unit:
    """The kernel as the compiler needs it; dtypes of the tables and of the weight."""
    dtypes = {"X": spec.x_dtype, "DX": spec.x_dtype, "Y": spec.y_dtype, "DY": spec.y_dtype, "COS": table, "SIN": table,
              "WEIGHT": weight, "RSTD": torch.float32, "PARTIAL": torch.float32}
    strides = ("x_row", "dy_b", "dy_n", "dy_h", "cos_n", "sin_n")
    return Unit(spec.function, spec.D, emit(spec), tuple(dtypes.items()), strides, spec.warps)


class _Lines(HeadLines):
    """Lines of a kernel; `at_i` are the places of sub-block i in a contiguous row."""

    def __init__(self, spec: Rotary, arguments: str) -> None:
        self.spec = spec
        super().__init__(spec, arguments, "")

    def places(self, i: int) -> None:
        self(f"at_{i} = h_{i} * {self.spec.d} + e[None, :]")

    def angles(self) -> None:
        """`cos` and `sin` of the current row, [1, d / 2]: one angle a pair."""
        half = self.spec.d // 2
        for name, odd in (("cos", False), ("sin", True)):
            self(f"row_of_{name} = tl.load({name.upper()} + n.to(tl.int64) * {name}_n + e).to(tl.float32)")
            kept = f"_, {name}" if odd else f"{name}, _"
            self(f"{kept} = tl.split(tl.reshape(row_of_{name}, [{half}, 2]))")
            self(f"{name} = {name}[None, :]")

    def turned(self, name: str, i: int, back: bool) -> None:
        """`name_i` rotated by the angles, or back by them."""
        sign, other = ("+", "-") if back else ("-", "+")
        self.paired(name, i, f"even * cos {sign} odd * sin, odd * cos {other} even * sin")

    def mean(self, name: str, part: str) -> None:
        """`name`: mean over the row of an expression, one reduction per width."""
        by_width: dict[int, list[str]] = {}
        for i in self.blocks:
            by_width.setdefault(self.spec.blocks[i], []).append(part.format(i=i))
        terms = " + ".join(f"tl.sum(tl.sum({' + '.join(parts)}, 1), 0)" for parts in by_width.values())
        self(f"{name} = ({terms}) * {1.0 / self.spec.D!r}")


def _forward(spec: Rotary) -> str:
    weight = "WEIGHT, " if spec.weighted else ""
    out = _Lines(spec, f"X, {weight}COS, SIN, Y, RSTD, N, x_row, cos_n, sin_n")
    out("row = tl.program_id(0).to(tl.int64)")
    out("n = tl.program_id(0) % N")
    for i in out.blocks:
        out.load("x", i, f"X + row * x_row + at_{i}")
    out.mean("square", "x_{i} * x_{i}")
    out(f"rstd = 1.0 / tl.sqrt(square + {spec.eps!r})")
    out("tl.store(RSTD + row, rstd)")
    out.angles()
    for i in out.blocks:
        if spec.weighted:
            out.load("weight", i, f"WEIGHT + at_{i}")
        out(f"y_{i} = x_{i} * rstd{f' * weight_{i}' if spec.weighted else ''}")
        out.turned("y", i, back=False)
        out.store(i, f"Y + row * {spec.D} + at_{i}", f"y_{i}", spec.y_dtype)
    return out.source()


def _backward(spec: Rotary) -> str:
    weight, partial = ("WEIGHT, ", ", PARTIAL") if spec.weighted else ("", "")
    out = _Lines(spec, f"DY, X, {weight}COS, SIN, RSTD, DX{partial}, M, N, P, x_row, dy_b, dy_n, dy_h, cos_n, sin_n")
    if spec.weighted:
        for i in out.blocks:
            out.load("weight", i, f"WEIGHT + at_{i}")
            out(f"sum_{i} = tl.zeros([{spec.blocks[i]}, {spec.d}], tl.float32)")
    ring = f", num_stages={spec.stages}" if spec.stages else ""
    out(f"for step in tl.range(tl.program_id(0), M, P{ring}):")
    out.depth = 2
    out("row = tl.cast(step, tl.int64)")
    out("n = step % N")
    out("sample = (step // N).to(tl.int64) * dy_b + n.to(tl.int64) * dy_n")
    for i in out.blocks:
        out.load("dy", i, f"DY + sample + h_{i} * dy_h + e[None, :]")
        out.load("x", i, f"X + row * x_row + at_{i}")
    out("rstd = tl.load(RSTD + row)")
    out.angles()
    for i in out.blocks:
        out(f"x_{i} = x_{i} * rstd")
        out.turned("dy", i, back=True)
        if spec.weighted:
            out(f"sum_{i} += dy_{i} * x_{i}")
            out(f"dy_{i} = dy_{i} * weight_{i}")
    out.mean("mean", "dy_{i} * x_{i}")
    for i in out.blocks:
        out.store(i, f"DX + row * {spec.D} + at_{i}", f"(dy_{i} - x_{i} * mean) * rstd", spec.x_dtype)
    out.depth = 1
    if spec.weighted:
        for i in out.blocks:
            address = f"PARTIAL + tl.program_id(0).to(tl.int64) * {spec.D} + at_{i}"
            out(f"tl.store({address}, sum_{i}{out.mask(i, False)})")
    return out.source()
