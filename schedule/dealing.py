"""Samples in, optimizer steps out: a seeded order, and strata dealt so that every step costs the same.

The order comes from raw Philox output and stable sorts only: numpy promises the raw stream of a bit generator for ever,
but not the stream of `Generator.permutation`, and a plan must have the same bytes on any host.
"""

from __future__ import annotations

import numpy as np

ORDER, DEAL, SLOT, BATCH, STEP = range(5)  # independent streams of one seed


def raw_bits(n: int, seed: int, epoch: int, stream: int) -> np.ndarray:
    """n random uint64 of a counter-based generator keyed by (seed, epoch, stream)."""
    key = np.array([np.uint64(seed & (2**64 - 1)), np.uint64((epoch & (2**32 - 1)) << 8 | stream)], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(n)


def permutation(n: int, seed: int, epoch: int, stream: int = ORDER) -> np.ndarray:
    """A seeded order of n things, int64 [n]."""
    return np.argsort(raw_bits(n, seed, epoch, stream), kind="stable")


def by_cost(shape_id: np.ndarray, cost: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Rows from the costliest shape down; rows of one shape in the given random order.

    Args:
        shape_id: int32 [rows]. cost: float64 [shapes], seconds. order: int64 [n], rows to take, shuffled.
    """
    rank_of = np.empty(len(cost), np.int32)
    rank_of[np.lexsort((np.arange(len(cost)), -cost))] = np.arange(len(cost), dtype=np.int32)
    key = rank_of[shape_id[order]]
    # Shapes rarely exceed 65,536, and numpy's stable sort of 16-bit keys is a radix sort: linear in the rows.
    key = key.astype(np.uint16) if len(cost) <= 1 << 16 else key
    return order[np.argsort(key, kind="stable")]


def deal(cost: np.ndarray, steps: int, seed: int, epoch: int, stream: int = DEAL) -> np.ndarray:
    """Deal things, sorted from costly to cheap, to steps of equal size and nearly equal cost.

    A stratum is `steps` consecutive things; each step gets one of each stratum, so that every step's composition is the
    corpus's.  Within a stratum the costlier things go to the steps that have cost less so far; the first stratum, and
    steps with equal cost, in random order.

    Args:
        cost: float64 [n], descending, seconds.
        steps: how many steps.

    Returns:
        int32 [n], the step of each thing.  Sizes differ by one at most.
    """
    step = np.empty(len(cost), np.int32)
    load = np.zeros(steps)
    jitter = permutation(steps, seed, epoch, stream)
    for start in range(0, len(cost), steps):
        part = cost[start : start + steps]
        chosen = jitter[np.argsort(load[jitter], kind="stable")][: len(part)]
        step[start : start + len(part)] = chosen
        load[chosen] += part
    return step


def shuffle_groups(groups: int, seed: int, epoch: int, stream: int) -> np.ndarray:
    """A random new number for each of `groups` groups, int64 [groups] (used to shuffle the order of steps)."""
    out = np.empty(groups, np.int64)
    out[permutation(groups, seed, epoch, stream)] = np.arange(groups)
    return out
