"""Lines of a kernel over rows of heads: tiles [heads, d], sub-blocks of heads that together are a row.

Shared by rotary.py (a norm over all heads) and head_rotary.py (a norm per head).
"""

from __future__ import annotations

from typing import Protocol

import torch

from graphopt.codegen.emit_base import HEADER, TL


class Rows(Protocol):
    """What is asked of a kernel's spec."""

    @property
    def heads(self) -> int:
        """Heads of a row."""

    @property
    def d(self) -> int:
        """Channels of a head."""

    @property
    def function(self) -> str:
        """Name of the kernel's function."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """Heads of every sub-block."""


class HeadLines:
    """Lines of a kernel; `h_i` are the heads of sub-block i, [heads, 1]."""

    def __init__(self, rows: Rows, arguments: str, columns: str) -> None:
        """columns: index on `tl.arange(0, d)` that makes `e`, if any."""
        self.rows, self.depth = rows, 1
        self.text = ["@triton.jit", f"def {rows.function}({arguments}):"]
        self.starts = [sum(rows.blocks[:i]) for i in range(len(rows.blocks))]
        self(f"e = tl.arange(0, {rows.d}){columns}")
        for i, heads in enumerate(rows.blocks):
            start = f"{self.starts[i]} + " if self.starts[i] else ""
            self(f"h_{i} = ({start}tl.arange(0, {heads}))[:, None]")
            self.places(i)

    def __call__(self, line: str) -> None:
        """Add a line."""
        self.text.append("    " * self.depth + line)

    def places(self, i: int) -> None:
        """More names for sub-block i, behind `h_i`."""

    @property
    def blocks(self) -> range:
        """Numbers of the sub-blocks."""
        return range(len(self.rows.blocks))

    def mask(self, i: int, load: bool) -> str:
        """The mask arguments of a load or a store."""
        if self.starts[i] + self.rows.blocks[i] <= self.rows.heads:
            return ""
        return f", mask=h_{i} < {self.rows.heads}" + (", other=0.0" if load else "")

    def load(self, name: str, i: int, address: str) -> None:
        """`name_i` in fp32."""
        self(f"{name}_{i} = tl.load({address}{self.mask(i, True)}).to(tl.float32)")

    def store(self, i: int, address: str, value: str, dtype: torch.dtype) -> None:
        """Round and store."""
        self(f"tl.store({address}, ({value}).to({TL[dtype]}){self.mask(i, False)})")

    def paired(self, name: str, i: int, pair: str) -> None:
        """`name_i` with each pair of columns (`even`, `odd`) replaced by two expressions."""
        heads, d = self.rows.blocks[i], self.rows.d
        self(f"even, odd = tl.split(tl.reshape({name}_{i}, [{heads}, {d // 2}, 2]))")
        self(f"{name}_{i} = tl.reshape(tl.join({pair}), [{heads}, {d}])")

    def source(self) -> str:
        """The kernel's file."""
        return HEADER + "\n".join(self.text) + "\n"
