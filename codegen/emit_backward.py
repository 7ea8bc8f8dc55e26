"""The backward in one pass: dx, dbranch and the sums over rows from one read of dy, dh, h and the branch.

Persistent programs walk the rows p, p + P, ... of one modulation group through an asynchronous ring
(`tl.range(num_stages >= 3)`), keep fp32 sums of the factor gradients in registers and write one partial each; a second
kernel adds the partials in a fixed order (emit_sums.py).  No atomics: gradients are bitwise repeatable.

Rows whose sums do not fit in registers take two kernels: `rows` (dx, dbranch, per-token gradients, and the row means
the other needs) and `columns` (tiles of a few columns and many rows, which compute everything again and add it up).
"""

from __future__ import annotations

from graphopt.codegen.emit_base import Base
from graphopt.codegen.spec import KernelSpec, numbered

FRONT = ("gate", "branch_weight", "branch_bias")


def row_means(spec: KernelSpec) -> tuple[str, ...]:
    """The means over a row that the rows of a two-pass backward leave to its columns."""
    if not spec.normed:
        return ()
    return ("mean_w", "mean_wx") if spec.norm == "layer_norm" else ("mean_wx",)


class Backward(Base):
    """Emits a backward kernel: the whole of it, its rows or its columns."""

    def emit(self) -> str:
        """The source."""
        s = self.spec
        tensors = (*s.rows_in, *s.factors, *s.rows_out, *s.statistics)
        if s.part != "whole":
            tensors += row_means(s)
        if s.sums:
            tensors += ("partial",)
        self.define(tensors, ("N", "P"))
        self("group = tl.program_id(0).to(tl.int64) // P")
        self.group_index()
        if s.part == "columns":
            self.walk_columns()
        elif self.config.chunked:
            self.walk_chunked()
        else:
            self.walk_rows()
        return self.source()

    # -- the three walks -------------------------------------------------------------------------

    def walk_rows(self) -> None:
        """Whole rows in registers, sums beside them."""
        s = self.spec
        self.columns()
        self.before_the_loop()
        ring = f", num_stages={self.config.stages}" if self.config.stages else ""
        self(f"for step in tl.range(tl.program_id(0) % P, N, P{ring}):")
        self.depth = 2
        self.row_index("tl.cast(step, tl.int64)")
        for t in s.streams:
            for i in self.blocks:
                self.load_streams((t,), i)
        self.load_statistics()
        for i in self.blocks:
            for f in self.each_row:
                self.factor(f, i)
        if s.normed:
            for i in self.blocks:
                self.through_norm(i)
            self.means("", s.norm, "w", "xhat")
        for i in self.blocks:
            self.total(i)
            if s.gated:
                self.gate(i)
        if s.branch_normed:
            for i in self.blocks:
                self.through_branch_norm(i)
            self.means("branch_", s.branch_norm, "v", "bhat")
        for i in self.blocks:
            self.finish(i)
        self.save_means()
        self.depth = 1
        self.store_partials()

    def walk_chunked(self) -> None:
        """Rows that do not fit: one pass per norm for its means, one that writes."""
        s = self.spec
        self("for step in tl.range(tl.program_id(0) % P, N, P):")
        self.depth = 2
        self.row_index("tl.cast(step, tl.int64)")
        self.load_statistics()
        width = self.config.blocks[0]
        for prefix, norm, present, w, hat in (
            ("", s.norm, s.normed, "w", "xhat"), ("branch_", s.branch_norm, s.branch_normed, "v", "bhat"),
        ):
            if not present:
                continue
            for name in ("sum_w", "sum_wx"):
                self(f"{name} = tl.zeros([{width}], tl.float32)")
            with self.over_chunks():
                self.chunk(branch=prefix == "branch_")
                self(f"sum_w += {w}_0")
                self(f"sum_wx += {w}_0 * {hat}_0")
            if norm == "layer_norm":
                self(f"{prefix}mean_w = tl.sum(sum_w, 0) * {1.0 / s.D!r}")
            self(f"{prefix}mean_wx = tl.sum(sum_wx, 0) * {1.0 / s.D!r}")
        with self.over_chunks():
            self.chunk(branch=True, store=True)
            self.finish(0)
        self.save_means()

    def chunk(self, branch: bool, store: bool = False) -> None:
        """Everything of one chunk up to the norm, or up to the branch's norm."""
        s = self.spec
        self.load_streams(tuple(t for t in s.streams if branch or t != "branch"), 0)
        for f in self._heads:
            if branch or f not in FRONT:
                self.factor(f, 0)
        if s.normed:
            self.through_norm(0, store)
        if branch:
            self.total(0)
            if s.gated:
                self.gate(0, store)
            if s.branch_normed:
                self.through_branch_norm(0)

    def walk_columns(self) -> None:
        """Tiles of a few columns and `rows` rows; sums stay in registers over all rows of a program."""
        s = self.spec
        width, rows = self.config.blocks[0], self.config.rows
        self(f"c_0 = tl.program_id(1) * {width} + tl.arange(0, {width})")
        self.before_the_loop()
        self(f"for step in tl.range((tl.program_id(0) % P) * {rows}, N, P * {rows}):")
        self.depth = 2
        self(f"r = tl.cast(step, tl.int64) + tl.arange(0, {rows})")
        self.row_index("r")
        self.load_streams(s.streams, 0)
        self.load_statistics()
        for name in row_means(s):
            self(f"{name} = tl.load({self.statistic(name)}, mask=r < N, other=0.0)[:, None]")
        for f in self.each_row:
            self.factor(f, 0)
        if s.normed:
            self.through_norm(0)
        if s.gated:
            self.total(0)
            self.gate(0)
        if s.branch_normed:
            self.through_branch_norm(0)
        self.depth = 1
        self.store_partials()

    # -- pieces ----------------------------------------------------------------------------------

    def before_the_loop(self) -> None:
        """Factors and sums in registers: inside the loop factors would take space in the ring."""
        for i in self.blocks:
            for f in self.once:
                self.factor(f, i)
            for f in self.spec.sums:
                shape = f"{self.config.rows}, {self.config.blocks[i]}" if self.tile else str(self.config.blocks[i])
                self(f"sum_{f}_{i} = tl.zeros([{shape}], tl.float32)")

    def load_statistics(self) -> None:
        """mean and rstd of the row."""
        for name in self.spec.statistics:
            pointer = self.statistic(name)
            self(f"{name} = tl.load({pointer}, mask=r < N, other=0.0)[:, None]" if self.tile
                 else f"{name} = tl.load({pointer})")

    def hat(self, i: int, name: str, of: str, norm: str, prefix: str) -> None:
        """`name_i`: what was normed, normalised."""
        centred = f"({of}_{i} - {prefix}mean)" if norm == "layer_norm" else f"{of}_{i}"
        self(f"{name}_{i} = {self.zero_outside(i, f'{centred} * {prefix}rstd')}")

    def through_norm(self, i: int, store: bool = True) -> None:
        """xhat, the gradients of the norm's factors, and w = (sum of dy * gain) * weight."""
        s = self.spec
        self.hat(i, "xhat", "h", s.norm, "")
        n = f"xhat_{i}"
        if (s.has("weight") or s.has("bias")) and any(s.has(numbered("scale", k)) for k in s.outputs):
            affine = f"xhat_{i}" + (f" * weight_{i}" if s.has("weight") else "")
            self(f"n_{i} = {affine}{f' + bias_{i}' if s.has('bias') else ''}")
            n = f"n_{i}"
        terms = []
        for k in s.outputs:
            dy = f"{numbered('dy', k)}_{i}"
            if s.has(numbered("scale", k)):
                self.gradient(numbered("scale", k), i, f"{dy} * {n}", store)
                terms.append(f"{dy} * {numbered('gain', k)}_{i}")
            else:
                terms.append(dy)
            if s.has(numbered("shift", k)):
                self.gradient(numbered("shift", k), i, dy, store)
        self(f"w_{i} = {' + '.join(terms)}")
        self.affine_gradient(i, "", "w", "xhat", store)

    def through_branch_norm(self, i: int) -> None:
        """v: what reaches the branch's norm, times its weight, and the gradients of its factors."""
        self(f"v_{i} = {self.through_gate(i)}")
        self.affine_gradient(i, "branch_", "v", "bhat", True)

    def affine_gradient(self, i: int, prefix: str, w: str, hat: str, store: bool) -> None:
        """Gradients of weight and bias; `w_i` becomes the gradient of what was normalised."""
        s = self.spec
        if s.has(f"{prefix}weight"):
            self.gradient(f"{prefix}weight", i, f"{w}_{i} * {hat}_{i}", store)
        if s.has(f"{prefix}bias"):
            self.gradient(f"{prefix}bias", i, f"{w}_{i}", store)
        if s.has(f"{prefix}weight"):
            self(f"{w}_{i} = {w}_{i} * {prefix}weight_{i}")

    def means(self, prefix: str, norm: str, w: str, hat: str) -> None:
        """The means over the row that a norm's backward subtracts."""
        if norm == "layer_norm" and self.config.joint:
            self.two_means(f"{prefix}mean_w", f"{w}_{{i}}", f"{prefix}mean_wx", f"{w}_{{i}} * {hat}_{{i}}")
            return
        if norm == "layer_norm":
            self.mean_over_row(f"{prefix}mean_w", f"{w}_{{i}}")
        self.mean_over_row(f"{prefix}mean_wx", f"{w}_{{i}} * {hat}_{{i}}")

    def behind_norm(self, i: int, prefix: str, norm: str, w: str, hat: str) -> str:
        """The gradient of what was normed."""
        if norm == "layer_norm" and self.spec.D == 1:
            # w is its own mean; the compiler would contract `dy * gain - mean_w`, and rstd is 1 / sqrt(eps)
            return f"{w}_{i} * 0.0 * {prefix}rstd"
        centred = f"{w}_{i} - {prefix}mean_w" if norm == "layer_norm" else f"{w}_{i}"
        return f"({centred} - {hat}_{i} * {prefix}mean_wx) * {prefix}rstd"

    def total(self, i: int) -> None:
        """`total_i`: the gradient of h."""
        s = self.spec
        terms = [self.behind_norm(i, "", s.norm, "w", "xhat")] if s.normed else []
        terms += [f"dh_{i}"] if s.has("dh") else []
        self(f"total_{i} = {' + '.join(terms)}")

    def gate(self, i: int, store: bool = True) -> None:
        """The branch as it was gated, and the gate's gradient."""
        s = self.spec
        added = f"branch_{i}"
        if s.branch_normed:
            self.hat(i, "bhat", "branch", s.branch_norm, "branch_")
            added = f"bhat_{i}"
            if s.has("gate") and (s.has("branch_weight") or s.has("branch_bias")):
                weight = f" * branch_weight_{i}" if s.has("branch_weight") else ""
                bias = f" + branch_bias_{i}" if s.has("branch_bias") else ""
                self(f"added_{i} = bhat_{i}{weight}{bias}")
                added = f"added_{i}"
        if s.has("gate"):
            dgate = f"total_{i} * {added}"
            if s.activation == "tanh":
                dgate += f" * (1.0 - gate_{i} * gate_{i})"
            self.gradient("gate", i, dgate, store)

    def through_gate(self, i: int) -> str:
        """The gradient of the gated branch."""
        return f"total_{i} * gate_{i}" if self.spec.has("gate") else f"total_{i}"

    def finish(self, i: int) -> None:
        """Store dx and dbranch."""
        s = self.spec
        if s.has("dx"):
            self.store("dx", i, f"total_{i}")
        if s.has("dbranch"):
            normed = s.branch_normed
            value = self.behind_norm(i, "branch_", s.branch_norm, "v", "bhat") if normed else self.through_gate(i)
            self.store("dbranch", i, value)

    def gradient(self, factor: str, i: int, value: str, store: bool) -> None:
        """Add a factor's gradient to its sum, and store it where the factor has a row per token."""
        s = self.spec
        if factor in s.sums:
            self(f"sum_{factor}_{i} += {value}")
        if store and s.part != "columns":
            for member in s.members(factor):
                if s.has(f"d{member}"):
                    self.store(f"d{member}", i, value)

    def save_means(self) -> None:
        """Leave the row means to the kernel that works on columns."""
        if self.spec.part == "rows":
            for name in row_means(self.spec):
                self(f"tl.store({self.statistic(name)}, {name})")

    def store_partials(self) -> None:
        """The sums of this program."""
        s = self.spec
        if not s.sums:
            return
        self(f"partial = PARTIAL + tl.program_id(0).to(tl.int64) * {len(s.sums) * s.D}")
        for k, f in enumerate(s.sums):
            for i in self.blocks:
                value = f"tl.sum(sum_{f}_{i}, 0)" if self.tile else f"sum_{f}_{i}"
                edge = f", mask=c_{i} < {s.D}" if self.inside(i) else ""
                self(f"tl.store(partial + {f'{k * s.D} + ' if k else ''}c_{i}, {value}{edge})")
