"""The forward: h, the statistics, and every output, from one read of x and of the branch.

Unrolled: one row per program, factors loaded after the statistics (fewer registers, and the hardware keeps the active
rows in one compact window); or a few rows per program through an asynchronous ring, factors in registers.  Chunked:
one row per program, one pass per statistic and one that writes.
"""

from __future__ import annotations

import torch

from graphopt.codegen.emit_base import TL, Base
from graphopt.codegen.spec import numbered

# factors that are needed before the norm
FRONT = ("gate", "branch_weight", "branch_bias")


class Forward(Base):
    """Emits a forward kernel."""

    def emit(self) -> str:
        """The source."""
        s = self.spec
        tensors = (*s.rows_in, *s.factors, *s.rows_out, *s.statistics)
        walks = self.config.rows > 1
        self.define(tensors, ("N", "P") if walks else ("N",))
        self.declare_zero()
        if walks:
            self("group = tl.program_id(0).to(tl.int64) // P")
            self(f"first = (tl.program_id(0) % P) * {self.config.rows}")
            self.group_index()
            self.columns()
            for i in self.blocks:
                for f in self.once:
                    self.factor(f, i)
            last = f"tl.minimum(first + {self.config.rows}, N)"
            self(f"for step in tl.range(first, {last}, num_stages={self.config.stages}):")
            self.depth = 2
            self.row_index("tl.cast(step, tl.int64)")
            self.unrolled(loaded=True)
            return self.source()
        if s.permuted:
            self("program = tl.program_id(0).to(tl.int64)")
            self("group = program // N")
            self.group_index()
            self.row_index("program % N")
        else:
            self("row = tl.program_id(0).to(tl.int64)")
            if any(i != "column" for _, i in s.stride_arguments):
                self("group = row // N")
                self.group_index()
                if any(i.startswith("n") for _, i in s.stride_arguments):
                    self.row_index("row % N")
        if self.config.chunked:
            self.chunked()
        else:
            self.columns()
            self.unrolled(loaded=False)
        return self.source()

    # -- one row in registers --------------------------------------------------------------------

    def unrolled(self, loaded: bool) -> None:
        """The body for one row; `loaded`: factors common to a group are in registers already."""
        s = self.spec
        late = self.each_row if loaded else [*self.once, *self.each_row]
        for i in self.blocks:
            for t in s.rows_in:
                self(f"{t}_{i} = {self.load(t, i)}")
        if s.branch_normed:
            self.normalise("branch", s.branch_norm, s.branch_eps, "branch_")
        for i in self.blocks:
            for f in late:
                if f in FRONT:
                    self.factor(f, i)
        if s.gated:
            for i in self.blocks:
                self.h(i, "branch" if not s.branch_normed else "centred")
                self.store("h", i, f"h_{i}")
        self.save_statistics("branch_", s.branch_normed, s.branch_norm)
        if not s.normed:
            return
        self.normalise(self.normed_name, s.norm, s.eps, "")
        for i in self.blocks:
            for f in late:
                if f not in FRONT:
                    self.factor(f, i)
            self.outputs(i)
        self.save_statistics("", s.normed, s.norm)

    @property
    def normed_name(self) -> str:
        """What is normed: the sum, or x itself where nothing is added."""
        return "h" if self.spec.gated else "x"

    def normalise(self, of: str, norm: str, eps: float, prefix: str) -> None:
        """`centred_i`, `mean` and `rstd` of `of_i`: two passes, so a large mean costs no digits."""
        s = self.spec
        if norm == "layer_norm":
            # a sum of D equal values is exact with 8 bits for a value (bf16) and 16 for D, with 11 (fp16) and 13
            exact = s.dtype(of) == torch.bfloat16 or (s.dtype(of) == torch.float16 and s.D <= 8192)
            if exact:
                self.centre_of_row(f"{prefix}mean", self.sum_over_row(f"{of}_{{i}}"))
            else:
                self.mean_over_row(f"{prefix}mean", f"{of}_{{i}}")
            for i in self.blocks:
                self(f"centred_{i} = {self.zero_outside(i, f'{of}_{i} - {prefix}mean')}")
            if not exact:  # what rounding the mean lost
                self.mean_over_row("rest", "centred_{i}")
                for i in self.blocks:
                    self(f"centred_{i} = {self.zero_outside(i, f'centred_{i} - rest')}")
                self(f"{prefix}mean += rest")
        else:
            for i in self.blocks:
                self(f"centred_{i} = {of}_{i}")
        self.mean_over_row("variance", "centred_{i} * centred_{i}")
        self.inverse_root(f"{prefix}rstd", "variance", eps)

    def save_statistics(self, prefix: str, present: bool, norm: str) -> None:
        """Store mean and rstd of the row."""
        if present:
            if norm == "layer_norm":
                self(f"tl.store({self.statistic(f'{prefix}mean')}, {prefix}mean)")
            self(f"tl.store({self.statistic(f'{prefix}rstd')}, {prefix}rstd)")

    def h(self, i: int, branch: str) -> None:
        """`h_i`, rounded to its dtype: x + gate * branch, from the branch or its centred values."""
        s = self.spec
        value = f"{branch}_{i}"
        if s.branch_normed:
            value = f"{value} * branch_rstd"
            if s.has("branch_weight"):
                value += f" * branch_weight_{i}"
            if s.has("branch_bias"):
                value += f" + branch_bias_{i}"
            value = self.rounded(value, "branch_norm")
        if s.has("gate"):
            value = f"({value})" if " + " in value else value
            value = self.product(f"{value} * gate_{i}", "gated")
        total = self.rounded(f"x_{i} + {value}", "residual")
        self(f"h_{i} = ({total}).to({TL[s.dtype('h')]}).to(tl.float32)")

    def outputs(self, i: int) -> None:
        """Every y of sub-block i from `centred_i` and `rstd`."""
        s = self.spec
        value = f"centred_{i} * rstd"
        if s.has("weight"):
            value += f" * weight_{i}"
        if s.has("bias"):
            value += f" + bias_{i}"
        value = self.rounded(value, "norm")
        if len(s.outputs) > 1:
            self(f"n_{i} = {value}")
            value = f"n_{i}"
        for k in s.outputs:
            y = value
            if s.has(numbered("scale", k)):
                y = f"({y})" if " + " in y else y
                y = f"{y} * {numbered('gain', k)}_{i}"
                y = self.product(y, "product") if s.has(numbered("shift", k)) else y
            if s.has(numbered("shift", k)):
                y += f" + {numbered('shift', k)}_{i}"
            self.store(numbered("y", k), i, y)

    # -- a row walked in chunks ------------------------------------------------------------------

    def chunked(self) -> None:
        """One pass per statistic, then one that writes; rows come from L2 after the first."""
        s = self.spec
        if s.branch_normed:
            self.chunk_statistics("branch", s.branch_norm, s.branch_eps, "branch_")
        if s.normed:
            self.chunk_statistics(self.normed_name, s.norm, s.eps, "")
        with self.over_chunks():
            self.chunk_h()
            if s.gated:
                self.store("h", 0, "h_0")
            if s.normed:
                self(f"centred_0 = {self.normed_name}_0{' - mean - rest' if s.norm == 'layer_norm' else ''}")
                for f in self._heads:
                    if f not in FRONT:
                        self.factor(f, 0)
                self.outputs(0)
        for prefix, present, norm in (("branch_", s.branch_normed, s.branch_norm), ("", s.normed, s.norm)):
            if present and norm == "layer_norm":
                self(f"{prefix}mean += {prefix}rest")
            self.save_statistics(prefix, present, norm)

    def chunk_statistics(self, of: str, norm: str, eps: float, prefix: str) -> None:
        """`mean`, `rest` (what rounding the mean lost) and `rstd` of a row that is read in chunks."""
        width, D = self.config.blocks[0], self.spec.D
        load = self.chunk_h if of != "branch" else lambda: self(f"branch_0 = {self.load('branch', 0)}")
        mean = f"{prefix}mean"
        if norm == "layer_norm":
            self(f"total = tl.zeros([{width}], tl.float32)")
            with self.over_chunks():
                load()
                self(f"total += {self.zero_outside(0, f'{of}_0')}")
            if self.spec.dtype(of) == torch.float32:
                self(f"{mean} = tl.sum(total, 0) * {1.0 / D!r}")
            else:
                self.centre_of_row(mean, "tl.sum(total, 0)")
            self(f"total = tl.zeros([{width}], tl.float32)")
        self(f"squares = tl.zeros([{width}], tl.float32)")
        with self.over_chunks():
            load()
            if norm == "layer_norm":
                self(f"centred_0 = {self.zero_outside(0, f'{of}_0 - {mean}')}")
                self("total += centred_0")
                self("squares += centred_0 * centred_0")
            else:
                self(f"squares += {self.zero_outside(0, f'{of}_0 * {of}_0')}")
        self(f"variance = tl.sum(squares, 0) * {1.0 / D!r}")
        if norm == "layer_norm":
            self(f"{prefix}rest = tl.sum(total, 0) * {1.0 / D!r}")
            self(f"variance -= {prefix}rest * {prefix}rest")
        self.inverse_root(f"{prefix}rstd", "variance", eps)

    def chunk_h(self) -> None:
        """`h_0` of the current chunk, from x and the branch again."""
        s = self.spec
        self.load_streams(s.streams, 0)
        for f in self._heads:
            if f in FRONT:
                self.factor(f, 0)
        if s.branch_normed:
            centre = " - branch_mean - branch_rest" if s.branch_norm == "layer_norm" else ""
            self(f"centred_0 = branch_0{centre}")
        if s.gated:
            self.h(0, "centred" if s.branch_normed else "branch")
