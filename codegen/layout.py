"""Which row of which tensor: x [.., D] becomes groups of rows, every tensor is read through its own strides.

A factor that broadcasts to x is the same for all rows of a *group*: [B, 1, D] against [B, S, D] makes B groups of S
rows.  Leading dimensions in which such factors vary come first, the others after them, whatever order they lie in
(sequence-first [S, B, D] is walked batch by batch); dimensions that can be are merged.  Layouts of a tensor:

    dense     contiguous, like x itself
    rows      a row of its own per row of x, by strides: transposed or sliced activations, per-token factors
    group     one row per group
    vector    one row for all

with `+column` where its last dimension has a stride of its own.  Nothing is copied: where dimensions do not merge, a
kernel takes the index of a group or a row apart into as many as are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from graphopt._compat import statically_true


def same(a: Any, b: Any) -> bool:
    """Are two sizes equal for certain?  Adds no guard when they are symbolic."""
    return a == b if isinstance(a, int) and isinstance(b, int) else statically_true(a == b)


@dataclass(frozen=True)
class Plan:
    """How the rows of x are walked.

    groups, rows: sizes of the merged dimensions of a group and of a row, one at least.
    permuted: rows are walked in another order than they lie in.
    layouts: (tensor, layout) for what is not dense.
    strides: (tensor, index) -> elements; tensor "row" counts whole rows.
    lead: the leading dimensions of x in the order walked; the first `grouped` of them make the groups.
    """

    groups: tuple[Any, ...]
    rows: tuple[Any, ...]
    permuted: bool
    layouts: dict[str, str]
    strides: dict[tuple[str, str], Any]
    lead: tuple[int, ...]
    grouped: int

    @property
    def G(self) -> Any:
        """How many groups."""
        return math.prod(self.groups)

    @property
    def N(self) -> Any:
        """How many rows a group has."""
        return math.prod(self.rows)


def varies(f: Tensor, x: Tensor) -> frozenset[int]:
    """The leading dimensions of x in which a factor varies."""
    off = x.dim() - f.dim()
    sizes = {i + off: size for i, size in enumerate(f.shape[:-1])}
    return frozenset(i for i, size in sizes.items() if not same(size, 1) and not same(x.shape[i], 1))


def per_token(f: Tensor, x: Tensor, group: frozenset[int]) -> bool:
    """Does a factor vary within a group?"""
    return not varies(f, x) <= group


def group_of(x: Tensor, factors: Iterable[Tensor]) -> frozenset[int]:
    """The dimensions that make the groups: those in which factors vary that do not vary in all."""
    lead = frozenset(i for i, size in enumerate(x.shape[:-1]) if not same(size, 1))
    coarse = [v for v in (varies(f, x) for f in factors) if v and v != lead]
    union = frozenset().union(*coarse)
    if union != lead:
        return union
    # no one grouping serves them all: take what serves most, the others are treated per token
    candidates = [*coarse, frozenset[int]()]
    return max(candidates, key=lambda c: (sum(v <= c for v in coarse), -min(c, default=len(lead))))


def plan(x: Tensor, activations: dict[str, Tensor], factors: dict[str, Tensor]) -> Plan:
    """The plan for these tensors.

    activations: tensors shaped like x, by name.  factors: tensors that broadcast to x, last size D.
    """
    D, sizes = x.shape[-1], x.shape
    group = group_of(x, factors.values())
    kept = [i for i in range(x.dim() - 1) if not same(sizes[i], 1)]
    first = [i for i in kept if i in group]
    then = [i for i in kept if i not in group]
    lead = (*first, *then)
    permuted = list(lead) != sorted(lead)
    row_strides = _dense_strides([sizes[i] for i in range(x.dim() - 1)])
    layouts: dict[str, str] = {}
    steps: dict[str, dict[int, Any]] = {}  # strides of tensors that are not dense, per dimension of x
    columns: dict[str, Any] = {}
    if permuted:
        steps["row"] = {i: row_strides[i] for i in lead}
    for name, t in (activations | factors).items():
        v = varies(t, x)
        place = "vector" if name in factors and not v else "group" if name in factors and v <= group else "rows"
        off = x.dim() - t.dim()
        stride = {i: t.stride(i - off) if i in v else 0 for i in lead}
        column = t.stride(-1) if not same(D, 1) and not same(t.stride(-1), 1) else 1
        if place == "rows" and column == 1 and all(same(stride[i], row_strides[i] * D) for i in lead):
            continue  # dense
        layouts[name] = place + ("" if isinstance(column, int) and column == 1 else "+column")
        columns[name] = column
        if place != "vector":
            steps[name] = stride
    groups = _merged(first, sizes, steps)
    rows = _merged(then, sizes, steps)
    strides: dict[tuple[str, str], Any] = {}
    for kind, runs in (("g", groups), ("n", rows)):
        for k, run in enumerate(runs):
            index = f"{kind}{k}" if len(runs) > 1 else kind
            for name, stride in steps.items():
                strides[name, index] = stride[run[-1]]
        if not runs:
            strides |= {(name, kind): 0 for name in steps}
    strides |= {(name, "column"): c for name, c in columns.items()}
    g, n = (tuple(math.prod(sizes[i] for i in run) for run in runs) or (1,) for runs in (groups, rows))
    return Plan(g, n, permuted, layouts, strides, lead, len(first))


def _dense_strides(sizes: list[Any]) -> list[Any]:
    """Strides of a contiguous tensor, in units of its last dimension."""
    out: list[Any] = []
    step: Any = 1
    for size in reversed(sizes):
        out.insert(0, step)
        step = step * size
    return out


def _merged(dims: list[int], sizes: Any, steps: dict[str, dict[int, Any]]) -> list[list[int]]:
    """Runs of neighbouring dimensions that every tensor walks with one stride."""
    runs: list[list[int]] = []
    for i in dims:
        if runs and all(same(s[runs[-1][-1]], s[i] * sizes[i]) for s in steps.values()):
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs
