"""Steps of unlike cost, each level over its ranks: for data whose equal steps cannot be level.

Where a rank's step holds few samples and many of them are about as costly as the costliest (videos cut at one length),
a step with the corpus's composition leaves some rank with one costly sample too many, whatever the order.  The same
samples are level if like meets like: fill the ranks of many steps at once, as evenly as can be, sort these bins, and
let neighbours form a step.  Steps then differ in cost and tokens (tau is their mean), and in composition.
"""

from __future__ import annotations

import numpy as np

from graphopt.schedule import dealing
from graphopt.schedule.balance import lpt, refine
from graphopt.schedule.problem import Problem, split_sizes

BINS = 128  # filled at once, in at least 16 and at most 64 steps: more find closer neighbours, fewer mix better
Units = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # step, rank, shape, size (in atoms)


def chunk_steps(groups: int) -> int:
    """Steps whose samples may change places."""
    return int(np.clip(BINS // groups, 16, 64))


def waste(p: Problem, units: Units, steps: int) -> np.ndarray:
    """Predicted seconds of each chunk of steps over what they would take if no rank waited, minus 1; 0 where no units
    are."""
    step, rank, shape, size = units
    cell = step.astype(np.int64) * p.groups + rank
    busy = np.bincount(cell, p.cost(shape, size * p.atom), steps * p.groups).reshape(steps, p.groups)
    speed = np.ones(p.groups) if p.speeds is None else p.speeds
    starts = np.arange(0, steps, chunk_steps(p.groups))
    longest = np.add.reduceat((busy / speed).max(1), starts)
    mean = np.add.reduceat(busy.sum(1), starts) / speed.sum()
    return np.divide(longest, mean, out=np.ones_like(mean), where=mean > 0) - 1


def regroup(
    p: Problem, step: np.ndarray, shape: np.ndarray, size: np.ndarray, steps: int, most: np.ndarray, first: int,
    *, tolerance: float, rounds: tuple[int, ...],
) -> Units:  # fmt: skip
    """Form steps of bins that are alike.

    Args:
        step, shape, size: units as they were dealt to `steps` steps, sizes in atoms; of whole chunks.
        most: largest size of each shape, in atoms.
        first: number of the window's first step, for the order.
        tolerance, rounds: of the exchanges between bins.
    """
    width = min(steps, chunk_steps(p.groups))
    key = dealing.raw_bits(first + steps, p.seed, p.epoch, dealing.STEP)[first:]
    parts: list[Units] = []
    for start, chunks, w in ((0, steps // width, width), (steps // width * width, 1, steps % width)):
        if not w or not chunks:
            continue
        mine = (step >= start) & (step < start + chunks * w)
        chunk, bins, shapes, sizes = _fill(
            p, (step[mine] - start) // w, shape[mine], size[mine], chunks, w, most, tolerance, rounds
        )
        load = np.bincount(
            chunk.astype(np.int64) * w * p.groups + bins, p.cost(shapes, sizes * p.atom), chunks * w * p.groups
        )
        row, rank = _like_with_like(load.reshape(chunks, w, p.groups), p.speeds)
        # From costly to cheap so far: a random order, for the optimizer's sake.
        mixed = np.argsort(key[start : start + chunks * w].reshape(chunks, w), axis=1, kind="stable")
        order = np.argsort(mixed, axis=1)
        new = order[chunk, row[chunk, bins]] + chunk * w + start
        parts.append((new.astype(np.int32), rank[chunk, bins].astype(np.int32), shapes, sizes))
    return tuple(np.concatenate(x) for x in zip(*parts))  # type: ignore[return-value]


def _fill(
    p: Problem, chunk: np.ndarray, shape: np.ndarray, size: np.ndarray, chunks: int, w: int, most: np.ndarray,
    tolerance: float, rounds: tuple[int, ...],
) -> Units:  # fmt: skip
    """Units to the w * groups bins of their chunk; bin b belongs to rank b % groups."""
    bins = w * p.groups
    speeds = None if p.speeds is None else np.tile(p.speeds, w)
    bin_ = lpt(chunk, p.cost(shape, size * p.atom), chunks, bins, speeds)
    for n in rounds:
        cost = p.cost(shape, size * p.atom)
        bin_ = refine(chunk, bin_, cost, chunks, bins, speeds, tolerance=tolerance, rounds=n)
        chunk, bin_, shape, size = merge(chunk, bin_, shape, size, most, p, bins)
    return chunk, bin_, shape, size


def _like_with_like(load: np.ndarray, speeds: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """(step within the chunk, rank) of each bin, both int64 [chunks, w * groups], from load [chunks, w, groups]."""
    chunks, w, groups = load.shape
    place = np.empty((chunks, w * groups), np.int64)
    if speeds is None:
        order = np.argsort(-load.reshape(chunks, -1), axis=1, kind="stable")
        np.put_along_axis(place, order, np.arange(w * groups)[None].repeat(chunks, 0), 1)
        return place // groups, place % groups
    # A bin was filled for its rank's speed: only bins of one rank change places.
    order = np.argsort(-load, axis=1, kind="stable")
    row = np.empty_like(order)
    np.put_along_axis(row, order, np.arange(w)[None, :, None].repeat(chunks, 0).repeat(groups, 2), 1)
    return row.reshape(chunks, -1), np.broadcast_to(np.arange(groups), load.shape).reshape(chunks, -1)


def merge(
    step: np.ndarray, rank: np.ndarray, shape: np.ndarray, size: np.ndarray, most: np.ndarray, p: Problem, ranks: int
) -> Units:
    """Join units of one shape that met on a rank into as few microbatches as memory allows."""
    shapes = len(p.each)
    key = (step.astype(np.int64) * ranks + rank) * shapes + shape
    distinct, inverse = np.unique(key, return_inverse=True)
    total = np.bincount(inverse, size).astype(np.int64)
    allowed = tuple(b // p.atom for b in p.allowed) if p.allowed else None
    group, size = split_sizes(total, most[distinct % shapes], allowed)
    cell = distinct[group] // shapes
    return (
        (cell // ranks).astype(np.int32),
        (cell % ranks).astype(np.int32),
        (distinct[group] % shapes).astype(np.int32),
        size,
    )
