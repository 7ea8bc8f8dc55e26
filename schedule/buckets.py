"""Policies with one batch size per bucket: equal tokens, and AdaptiveLoad's dual constraint to the letter.

Both draw batches at random, so ranks get different work in a step; they are here to be compared with, and because
trainers that cannot change their loop use them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from graphopt.errors import ConfigError, PlanInfeasible
from graphopt.schedule import dealing
from graphopt.schedule.problem import (
    OVER_COMPUTE,
    OVER_MEMORY,
    PARTIAL,
    REPEATED,
    Leftover,
    Problem,
    Window,
    slot_numbers,
)
from graphopt.schedule.shapes import ShapeTable

WINDOW_BATCHES = 1 << 18


def adaptive_batch(tokens: np.ndarray, m_mem: float, m_comp: float, p: float) -> tuple[np.ndarray, np.ndarray]:
    """AdaptiveLoad's batch size: B = max(1, min(floor(M_mem / S), floor(M_comp / S^p))).

    Args:
        tokens: S per bucket, int64 [shapes].
        m_mem: memory limit in tokens per microbatch.
        m_comp: compute limit in tokens^p per microbatch.
        p: exponent of the fitted cost.

    Returns:
        B, int64 [shapes], and flags, uint8 [shapes]: the outer max(1, .) breaks a limit where a flag is set.
    """
    s = np.asarray(tokens, dtype=np.float64)
    by_memory, by_compute = np.floor(m_mem / s), _floor_div(m_comp, s**p)
    flags = np.where(by_memory < 1, OVER_MEMORY, 0) | np.where(by_compute < 1, OVER_COMPUTE, 0)
    return np.maximum(1, np.minimum(by_memory, by_compute)).astype(np.int64), flags.astype(np.uint8)


def _floor_div(limit: float, cost: np.ndarray) -> np.ndarray:
    """floor(limit / cost), robust to the last bit: 4096^2 * 4 is 2^26 also where pow rounds up."""
    return np.floor(limit / cost * (1 + 1e-12))


def compute_target(tokens: np.ndarray, m_comp: float, p: float) -> np.ndarray:
    """floor(M_comp / S^p), int64 [shapes]; 0 where one sample exceeds the target."""
    return _floor_div(m_comp, np.asarray(tokens, np.float64) ** p).astype(np.int64)


def bucket_table(
    tokens: list[int] | np.ndarray | ShapeTable, *, m_mem: float, m_comp: float, p: float = 2.0
) -> list[dict]:
    """Batch size of each bucket under both limits, memory hard and compute as a target.

    Args:
        tokens: S of each bucket, or a shape table.
        m_mem: tokens per microbatch. m_comp: limit on B * S^p.

    Returns:
        One dict per bucket: name, tokens, batch, binds ("memory" or "compute"), flag ("" or "over compute target").

    Raises:
        PlanInfeasible: a bucket of which one sample exceeds the memory limit, by name.
    """
    shapes = tokens if isinstance(tokens, ShapeTable) else ShapeTable.of_tokens(tokens)
    rows = []
    s = shapes.tokens
    by_memory, by_compute = np.floor(m_mem / s).astype(np.int64), compute_target(s, m_comp, p)
    for i in range(len(shapes)):
        if by_memory[i] < 1:
            raise PlanInfeasible(
                f"bucket {shapes.name(i)} has {s[i]} tokens, {s[i] - m_mem:g} over the memory limit {m_mem:g}",
                where=f"bucket {shapes.name(i)}",
                remedy="raise m_mem, use sequence parallelism, or remove it",
            )
        rows.append(
            {
                "name": shapes.name(i),
                "tokens": int(s[i]),
                "batch": int(max(1, min(by_memory[i], by_compute[i]))),
                "binds": "memory" if by_memory[i] <= by_compute[i] else "compute",
                "flag": "over compute target" if by_compute[i] < 1 else "",
            }
        )
    return rows


def plan(
    problem: Problem, batch: np.ndarray, flags: np.ndarray, first: np.ndarray
) -> tuple[Iterator[Window], Leftover, int]:
    """Draw each bucket's samples in random order into batches, and the batches in random order over steps and ranks.

    Args:
        batch: int64 [shapes], B. flags: uint8 [shapes].
        first: rows that an earlier epoch left over; their batches come first.
    """
    p = problem
    if p.allowed:
        batch = np.array(p.allowed)[np.maximum(np.searchsorted(p.allowed, batch, "right") - 1, 0)]
        if (batch[np.unique(p.samples.shape_id[p.rows])] > p.cap[np.unique(p.samples.shape_id[p.rows])]).any():
            raise PlanInfeasible(
                f"the smallest allowed B = {p.allowed[0]} is over the memory limit for some bucket",
                remedy="allow smaller batches",
            )
    shape = p.samples.shape_id[p.rows]
    order = np.argsort(shape, kind="stable")
    rows, shape = p.rows[order], shape[order]
    start = np.flatnonzero(np.r_[True, np.diff(shape) != 0])
    count = np.diff(np.r_[start, len(rows)])
    pieces = -(-count // batch[shape[start]])
    b_shape = np.repeat(shape[start], pieces)
    nth = np.arange(len(b_shape)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = np.repeat(start, pieces) + nth * batch[b_shape]
    size = np.minimum(batch[b_shape], np.repeat(start + count, pieces) - begin)
    mixed = dealing.permutation(len(size), p.seed, p.epoch, dealing.BATCH)
    if len(first):
        owed = np.zeros(len(p.samples), bool)
        owed[first] = True
        mixed = mixed[np.argsort(~owed[rows[begin[mixed]]], kind="stable")]
    each = rounds(p.microbatches, len(mixed) // p.groups + 1)  # one step too many
    ends = each.cumsum() * p.groups
    steps = int(np.searchsorted(ends, len(mixed), "right"))
    over = len(mixed) - int(ends[steps - 1] if steps else 0)
    left = Leftover.none()
    repeated = 0
    if over and p.tail == "pad":
        repeated = int(ends[steps]) - len(mixed)
        filler = mixed[np.arange(repeated) % len(mixed)]
        left.repeated = np.sort(np.concatenate([rows[begin[i] : begin[i] + size[i]] for i in filler]))
        mixed, steps = np.concatenate([mixed, filler]), steps + 1
    elif over:
        tail = mixed[len(mixed) - over :]
        left = Leftover.by(p.tail, np.concatenate([rows[begin[i] : begin[i] + size[i]] for i in tail]))
        mixed = mixed[: len(mixed) - over]
        if not steps and p.tail == "carry":
            raise PlanInfeasible(
                f"{over} batches do not fill one step of {p.groups} groups x {p.microbatches} microbatches",
                where=p.samples.where,
                remedy='use fewer ranks, tail="pad" or tail="drop"',
            )
    mark = np.where(size < batch[b_shape], PARTIAL, 0).astype(np.uint8) | flags[b_shape]
    return _windows(p, each[:steps], mixed, begin, size, b_shape, mark, rows, repeated), left, steps


def rounds(microbatches: float, slots: int) -> np.ndarray:
    """Microbatches that every rank runs in each step: K, or the whole numbers beside it with K as their mean; int64
    [steps], enough steps for `slots` microbatches."""
    ends = np.floor(np.arange(int(slots / microbatches) + 2) * microbatches + 1e-9).astype(np.int64)
    return np.diff(ends)


def _windows(
    p: Problem,
    each: np.ndarray,
    mixed: np.ndarray,
    begin: np.ndarray,
    size: np.ndarray,
    shape: np.ndarray,
    mark: np.ndarray,
    rows: np.ndarray,
    repeated: int,
) -> Iterator[Window]:
    """Some whole steps at a time."""
    borders = np.r_[0, each.cumsum() * p.groups]
    width = max(1, int(WINDOW_BATCHES // (p.groups * p.microbatches)))
    for first in range(0, len(each), width):
        mine = each[first : first + width]
        start = borders[first : first + width]
        b = mixed[start[0] : start[-1] + mine[-1] * p.groups]
        position = np.arange(start[0], start[0] + len(b))
        step = np.repeat(np.arange(first, first + len(mine)), mine * p.groups)
        rank = (position - borders[step]) // each[step]
        ends = np.cumsum(size[b])
        index = np.arange(ends[-1]) + np.repeat(begin[b] - (ends - size[b]), size[b])
        flags = mark[b].copy()
        flags[position >= len(mixed) - repeated] |= REPEATED
        yield Window(
            step.astype(np.int32),
            rank.astype(np.int32),
            slot_numbers(step, rank),
            shape[b],
            flags,
            np.r_[0, ends].astype(np.int64),
            rows[index],
        )


def required(value: float | None, name: str, policy: str, remedy: str) -> float:
    """A limit that a policy cannot do without."""
    if value is None:
        raise ConfigError(f"policy {policy!r} needs {name}", where="plan_batches", remedy=remedy)
    return value
