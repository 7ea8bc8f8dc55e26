"""The default policy: whole optimizer steps, each with the corpus's composition and level over the ranks.

Ranks may run different numbers of microbatches in a step, so only the step's end is a barrier.  Order of work: deal all
samples to steps in cost strata (dealing.py); per step, cut each shape's samples into units of a few percent of a
rank's load; LPT; exchanges; merge equal shapes that met on a rank up to the memory cap; exchanges again with what was
merged.  Where that leaves ranks waiting, steps are formed anew, of unlike cost (uneven.py).
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
from graphopt.schedule.uneven import Units, chunk_steps, joined, merge, only, regroup, waste

GRAIN = 0.05  # a unit costs at most this fraction of a rank's step, if one sample does
UNLEVEL = 0.02  # predicted waiting above which steps need no longer cost alike
HOPELESS = 0.08  # and above which, after LPT, it is not tried for long to level equal ones
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
    width = -(-width // chunk_steps(p.groups)) * chunk_steps(p.groups) if p.uneven else width
    bounds = np.searchsorted(step, np.arange(0, steps + width, width))
    # Windows are independent; numpy lets go of the interpreter lock in its loops, so a second thread helps.
    with ThreadPoolExecutor(WORKERS) as pool:
        waiting: deque[Future[Window]] = deque()
        try:
            for first, a, b in zip(range(0, steps, width), bounds[:-1], bounds[1:]):
                some = None if again is None else again[a:b]
                waiting.append(pool.submit(_balance, p, rows[a:b], shape[a:b], step[a:b] - first,
                                           min(width, steps - first), first, some))  # fmt: skip
                if len(waiting) > WORKERS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BaseException:  # Ctrl-C, say: the pool would wait for every window that was begun
            p.stop.set()
            raise


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
    made = lpt_and_exchange(p, u_step, u_shape, size, steps, most)
    bad = waste(p, made, steps) > UNLEVEL
    if p.uneven and bad.any():
        chunk = chunk_steps(p.groups)
        mine = bad[u_step // chunk]
        far = regroup(p, u_step[mine], u_shape[mine], size[mine], steps, most, first, tolerance=TOLERANCE,
                      rounds=ROUNDS[:2])  # fmt: skip
        far = exchange(p, far, steps, most)
        better = bad & (waste(p, far, steps) < waste(p, made, steps))
        made = joined([only(made, ~better[made[0] // chunk]), only(far, better[far[0] // chunk])])
        p.unlike.update([first] if better.any() else [])
        # Units have changed steps: rows follow, shape by shape.
        by_shape, wanted = np.argsort(shape, kind="stable"), _by_shape(made)
        rows, again = rows[by_shape][wanted], None if again is None else again[by_shape][wanted]
    return assemble(p, *made, rows, again, first)


def lpt_and_exchange(
    p: Problem, step: np.ndarray, shape: np.ndarray, size: np.ndarray, steps: int, most: np.ndarray
) -> Units:
    """Units to ranks, within the steps they were dealt to."""
    rank = lpt(step, p.cost(shape, size * p.atom), steps, p.groups, p.speeds)
    units = step, rank, shape, size
    if not p.uneven:
        return exchange(p, units, steps, most)
    hopeless = (waste(p, units, steps) > HOPELESS)[step // chunk_steps(p.groups)]
    return joined([
        exchange(p, only(units, which), steps, most, turns)
        for which, turns in ((~hopeless, ROUNDS), (hopeless, ROUNDS[:1])) if which.any()
    ])  # fmt: skip


def exchange(p: Problem, units: Units, steps: int, most: np.ndarray, turns: tuple[int, ...] = ROUNDS) -> Units:
    """Exchange units between a step's ranks and merge those that meet."""
    step, rank, shape, size = units
    for rounds in turns:
        cost = p.cost(shape, size * p.atom)
        rank = refine(step, rank, cost, steps, p.groups, p.speeds, tolerance=TOLERANCE, rounds=rounds,
                      stop=p.stop)  # fmt: skip
        step, rank, shape, size = merge(step, rank, shape, size, most, p, p.groups)
    return step, rank, shape, size


def _by_shape(units: Units) -> np.ndarray:
    """Where the atoms of units in the order (step, shape, rank) stand if they are ordered by (shape, step, rank)."""
    step, rank, shape, size = units
    start = np.empty(len(size), np.int64)
    order = np.lexsort((rank, step, shape))
    start[order] = np.cumsum(size[order]) - size[order]
    wanted = np.lexsort((rank, shape, step))
    ends = np.cumsum(size[wanted])
    return np.arange(ends[-1]) + np.repeat(start[wanted] - (ends - size[wanted]), size[wanted])


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
    # Costliest first within a rank: the allocator then meets its largest blocks before any small ones, and the gather
    # of parameters hides under it.  The second last, so that the reduction of gradients hides as well.
    order = np.lexsort((shape, -p.cost(shape, size * p.atom), rank, step))
    k = slot_numbers(step[order], rank[order])
    order = order[np.lexsort((np.where(k == 1, np.iinfo(k.dtype).max, k), rank[order], step[order]))]
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
