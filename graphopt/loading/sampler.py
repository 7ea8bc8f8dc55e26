"""`PlanBatchSampler`: the rows of one rank's microbatches, in the plan's order, with their place in the step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow.compute as pc
from torch.utils.data import Sampler

from graphopt.errors import ConfigError
from graphopt.loading import agreement
from graphopt.loading.dataset import PlanCollate, PlanDataset
from graphopt.loading.microbatch import MicrobatchIds, MicrobatchInfo
from graphopt.loading.position import Position, Source
from graphopt.schedule.bench import Shape
from graphopt.schedule.plan import Plan

WEIGHTS = ("token", "sample")


class PlanBatchSampler(Sampler[list[int]]):
    """A torch batch sampler that follows a plan, for those who bring their own DataLoader.

    Use it with `dataset` and `collate_fn` below, so that each microbatch's place in the step travels inside the batch
    and no prefetching can run ahead of it:

        sampler = graphopt.PlanBatchSampler("plan/", rank=rank)
        loader = DataLoader(sampler.dataset(data), batch_sampler=sampler, collate_fn=sampler.collate_fn(my_collate))
        for batch, mb in loader: ...

    It must not be sharded again: `accelerator.prepare` would (`PlanLoader` goes through it untouched).

    Args:
        plan: a plan, its folder, or a function epoch -> either.  With one plan, later epochs are planned from it.
        rank: this process; from the process group, or RANK, or 0, if None.
        weight: what a loss counts per: "token" (`loss_scale` expects the sum over tokens), or "sample" (the sum over
            samples of each one's mean).
        reduce_size: ranks over which the gradient reduction averages (DDP and FSDP2: all, the default; with sequence
            parallelism each rank's loss is then the sum over its part of the sequence); 1 if it sums.
        first_step: optimizer steps the trainer has done before.
        timeout_s: how long the comparison of ranks waits for one that does not report.

    Raises:
        PlanInfeasible, ConfigError: as `Plan.load`; at the start of an iteration also on all ranks, if they run
            different plans, or the world is not the plan's.
    """

    def __init__(
        self,
        plan: Source,
        rank: int | None = None,
        *,
        weight: str = "token",
        reduce_size: int | None = None,
        first_step: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        if weight not in WEIGHTS:
            raise ConfigError(f"unknown weight {weight!r}", remedy=f"use one of {', '.join(WEIGHTS)}")
        if reduce_size is not None and reduce_size < 1:
            raise ConfigError(f"reduce_size must be positive, not {reduce_size}")
        self._source, self._first_step, self._given_rank = plan, first_step, rank
        self.weight, self.reduce_size, self.timeout_s = weight, reduce_size, timeout_s
        self._position: Position | None = None
        self._error: Exception | None = None
        self._iteration = 0
        self._compared = False
        try:
            self._place()
        except Exception as e:
            if agreement.world() is None:
                raise
            self._error = e  # raised where ranks compare, so that the others hear of it
        if agreement.world() is not None:
            self.compare({})

    def _place(self) -> Position:
        """The position, made once; the process group may come after the loader."""
        if self._error is not None:
            raise self._error
        if self._position is None:
            self._position = Position(self._source, _world_size(), self._first_step)
        elif (ranks := _world_size()) is not None and ranks != self._position.ranks:
            self._position.ranks = ranks
        return self._position

    @property
    def rank(self) -> int:
        """This process's rank in the plan."""
        if self._given_rank is not None:
            return self._given_rank
        here = agreement.world()
        return here[0] if here else int(os.environ.get("RANK", "0"))

    @property
    def plan(self) -> Plan:
        """The plan that holds now (after a change of the world size, one of what was left)."""
        return self._place().plan

    @property
    def epoch(self) -> int:
        """Epoch of the next iteration."""
        return self._place().epoch

    @property
    def position(self) -> Position:
        """Where the job stands."""
        return self._place()

    def set_epoch(self, epoch: int) -> None:
        """Stand at the start of an epoch; nothing happens if the job is in it already (after a resume, or because a
        finished iteration moves on by itself)."""
        self._compared = self._compared and epoch == self.epoch
        self._place().set_epoch(epoch)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """The state after `step` optimizer steps of the trainer, JSON and the same on every rank.

        Without `step`: where the current iteration started (torchdata's StatefulDataLoader counts from there).
        """
        return self._place().state(step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; with another world size, re-plan what is left of the epoch."""
        self._compared = False
        self._place().restore(state)

    def facts(self) -> dict[str, Any]:
        """What must be equal on all ranks, and this rank's number."""
        p = self._place()
        if not 0 <= self.rank < p.ranks:
            raise ConfigError(f"rank {self.rank} is not in a world of {p.ranks}", remedy="give rank=, or none")
        return {
            "plan": p.base.hash, "epoch": p.epoch, "first step": p.first_step, "start": p.start, "world size": p.ranks,
            "weight": self.weight, "reduce_size": self.reduce_size, "rank": self.rank,
        }  # fmt: skip

    def compare(self, more: dict[str, Any] | Callable[[], dict[str, Any]]) -> None:
        """Raise on all ranks unless they run the same plan from the same step; `more` must be equal as well."""
        agreement.agree(lambda: {**self.facts(), **(more() if callable(more) else more)}, timeout_s=self.timeout_s)

    def __len__(self) -> int:
        """Microbatches of this rank in the next iteration; ranks differ."""
        p = self._place()
        group = self.rank // (p.plan.ranks // p.plan.groups)
        return int(((p.plan.column("rank") == group) & (p.plan.column("step") >= p.start)).sum())

    def __iter__(self) -> PlanIterator:
        # Later epochs follow from what was compared; a rank that is late then waits for the others as anywhere else.
        if not self._compared:
            self.compare(lambda: {"plan of this epoch": self.plan.hash})
            self._compared = True
        self._iteration += 1
        return PlanIterator(self, self._iteration)

    def microbatches(self, iteration: int = 0) -> Iterator[MicrobatchInfo]:
        """This rank's microbatches from the current position to the end of the epoch."""
        p = self._place()
        plan, start, first_step = p.plan, p.start, p.first_step
        table = plan.step_table
        total = table.column("tokens" if self.weight == "token" else "samples").to_numpy()
        scale = (self.reduce_size or plan.ranks) / total.astype(np.float64)
        shapes = plan.shapes
        group = self.rank // (plan.ranks // plan.groups)
        sync = plan.manifest["layout"]["sync"]
        for part in plan.parts:
            mine = part.filter(
                pc.and_(pc.equal(part.column("rank"), group), pc.greater_equal(part.column("step"), start))
            )
            for batch in mine.to_batches(max_chunksize=1024):
                for r in batch.to_pylist():
                    s = r["shape"]
                    grid = (int(shapes.t[s]), int(shapes.h[s]), int(shapes.w[s]), int(shapes.caption[s]))
                    yield MicrobatchInfo(
                        epoch=p.epoch, step=first_step + r["step"], plan_step=r["step"], k=r["k"], K=r["microbatches"],
                        loss_scale=float(scale[r["step"]]), shape=Shape(r["batch"], *grid), tokens=r["tokens"],
                        samples=tuple(r["samples"]), sync=sync, cost_s=r["cost_s"], bytes=r["bytes"],
                        iteration=iteration,
                    )  # fmt: skip

    def dataset(self, data: Any, **options: Any) -> PlanDataset:
        """The data set as the workers need it: see `PlanDataset` for the options."""
        return PlanDataset(data, self._place().base, **options)

    def collate_fn(self, collate: Callable[[list[Any]], Any] | None = None) -> PlanCollate:
        """A collate function that returns (your collated batch, `MicrobatchInfo`)."""
        return PlanCollate(collate)


class PlanIterator(Iterator[list[int]]):
    """One pass over a rank's microbatches; it says where it is, for loaders that save their samplers."""

    def __init__(self, sampler: PlanBatchSampler, iteration: int) -> None:
        self.sampler, self.iteration = sampler, iteration
        self.yielded = 0
        self._rest = sampler.microbatches(iteration)

    def __next__(self) -> MicrobatchIds:
        info = next(self._rest)
        self.yielded += 1
        return MicrobatchIds.of(info)

    def state_dict(self) -> dict[str, Any]:
        """Microbatches handed out, and the plan they are of."""
        return {"plan": self.sampler.plan.hash, "yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Skip what was handed out before."""
        if state["plan"] != self.sampler.plan.hash:
            raise ConfigError(
                "the loader's state counts microbatches of another plan",
                remedy="after a change of the world size, resume from sampler.state_dict(step), not from the loader's",
            )
        self._rest = self.sampler.microbatches(self.iteration)
        self.yielded = int(state["yielded"])
        for _ in range(self.yielded):
            next(self._rest)


def _world_size() -> int | None:
    """Processes of the job, None if nothing says so."""
    here = agreement.world()
    if here is not None:
        return here[1]
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None
