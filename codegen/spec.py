"""KernelSpec: everything that decides the source of one kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from graphopt.codegen.form import OUTPUT_PARTS, decode_rounding

MAX_D = 65536
Direction = Literal["forward", "backward"]
Part = Literal["whole", "rows", "columns"]

# factors of the chain up to h, and of its norm; each output adds its own scale and shift
FRONT_FACTORS = ("gate", "gate_table", "branch_weight", "branch_bias")
NORM_FACTORS = ("weight", "bias")
# factors whose gradient is that of a sum with their table
PAIRED = ("gate", "scale", "shift")
# a gradient may arrive as a sum of up to four tensors: dy, dy_plus1, dy_plus2, dy_plus3
MAX_ADDENDS = 4


def addend(gradient: str, k: int) -> str:
    """The name of the k-th addend of a gradient that arrives: `dy`, `dy_plus1`."""
    return gradient if k == 0 else f"{gradient}_plus{k}"


def numbered(part: str, i: int) -> str:
    """The name of a tensor of output i: `scale` of the first, `scale2` of the second."""
    return part if i == 0 else f"{part}{i + 1}"


def with_table(factor: str) -> str:
    """The name of a factor's table: gate_table, scale_table, scale_table2."""
    stem = factor.rstrip("0123456789")
    return f"{stem}_table{factor[len(stem):]}"


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: a direction of one chain (form.py) for one width, one set of dtypes and one memory layout.

    name: the parts it has, as in `gate_norm_modulate`.
    part: "whole"; in the two-pass backward "rows" (dx, dbranch, per-token gradients) or "columns" (sums over rows).
    norm, branch_norm: "none", "layer_norm" or "rms_norm".
    dtypes: (tensor name, dtype) for every tensor it reads or writes; a part of the chain is there exactly when its
        tensors are.
    layouts: (tensor name, layout), layout.py; "dense" where not listed.
    group_dims, row_dims: into how many indices a modulation group and a row of it are taken apart.
    permuted: rows are walked in another order than they lie in.
    target: the GPU, such as sm90 or gfx942.
    gpu: its name, where it is one of this machine: configurations may have been measured on it (tuned.py).
    rounding: rounding points of numerics="eager" (form.py); "" rounds once at the end.
    """

    name: str
    direction: Direction
    norm: str
    offset: float
    eps: float
    D: int
    dtypes: tuple[tuple[str, torch.dtype], ...]
    branch_norm: str = "none"
    branch_eps: float = 0.0
    activation: str = "identity"
    rounding: str = ""
    layouts: tuple[tuple[str, str], ...] = ()
    group_dims: int = 1
    row_dims: int = 1
    permuted: bool = False
    part: Part = "whole"
    target: str = "sm90"
    gpu: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.D <= MAX_D:
            raise ValueError(f"no kernel for D = {self.D}: supported are 1 to {MAX_D}")

    @property
    def function(self) -> str:
        """Name of the kernel's function."""
        suffix = "" if self.part == "whole" else f"_{self.part}"
        return f"{self.name}_{self.direction}{suffix}"

    def has(self, tensor: str) -> bool:
        """Does the kernel read or write this tensor?"""
        return any(n == tensor for n, _ in self.dtypes)

    def dtype(self, tensor: str) -> torch.dtype:
        """The dtype of one of its tensors."""
        return dict(self.dtypes)[tensor]

    def layout(self, tensor: str) -> str:
        """How a tensor lies in memory (layout.py)."""
        return dict(self.layouts).get(tensor, "dense")

    def per_token(self, factor: str) -> bool:
        """Does a factor have a row of its own for every row of x?"""
        return not self.layout(factor).startswith(("vector", "group"))

    @property
    def points(self) -> dict[str, torch.dtype]:
        """Where it rounds besides the end."""
        return decode_rounding(self.rounding)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The numbers of the modulated results (forward), or of those whose gradient arrives (backward)."""
        name = "y" if self.direction == "forward" else "dy"
        return tuple(i for i in range(len(self.dtypes)) if self.has(numbered(name, i)))

    @property
    def gated(self) -> bool:
        """Is there anything added to x?"""
        return self.has("branch")

    @property
    def normed(self) -> bool:
        """Does this kernel work on the norm after the residual?"""
        return self.norm != "none" and (self.direction == "forward" or bool(self.outputs))

    @property
    def branch_normed(self) -> bool:
        """Does this kernel work on the norm of the branch?"""
        return self.branch_norm != "none" and self.gated

    @property
    def streams(self) -> tuple[str, ...]:
        """The [rows, D] activations it works on."""
        names = ("x", "branch") if self.direction == "forward" else ("dh", "h", "branch")
        dys = tuple(numbered("dy", i) for i in self.outputs) if self.direction == "backward" else ()
        return dys + tuple(n for n in names if self.has(n))

    def addends(self, stream: str) -> tuple[str, ...]:
        """The tensors whose sum a stream is: itself, where it arrives as one."""
        return tuple(n for k in range(MAX_ADDENDS) if self.has(n := addend(stream, k)))

    @property
    def rows_in(self) -> tuple[str, ...]:
        """The [rows, D] tensors it reads."""
        return tuple(n for stream in self.streams for n in self.addends(stream))

    @property
    def without_addends(self) -> KernelSpec:
        """The same kernel with every gradient arriving as one tensor."""
        return replace(self, dtypes=tuple((n, d) for n, d in self.dtypes if "_plus" not in n))

    @property
    def rows_out(self) -> tuple[str, ...]:
        """The [rows, D] tensors it writes: results, and gradients of per-token factors."""
        if self.direction == "forward":
            return tuple(n for n in ("h", *(numbered("y", i) for i in self.outputs)) if self.has(n))
        if self.part == "columns":
            return ()
        return tuple(n for n in ("dx", "dbranch", *(f"d{f}" for f in self.all_factors)) if self.has(n))

    @property
    def all_factors(self) -> tuple[str, ...]:
        """Every factor among its tensors, in the order of its arguments."""
        numbers = range(1 + max((i for i in range(len(self.dtypes)) if self._output(i)), default=0))
        own = [numbered(part, i) for i in numbers for part in OUTPUT_PARTS]
        return tuple(f for f in (*FRONT_FACTORS, *NORM_FACTORS, *own) if self.has(f))

    def _output(self, i: int) -> bool:
        return any(self.has(numbered(part, i)) for part in OUTPUT_PARTS)

    @property
    def factors(self) -> tuple[str, ...]:
        """The factors it reads, in the order of its arguments.  A backward needs no shift, and a bias only for n."""
        if self.direction == "forward":
            return self.all_factors
        scaled = any(self.has(numbered("scale", i)) for i in self.outputs)
        unread = {numbered(p, i) for p in ("shift", "shift_table") for i in range(len(self.dtypes))}
        unread |= set() if scaled else {"bias"}
        unread |= set() if self.has("gate") else {"branch_bias"}
        return tuple(f for f in self.all_factors if f not in unread)

    def members(self, factor: str) -> tuple[str, ...]:
        """The tensors that share the gradient of a factor: itself and its table."""
        names = (factor, with_table(factor)) if factor.rstrip("0123456789") in PAIRED else (factor,)
        return tuple(n for n in names if self.has(n))

    @property
    def sums(self) -> tuple[str, ...]:
        """The factors whose gradients it sums over rows, in the order of the partial buffer."""
        if self.direction == "forward" or self.part == "rows":
            return ()
        heads = [f for f in self.all_factors if "_table" not in f]
        return tuple(f for f in heads if any(not self.per_token(m) for m in self.members(f)))

    @property
    def statistics(self) -> tuple[str, ...]:
        """The [rows] fp32 statistics it writes (forward) or reads (backward)."""
        norms = (("", self.norm, self.normed), ("branch_", self.branch_norm, self.branch_normed))
        return tuple(
            f"{prefix}{name}" for prefix, norm, present in norms if present
            for name in (("mean", "rstd") if norm == "layer_norm" else ("rstd",))
        )

    @property
    def indices(self) -> tuple[str, ...]:
        """The index variables of a row: g (or g0, g1, ..) of its group, n (or n0, n1, ..) within it."""
        return self.group_indices + self.row_indices

    @property
    def group_indices(self) -> tuple[str, ...]:
        """The index variables of a modulation group."""
        return tuple(f"g{k}" for k in range(self.group_dims)) if self.group_dims > 1 else ("g",)

    @property
    def row_indices(self) -> tuple[str, ...]:
        """The index variables of a row within its group."""
        return tuple(f"n{k}" for k in range(self.row_dims)) if self.row_dims > 1 else ("n",)

    @property
    def stride_arguments(self) -> tuple[tuple[str, str], ...]:
        """(tensor, index) of every stride it takes, in the order of its arguments; tensor "row" counts whole rows."""
        out: list[tuple[str, str]] = []
        g = [i for i in self.indices if i.startswith("g")]
        if self.permuted:
            out += [("row", i) for i in self.indices]
        for t in (*self.rows_in, *self.factors):
            place, _, column = self.layout(t).partition("+")
            out += [(t, i) for i in (g if place == "group" else self.indices if place == "rows" else ())]
            out += [(t, "column")] if column else []
        return tuple(out)

    @property
    def size_arguments(self) -> tuple[str, ...]:
        """The inner sizes that take an index apart: G1, .. and N1, .."""
        return tuple(f"G{k}" for k in range(1, self.group_dims)) + tuple(f"N{k}" for k in range(1, self.row_dims))
