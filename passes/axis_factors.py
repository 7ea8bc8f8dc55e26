"""The factors of a tensor's dimensions, and what reshaping, joining and slicing make of them (see axes.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphopt.passes import ops_view

Size = Any  # int or SymInt


@dataclass(frozen=True)
class Axis:
    """A dimension of an input of the graph, of a tensor with `rank` dimensions."""

    source: str
    dim: int
    rank: int


@dataclass(frozen=True)
class Join:
    """A concatenation along a dimension; each part is a tuple of axes (None: of unknown origin)."""

    parts: tuple[tuple[Axis | Join | Piece | None, ...], ...]


@dataclass(frozen=True)
class Piece:
    """A run of a dimension; `start` and `whole` tell pieces of equal size apart."""

    of: tuple[Axis | Join | Piece | None, ...]
    start: str


@dataclass
class Factor:
    """A factor of a dimension: its axis (None: unknown) and its size.

    A Join knows the factors of its parts, a Piece where it starts and the dimension it is cut from.
    """

    axis: Axis | Join | Piece | None
    size: Size
    parts: list[list[Factor]] | None = None
    start: Size = 0
    whole: list[Factor] | None = None


Dim = list[Factor]
Dims = list[Dim]


def sequence_of(dims: Dims | None, dim: int) -> Dim:
    """The factors of a dimension with an axis, [] if its origin is unknown."""
    if dims is None or not -len(dims) <= dim < len(dims):
        return []
    factors = [f for f in dims[dim] if not ops_view.same_size(f.size, 1)]
    return [] if any(f.axis is None for f in factors) else factors


def key(dim: Dim) -> tuple[Axis | Join | Piece | None, ...]:
    """What makes two dimensions the same sequence: their axes in order."""
    return tuple(f.axis for f in dim)


class Unknown(Exception):
    """The axes of an operand are not known."""


def size_of(dim: Dim) -> Size:
    """How many elements."""
    n: Size = 1
    for f in dim:
        n = n * f.size
    return n


def leaves(axis: Axis | Join | Piece | None) -> list[Axis | None]:
    """The axes inside a factor."""
    if isinstance(axis, Join):
        return [a for part in axis.parts for x in part for a in leaves(x)]
    if isinstance(axis, Piece):
        return [a for x in axis.of for a in leaves(x)]
    return [axis]


def joined(each: list[Dim], size: Size) -> Dim:
    """One dimension out of several, one after the other.

    A Join inside is taken apart, empty parts are left out, pieces in a row become what they were cut from.
    """
    parts: list[Dim] = []
    for dim in each:
        for part in dim[0].parts if len(dim) == 1 and dim[0].parts is not None else [dim]:
            if ops_view.same_size(size_of(part), 0):
                continue
            last = parts[-1][0] if parts and len(parts[-1]) == 1 else None
            this = part[0] if len(part) == 1 else None
            if (last and this and last.whole is not None and this.whole is not None
                    and key(last.whole) == key(this.whole) and ops_view.same_size(last.start + last.size, this.start)):
                parts[-1] = _piece(last.whole, last.start, last.size + this.size)
            else:
                parts.append(part)
    if len(parts) == 1:
        return parts[0]
    return [Factor(Join(tuple(tuple(f.axis for f in p) for p in parts)), size, parts)]


def _piece(dim: Dim, start: Size, size: Size) -> Dim:
    if ops_view.same_size(size_of(dim), size):
        return dim
    return [Factor(Piece(key(dim), str(start)), size, start=start, whole=dim)]


def sliced(dim: Dim, start: Size, size: Size) -> Dim:
    """A run of a dimension: all of it, whole parts of a Join, or a piece."""
    if len(dim) == 1 and dim[0].parts is not None and not ops_view.same_size(size_of(dim), size):
        at: Size = 0
        for i, _ in enumerate(dim[0].parts):
            if ops_view.same_size(at, start):
                total: Size = 0
                for j in range(i, len(dim[0].parts)):
                    total = total + size_of(dim[0].parts[j])
                    if ops_view.same_size(total, size):
                        return joined(dim[0].parts[i : j + 1], size)
            at = at + size_of(dim[0].parts[i])
    if all(f.axis is None for f in dim):
        return [Factor(None, size)]
    return _piece(dim, start, size)


def regroup(dims: Dims, shape: list[Size]) -> Dims:
    """A reshape: factors are dealt out to the new dimensions in order.

    Where a factor is cut, its slow part keeps the axis and the fast part has none (it goes into a patch's channels).
    """
    pool = [f for d in dims for f in d if not ops_view.same_size(f.size, 1)]
    out: Dims = []
    for n in shape:
        taken: Dim = []
        left: Size = n
        while not ops_view.same_size(left, 1):
            if not pool:
                raise Unknown
            head = pool[0]
            if ops_view.same_size(head.size, left) or _divides(head.size, left):
                taken.append(pool.pop(0))
                left = left // head.size
            elif _divides(left, head.size):
                taken.append(Factor(head.axis, left))
                pool[0] = Factor(None, head.size // left)
                left = 1
            else:
                raise Unknown
        out.append(taken or [Factor(None, 1)])
    return out


def _divides(a: Size, b: Size) -> bool:
    """Is b a multiple of a, for certain?"""
    if isinstance(a, int) and isinstance(b, int):
        return a > 0 and b % a == 0
    return ops_view.same_size(b % a, 0)
