"""Kernels of an RMS norm per head with a rotary embedding behind it (queries and keys of HunyuanVideo, FLUX).

    n      = x * rstd * weight                           x [B, N, H, d], rstd over d, one weight [d] for all heads
    y_2i   = n_2i * cos_2i - n_2i+1 * sin_2i             y [B, N, H, d]; cos, sin [1, R, 1, d], the same for all heads
    y_2i+1 = n_2i+1 * cos_2i+1 + n_2i * sin_2i+1         rows from R on: y = n

x is one tensor, or two that stand behind one another in y (text and image), each with its own weight: a program works
on rows of one of them, and picks its pointers by its number.  A tile is [heads, d] with every head inside one warp, so
that no reduction waits for another warp.  rstd is not stored: the backward has the whole head and computes it again.
The backward walks rows with persistent programs and sums the weight's gradient in registers; one pass each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphopt.codegen.compiler import Unit
from graphopt.codegen.configure import cut, ring_limit
from graphopt.codegen.emit_heads import HeadLines

MAX_D = 8192
MAX_HEAD = 512


@dataclass(frozen=True)
class HeadRotary:
    """One kernel: direction, heads, channels per head (a power of two), how many tensors, eps, weights or none, dtypes,
    GPU.  `chosen`: warps, programs per multiprocessor and ring stages, where a benchmark tries others than these."""

    direction: str
    heads: int
    d: int
    streams: int
    eps: float
    weighted: bool
    x_dtype: torch.dtype
    y_dtype: torch.dtype
    target: str = "sm90"
    chosen: tuple[int, int, int] | None = None

    @property
    def D(self) -> int:
        """Channels of a row."""
        return self.heads * self.d

    @property
    def function(self) -> str:
        """Name of the kernel's function."""
        return f"head_norm_rotate_{self.direction}"

    @property
    def warps(self) -> int:
        """Warps of a program."""
        if self.chosen is not None:
            return self.chosen[0]
        if self.direction == "forward":
            return 1 if self.D <= 1024 else 2 if self.D <= 4096 else 4
        return 1 if self.D <= 512 else 2 if self.D < 1400 else 4 if self.D <= 5120 else 8

    @property
    def blocks(self) -> tuple[int, ...]:
        """Heads of every sub-block: eight channels a thread."""
        return cut(self.heads, max(1, self.warps * 256 // self.d))

    @property
    def programs_per_sm(self) -> int:
        """Of the backward: 16 warps."""
        return 16 // self.warps if self.chosen is None else self.chosen[1]

    @property
    def stages(self) -> int:
        """Depth of a ring in the backward: none, as loads of one program pass under the work of the others (0.87 of a
        copy's speed; a ring is not measured in today's form).  0 also where a target forms none."""
        stages = 0 if self.chosen is None else self.chosen[2]
        row = self.D * (self.x_dtype.itemsize + self.y_dtype.itemsize) + 2 * self.d * 4
        return stages if (stages - 1) * row * self.programs_per_sm <= ring_limit(self.target) else 0


def emit(spec: HeadRotary) -> str:
    """The source of one kernel."""
    return _forward(spec) if spec.direction == "forward" else _backward(spec)


def unit(spec: HeadRotary, table: torch.dtype, weights: tuple[torch.dtype, ...]) -> Unit:
    """The kernel as the compiler needs it; dtypes of the tables and of the weights."""
    dtypes = {"Y": spec.y_dtype, "DY": spec.y_dtype, "COS": table, "SIN": table, "PARTIAL": torch.float32}
    for k in range(spec.streams):
        dtypes |= {f"X{k}": spec.x_dtype, f"DX{k}": spec.x_dtype}
    dtypes |= {f"WEIGHT{k}": dtype for k, dtype in enumerate(weights)}
    strides = ("dy_b", "dy_n", "dy_h", "cos_n", "sin_n", *(f"x{k}_{i}" for k in range(spec.streams) for i in "bnh"))
    return Unit(spec.function, spec.D, emit(spec), tuple(dtypes.items()), strides, spec.warps)


def arguments(spec: HeadRotary) -> list[str]:
    """The kernel's arguments, in order."""
    each = range(spec.streams)
    xs = [f"X{k}" for k in each]
    weights = [f"WEIGHT{k}" for k in each] if spec.weighted else []
    two = spec.streams == 2
    sizes = ["N", *(["N0"] if two else []), "R"]
    strides = [f"x{k}_{i}" for k in each for i in "bnh"] + ["cos_n", "sin_n"]
    if spec.direction == "forward":
        return [*xs, *weights, "COS", "SIN", "Y", *sizes, *strides]
    results = [*(f"DX{k}" for k in each), *(["PARTIAL"] if spec.weighted else [])]
    counts = ["M", "P", *(["P0"] if two else [])]
    return ["DY", *xs, *weights, "COS", "SIN", *results, *counts, *sizes, "dy_b", "dy_n", "dy_h", *strides]


class _Lines(HeadLines):
    """Lines of a kernel over one tensor or two."""

    def __init__(self, spec: HeadRotary) -> None:
        self.spec, self.two = spec, spec.streams == 2
        super().__init__(spec, ", ".join(arguments(spec)), "[None, :]")

    @property
    def heights(self) -> list[int]:
        """The different heights of sub-blocks."""
        return sorted(set(self.spec.blocks), reverse=True)

    def pick(self, name: str, one: str, other: str) -> None:
        """A name for what belongs to the tensor that the program works on."""
        self(f"{name} = {f'tl.where(first, {one}, {other})' if self.two else one}")

    def tensor(self) -> None:
        """Names for that tensor's pointers and strides."""
        for name in ("X", *(["WEIGHT"] if self.spec.weighted else [])):
            self.pick(name.lower(), f"{name}0", f"{name}1")
        for index in "bnh":
            self.pick(f"x_{index}", f"x0_{index}", f"x1_{index}")

    def weights(self) -> None:
        """The weight in fp32, a tile of each height: a single row would have a layout of its own, and the compiler
        turns tiles into that instead of the row into theirs."""
        for heads in self.heights if self.spec.weighted else ():
            self(f"weight_{heads} = tl.load(weight + e + tl.zeros([{heads}, 1], tl.int32)).to(tl.float32)")

    def angles(self) -> None:
        """`cos` and `sin` of the current row, even and odd columns, [1, d / 2]; rows behind the tables stay."""
        half = self.spec.d // 2
        for name, rest in (("cos", "1.0"), ("sin", "0.0")):
            self(f"row_of_{name} = tl.load({name.upper()} + n * {name}_n + e, mask=n < R, other={rest}).to(tl.float32)")
            self(f"{name}_even, {name}_odd = tl.split(tl.reshape(row_of_{name}, [1, {half}, 2]))")

    def turned(self, name: str, i: int, back: bool) -> None:
        """`name_i` rotated by the angles, or the gradient of that."""
        if back:
            pair = "even * cos_even + odd * sin_odd, odd * cos_odd - even * sin_even"
        else:
            pair = "even * cos_even - odd * sin_even, odd * cos_odd + even * sin_odd"
        self.paired(name, i, pair)

    def rstd(self, i: int) -> None:
        """1 / root mean square of each head, [heads, 1]."""
        self(f"square = tl.sum(x_{i} * x_{i}, 1)[:, None] * {1.0 / self.spec.d!r}")
        self(f"rstd = 1.0 / tl.sqrt(square + {self.spec.eps!r})")


def _forward(spec: HeadRotary) -> str:
    out = _Lines(spec)
    out("program = tl.program_id(0)")
    out("n = (program % N).to(tl.int64)")
    out("b = (program // N).to(tl.int64)")
    if out.two:
        out("first = n < N0")
    out.tensor()
    out.pick("k", "n", "n - N0")
    for i in out.blocks:
        out.load("x", i, f"x + b * x_b + k * x_n + h_{i} * x_h + e")
    out.angles()
    out.weights()
    out(f"y = Y + program.to(tl.int64) * {spec.D}")
    for i, heads in enumerate(spec.blocks):
        out.rstd(i)
        out(f"y_{i} = x_{i} * rstd{f' * weight_{heads}' if spec.weighted else ''}")
        out.turned("y", i, back=False)
        out.store(i, f"y + h_{i} * {spec.d} + e", f"y_{i}", spec.y_dtype)
    return out.source()


def _backward(spec: HeadRotary) -> str:
    out = _Lines(spec)
    out("program = tl.program_id(0)")
    if out.two:  # the first P0 programs walk the first tensor
        out("first = program < P0")
    out.tensor()
    out.pick("dx", "DX0", "DX1")
    out.pick("begin", "program", "program - P0")
    out.pick("step_by", *(("P0", "P - P0") if out.two else ("P", "")))
    out.pick("rows", *(("N0", "N - N0") if out.two else ("N", "")))
    out.pick("end", *(("M // N * N0", "M // N * (N - N0)") if out.two else ("M", "")))
    out.pick("offset", "0", "N0")
    out.weights()
    for heads in out.heights if spec.weighted else ():
        out(f"sum_{heads} = tl.zeros([{heads}, {spec.d}], tl.float32)")
    ring = f", num_stages={spec.stages}" if spec.stages else ""
    out(f"for step in tl.range(begin, end, step_by{ring}):")
    out.depth = 2
    out("k = (step % rows).to(tl.int64)")
    out("b = (step // rows).to(tl.int64)")
    out(f"n = k{' + offset' if out.two else ''}")
    for i in out.blocks:
        out.load("dy", i, f"DY + b * dy_b + n * dy_n + h_{i} * dy_h + e")
        out.load("x", i, f"x + b * x_b + k * x_n + h_{i} * x_h + e")
    out.angles()
    for i, heads in enumerate(spec.blocks):
        out.rstd(i)
        out.turned("dy", i, back=True)
        out(f"x_{i} = x_{i} * rstd")
        if spec.weighted:
            out(f"sum_{heads} += dy_{i} * x_{i}")
            out(f"dy_{i} = dy_{i} * weight_{heads}")
        out(f"mean = tl.sum(dy_{i} * x_{i}, 1)[:, None] * {1.0 / spec.d!r}")
        address = f"dx + tl.cast(step, tl.int64) * {spec.D} + h_{i} * {spec.d} + e"
        out.store(i, address, f"(dy_{i} - x_{i} * mean) * rstd", spec.x_dtype)
    out.depth = 1
    if spec.weighted:
        out(f"total = {' + '.join(f'tl.sum(sum_{heads}, 0)' for heads in out.heights)}")
        out(f"partial = PARTIAL + program.to(tl.int64) * {spec.streams * spec.d} + tl.arange(0, {spec.d})")
        out(f"tl.store(partial, {'tl.where(first, total, 0.0)' if out.two else 'total'})")
        if out.two:
            out(f"tl.store(partial + {spec.d}, tl.where(first, 0.0, total))")
    return out.source()
