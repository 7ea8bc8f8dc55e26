"""Step-balanced plans where every microbatch is a barrier: ZeRO-3, pipelines, anything with a collective per
microbatch.

Every rank runs K microbatches a step.  Units as near to the costliest sample as memory allows are sorted by cost; N
consecutive ones form a slot, so that the ranks of a slot are level; slots are dealt to steps in strata.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from graphopt.schedule import dealing
from graphopt.schedule.problem import OVER_COMPUTE, REPEATED, Leftover, Problem, Window, slot_numbers, split_sizes
from graphopt.schedule.step_balanced import second_uses, too_few, whole_atoms

WINDOW_UNITS = 1 << 17


def plan(problem: Problem) -> tuple[Iterator[Window], Leftover, int]:
    """Windows of the plan, what is left over, and the number of steps."""
    p = problem
    p.refuse_oversize()
    per_step = p.groups * int(p.microbatches)
    rows, left = whole_atoms(p)
    repeated = 0
    if len(rows) // p.atom < per_step:
        # A unit of work for every place: as for steps, with K times the groups.
        wide = Problem(**{**p.__dict__, "groups": per_step})
        rows, left, repeated = too_few(wide, rows, left)
        if not len(rows):
            return iter(()), left, 0
    shape = p.samples.shape_id[rows[:: p.atom]]
    start, size = _units(p, shape, per_step)
    atoms = rows.reshape(-1, p.atom)
    over = len(start) % per_step
    if over:
        mixed = dealing.permutation(len(start), p.seed, p.epoch, dealing.BATCH)
        if p.tail == "pad":
            filler = mixed[: per_step - over]
            left.repeated = np.sort(np.concatenate([left.repeated, _rows(atoms, start[filler], size[filler])]))
            start, size = np.r_[start, start[filler]], np.r_[size, size[filler]]
            mark = np.r_[np.zeros(len(start) - len(filler), bool), np.ones(len(filler), bool)]
        else:
            tail = mixed[:over]
            rest = Leftover.by(p.tail, _rows(atoms, start[tail], size[tail]))
            left = Leftover(*(np.sort(np.concatenate(x)) for x in zip(_parts(left), _parts(rest))))
            kept = np.sort(mixed[over:])
            start, size = start[kept], size[kept]
            mark = np.zeros(len(start), bool)
    else:
        mark = np.zeros(len(start), bool)
    if repeated or p.tail == "pad":
        seen_again: np.ndarray = np.any(second_uses(rows).reshape(-1, p.atom), axis=1)
        mark |= np.logical_or.reduceat(seen_again[_rows(np.arange(len(atoms)), start, size)], np.cumsum(size) - size)
    u_shape = shape[start]
    cost = p.cost(u_shape, size * p.atom)
    order = np.argsort(-cost, kind="stable")
    slots = len(order) // p.groups
    slot_cost = cost[order].reshape(slots, p.groups).max(1)
    steps = slots // int(p.microbatches)
    by_cost = np.argsort(-slot_cost, kind="stable")
    step_of_slot = np.empty(slots, np.int32)
    step_of_slot[by_cost] = dealing.deal(slot_cost[by_cost], steps, p.seed, p.epoch, dealing.SLOT)
    if p.speeds is None:
        turn = dealing.raw_bits(slots, p.seed, p.epoch, dealing.BATCH) % np.uint64(p.groups)
        rank = (np.arange(p.groups)[None] + turn.astype(np.int64)[:, None]) % p.groups
    else:  # the fastest rank takes each slot's costliest unit
        rank = np.broadcast_to(np.argsort(-p.speeds, kind="stable"), (slots, p.groups))
    slot = np.repeat(np.arange(slots), p.groups)
    place = np.lexsort((slot, rank.ravel(), step_of_slot[slot]))
    unit = order[place]
    return (
        _windows(
            p,
            atoms,
            start[unit],
            size[unit],
            u_shape[unit],
            mark[unit],
            step_of_slot[slot][place],
            rank.ravel()[place],
            steps,
        ),
        left,
        steps,
    )


def _parts(left: Leftover) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Its three arrays."""
    return left.dropped, left.carried, left.repeated


def _rows(atoms: np.ndarray, start: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Rows of the given units, in their order; int64."""
    ends = np.cumsum(size)
    return atoms[np.arange(ends[-1]) + np.repeat(start - (ends - size), size)].ravel()


def _units(p: Problem, shape: np.ndarray, multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """(first atom, atoms) of units no costlier than the costliest atom.

    Where batch sizes are free, some units are halved until their number is a multiple of the places in a step.
    """
    each = p.each * p.atom
    ceiling = max(p.floor, float((p.fixed + each)[np.unique(shape)].max()))
    most = np.clip(np.minimum(p.limit() // p.atom, (ceiling - p.fixed) / each * (1 + 1e-12)), 1, None).astype(np.int64)
    begin = np.flatnonzero(np.r_[True, np.diff(shape) != 0])
    count = np.diff(np.r_[begin, len(shape)])
    allowed = tuple(b // p.atom for b in p.allowed) if p.allowed else None
    _, size = split_sizes(count, most[shape[begin]], allowed)
    if len(size) < multiple:
        _, size = split_sizes(count, np.ones_like(count), allowed)
    ends = np.cumsum(size)
    start = ends - size  # groups are consecutive in `shape`, and so are their units
    if p.allowed or len(shape) < len(start) + -len(start) % multiple:
        return start, size
    while need := -len(start) % multiple:
        pick = np.argsort(-size, kind="stable")[:need]
        pick = pick[size[pick] > 1]
        half = size[pick] // 2
        start = np.r_[start, start[pick] + size[pick] - half]
        size[pick] -= half
        size = np.r_[size, half]
    return start, size


def _windows(
    p: Problem,
    atoms: np.ndarray,
    start: np.ndarray,
    size: np.ndarray,
    shape: np.ndarray,
    mark: np.ndarray,
    step: np.ndarray,
    rank: np.ndarray,
    steps: int,
) -> Iterator[Window]:
    """Some whole steps at a time; k is the slot's place in its step."""
    per_step = p.groups * int(p.microbatches)
    width = max(1, WINDOW_UNITS // per_step) * per_step
    for a in range(0, steps * per_step, width):
        b = slice(a, a + width)
        flags = np.where(mark[b], REPEATED, 0).astype(np.uint8)
        if p.target is not None:
            flags[size[b] * p.atom > p.target[shape[b]]] |= OVER_COMPUTE
        yield Window(
            step[b].astype(np.int32),
            rank[b].astype(np.int32),
            slot_numbers(step[b], rank[b]),
            shape[b],
            flags,
            np.r_[0, np.cumsum(size[b]) * p.atom].astype(np.int64),
            _rows(atoms, start[b], size[b]),
        )
