"""A KernelSpec in, readable Triton source out.

A row of D elements is cut into unrolled sub-blocks.  Only `tl.*` names and literals appear, because Inductor copies
the source of a user's kernel into its own module.  Tensor names are those of form.py in capitals; a trailing number is
the sub-block.

Forward: one row per program, modulation loaded after the statistics (fewer registers, hardware keeps the row window
compact).  Backward: persistent programs walk the rows p, p + P, ... of one modulation group through an asynchronous
ring (`tl.range(num_stages >= 3)`), keep fp32 sums of the factor gradients in registers and write one partial each; a
second kernel adds the partials in a fixed order.  No atomics: gradients are bitwise repeatable.
"""

from __future__ import annotations

import torch

from graphopt.codegen.spec import Configuration, KernelSpec

_TL = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16", torch.float32: "tl.float32"}
FACTORS = ("gate", "scale", "shift", "weight", "bias")

HEADER = "import triton\nimport triton.language as tl\n\n\n"


class _Source:
    """Lines with an indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def __call__(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)


class _Emitter:
    def __init__(self, spec: KernelSpec, config: Configuration) -> None:
        self.spec, self.config, self.out = spec, config, _Source()
        self.starts = [sum(config.blocks[:i]) for i in range(len(config.blocks))]
        self.masked = [start + width > spec.D for start, width in zip(self.starts, config.blocks)]
        self.factors = [f for f in FACTORS if spec.has(f)]

    @property
    def blocks(self) -> range:
        return range(len(self.config.blocks))

    # -- pieces ----------------------------------------------------------------------------------

    def columns(self) -> None:
        for i in self.blocks:
            self.out(f"c{i} = {self.starts[i]} + tl.arange(0, {self.config.blocks[i]})")

    def mask(self, i: int, load: bool) -> str:
        if not self.masked[i]:
            return ""
        return f", mask=c{i} < {self.spec.D}" + (", other=0.0" if load else "")

    def load_row(self, tensor: str, i: int) -> str:
        return f"tl.load({tensor.upper()} + row * {self.spec.D} + c{i}{self.mask(i, True)}).to(tl.float32)"

    def load_factor(self, tensor: str, i: int) -> str:
        return f"tl.load({tensor.upper()} + group * {tensor}_stride + c{i}{self.mask(i, True)}).to(tl.float32)"

    def store_row(self, tensor: str, i: int, value: str) -> None:
        kind = _TL[self.spec.dtype(tensor)]
        self.out(
            f"tl.store({tensor.upper()} + row * {self.spec.D} + c{i}, ({value}).to({kind}){self.mask(i, False)})"
        )

    def mean_over_row(self, name: str, parts: list[str]) -> None:
        """`name` = mean over D; equal widths are added first, so that there is one reduction per width."""
        by_width: dict[int, list[str]] = {}
        for i, part in enumerate(parts):
            by_width.setdefault(self.config.blocks[i], []).append(part)
        terms = " + ".join(f"tl.sum({' + '.join(ps)}, 0)" for ps in by_width.values())
        self.out(f"{name} = ({terms}) * {1.0 / self.spec.D!r}")

    # -- kernels ---------------------------------------------------------------------------------

    def forward(self) -> None:
        s, out = self.spec, self.out
        outputs = [t for t in ("h", "y") if s.has(t)]
        stats = ["MEAN", "RSTD"] if s.norm != "none" else []
        names = [t.upper() for t in (*s.rows_in, *self.factors, *outputs)] + stats
        strides = [f"{f}_stride" for f in self.factors]
        out("@triton.jit")
        out(f"def {s.name}_forward({', '.join([*names, 'N', *strides])}):")
        out.depth = 1
        out("row = tl.program_id(0).to(tl.int64)")
        out("group = row // N")
        self.columns()
        for i in self.blocks:
            for t in s.rows_in:
                out(f"{t}{i} = {self.load_row(t, i)}")
            if s.has("gate"):
                out(f"gate{i} = {self.load_factor('gate', i)}")
        for i in self.blocks:
            if s.has("branch"):
                out(f"h{i} = (x{i} + branch{i} * gate{i}).to({_TL[s.dtype('h')]})")
                self.store_row("h", i, f"h{i}")
                out(f"h{i} = h{i}.to(tl.float32)")
            else:
                out(f"h{i} = x{i}")
        if s.norm != "none":
            self.mean_over_row("mean", [f"h{i}" for i in self.blocks])
            for i in self.blocks:
                centred = f"h{i} - mean"
                out(f"h{i} = tl.where(c{i} < {s.D}, {centred}, 0.0)" if self.masked[i] else f"h{i} = {centred}")
            self.mean_over_row("variance", [f"h{i} * h{i}" for i in self.blocks])
            out(f"rstd = 1.0 / tl.sqrt(variance + {s.eps!r})")
            for i in self.blocks:
                value = f"h{i} * rstd"
                if s.has("weight"):
                    out(f"weight{i} = {self.load_factor('weight', i)}")
                    value += f" * weight{i}"
                if s.has("bias"):
                    out(f"bias{i} = {self.load_factor('bias', i)}")
                    value += f" + bias{i}"
                if s.has("scale"):
                    gain = self.load_factor("scale", i)
                    out(f"gain{i} = {s.offset!r} + {gain}" if s.offset else f"gain{i} = {gain}")
                    value = f"({value}) * gain{i}" if s.has("bias") else f"{value} * gain{i}"
                if s.has("shift"):
                    out(f"shift{i} = {self.load_factor('shift', i)}")
                    value += f" + shift{i}"
                self.store_row("y", i, value)
            out("tl.store(MEAN + row, mean)")
            out("tl.store(RSTD + row, rstd)")

    def backward(self) -> None:
        s, out = self.spec, self.out
        normed = s.norm != "none" and s.has("dy")
        outputs = [t for t in ("dx", "dbranch") if s.has(t)]
        stats = ["MEAN", "RSTD"] if normed else []
        used = [f for f in self.factors if f not in ("shift", "bias")]
        if s.has("bias") and s.has("scale"):
            used.append("bias")
        names = [t.upper() for t in (*s.rows_in, *used, *outputs)] + stats + ["PARTIAL"]
        strides = [f"{f}_stride" for f in used]
        out("@triton.jit")
        out(f"def {s.name}_backward({', '.join([*names, 'N', 'P', *strides])}):")
        out.depth = 1
        out("group = tl.program_id(0).to(tl.int64) // P")
        out("p = tl.program_id(0) % P")
        self.columns()
        for i in self.blocks:  # factors live in registers: inside the loop they would take space in the ring
            for f in used:
                value = self.load_factor(f, i)
                if f == "scale" and s.offset:
                    value = f"{s.offset!r} + {value}"
                out(f"{'gain' if f == 'scale' else f}{i} = {value}")
            for f in s.sums:
                out(f"sum_{f}{i} = tl.zeros([{self.config.blocks[i]}], tl.float32)")
        ring = f"tl.range(p, N, P, num_stages={self.config.stages})"
        out(f"for n in {ring}:")
        out.depth = 2
        out("row = group * N + n")
        for t in s.rows_in:
            for i in self.blocks:
                out(f"{t}{i} = {self.load_row(t, i)}")
        if normed:
            self.norm_backward()
        for i in self.blocks:
            terms = ([f"through{i}"] if normed else []) + ([f"dh{i}"] if s.has("dh") else [])
            out(f"total{i} = {' + '.join(terms)}")
            if s.has("dx"):
                self.store_row("dx", i, f"total{i}")
            if s.has("branch"):
                self.store_row("dbranch", i, f"total{i} * gate{i}")
                out(f"sum_gate{i} += total{i} * branch{i}")
        out.depth = 1
        out(f"partial = PARTIAL + tl.program_id(0).to(tl.int64) * {len(s.sums) * s.D}")
        for k, f in enumerate(s.sums):
            for i in self.blocks:
                out(f"tl.store(partial + {k * s.D} + c{i}, sum_{f}{i}{self.mask(i, False)})")

    def norm_backward(self) -> None:
        """xhat, the sums of the norm's factors, and `through`: what flows through the norm."""
        s, out = self.spec, self.out
        out("mean = tl.load(MEAN + row)")
        out("rstd = tl.load(RSTD + row)")
        for i in self.blocks:
            xhat = f"(h{i} - mean) * rstd"
            out(f"xhat{i} = tl.where(c{i} < {s.D}, {xhat}, 0.0)" if self.masked[i] else f"xhat{i} = {xhat}")
            out(f"w{i} = dy{i}")
            if s.has("scale"):
                n = f"xhat{i}"
                if s.has("weight"):
                    n += f" * weight{i}"
                if s.has("bias"):
                    n = f"({n} + bias{i})"
                out(f"sum_scale{i} += w{i} * {n}")
            if s.has("shift"):
                out(f"sum_shift{i} += w{i}")
            if s.has("scale"):
                out(f"w{i} = w{i} * gain{i}")
            if s.has("weight"):
                out(f"sum_weight{i} += w{i} * xhat{i}")
            if s.has("bias"):
                out(f"sum_bias{i} += w{i}")
            if s.has("weight"):
                out(f"w{i} = w{i} * weight{i}")
        self.mean_over_row("mean_w", [f"w{i}" for i in self.blocks])
        self.mean_over_row("mean_wx", [f"w{i} * xhat{i}" for i in self.blocks])
        for i in self.blocks:
            out(f"through{i} = (w{i} - mean_w - xhat{i} * mean_wx) * rstd")


def emit(spec: KernelSpec, config: Configuration) -> str:
    """The source of one kernel, as a module of its own."""
    emitter = _Emitter(spec, config)
    if spec.direction == "forward":
        emitter.forward()
    else:
        emitter.backward()
    return HEADER + "\n".join(emitter.out.lines) + "\n"


SUM_PARTIALS = HEADER + '''@triton.jit
def sum_partials(PARTIAL, SUM, P, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """SUM[g, c] = sum over p of PARTIAL[g, p, c], always in the same order."""
    group = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, P, ROWS):
        inside = ((first + r) < P)[:, None] & (c < C)[None, :]
        place = PARTIAL + (group * P + first + r[:, None]) * C + c[None, :]
        total += tl.load(place, mask=inside, other=0.0)
    tl.store(SUM + group * C + c, tl.sum(total, 0), mask=c < C)
'''
