"""Units of one shape in, ranks out: LPT, then swaps between the fullest and the emptiest ranks.

All steps of a window are refined together in numpy: pair the i-th fullest with the i-th emptiest rank of each step,
try every exchange of one unit against one unit or against nothing, keep the one that levels the pair best, repeat.
Where that stalls, split the units of a pair afresh in the best of all ways.  Against HiGHS on small cases this ends
within 2 % of the optimum (tests/schedule/test_oracle.py).
"""

from __future__ import annotations

import heapq
import threading
from concurrent.futures import CancelledError

import numpy as np

PATIENCE = 8  # rounds without progress after which a step is left as it is
DEEP_UNITS = 10  # pairs with at most this many units may be split afresh: 1,024 ways
PAIRS_AT_ONCE = 1 << 16  # entries of one exchange table: small enough for the cache


def lpt(step: np.ndarray, cost: np.ndarray, steps: int, ranks: int, speeds: np.ndarray | None) -> np.ndarray:
    """Longest processing time first: each unit, from the costliest down, to the rank of its step that ends first.

    Args:
        step: int [units]. cost: float64 [units], seconds at speed 1. speeds: float64 [ranks] relative speeds, or None.

    Returns:
        int32 [units], rank of each unit.
    """
    rank = np.empty(len(step), np.int32)
    order = np.lexsort((-cost, step))
    bounds = np.searchsorted(step[order], np.arange(steps + 1))
    for s in range(steps):
        units = order[bounds[s] : bounds[s + 1]]
        if speeds is None:
            heap = [(0.0, r) for r in range(ranks)]
            chosen = []
            for c in cost[units].tolist():
                load, r = heap[0]
                chosen.append(r)
                heapq.heapreplace(heap, (load + c, r))
            rank[units] = chosen
        else:
            load_r = np.zeros(ranks)
            for u in units.tolist():
                r = int(np.argmin((load_r + cost[u]) / speeds))
                rank[u] = r
                load_r[r] += cost[u]
            _fill_idle(units, rank, cost, ranks)
    return rank


def _fill_idle(units: np.ndarray, rank: np.ndarray, cost: np.ndarray, ranks: int) -> None:
    """Give a rank that LPT left empty (a slow one) the cheapest unit of a rank that has several; in place."""
    count = np.bincount(rank[units], minlength=ranks)
    for r in np.flatnonzero(count == 0).tolist():
        spare = units[count[rank[units]] > 1]
        if not len(spare):
            return
        u = spare[np.argmin(cost[spare])]
        count[rank[u]] -= 1
        rank[u] = r
        count[r] = 1


def refine(
    step: np.ndarray,
    rank: np.ndarray,
    cost: np.ndarray,
    steps: int,
    ranks: int,
    speeds: np.ndarray | None,
    *,
    tolerance: float,
    rounds: int = 60,
    stop: threading.Event | None = None,
) -> np.ndarray:
    """Level the ranks of every step by exchanges; no rank loses its last unit.

    Args:
        step, rank, cost: [units], as for `lpt`.
        tolerance: stop where the fullest rank is within this fraction of the step's mean.
        rounds: at most this many rounds.
        stop: if set, ends with CancelledError (from a thread that nobody waits for any more).

    Returns:
        int32 [units], the new ranks.
    """
    if ranks == 1 or not len(step):
        return rank
    cell = step.astype(np.int64) * ranks + rank
    order = np.lexsort((-cost, cell))
    counts = np.bincount(cell, minlength=steps * ranks)
    width = max(int(counts.max()) + 2, DEEP_UNITS)  # spare places, for units that move in
    place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    unit = np.full((steps * ranks, width), -1, np.int64)
    unit[cell[order], place] = order
    value = np.where(unit >= 0, cost[unit], 0.0)
    speed = np.ones(ranks) if speeds is None else speeds
    load = value.sum(1)
    half = ranks // 2
    idle = np.zeros(steps, np.int64)
    for turn in range(rounds):
        if stop is not None and stop.is_set():
            raise CancelledError
        time = load.reshape(steps, ranks) / speed
        level = load.reshape(steps, ranks).sum(1) / speed.sum() * (1 + tolerance)
        todo = np.flatnonzero((time.max(1) > level) & (idle < PATIENCE))
        if not len(todo):
            break
        by_load = np.argsort(time[todo], axis=1, kind="stable")
        # Extremes are paired first; where that stalls (equal ranks hold equal units), partners are mixed by a fixed
        # stride.
        high, low = by_load[:, ::-1][:, :half], by_load[:, :half]
        if turn % 2:
            low = np.roll(low, (turn // 2 + 1) * max(1, half * 13 // 34) % half, axis=1)
        base = todo[:, None] * ranks
        deep = idle[todo] > 1
        excess = np.maximum(time[todo] - level[todo, None], 0).sum(1)
        _exchange(
            (base + high).ravel(),
            (base + low).ravel(),
            unit,
            value,
            load,
            np.tile(speed, steps),
            (level[todo] * tolerance).repeat(half),
        )
        if deep.any():
            few = min(half, 16)  # splitting is costly, and the extremes are what a step waits for
            pairs = (base + high)[deep, :few], (base + low)[deep, :few]
            _repartition(
                pairs[0].ravel(),
                pairs[1].ravel(),
                unit,
                value,
                load,
                np.tile(speed, steps),
                level[todo][deep].repeat(pairs[0].shape[1]),
            )
        after = np.maximum(load.reshape(steps, ranks)[todo] / speed - level[todo, None], 0).sum(1)
        idle[todo] = np.where(after < excess * (1 - 1e-3), 0, idle[todo] + 1)
    out = np.empty(len(step), np.int32)
    filled = unit >= 0
    out[unit[filled]] = (np.nonzero(filled)[0] % ranks).astype(np.int32)
    return out


def _exchange(
    high: np.ndarray,
    low: np.ndarray,
    unit: np.ndarray,
    value: np.ndarray,
    load: np.ndarray,
    speed: np.ndarray,
    least: np.ndarray,
) -> None:
    """Apply the best exchange of each (high, low) pair of cells in place; pairs closer than `least` seconds are left
    alone."""
    gap = load[high] / speed[high] - load[low] / speed[low]
    active = gap > least
    high, low = high[active], low[active]
    width = unit.shape[1]
    at_once = max(1, PAIRS_AT_ONCE // width**2)  # one, where a rank holds very many units
    for start in range(0, len(high), at_once):
        h, low_ = high[start : start + at_once], low[start : start + at_once]
        # Only the places in use are compared: the table is small although one rank may hold many units.
        used_h = min(width, int((unit[h] >= 0).sum(1).max()))
        used_l = min(width, int((unit[low_] >= 0).sum(1).max()) + 1)  # plus one empty place: a move instead of a swap
        change = value[h][:, :used_h, None] - value[low_][:, None, :used_l]
        vh, vl = speed[h], speed[low_]
        gap_now = load[h] / vh - load[low_] / vl
        want = gap_now / (1 / vh + 1 / vl)  # cost that would have to move for equal times
        off = np.abs(change - want[:, None, None]).reshape(len(h), -1)
        best = off.argmin(1)
        pick = np.arange(len(h))
        # Better only if the pair's slower end gets faster.
        moved = change.reshape(len(h), -1)[pick, best]
        slower = np.maximum((load[h] - moved) / vh, (load[low_] + moved) / vl)
        i, j = best // used_l, best % used_l
        stays = (unit[low_, j] >= 0) | ((unit[h] >= 0).sum(1) > 1)
        ok = (slower < load[h] / vh - 1e-12) & stays & (unit[h, i] >= 0)
        h, low_, i, j, moved = h[ok], low_[ok], i[ok], j[ok], moved[ok]
        unit[h, i], unit[low_, j] = unit[low_, j], unit[h, i]
        value[h, i], value[low_, j] = value[low_, j], value[h, i]
        load[h] -= moved
        load[low_] += moved
        _pack(unit, value, h)
        _pack(unit, value, low_)


def _repartition(
    high: np.ndarray,
    low: np.ndarray,
    unit: np.ndarray,
    value: np.ndarray,
    load: np.ndarray,
    speed: np.ndarray,
    level: np.ndarray,
) -> None:
    """Split the units of each pair whose fuller cell is above `level` in the best of all 2^n ways, if it has few
    units."""
    count = (unit >= 0).sum(1)
    chosen = (
        (load[high] / speed[high] > level) & (count[high] + count[low] <= DEEP_UNITS) & (load[low] / speed[low] < level)
    )
    high, low = high[chosen], low[chosen]
    width = min(unit.shape[1], DEEP_UNITS)
    member = (np.arange(1 << DEEP_UNITS)[None] >> np.arange(DEEP_UNITS)[:, None] & 1).astype(np.float64)
    for start in range(0, len(high), 256):
        h, low_ = high[start : start + 256], low[start : start + 256]
        both = np.concatenate([unit[h][:, :width], unit[low_][:, :width]], 1)
        worth = np.concatenate([value[h][:, :width], value[low_][:, :width]], 1)
        first = np.argsort(both < 0, axis=1, kind="stable")[:, :DEEP_UNITS]  # the real units first; the rest is empty
        both, worth = np.take_along_axis(both, first, 1), np.take_along_axis(worth, first, 1)
        total, n = worth.sum(1), (both >= 0).sum(1)
        part = worth @ member[: worth.shape[1]]
        parts = (both >= 0).astype(np.float64) @ member[: worth.shape[1]]
        slower = np.maximum(part / speed[h][:, None], (total[:, None] - part) / speed[low_][:, None])
        slower[(parts < 1) | (parts > n[:, None] - 1)] = np.inf  # no cell may end empty
        best = slower.argmin(1)
        ok = slower[np.arange(len(h)), best] < load[h] / speed[h] - 1e-12
        for cell, side in ((h[ok], 1), (low_[ok], 0)):
            mine = side == member[: worth.shape[1], best[ok]].T
            units = np.where(mine, both[ok], -1)
            order = np.argsort(units < 0, axis=1, kind="stable")[:, : unit.shape[1]]
            fits = np.take_along_axis(units, order, 1)
            unit[cell], value[cell] = -1, 0.0
            unit[cell, : fits.shape[1]] = fits
            value[cell, : fits.shape[1]] = np.where(fits >= 0, np.take_along_axis(worth[ok], order, 1), 0.0)
            load[cell] = value[cell].sum(1)
            _pack(unit, value, cell)


def _pack(unit: np.ndarray, value: np.ndarray, cells: np.ndarray) -> None:
    """Close the gaps in the given cells, so that units fill the first places, costliest first."""
    order = np.lexsort((-value[cells], unit[cells] < 0), axis=-1)
    unit[cells] = np.take_along_axis(unit[cells], order, 1)
    value[cells] = np.take_along_axis(value[cells], order, 1)
