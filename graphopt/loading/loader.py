"""`PlanLoader`: a plan and a data set in, (batch, microbatch info) out, resumable at any optimizer step."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from graphopt import _compat
from graphopt.errors import ConfigError, PlanInfeasible
from graphopt.loading.dataset import CORRUPT
from graphopt.loading.microbatch import MicrobatchInfo, Replacement
from graphopt.loading.position import Position, Source
from graphopt.loading.sampler import PlanBatchSampler
from graphopt.schedule.dataset import read_samples
from graphopt.schedule.plan import Plan

log = logging.getLogger(__name__)


class PlanLoader:
    """Iterate over a rank's microbatches of a plan.

        for batch, mb in graphopt.PlanLoader(dataset, "plan/", rank=r, collate_fn=..., num_workers=4):
            with graphopt.accumulate(model, mb):
                (loss_sum(model, batch) * mb.loss_scale).backward()
            if mb.last:
                opt.step(); opt.zero_grad()

    One pass is one epoch; the next pass is the next epoch.  `accelerator.prepare(loader)` returns it as it is, so that
    it is not sharded twice.

    Args:
        dataset: map-style, `dataset[row]` for the rows of the metadata the plan was made from.
        plan, rank, weight, reduce_size, first_step, timeout_s: see `PlanBatchSampler`.
        collate_fn: list of samples -> batch; torch's default if None.
        reserve, corrupt, shape_of, index: replacing samples that cannot be read; see `PlanDataset`.
        record: JSON lines file to which replacements are appended (one per rank); they are logged and in
            `loader.replaced` as well.
        max_replaced: share of a rank's samples that may be replaced before the loader gives up (at least 10 may).
        manifest: the metadata file (or `Samples`, where layout or caption_bin are not the default); if given, the plan
            must have been made for it.
        dataset_id: any text that names the data set; ranks compare it, beside its length.
        device: moves tensors of the batch there, without blocking where they are pinned.
        loader_class: what fetches, e.g. torchdata's StatefulDataLoader.
        options: everything else goes to it: num_workers, prefetch_factor, pin_memory, persistent_workers, ...

    Raises:
        PlanInfeasible: another plan or data set on some rank, or a world that is not the plan's: on all ranks, within
            seconds, when the loader is made or its iteration starts.
    """

    def __init__(
        self,
        dataset: Any,
        plan: Source,
        *,
        rank: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        weight: str = "token",
        reduce_size: int | None = None,
        first_step: int = 0,
        reserve: Sequence[int] | None = None,
        corrupt: tuple[type[Exception], ...] = CORRUPT,
        shape_of: Callable[[Any], Any] | None = None,
        index: Sequence[Any] | Callable[[int], Any] | None = None,
        record: str | Path | None = None,
        max_replaced: float = 0.01,
        manifest: Any = None,
        dataset_id: str | None = None,
        device: str | torch.device | None = None,
        loader_class: type[DataLoader] = DataLoader,
        timeout_s: float = 600.0,
        **options: Any,
    ) -> None:
        taken = {"batch_sampler", "batch_size", "shuffle", "sampler", "drop_last"} & set(options)
        if taken:
            raise ConfigError(
                f"{', '.join(sorted(taken))}: the plan decides this",
                remedy="leave it out; plan again to change batches",
            )
        self.sampler = PlanBatchSampler(
            plan, rank, weight=weight, reduce_size=reduce_size, first_step=first_step, timeout_s=timeout_s
        )
        self.max_replaced, self.device, self.dataset_id = max_replaced, device, dataset_id
        self.replaced: list[Replacement] = []
        self.record = None if record is None else Path(record)
        self._seen = 0
        self._rows = len(dataset) if hasattr(dataset, "__len__") else None

        def make() -> dict[str, Any]:
            if manifest is not None:
                self.sampler.position.base.check_dataset(read_samples(manifest))
            data = self.sampler.dataset(dataset, reserve=reserve, corrupt=corrupt, shape_of=shape_of, index=index)
            self._loader = loader_class(
                data, batch_sampler=self.sampler, collate_fn=self.sampler.collate_fn(collate_fn), **options
            )
            return {"data set length": self._rows, "data set": dataset_id}

        self.sampler.compare(make)

    @property
    def plan(self) -> Plan:
        """The plan that holds now."""
        return self.sampler.plan

    @property
    def position(self) -> Position:
        """Where the job stands: epoch, first_step, start."""
        return self.sampler.position

    @property
    def epoch(self) -> int:
        """Epoch of the next iteration."""
        return self.sampler.epoch

    @property
    def steps(self) -> int:
        """Optimizer steps of the next iteration, the same on every rank."""
        return len(self.plan) - self.position.start

    def __len__(self) -> int:
        """Microbatches of this rank in the next iteration; ranks differ, `steps` does not."""
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Stand at the start of an epoch; nothing happens if the job is in it already."""
        self.sampler.set_epoch(epoch)

    def state_dict(self, step: int) -> dict[str, Any]:
        """What `load_state_dict` needs to go on after `step` optimizer steps of the trainer.

        `mb.step + 1` after the optimizer's step.  The trainer's count is the truth: how far workers have prefetched
        does not enter.  JSON, and the same on every rank.
        """
        if step is None:
            raise ConfigError("state_dict needs the trainer's step count", remedy="loader.state_dict(mb.step + 1)")
        return self.sampler.state_dict(step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: the same samples in the same steps as without the interruption.

        With another world size, what is left of the epoch is planned again, on every rank alike.  A state at the end
        of an epoch starts the next one at once.
        """
        self.sampler.load_state_dict(state)

    def __iter__(self) -> Iterator[tuple[Any, MicrobatchInfo]]:
        position = self.position
        for batch, mb in self._loader:
            self._record(mb)
            if mb.last:
                position.done = mb.plan_step + 1
            yield (batch if self.device is None else _to(batch, self.device)), mb
        position.finish()

    def _record(self, mb: MicrobatchInfo) -> None:
        """Keep account of replacements; give up where they are no accident."""
        self._seen += len(mb.samples)
        for r in mb.replaced:
            log.warning("sample %d was replaced by %d, of the same shape: %s", r.row, r.by, r.reason)
            self.replaced.append(r)
            if self.record is not None:
                with self.record.open("a") as f:
                    f.write(json.dumps({"epoch": mb.epoch, "step": mb.step, "rank": self.sampler.rank, **r._asdict()}))
                    f.write("\n")
        if mb.replaced and len(self.replaced) > max(10, self.max_replaced * self._seen):
            last = self.replaced[-1]
            raise PlanInfeasible(
                f"{len(self.replaced)} of {self._seen} samples could not be read, the last one: {last.reason}",
                where=f"sample {last.row}",
                remedy="check the storage, or raise max_replaced",
            )


def _to(batch: Any, device: str | torch.device) -> Any:
    """Tensors of nested containers on a device."""
    return _compat.tree_map(
        lambda x: x.to(device, non_blocking=True) if isinstance(x, torch.Tensor) else x, batch
    )
