"""What runs in the workers: fetch a microbatch's samples, replace those that cannot be read, collate.

A skipped sample would change the step's token count, which every rank's loss scale relies on; so a corrupt or missing
one is replaced by another of the same shape, and the replacement is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset, default_collate

from graphopt.errors import ConfigError, PlanInfeasible
from graphopt.loading.microbatch import MicrobatchIds, MicrobatchInfo, Replacement
from graphopt.schedule.plan import Plan

CORRUPT: tuple[type[Exception], ...] = (OSError, EOFError, ValueError, RuntimeError, KeyError)
try:
    from safetensors import SafetensorError  # no ValueError, and what a file that is cut short raises
except ImportError:
    pass
else:
    CORRUPT = (*CORRUPT, SafetensorError)
PER_SHAPE = 64  # rows kept per shape when no reserve is given
TRIES = 8


class Fetched(list[Any]):
    """Samples of a microbatch, with what is known about it."""

    info: MicrobatchInfo


class PlanDataset(Dataset[Any]):
    """A map-style data set, fetched a microbatch at a time.

    Args:
        data: `data[row]` is the sample of the metadata's row; `__getitems__` is used if it has one.
        plan: tells the shape of each reserve row.
        reserve: rows that may replace a corrupt one of their shape; by default some rows of each shape in the plan
            itself, which are then used twice.
        corrupt: exceptions that mean that a sample cannot be read (a returned None means it as well).  Others pass
            through: a bug in the data set must not look like bad data.
        shape_of: sample -> (T, H, W), (T, H, W, L) or its token count; a sample of another shape counts as corrupt.
        index: row -> key of `data`, as a sequence or a function; the row itself by default.
    """

    def __init__(
        self,
        data: Any,
        plan: Plan,
        *,
        reserve: Sequence[int] | None = None,
        corrupt: tuple[type[Exception], ...] = CORRUPT,
        shape_of: Callable[[Any], Any] | None = None,
        index: Sequence[Any] | Callable[[int], Any] | None = None,
    ) -> None:
        if not hasattr(data, "__getitem__"):
            raise ConfigError(
                f"a plan needs random access, and {type(data).__name__} has no __getitem__",
                remedy="give a map-style data set (for WebDataset: one with an index)",
            )
        rows = int(plan.manifest["dataset"]["rows"])
        if index is None and hasattr(data, "__len__") and len(data) != rows:
            raise PlanInfeasible(
                f"the plan was made for {rows} samples, and this data set has {len(data)}",
                where=f"plan {plan.hash[:12]}",
                remedy="plan again for this data set, or give index= if rows are not its keys",
            )
        self.data, self.corrupt, self.shape_of, self.index = data, corrupt, shape_of, index
        self.reserve = _reserve(plan, reserve)

    def __len__(self) -> int:
        return len(self.data)

    def _key(self, row: int) -> Any:
        if self.index is None:
            return row
        return self.index(row) if callable(self.index) else self.index[row]

    def __getitems__(self, ids: list[int]) -> Fetched:
        """The samples of a microbatch."""
        if not isinstance(ids, MicrobatchIds):
            raise ConfigError(
                "the batch sampler's rows have lost their place in the step",
                remedy="use PlanBatchSampler itself as batch_sampler, with nothing around it",
            )
        out = Fetched()
        replaced = []
        for row, got in zip(ids, self._together(ids)):
            sample, reason = (got, "") if got is not None else self._one(row, ids.info)
            if reason:
                sample, by = self._replacement(row, ids, reason)
                replaced.append(Replacement(row, by, reason))
            out.append(sample)
        out.info = ids.info.with_replacements(replaced) if replaced else ids.info
        return out

    def _together(self, ids: MicrobatchIds) -> Sequence[Any]:
        """All samples by the data set's own batched access; None for each that has to be fetched alone."""
        nothing = [None] * len(ids)
        if not hasattr(self.data, "__getitems__"):
            return nothing
        try:
            got = self.data.__getitems__([self._key(row) for row in ids])
        except self.corrupt:
            return nothing  # one of them is corrupt: find out which
        return got if all(not self._wrong(sample, ids.info) for sample in got) else nothing

    def _one(self, row: int, info: MicrobatchInfo) -> tuple[Any, str]:
        """(sample, what is wrong with it)."""
        try:
            sample = self.data[self._key(row)]
        except self.corrupt as e:
            return None, f"{type(e).__name__}: {e}"
        return sample, self._wrong(sample, info)

    def _wrong(self, sample: Any, info: MicrobatchInfo) -> str:
        if sample is None:
            return "the data set returned None"
        if self.shape_of is None:
            return ""
        shape = self.shape_of(sample)
        planned: tuple[int, ...] = tuple(info.shape[1:])
        if isinstance(shape, int):
            return "" if shape == info.shape.S else f"it has {shape} tokens, and {info.shape.S} were planned"
        shape = tuple(int(x) for x in shape)
        return "" if shape == planned[: len(shape)] else f"its shape is {shape}, and {planned} was planned"

    def _replacement(self, row: int, ids: MicrobatchIds, reason: str) -> tuple[Any, int]:
        """A readable sample of the same shape, the same at every try."""
        rows = self.reserve.get(tuple(ids.info.shape[1:]), np.zeros(0, np.int64))
        rows = rows[(rows != row) & ~np.isin(rows, list(ids))] if (rows != row).sum() > len(ids) else rows[rows != row]
        start = row * 2654435761 % max(1, len(rows))
        tried = [int(r) for r in np.roll(rows, -start)[:TRIES]]
        for by in tried:
            sample, wrong = self._one(by, ids.info)
            if not wrong:
                return sample, by
        raise PlanInfeasible(
            f"sample {row} cannot be read ({reason}), and "
            + (f"neither can {len(tried)} others of its shape" if tried else "no other of its shape is in the reserve"),
            where=f"epoch {ids.info.epoch}, step {ids.info.step}, shape {tuple(ids.info.shape[1:])}",
            remedy="check the storage; give reserve= rows of every shape",
        )


def _reserve(plan: Plan, given: Sequence[int] | None) -> dict[tuple[int, ...], np.ndarray]:
    """Rows per shape [T, H, W, L] that can replace others."""
    from graphopt.schedule.replan import known_samples

    samples = known_samples(plan)
    shapes = samples.shapes.to_json()
    if given is not None:
        rows = np.unique(np.asarray(given, np.int64))
        if len(rows) and (rows[0] < 0 or rows[-1] >= len(samples)):
            raise ConfigError(f"reserve holds row {rows[0] if rows[0] < 0 else rows[-1]}, outside the data set")
        return {tuple(shapes[s]): rows[samples.shape_id[rows] == s] for s in np.unique(samples.shape_id[rows])}
    used = np.unique(plan.samples()[0]).astype(np.int64)
    order = used[np.argsort(samples.shape_id[used], kind="stable")]
    start = np.flatnonzero(np.r_[True, np.diff(samples.shape_id[order]) != 0])
    ends = np.r_[start[1:], len(order)]
    out = {}
    for a, b in zip(start, ends):
        picked = order[a:b][np.linspace(0, b - a - 1, min(PER_SHAPE, b - a)).astype(np.int64)]
        out[tuple(shapes[samples.shape_id[order[a]]])] = picked
    return out


class PlanCollate:
    """Collate a microbatch's samples and put its `MicrobatchInfo` beside them."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self.collate = collate or default_collate

    def __call__(self, samples: Any) -> tuple[Any, MicrobatchInfo]:
        """(your collated batch, info)."""
        if not isinstance(samples, Fetched):
            raise ConfigError(
                "the samples have lost their place in the step", remedy="use sampler.dataset(data) as the data set"
            )
        return self.collate(list(samples)), samples.info
