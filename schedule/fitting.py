"""Measured runs in, a cost model out: least squares, with the quality stated and bad fits refused.

Residuals are relative (each run's error in per cent counts alike), since a plan adds up short and long microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.optimize
import scipy.stats

from graphopt.errors import ConfigError, GraphoptError
from graphopt.schedule.costmodel import CostFit, MemoryModel
from graphopt.schedule.problem import positive
from graphopt.schedule.shapes import ShapeTable
from graphopt.schedule.symbolic import SymbolicCost

LEAST_SHAPES = {"two_term": 4, "power_law": 4, "symbolic": 4}


def fit_cost(
    runs: Any,
    form: str = "two_term",
    *,
    cost: SymbolicCost | None = None,
    max_error: float = 0.10,
    step_overhead_s: float = 0.0,
    anchored: bool = False,
    refuse: bool = True,
) -> CostFit:
    """Fit seconds per microbatch, and bytes if the runs recorded them.

    Args:
        runs: what `shape_benchmark` returned, or a sequence of dicts with B, T, H, W, L (or B, S) and `seconds`, and
            optionally `bytes`.  Shapes that ran out of memory are left out.
        form: "two_term": a + b*B*S + c*B*S^2 (default), and d*B*L where runs with captions and several B show it.
            "power_law": a + b*B*S^p, AdaptiveLoad's. "symbolic": a + theta_1 * (linear FLOPs) + theta_2 * (attention
            FLOPs) + theta_3 * (bytes moved), with `cost` in the dimensions B, T, H, W, L of the token grid
            (`SymbolicCost.subs` converts latent sizes).
        max_error: largest relative error of the mean allowed before the fit is refused.
        anchored: take each measured S as it was measured, and the form between them.  Worth it where most of the data
            set's long shapes were measured, at errors well below the form's; quality and intervals are the form's.
        refuse: raise on a bad fit (False returns it, to look at its plot).

    Where the smallest shapes take equal time although their work differs, launching kernels is what takes it: the fit
    then is max(floor, form), if that explains the runs clearly better (Akaike), and never for "power_law".

    Returns:
        The fit, with R2, mean and largest relative error, the error of each shape and 95 % intervals; `.p` and
        `.m_comp` come from the power law fitted to the same runs, whatever the form.

    Raises:
        GraphoptError: too few shapes, or a mean relative error above `max_error`; the message names the worst shape.
    """
    table, batch, seconds, peak, key = _arrays(runs)
    tokens = table.tokens.astype(np.float64)
    distinct = len({(int(b), int(s)) for b, s in zip(batch, tokens)})
    if form not in LEAST_SHAPES:
        raise ConfigError(f"unknown cost form {form!r}", remedy=f"use one of {', '.join(LEAST_SHAPES)}")
    if distinct < LEAST_SHAPES[form]:
        raise GraphoptError(
            f"{distinct} measured shapes cannot determine {form}",
            remedy=f"measure at least {LEAST_SHAPES[form]}, over the range of the data set (12 is comfortable)",
        )
    a, b, p = _power_law(batch, tokens, seconds)
    costliest = int(np.argmax(batch * tokens**p))
    common: dict[str, Any] = {
        "source": "measured",
        "p": p,
        "m_comp": float(batch[costliest] * tokens[costliest] ** p),
        "key": key,
        "step_overhead_s": step_overhead_s,
        "memory": fit_memory(runs) if peak is not None else None,
    }
    terms: list[str] = []
    floor, above = 0.0, np.ones(len(seconds), bool)
    if form == "power_law":
        coefficients = {"a": a, "b": b, "p": p}
        predicted = a + b * batch * tokens**p
        jacobian = np.stack([np.ones_like(tokens), batch * tokens**p, b * batch * tokens**p * np.log(tokens)], 1)
    else:
        if form == "two_term":
            names, columns = ["b", "c"], [batch * tokens, batch * tokens**2]
            if _captions_tell(batch, tokens, table.caption.astype(np.float64), seconds):
                names, columns = [*names, "d"], [*columns, batch * table.caption]
        else:
            terms, columns = _symbolic_terms(cost, table, batch)
            names = [f"theta_{i}" for i in range(len(terms))]
        jacobian = np.stack([np.ones_like(tokens), *columns], 1)
        solution, floor = _with_floor(jacobian, seconds, np.argsort(batch * tokens, kind="stable"))
        coefficients = dict(zip(["a", *names], solution.tolist()))
        predicted = np.maximum(floor, jacobian @ solution)
        above = predicted > floor
    error = predicted / seconds - 1
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    r2 = 1 - float(((predicted - seconds) ** 2).sum()) / spread if spread > 0 else 0.0  # equal times tell nothing
    fit = CostFit(
        form,
        {k: float(v) for k, v in coefficients.items()},
        terms,
        r2=r2,
        mape=float(np.abs(error).mean()),
        max_error=float(np.abs(error).max()),
        errors=[
            {"B": int(n), "S": int(s), "seconds": float(t), "error": float(e)}
            for n, s, t, e in zip(batch, tokens, seconds, error)
        ],
        intervals=_intervals(coefficients, (jacobian / seconds[:, None])[above], error[above]),
        floor_s=floor,
        **common,
    )
    if refuse and fit.mape is not None and fit.mape > max_error:
        worst = int(np.argmax(np.abs(error)))
        raise GraphoptError(
            f"{form} misses the measured times by {fit.mape:.1%} on average (limit {max_error:.0%}); the worst is "
            f"B = {batch[worst]:g}, S = {tokens[worst]:g}: {error[worst]:+.1%}",
            remedy='measure again on an idle machine, use form="two_term", or fit only the range you train on',
        )
    return replace(fit, anchors=_anchors(fit, table, batch, seconds)) if anchored else fit


def _anchors(fit: CostFit, table: ShapeTable, batch: np.ndarray, seconds: np.ndarray) -> list[list[float]]:
    """[S, fixed part, part per sample] over the form's, of every S that was measured above the floor."""
    fixed, each = fit.affine(table)
    found = []
    for s in np.unique(table.tokens[seconds > fit.floor_s * 1.05]):
        mine = table.tokens == s
        f, e, b, t = fixed[mine], each[mine], batch[mine], seconds[mine]
        scale = float(np.median(t / (f + b * e)))
        pair = np.array([scale, scale])
        if len(np.unique(b)) > 1 and f.min() > 0:
            pair, _ = scipy.optimize.nnls(np.stack([f, b * e], 1) / t[:, None], np.ones(len(t)))
        # A part that vanished is a matter of noise.
        found.append([float(s), *(pair.tolist() if pair.min() > 0.2 else [scale, scale])])
    return found


def _arrays(runs: Any) -> tuple[ShapeTable, np.ndarray, np.ndarray, np.ndarray | None, dict[str, Any]]:
    """(shape of each run, B, seconds, bytes or None, settings)."""
    key = dict(getattr(runs, "key", {}) or {})
    rows: Sequence[dict[str, Any]] = [r for r in getattr(runs, "rows", runs) if r.get("seconds") is not None]
    if not rows:
        raise GraphoptError(
            "there are no measured runs", remedy="every shape ran out of memory or time: measure smaller ones"
        )
    for r in rows:
        if not positive(r["seconds"]) or not positive(r.get("B")):
            raise ConfigError(f"a run has no positive time or batch: {r}")
        sizes = ("S",) if "S" in r and "T" not in r else ("T", "H", "W")
        if not all(positive(r.get(d)) for d in sizes) or not (r.get("L", 0) == 0 or positive(r["L"])):
            raise ConfigError(f"a run's sizes must be positive: {r}", remedy="give B and S, or B, T, H, W and L")
        if r.get("bytes") and not positive(r["bytes"]):
            raise ConfigError(f"a run has no positive bytes: {r}", remedy="leave bytes out where they are not known")
    table = ShapeTable.of(
        [
            [r["S"], 1, 1, r.get("L", 0)] if "S" in r and "T" not in r else [r["T"], r["H"], r["W"], r.get("L", 0)]
            for r in rows
        ]
    )
    peak = np.array([r["bytes"] for r in rows], float) if all(r.get("bytes") for r in rows) else None
    return table, np.array([r["B"] for r in rows], float), np.array([r["seconds"] for r in rows], float), peak, key


def _relative_nnls(jacobian: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Least squares on relative residuals; non-negative, since a negative second would make some unseen shape free."""
    relative = jacobian / seconds[:, None]
    scale = np.abs(relative).max(0)
    scale[scale == 0] = 1
    solution, _ = scipy.optimize.nnls(relative / scale, np.ones(len(seconds)))
    return solution / scale


def _with_floor(jacobian: np.ndarray, seconds: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, float]:
    """(coefficients, floor in seconds): the smallest shapes on the floor, the others by least squares.

    Args:
        jacobian: [runs, coefficients]. order: runs from small to large.
    """

    def misfit(solution: np.ndarray, floor: float) -> float:
        return float(np.mean(np.abs(np.maximum(floor, jacobian @ solution) / seconds - 1)))

    n = len(seconds)
    best: tuple[np.ndarray, float] = (_relative_nnls(jacobian, seconds), 0.0)
    candidate, lowest = best, np.inf
    plain = misfit(*best)
    if plain < 0.01:  # within one per cent there is nothing to explain
        return best
    for k in range(2, n - jacobian.shape[1] - 1):
        small, rest = order[:k], order[k:]
        found = _relative_nnls(jacobian[rest], seconds[rest]), float(1 / np.mean(1 / seconds[small]))
        if misfit(*found) < lowest:
            lowest, candidate = misfit(*found), found
    # One more parameter has to pay for itself, and more: Akaike's difference above 4.
    if lowest < np.inf and 2 * n * np.log(plain / lowest) - 2 > 4:
        best = candidate
    return best


def _power_law(batch: np.ndarray, tokens: np.ndarray, seconds: np.ndarray) -> tuple[float, float, float]:
    """a, b, p of a + b * B * S^p: p by bounded search, a and b >= 0 by least squares inside it."""

    def solve(p: float) -> tuple[float, np.ndarray, float]:
        columns = np.stack([np.ones_like(tokens), batch * tokens**p], 1) / seconds[:, None]
        scale = columns.max(0)
        solution, norm = scipy.optimize.nnls(columns / scale, np.ones(len(seconds)))
        return float(norm), solution / scale, p

    grid = min((solve(p) for p in np.linspace(0.5, 3.0, 51)), key=lambda r: r[0])
    best = scipy.optimize.minimize_scalar(
        lambda p: solve(p)[0],
        bounds=(max(0.5, grid[2] - 0.06), min(3.0, grid[2] + 0.06)),
        method="bounded",
        options={"xatol": 1e-6},
    )
    _, (a, b), p = solve(float(best.x))
    return float(a), float(b), p


def _captions_tell(batch: np.ndarray, tokens: np.ndarray, caption: np.ndarray, seconds: np.ndarray) -> bool:
    """Does a term in B * L pay for itself?  Where B is always 1 and L the same, it is the constant."""
    if not caption.any() or len(np.unique(batch * caption)) < 2:
        return False
    plain = np.stack([np.ones_like(tokens), batch * tokens, batch * tokens**2], 1)
    more = np.column_stack([plain, batch * caption])
    one, two = (
        float(((j @ _relative_nnls(j, seconds) / seconds - 1) ** 2).sum()) for j in (plain, more)
    )  # fmt: skip
    return len(seconds) > 5 and len(seconds) * np.log(one / max(two, 1e-12)) - 2 > 4  # Akaike, and more


def _symbolic_terms(
    cost: SymbolicCost | None, table: ShapeTable, batch: np.ndarray
) -> tuple[list[str], list[np.ndarray]]:
    """The symbolic cost's terms as text and their values for each run."""
    import sympy

    from graphopt.schedule.symbolic import symbol

    if cost is None:
        raise ConfigError(
            'form="symbolic" needs cost=', remedy="give trace_cost's result in B, T, H, W, L of the token grid"
        )
    extra = set(cost.dims) - set("BTHWL")
    if extra:
        raise ConfigError(
            f"the cost has dimensions {', '.join(sorted(extra))} beside B, T, H, W, L",
            remedy="substitute them: cost.subs(...)",
        )
    parts = {
        "linear FLOPs": cost.flops - cost.attention_flops,
        "attention FLOPs": cost.attention_flops,
        "bytes": cost.traffic,
    }
    terms = [str(sympy.expand(e)) for e in parts.values() if e != 0]
    names = [symbol(x) for x in "BTHWL"]
    values = [batch, *(x.astype(float) for x in (table.t, table.h, table.w, table.caption))]
    return terms, [
        np.broadcast_to(np.asarray(sympy.lambdify(names, e, modules="numpy")(*values), float), batch.shape)
        for e in parts.values()
        if e != 0
    ]


def _intervals(
    coefficients: dict[str, float], jacobian: np.ndarray, residual: np.ndarray
) -> dict[str, tuple[float, float]]:
    """95 % confidence intervals from the linearised problem; none where it has no degrees of freedom."""
    n, k = jacobian.shape
    if n <= k:
        return {}
    # Scaled columns: tokens^2 beside 1 would make the normal matrix singular in float64.
    scale = np.abs(jacobian).max(0)
    scale[scale == 0] = 1
    covariance = np.linalg.pinv((jacobian / scale).T @ (jacobian / scale)) * float(residual @ residual) / (n - k)
    half = scipy.stats.t.ppf(0.975, n - k) * np.sqrt(np.diag(covariance)) / scale
    return {name: (float(v - h), float(v + h)) for (name, v), h in zip(coefficients.items(), half)}


def fit_memory(runs: Any) -> MemoryModel:
    """m0 + m1 * B * S + m2 * B * L from measured peak bytes, non-negative least squares on relative residuals.

    Raises:
        GraphoptError: fewer than two runs with bytes.
    """
    table, batch, _, peak, _ = _arrays(runs)
    if peak is None or len(peak) < 2:
        raise GraphoptError(
            "a memory fit needs at least two runs with peak bytes", remedy="measure on a GPU, or record `bytes`"
        )
    columns = np.stack([np.ones_like(batch), batch * table.tokens, batch * table.caption], 1).astype(float)
    scaled = columns / peak[:, None]
    scale = np.where(scaled.max(0) > 0, scaled.max(0), 1)
    solution, _ = scipy.optimize.nnls(scaled / scale, np.ones(len(peak)))
    solution /= scale
    m0, m1, m2 = (float(x) for x in solution)
    return MemoryModel(m0, m1, m2, max_error=float(np.abs(columns @ solution / peak - 1).max()))
