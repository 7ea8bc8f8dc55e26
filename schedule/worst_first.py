"""Windows in, the same windows out, with the plan's largest microbatch at the start of the first step.

A job whose memory limit is wrong then fails in its first minute and not in its last hour.  Two steps change places;
what a step holds stays together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from graphopt.schedule.problem import Window


def worst_first(
    windows: Iterable[Window], memory: Callable[[Window], np.ndarray], *, together: bool
) -> Iterator[tuple[int, Window]]:
    """Numbered windows, not in order of their numbers; at most two are held back.

    Args:
        memory: a window's microbatches -> what each needs, in any unit.
        together: the k-th microbatches of all ranks meet, so they change places together.
    """
    first: Window | None = None
    worst: Window | None = None
    at, microbatch, most = 0, 0, -np.inf
    for i, w in enumerate(windows):
        need = memory(w)
        j = int(np.argmax(need))
        if need[j] > most:
            if worst is not None and at > 0:
                yield at, worst
            worst, at, microbatch, most = w, i, j, need[j]
            first = w if first is None else first
        else:
            yield i, w
    if first is None or worst is None:
        return
    w = _to_front(worst, microbatch, together)
    if at == 0:
        yield 0, _exchange(w, w, int(w.step[microbatch]))[0]
    else:
        yield from zip((0, at), _exchange(first, w, int(w.step[microbatch])))


def _to_front(w: Window, microbatch: int, together: bool) -> Window:
    """Microbatch `microbatch` and its rank's first (or all ranks' k-th and first) change places."""
    mine = w.step == w.step[microbatch]
    if not together:
        mine &= w.rank == w.rank[microbatch]
    k = w.k.copy()
    k[mine & (w.k == 0)] = w.k[microbatch]
    k[mine & (w.k == w.k[microbatch])] = 0
    return _take(w, np.lexsort((k, w.rank, w.step)), w.step)


def _exchange(a: Window, b: Window, step: int) -> tuple[Window, Window]:
    """Step `step` of `b` and the first step of `a` change places (both windows the same one, or different ones)."""
    zero = int(a.step[0])
    if a is b:
        number = np.where(a.step == step, zero, np.where(a.step == zero, step, a.step))
        done = _take(a, np.argsort(number, kind="stable"), np.sort(number, kind="stable"))
        return done, done
    front, rest = np.flatnonzero(a.step == zero), np.flatnonzero(a.step != zero)
    found, before = np.flatnonzero(b.step == step), np.flatnonzero(b.step < step)
    after = np.flatnonzero(b.step > step)
    both = _join(a, b)
    n = len(a)
    one = np.r_[found + n, rest]
    two = np.r_[before + n, front, after + n]
    return (
        _take(both, one, np.r_[np.full(len(found), zero), a.step[rest]]),
        _take(both, two, np.r_[b.step[before], np.full(len(front), step), b.step[after]]),
    )


def _join(a: Window, b: Window) -> Window:
    """Both windows' microbatches in a row."""
    step, rank, k, shape, flags, rows = (
        np.concatenate([getattr(a, n), getattr(b, n)]) for n in ("step", "rank", "k", "shape", "flags", "rows")
    )
    return Window(step, rank, k, shape, flags, np.r_[a.offsets, b.offsets[1:] + a.offsets[-1]], rows)


def _take(w: Window, order: np.ndarray, step: np.ndarray) -> Window:
    """Microbatches in another order, with new step numbers; k counts anew within each step and rank."""
    size = w.size[order]
    ends = np.cumsum(size)
    index = np.arange(int(ends[-1])) + np.repeat(w.offsets[:-1][order] - (ends - size), size)
    # Ranks and microbatches are consecutive within a step, so k only needs to count.
    rank = w.rank[order]
    new = np.r_[True, (np.diff(step) != 0) | (np.diff(rank) != 0)]
    starts = np.flatnonzero(new)
    k = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
    return Window(
        step.astype(np.int32), rank, k.astype(np.int32), w.shape[order], w.flags[order],
        np.r_[0, ends].astype(np.int64), w.rows[index],
    )  # fmt: skip
