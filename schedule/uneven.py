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

BINS = 512  # filled at once, in at least 16 and at most 64 steps: more find closer neighbours, fewer mix better
Units = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # step, rank, shape, size (in atoms)


def joined(parts: list[Units]) -> Units:
    """Units one behind the other."""
    step, rank, shape, size = (np.concatenate(x) for x in zip(*parts))
    return step, rank, shape, size


def only(units: Units, which: np.ndarray) -> Units:
    """Some of the units."""
    step, rank, shape, size = (x[which] for x in units)
    return step, rank, shape, size


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
        many = w * p.groups
        chunk, bins, shapes, sizes = _fill(
            p, (step[mine] - start) // w, shape[mine], size[mine], chunks, many, most, tolerance, rounds
        )
        load = np.bincount(chunk.astype(np.int64) * many + bins, p.cost(shapes, sizes * p.atom), chunks * many)
        row, rank = _like_with_like(load.reshape(chunks, many), p)
        # From costly to cheap so far: a random order, for the optimizer's sake.
        mixed = np.argsort(key[start : start + chunks * w].reshape(chunks, w), axis=1, kind="stable")
        order = np.argsort(mixed, axis=1)
        new = order[chunk, row[chunk, bins]] + chunk * w + start
        parts.append((new.astype(np.int32), rank[chunk, bins].astype(np.int32), shapes, sizes))
    return joined(parts)


def _fill(
    p: Problem, chunk: np.ndarray, shape: np.ndarray, size: np.ndarray, chunks: int, bins: int, most: np.ndarray,
    tolerance: float, rounds: tuple[int, ...],
) -> Units:  # fmt: skip
    """Units to the bins of their chunk, all alike."""
    bin_ = lpt(chunk, p.cost(shape, size * p.atom), chunks, bins, None)
    for n in rounds:
        cost = p.cost(shape, size * p.atom)
        bin_ = refine(chunk, bin_, cost, chunks, bins, None, tolerance=tolerance, rounds=n, stop=p.stop)
        chunk, bin_, shape, size = merge(chunk, bin_, shape, size, most, p, bins)
    return chunk, bin_, shape, size


def _like_with_like(load: np.ndarray, p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """(step within the chunk, rank) of each bin, both int64 [chunks, bins], from load [chunks, bins]: neighbours in
    cost form a step, and the costlier ones go to its faster ranks."""
    order = np.argsort(-load, axis=1, kind="stable")
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(load.shape[1]), order.shape), 1)
    ranks = np.arange(p.groups) if p.speeds is None else np.argsort(-p.speeds, kind="stable")
    return place // p.groups, ranks[place % p.groups]


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
