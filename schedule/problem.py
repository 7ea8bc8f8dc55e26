"""What every policy works from, what every policy returns, and the limits both must keep."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from graphopt.errors import PlanInfeasible
from graphopt.schedule.dataset import Samples

OVER_MEMORY, OVER_COMPUTE, PARTIAL, REPEATED = 1, 2, 4, 8  # bits of a microbatch's `flags`
FLAG_NAMES = {OVER_MEMORY: "over memory", OVER_COMPUTE: "over compute target", PARTIAL: "partial", REPEATED: "repeated"}


@dataclass(frozen=True)
class Problem:
    """One planning problem, as columns over shapes.

    Args:
        samples: the data set.
        rows: int64 [n], the rows to plan, in seeded random order.
        fixed: float64 [shapes], seconds a microbatch costs whatever its size.
        each: float64 [shapes], seconds per sample.
        floor: seconds no microbatch undercuts.
        cap: int64 [shapes], largest B that memory allows; 0 = not even one sample fits.
        target: int64 [shapes], largest B under the compute target (0: one sample exceeds it), or None.
        allowed: ascending batch sizes a microbatch may have, or None for any.
        groups: data-parallel groups (ranks / sequence-parallel size).
        speeds: float64 [groups] relative speeds, or None.
        step_cost: wanted seconds per group and step.
        microbatches: K, where the policy or the mode fixes it (of a bucket policy also a mean).
        slots: every microbatch is a barrier (ZeRO-3, pipelines), so K is equal on all ranks.
        tail: "carry", "drop" or "pad".
        advice: what else may help where samples do not fit.
        uneven: steps may differ in cost where equal ones cannot be level.
        unlike: first step of each window where they do; planning fills it.
        stop: set where planning was interrupted: its threads then end within a round of exchanges.
    """

    samples: Samples
    rows: np.ndarray
    fixed: np.ndarray
    each: np.ndarray
    floor: float
    cap: np.ndarray
    target: np.ndarray | None
    allowed: tuple[int, ...] | None
    groups: int
    speeds: np.ndarray | None
    step_cost: float
    microbatches: float
    slots: bool
    tail: str
    seed: int
    epoch: int
    advice: str = ""
    uneven: bool = True
    unlike: set[int] = field(default_factory=set)
    stop: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)

    @property
    def tokens(self) -> np.ndarray:
        """S per shape, int64."""
        return self.samples.shapes.tokens

    @property
    def atom(self) -> int:
        """Samples that always stay together: the smallest allowed B."""
        return self.allowed[0] if self.allowed else 1

    def cost(self, shape: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Predicted seconds of microbatches of `size` samples, float64 [microbatches]."""
        return np.maximum(self.floor, self.fixed[shape] + size * self.each[shape])

    def limit(self) -> np.ndarray:
        """Largest B per shape by memory and compute target together, int64 [shapes]."""
        return self.cap if self.target is None else np.minimum(self.cap, self.target)

    def refuse_oversize(self) -> None:
        """Raise if some sample does not fit alone (or, with allowed batch sizes, in the smallest of them)."""
        remedy = "raise m_mem, use sequence parallelism (sp=2, 4, ...), or remove these samples; they are never cut or "
        present = np.zeros(len(self.cap), bool)
        present[np.unique(self.samples.shape_id[self.rows])] = True
        bad = np.flatnonzero(present & (self.cap < self.atom))
        if not len(bad):
            return
        rows = np.sort(self.rows[np.isin(self.samples.shape_id[self.rows], bad)])
        worst = bad[np.argmax(self.tokens[bad])]
        shown = ", ".join(self.samples.name(int(r)) for r in rows[:10])
        shapes = ", ".join(f"{self.samples.shapes.name(int(s))} ({self.tokens[s]} tokens)" for s in bad[:5])
        raise PlanInfeasible(
            f"{len(rows)} samples do not fit in memory"
            f"{'' if self.atom == 1 else f' at the smallest allowed B = {self.atom}'}: "
            f"{shown}{', ...' if len(rows) > 10 else ''}",
            where=f"{self.samples.where}; buckets {shapes}{', ...' if len(bad) > 5 else ''}; the largest sample has "
            f"{self.tokens[worst]} tokens",
            remedy=remedy + "run over the cap" + self.advice,
        )


@dataclass
class Window:
    """Microbatches of some consecutive steps, as columns; `rows[offsets[i]:offsets[i + 1]]` are microbatch i's samples.

    Sorted by (step, rank, k).  `rank` is the data-parallel group.  All integer arrays; offsets int64 [microbatches +
    1].
    """

    step: np.ndarray
    rank: np.ndarray
    k: np.ndarray
    shape: np.ndarray
    flags: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.step)

    @property
    def size(self) -> np.ndarray:
        """B of each microbatch, int64."""
        return np.diff(self.offsets)


@dataclass
class Leftover:
    """Rows that a plan does not hold, or holds more than once: int64 arrays of row numbers."""

    dropped: np.ndarray
    carried: np.ndarray
    repeated: np.ndarray

    @staticmethod
    def none() -> Leftover:
        """Nothing left over."""
        return Leftover(*(np.zeros(0, np.int64) for _ in range(3)))

    @staticmethod
    def by(tail: str, rows: np.ndarray) -> Leftover:
        """Rows of an unfilled tail, under policy "carry" or "drop"."""
        left, rows = Leftover.none(), np.sort(rows)
        if tail == "drop":
            left.dropped = rows
        else:
            left.carried = rows
        return left


def positive(value: object) -> bool:
    """Is this a finite number above 0?"""
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return number and bool(np.isfinite(value)) and bool(value > 0)  # type: ignore[call-overload, operator]


def slot_numbers(step: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """k of each microbatch, counted within its (step, rank); both sorted.  int32."""
    if not len(step):
        return np.zeros(0, np.int32)
    new = np.r_[True, (np.diff(step) != 0) | (np.diff(rank) != 0)]
    starts = np.flatnonzero(new)
    return (np.arange(len(step)) - np.repeat(starts, np.diff(np.r_[starts, len(step)]))).astype(np.int32)


def split_sizes(total: np.ndarray, most: np.ndarray, allowed: tuple[int, ...] | None) -> tuple[np.ndarray, np.ndarray]:
    """Split counts of equal samples into microbatches.

    Args:
        total: int64 [groups], samples to split. most: int64 [groups], largest B of each.
        allowed: batch sizes to use (each total must be a multiple of the smallest), or None: as few and as even as
            possible.

    Returns:
        (group, B) of each microbatch, int64; microbatches of one group are consecutive.
    """
    if allowed is None:
        pieces = -(-total // most)
        group = np.repeat(np.arange(len(total)), pieces)
        nth = np.arange(len(group)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        base, extra = total // pieces, total % pieces
        return group, base[group] + (nth < extra[group])
    groups, sizes = [], []
    left = total.copy()
    for b in reversed(allowed):  # largest first; every total is a multiple of the smallest
        count = np.where(b <= most, left // b, 0)
        left -= count * b
        groups.append(np.repeat(np.arange(len(total)), count))
        sizes.append(np.full(int(count.sum()), b, np.int64))
    group, size = np.concatenate(groups), np.concatenate(sizes)
    order = np.argsort(group, kind="stable")
    return group[order], size[order]
