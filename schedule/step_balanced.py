"""The default policy: whole optimizer steps, each with the corpus's composition and level over the ranks.

Ranks may run different numbers of microbatches in a step, so only the step's end is a barrier.  Order of work: deal all
samples to steps in cost strata (dealing.py); per step, cut each shape's samples into units of a few percent of a
rank's load; LPT; exchanges; merge equal shapes that met on a rank up to the memory cap; exchanges again with what was
merged.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from graphopt.errors import PlanInfeasible
from graphopt.schedule import dealing
from graphopt.schedule.balance import lpt, refine
from graphopt.schedule.problem import OVER_COMPUTE, REPEATED, Leftover, Problem, Window, slot_numbers, split_sizes

GRAIN = 0.05  # a unit costs at most this fraction of a rank's step, if one sample does
TOLERANCE = 0.002  # exchanges stop when the fullest rank is this close to the mean
ROUNDS = (8, 12, 30)  # of exchanges: before merging, after merging, and after merging what met then
WORKERS = min(4, os.cpu_count() or 1)
WINDOW_SAMPLES = 1 << 17


def plan(problem: Problem, *, window_steps: int | None = None) -> tuple[Iterator[Window], Leftover, int]:
    """Windows of the plan, what is left over, and the number of steps."""
    p = problem
    p.refuse_oversize()
    rows, left = whole_atoms(p)
    atoms = len(rows) // p.atom
    repeated = 0
    if atoms < p.groups:
        rows, left, repeated = too_few(p, rows, left)
        atoms = len(rows) // p.atom
        if not atoms:
            return iter(()), left, 0
    shape = p.samples.shape_id[rows[:: p.atom]]
    total = estimate(p, shape)
    steps = int(min(max(1.0, total // (p.groups * p.step_cost)), atoms // p.groups))
    cost = p.each * p.atom
    step = dealing.deal(cost[shape], steps, p.seed, p.epoch)
    return _windows(p, rows, shape, step, steps, window_steps, repeated), left, steps


def estimate(p: Problem, shape: np.ndarray) -> float:
    """Predicted seconds of all atoms, microbatches as full as memory and the grain allow."""
    count = np.bincount(shape, minlength=len(p.each)) * p.atom
    size = np.clip(np.minimum(p.limit(), GRAIN * p.step_cost // p.each), p.atom, None)
    pieces = np.ceil(count / size)
    return float((pieces * np.maximum(p.floor, p.fixed + count / np.maximum(pieces, 1) * p.each)).sum())


def whole_atoms(p: Problem) -> tuple[np.ndarray, Leftover]:
    """Rows sorted from costly to cheap in whole atoms of one shape; rows that fill no atom are the tail."""
    rows = dealing.by_cost(p.samples.shape_id, p.each, p.rows)
    if p.atom == 1:
        return rows, Leftover.none()
    shape = p.samples.shape_id[rows]
    start = np.flatnonzero(np.r_[True, np.diff(shape) != 0])
    count = np.diff(np.r_[start, len(rows)])
    within = np.arange(len(rows)) - np.repeat(start, count)
    whole = within < np.repeat(count // p.atom * p.atom, count)
    rest = rows[~whole]
    if p.tail != "pad":
        return rows[whole], Leftover.by(p.tail, rest)
    # Pad: each unfilled atom is filled up with other samples of its shape, or with itself where there are none.
    parts, extra = [rows[whole]], []
    for s, n in zip(start[count % p.atom > 0], count[count % p.atom > 0]):
        group = rows[s : s + n]
        need = p.atom - n % p.atom
        filler = np.resize(group, need)
        parts.append(np.concatenate([group[n // p.atom * p.atom :], filler]))
        extra.append(filler)
    left = Leftover.none()
    left.repeated = np.sort(np.concatenate(extra)) if extra else left.repeated
    padded = np.concatenate(parts)
    cost_order = np.argsort(-p.each[p.samples.shape_id[padded[:: p.atom]]], kind="stable")
    return padded.reshape(-1, p.atom)[cost_order].ravel(), left


def too_few(p: Problem, rows: np.ndarray, left: Leftover) -> tuple[np.ndarray, Leftover, int]:
    """Fewer atoms than groups: one step cannot give every rank work without repeats."""
    if p.tail == "pad" and len(rows):
        need = p.groups * p.atom - len(rows)
        filler = np.resize(rows.reshape(-1, p.atom), (need // p.atom, p.atom)).ravel()
        left.repeated = np.sort(np.concatenate([left.repeated, filler]))
        both = np.concatenate([rows, filler]).reshape(-1, p.atom)
        order = np.argsort(-p.each[p.samples.shape_id[both[:, 0]]], kind="stable")
        return both[order].ravel(), left, need
    if p.tail == "drop":
        left.dropped = np.sort(np.concatenate([left.dropped, rows]))
        return rows[:0], left, 0
    raise PlanInfeasible(
        f"{len(rows)} samples ({len(rows) // p.atom} units of {p.atom}) cannot give each of {p.groups} "
        "data-parallel groups "
        "one microbatch",
        where=p.samples.where,
        remedy='use fewer ranks, tail="pad" (repeats are listed) or tail="drop"',
    )


def _windows(
    p: Problem,
    rows: np.ndarray,
    shape: np.ndarray,
    step: np.ndarray,
    steps: int,
    window_steps: int | None,
    repeated: int,
) -> Iterator[Window]:
    """Balance some steps at a time."""
    # The n-th use of a row is a repeat; flagged on its microbatch.
    again = second_uses(rows) if repeated or p.tail == "pad" else None
    order = np.argsort(step.astype(np.int64) * len(p.each) + shape, kind="stable")
    step, shape = step[order], shape[order]
    rows = rows.reshape(-1, p.atom)[order]
    again = None if again is None else again.reshape(-1, p.atom)[order]
    per_step = max(1, len(step) // steps)
    width = window_steps or max(16, WINDOW_SAMPLES // per_step)
    bounds = np.searchsorted(step, np.arange(0, steps + width, width))
    # Windows are independent; numpy lets go of the interpreter lock in its loops, so a second thread helps.
    with ThreadPoolExecutor(WORKERS) as pool:
        waiting: deque[Future[Window]] = deque()
        for first, a, b in zip(range(0, steps, width), bounds[:-1], bounds[1:]):
            waiting.append(
                pool.submit(
                    _balance,
                    p,
                    rows[a:b],
                    shape[a:b],
                    step[a:b] - first,
                    min(width, steps - first),
                    first,
                    None if again is None else again[a:b],
                )
            )
            if len(waiting) > WORKERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def second_uses(rows: np.ndarray) -> np.ndarray:
    """True where a row occurs again, bool [n]."""
    again = np.ones(len(rows), bool)
    again[np.unique(rows, return_index=True)[1]] = False
    return again


def _balance(
    p: Problem, rows: np.ndarray, shape: np.ndarray, step: np.ndarray, steps: int, first: int, again: np.ndarray | None
) -> Window:
    """One window; atoms sorted by (step, shape)."""
    most = np.maximum(p.limit() // p.atom, 1)  # in atoms
    each = p.each * p.atom
    cell = step.astype(np.int64) * len(each) + shape
    group_start = np.flatnonzero(np.r_[True, np.diff(cell) != 0])
    count = np.diff(np.r_[group_start, len(cell)])
    g_shape, g_step = shape[group_start], step[group_start]
    load = np.bincount(g_step, count * each[g_shape], steps) / p.groups
    # Under the floor a smaller unit costs no less.
    worth = np.maximum(GRAIN * load[g_step], p.floor - p.fixed[g_shape])
    grain = np.clip(worth // each[g_shape], 1, most[g_shape]).astype(np.int64)
    # A step with fewer units than groups is cut finer, down to single atoms, so that no rank stays idle.
    few = np.bincount(g_step, -(-count // grain), steps) < p.groups
    grain[few[g_step]] = 1
    group, size = split_sizes(count, grain, None)
    u_step, u_shape = g_step[group], g_shape[group]
    rank = lpt(u_step, p.cost(u_shape, size * p.atom), steps, p.groups, p.speeds)
    for rounds in ROUNDS:
        rank = refine(
            u_step,
            rank,
            p.cost(u_shape, size * p.atom),
            steps,
            p.groups,
            p.speeds,
            tolerance=TOLERANCE,
            rounds=rounds,
        )
        u_step, rank, u_shape, size = merge(u_step, rank, u_shape, size, most, p, len(each))
    return assemble(p, u_step, rank, u_shape, size, rows, again, first)


def merge(
    step: np.ndarray, rank: np.ndarray, shape: np.ndarray, size: np.ndarray, most: np.ndarray, p: Problem, shapes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Join units of one shape that met on a rank into as few microbatches as memory allows."""
    key = (step.astype(np.int64) * p.groups + rank) * shapes + shape
    distinct, inverse = np.unique(key, return_inverse=True)
    total = np.bincount(inverse, size).astype(np.int64)
    allowed = tuple(b // p.atom for b in p.allowed) if p.allowed else None
    group, size = split_sizes(total, most[distinct % shapes], allowed)
    cell = distinct[group] // shapes
    return (
        (cell // p.groups).astype(np.int32),
        (cell % p.groups).astype(np.int32),
        (distinct[group] % shapes).astype(np.int32),
        size,
    )


def assemble(
    p: Problem,
    step: np.ndarray,
    rank: np.ndarray,
    shape: np.ndarray,
    size: np.ndarray,
    rows: np.ndarray,
    again: np.ndarray | None,
    first: int,
) -> Window:
    """Give each microbatch its samples.  `rows` [atoms, atom] are sorted by (step, shape), and so are counts of
    `size`."""
    take = np.lexsort((rank, shape, step))
    start = np.empty(len(size), np.int64)
    start[take] = np.cumsum(size[take]) - size[take]
    # Costliest first within a rank: the allocator then meets its largest blocks before any small ones.
    order = np.lexsort((shape, -p.cost(shape, size * p.atom), rank, step))
    step, rank, shape, size, start = step[order], rank[order], shape[order], size[order], start[order]
    ends = np.cumsum(size)
    index = np.arange(ends[-1]) + np.repeat(start - (ends - size), size)
    flags = np.zeros(len(step), np.uint8)
    if p.target is not None:
        # Only a smallest unit that exceeds the target all alone: it runs, flagged.
        flags[size * p.atom > p.target[shape]] |= OVER_COMPUTE
    if again is not None:
        flags[np.add.reduceat(again[index].any(1), ends - size) > 0] |= REPEATED
    return Window(
        (step + first).astype(np.int32),
        rank,
        slot_numbers(step, rank),
        shape,
        flags,
        np.r_[0, ends * p.atom].astype(np.int64),
        rows[index].ravel(),
    )
