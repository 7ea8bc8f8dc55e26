"""FLOPs, bytes moved and bytes saved for the backward, as sympy expressions in a model's named dimensions.

Filled by `trace_cost` (cost.py); needs no torch to be stored, printed or evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import sympy

from graphopt.errors import ConfigError
from graphopt.schedule.costmodel import read_json, write_json

SCHEMA_VERSION = 1


def symbol(name: str) -> sympy.Symbol:
    """A dimension: a positive integer."""
    return sympy.Symbol(name, positive=True, integer=True)


@dataclass(frozen=True)
class SymbolicCost:
    """The cost of one forward and backward.

    Args:
        dims: names of the dimensions, e.g. ("B", "T", "H", "W", "L"), with the meaning they have in the traced inputs.
        flops_forward, flops_backward: floating-point operations, torch's counting (a multiply-add is two; fused
            attention's backward counts its recomputation).
        attention_flops: the part of both that softmax attention does.
        saved_bytes: storage kept from forward to backward, parameters and inputs left out, shared storage counted once.
        traffic: bytes read and written by every op of both graphs if nothing is fused (views are free).
        parameter_bytes: parameters and buffers.
        launches: ops of both graphs that write memory, so about the kernels that eager launches (0: not counted).
        valid_for: multiples a dimension must be of, e.g. {"H": 2}: the expressions hold there.
        at_one: costs traced apart for a dimension of size 1, by its name; `at` uses them.
        assumed: sizes of inputs that no name was given for; the expressions hold for these only.
    """

    dims: tuple[str, ...]
    flops_forward: sympy.Expr
    flops_backward: sympy.Expr
    attention_flops: sympy.Expr
    saved_bytes: sympy.Expr
    traffic: sympy.Expr
    parameter_bytes: sympy.Expr
    launches: sympy.Expr = sympy.S.Zero
    valid_for: dict[str, int] = field(default_factory=dict)
    assumed: dict[str, int] = field(default_factory=dict)
    at_one: dict[str, SymbolicCost] = field(default_factory=dict)

    EXPRESSIONS = (
        "flops_forward", "flops_backward", "attention_flops", "saved_bytes", "traffic", "parameter_bytes", "launches",
    )

    @property
    def flops(self) -> sympy.Expr:
        """Forward and backward together."""
        return sympy.expand(self.flops_forward + self.flops_backward)

    def _map(self, f: Callable[[sympy.Expr], sympy.Expr]) -> dict[str, sympy.Expr]:
        return {k: sympy.expand(f(getattr(self, k))) for k in self.EXPRESSIONS}

    def __mul__(self, count: int) -> SymbolicCost:
        """`count` such blocks in a row."""
        return replace(self, **self._map(lambda e: e * count), at_one={d: c * count for d, c in self.at_one.items()})

    __rmul__ = __mul__

    def __add__(self, other: SymbolicCost) -> SymbolicCost:
        """One after the other; dimensions of one name are one dimension."""
        return self._combine(other, 1)

    def __sub__(self, other: SymbolicCost) -> SymbolicCost:
        """What this has over the other: a two-layer model minus a one-layer model is a layer."""
        return self._combine(other, -1)

    def _combine(self, other: SymbolicCost, sign: int) -> SymbolicCost:
        both = {k: sympy.expand(getattr(self, k) + sign * getattr(other, k)) for k in self.EXPRESSIONS}
        dims = self.dims + tuple(d for d in other.dims if d not in self.dims)
        multiples = {
            d: sympy.ilcm(self.valid_for.get(d, 1), other.valid_for.get(d, 1))
            for d in {*self.valid_for, *other.valid_for}
        }
        return SymbolicCost(
            dims,
            **both,
            valid_for={k: int(v) for k, v in sorted(multiples.items())},
            assumed={**other.assumed, **self.assumed},
            at_one={d: c._combine(other.at_one[d], sign) for d, c in self.at_one.items() if d in other.at_one},
        )

    def subs(self, **changes: Any) -> SymbolicCost:
        """Substitute dimensions, by numbers or expressions in other dimensions: `cost.subs(H="2*h", L=512)`."""
        known = {d: symbol(d) for d in self.dims}
        unknown = set(changes) - set(known)
        if unknown:
            raise ConfigError(
                f"the cost has no dimension {sorted(unknown)[0]!r}", remedy=f"it has {', '.join(self.dims)}"
            )
        new: dict[str, sympy.Expr] = {}
        for name, value in changes.items():
            e = sympy.sympify(value)
            new[name] = e.subs({x: symbol(x.name) for x in e.free_symbols})
        added = sorted({x.name for e in new.values() for x in e.free_symbols} - set(self.dims))
        kept = tuple(d for d in self.dims if d not in changes) + tuple(added)
        kept += tuple(d for d in changes if any(symbol(d) in e.free_symbols for e in new.values()))
        table = {known[k]: v for k, v in new.items()}
        return SymbolicCost(
            kept,
            **self._map(lambda e: e.subs(table, simultaneous=True)),
            valid_for={k: v for k, v in self.valid_for.items() if k not in changes},
            assumed=self.assumed,
            at_one={
                d: c.subs(**{k: v for k, v in changes.items() if k in c.dims})
                for d, c in self.at_one.items()
                if d not in changes
            },
        )

    def lambdify(self, what: str = "flops") -> Callable[..., Any]:
        """A numpy function of the dimensions, by keyword: `cost.lambdify("saved_bytes")(B=2, T=21, H=60, W=104,
        L=512)`."""
        expression = getattr(self, what) if what in (*self.EXPRESSIONS, "flops") else None
        if expression is None:
            raise ConfigError(f"unknown quantity {what!r}", remedy=f"use flops, {', '.join(self.EXPRESSIONS)}")
        f = sympy.lambdify([symbol(d) for d in self.dims], expression, modules="numpy")

        def evaluate(**sizes: Any) -> Any:
            if set(sizes) != set(self.dims):
                raise ConfigError(f"sizes for {', '.join(sorted(sizes))}; the cost needs {', '.join(self.dims)}")
            return f(*(sizes[d] for d in self.dims))

        return evaluate

    def at(self, what: str = "flops", **sizes: int) -> int:
        """The exact value of one quantity at integer sizes.

        Raises:
            ConfigError: a size is missing, unknown, or not a multiple that the expressions hold for.
        """
        if set(sizes) != set(self.dims):
            raise ConfigError(f"sizes for {', '.join(sorted(sizes))}; the cost needs {', '.join(self.dims)}")
        for d, one in self.at_one.items():
            if sizes[d] == 1:
                return one.at(what, **{k: v for k, v in sizes.items() if k != d})
        for d, m in self.valid_for.items():
            if sizes[d] % m:
                raise ConfigError(f"{d} = {sizes[d]} is not a multiple of {m}, for which the cost was traced")
        value = getattr(self, what).subs({symbol(d): s for d, s in sizes.items()})
        return int(value)

    def to_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {
            "schema_version": SCHEMA_VERSION,
            "dims": list(self.dims),
            "valid_for": self.valid_for,
            "assumed": self.assumed,
            "at_one": {d: c.to_json() for d, c in self.at_one.items()},
            **{k: str(getattr(self, k)) for k in self.EXPRESSIONS},
        }

    @staticmethod
    def of(data: dict[str, Any], where: str = "cost") -> SymbolicCost:
        """From `to_json`."""
        if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION or "flops_forward" not in data:
            raise ConfigError(
                "this is not a symbolic cost of this version of graphopt", where=where, remedy="trace it again"
            )
        local = {d: symbol(d) for d in data["dims"]}
        return SymbolicCost(
            tuple(data["dims"]),
            **{k: sympy.sympify(data.get(k, 0), locals=local) for k in SymbolicCost.EXPRESSIONS},
            valid_for=data["valid_for"],
            assumed=data["assumed"],
            at_one={d: SymbolicCost.of(c, where) for d, c in data.get("at_one", {}).items()},
        )

    def save(self, path: str | Path) -> None:
        """Write JSON, whole or not at all."""
        write_json(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> SymbolicCost:
        """Read what `save` wrote."""
        return SymbolicCost.of(read_json(path), str(path))

    def __str__(self) -> str:
        lines = [f"dimensions: {', '.join(self.dims)}"]
        lines += [f"{k:16} {getattr(self, k)}" for k in self.EXPRESSIONS]
        if self.valid_for:
            lines.append("holds for " + ", ".join(f"{d} a multiple of {m}" for d, m in self.valid_for.items()))
        if self.assumed:
            lines.append("with " + ", ".join(f"{k} = {v}" for k, v in self.assumed.items()))
        return "\n".join(lines)
