"""Seconds and bytes of a microbatch as functions of its shape: what the planner plans with.

Every form is affine in B: time = max(floor, fixed(shape) + B * each(shape)).  The floor is what launching the kernels
takes: below it the host is the bottleneck, whatever the shape.  Forms:

- `two_term` (default): a + b * B * S + c * B * S^2, and d * B * L where captions were measured
- `power_law` (AdaptiveLoad): a + b * B * S^p
- `symbolic`: a + sum of theta_i * term_i(B, T, H, W, L), terms from a traced graph (cost.py)

A GPU's time is no smooth function of S: matrix products run in waves of tiles, and a size that begins another wave
costs some per cent more.  `anchors` hold what was measured at some S over what the form gives; it is interpolated.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from graphopt.errors import ConfigError
from graphopt.schedule.shapes import ShapeTable

FORMS = ("two_term", "power_law", "symbolic")
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class MemoryModel:
    """Peak bytes of a microbatch: m0 + m1 * B * S + m2 * B * L.

    Args:
        m0: bytes that do not depend on the batch (parameters, optimizer state, buffers).
        m1: bytes per latent token. m2: bytes per caption token.
        max_error: largest relative error over the measured shapes (0 when derived).
    """

    m0: float
    m1: float
    m2: float = 0.0
    max_error: float = 0.0

    def bytes(self, shapes: ShapeTable, shape: np.ndarray, batch: np.ndarray) -> np.ndarray:
        """Predicted peak bytes, int64 [microbatches]."""
        return np.round(self.m0 + batch * (self.m1 * shapes.tokens[shape] + self.m2 * shapes.caption[shape])).astype(
            np.int64
        )

    def cap(self, shapes: ShapeTable, limit: float) -> np.ndarray:
        """Largest B that stays within `limit` bytes, int64 [shapes]; 0 where not even one sample does."""
        per = self.m1 * shapes.tokens + self.m2 * shapes.caption
        return np.maximum(0, np.floor((limit - self.m0) / np.maximum(per, 1e-9) * (1 + 1e-12))).astype(np.int64)


@dataclass(frozen=True)
class CostFit:
    """A cost model with where it comes from and how good it is.

    Args:
        form: "two_term", "power_law" or "symbolic".
        coefficients: a, b, c (seconds, per token, per token^2) and d (per caption token, or absent); a, b, p; or a and
            theta_i (seconds per unit of term i).
        terms: for "symbolic", the terms as sympy text in B, T, H, W (token grid), L.
        source: "measured", or "symbolic" for a model trace and a hardware description without any measurement.
        r2: coefficient of determination of the fit. mape: mean absolute relative error. max_error: the largest.
            All three are None when nothing was measured.
        errors: relative error of each measured shape, as {"B": ..., "S": ..., "error": ...}.
        intervals: 95 % confidence interval of each coefficient.
        p, m_comp: exponent of the power law, and B * S^p that costs as much as the costliest measured sample.
        step_overhead_s: seconds an optimizer step costs beside its microbatches.
        floor_s: seconds no microbatch undercuts (0: no such floor was seen).
        anchors: [S, measured over fitted fixed part, measured over fitted part per sample], ascending in S; between
            them linear in log S, beyond them as at the nearest.
        memory: fitted peak bytes, or None.
        key: settings the model holds for (model, remat, dtype, GPU); a plan carries them.
    """

    form: str
    coefficients: dict[str, float]
    terms: list[str] = field(default_factory=list)
    source: str = "measured"
    r2: float | None = None
    mape: float | None = None
    max_error: float | None = None
    errors: list[dict[str, float]] = field(default_factory=list)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    p: float = 2.0
    m_comp: float | None = None
    step_overhead_s: float = 0.0
    floor_s: float = 0.0
    anchors: list[list[float]] = field(default_factory=list)
    memory: MemoryModel | None = None
    key: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ConfigError(f"unknown cost form {self.form!r}", remedy=f"use one of {', '.join(FORMS)}")

    @staticmethod
    def two_term(
        a: float,
        b: float,
        c: float,
        *,
        step_overhead_s: float = 0.0,
        source: str = "given",
        p: float = 2.0,
        m_comp: float | None = None,
        memory: MemoryModel | None = None,
    ) -> CostFit:
        """a + b * B * S + c * B * S^2 with given coefficients (seconds)."""
        return CostFit(
            "two_term",
            {"a": a, "b": b, "c": c},
            source=source,
            step_overhead_s=step_overhead_s,
            p=p,
            m_comp=m_comp,
            memory=memory,
        )

    def affine(self, shapes: ShapeTable) -> tuple[np.ndarray, np.ndarray]:
        """(fixed, each): seconds per microbatch and per sample above the floor, float64 [shapes].

        Raises:
            ConfigError: a shape would cost nothing or less than nothing.
        """
        s = shapes.tokens.astype(np.float64)
        c = self.coefficients
        if self.form == "two_term":
            fixed, each = np.full(len(s), c["a"]), c["b"] * s + c["c"] * s * s + c.get("d", 0.0) * shapes.caption
        elif self.form == "power_law":
            fixed, each = np.full(len(s), c["a"]), c["b"] * s ** c["p"]
        else:
            one, two = self._terms_at(shapes, 1), self._terms_at(shapes, 2)
            theta = np.array([c[f"theta_{i}"] for i in range(len(self.terms))])
            each = theta @ (two - one)
            fixed = c["a"] + theta @ (one - (two - one))
        if self.anchors:
            at, of_fixed, of_each = np.array(self.anchors, dtype=np.float64).T
            fixed = fixed * np.interp(np.log(s), np.log(at), of_fixed)
            each = each * np.interp(np.log(s), np.log(at), of_each)
        bad = ~(np.isfinite(each) & (each > 0) & np.isfinite(fixed))
        if bad.any():
            i = int(np.argmax(bad))
            raise ConfigError(
                f"the cost model gives {each[i]:.3g} s per sample and {fixed[i]:.3g} s per microbatch for shape "
                f"{shapes.name(i)}",
                remedy="fit again over shapes that cover the data set",
            )
        return np.maximum(fixed, 0.0), each

    def _terms_at(self, shapes: ShapeTable, batch: int) -> np.ndarray:
        """Values of the terms, float64 [terms, shapes]."""
        import sympy

        names = sympy.symbols("B T H W L", positive=True, integer=True)
        local = {str(x): x for x in names}
        values = (float(batch), *(x.astype(np.float64) for x in (shapes.t, shapes.h, shapes.w, shapes.caption)))
        rows = []
        for text in self.terms:
            f = sympy.lambdify(names, sympy.sympify(text, locals=local), modules="numpy")
            rows.append(np.broadcast_to(np.asarray(f(*values), dtype=np.float64), (len(shapes),)))
        return np.stack(rows) if rows else np.zeros((0, len(shapes)))

    def seconds(self, shapes: ShapeTable, shape: np.ndarray, batch: np.ndarray) -> np.ndarray:
        """Predicted seconds of microbatches, float64 [microbatches]."""
        fixed, each = self.affine(shapes)
        return np.maximum(self.floor_s, fixed[shape] + batch * each[shape])

    def to_json(self) -> dict[str, Any]:
        """Everything, for a file or a plan's manifest."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @staticmethod
    def of(data: dict[str, Any], where: str = "fit") -> CostFit:
        """From `to_json`."""
        if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION or "form" not in data:
            raise ConfigError(
                "this is not a fit of this version of graphopt", where=where, remedy="run `graphopt fit` again"
            )
        data = {k: v for k, v in data.items() if k != "schema_version"}
        data["memory"] = MemoryModel(**data["memory"]) if data.get("memory") else None
        data["intervals"] = {k: tuple(v) for k, v in data.get("intervals", {}).items()}
        try:
            return CostFit(**data)
        except TypeError as e:
            raise ConfigError(
                f"the fit has unknown or missing entries: {e}", where=where, remedy="run `graphopt fit` again"
            ) from e

    def save(self, path: str | Path) -> None:
        """Write JSON, whole or not at all."""
        write_json(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> CostFit:
        """Read what `save` wrote."""
        return CostFit.of(read_json(path), str(path))

    def describe(self) -> str:
        """One line: form, coefficients, quality, origin."""
        numbers = ", ".join(f"{k} = {v:.4g}" for k, v in self.coefficients.items())
        numbers += f", floor {self.floor_s:.4g} s" if self.floor_s else ""
        numbers += f", anchored at {len(self.anchors)} S" if self.anchors else ""
        quality = (
            "not measured"
            if self.r2 is None
            else f"R2 {self.r2:.4f}, mean error {self.mape:.1%}, largest {self.max_error:.1%}"
        )
        return f"{self.form}: {numbers} ({quality}; source: {self.source})"


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file through a temporary one and a rename, so that no reader meets half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: str | Path, data: Any) -> None:
    """Write JSON, whole or not at all."""
    write_whole(path, (json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


def read_json(path: str | Path) -> Any:
    """Read JSON; a missing or broken file is a ConfigError that names it."""
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError as e:
        raise ConfigError("the file does not exist", where=str(path), remedy="check the path") from e
    except (OSError, ValueError) as e:
        raise ConfigError(f"the file cannot be read as JSON: {e}", where=str(path), remedy="write it again") from e
