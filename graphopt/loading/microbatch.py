"""What travels with a collated batch: which microbatch of which step it is, and how its loss counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from graphopt.schedule.bench import Shape


class Replacement(NamedTuple):
    """A sample that could not be read, and the one of the same shape that was used in its place."""

    row: int
    by: int
    reason: str


@dataclass(frozen=True)
class MicrobatchInfo:
    """The k-th of K microbatches that a rank runs in an optimizer step.

    Args:
        epoch: epoch of the plan.
        step: optimizer steps that the trainer has done before this one; give `step + 1` to `state_dict` after it.
        plan_step: the step's number in the plan, which differs after an epoch or a change of the world size.
        k, K: 0 <= k < K; K differs over ranks unless `sync` is "microbatch".
        loss_scale: factor of this microbatch's summed loss, so that the reduced gradient is the mean over the step's
            global batch: (ranks that the reduction averages over) / (tokens of the step, or its samples).
        shape: B samples of T x H x W latent tokens and L caption tokens; `shape.S` tokens each.
        tokens: B * S.
        samples: row of each sample, after replacements.
        sync: "step" (ranks meet once a step) or "microbatch" (at each one).
        cost_s: predicted seconds. bytes: predicted peak bytes, None without a memory fit.
        iteration: counts the loader's iterations, to tell a restart from a gap.
        replaced: samples of this microbatch that could not be read.
    """

    epoch: int
    step: int
    plan_step: int
    k: int
    K: int
    loss_scale: float
    shape: Shape
    tokens: int
    samples: tuple[int, ...]
    sync: str
    cost_s: float
    bytes: int | None
    iteration: int = 0
    replaced: tuple[Replacement, ...] = ()

    @property
    def first(self) -> bool:
        """The step's first microbatch on this rank?"""
        return self.k == 0

    @property
    def last(self) -> bool:
        """The step's last microbatch on this rank: reduce, then step the optimizer."""
        return self.k == self.K - 1

    def generators(self, seed: int, device: str | torch.device = "cpu") -> list[torch.Generator]:
        """A random generator per sample, which depends on seed, epoch and sample alone.

        Noise and timesteps drawn from them are the same after a resume and on any number of ranks, so no random state
        needs saving.
        """
        states = (np.random.SeedSequence((seed, self.epoch, row)).generate_state(1, np.uint64) for row in self.samples)
        return [torch.Generator(device).manual_seed(int(s[0] >> np.uint64(1))) for s in states]

    def with_replacements(self, replaced: Iterable[Replacement]) -> MicrobatchInfo:
        """With the rows that were really used."""
        found = tuple(replaced)
        by = {r.row: r.by for r in found}
        return replace(self, samples=tuple(by.get(s, s) for s in self.samples), replaced=found)


class MicrobatchIds(list[int]):
    """What the sampler yields: rows of the data set, with `info` beside them on the way to the workers and back."""

    info: MicrobatchInfo

    @staticmethod
    def of(info: MicrobatchInfo) -> MicrobatchIds:
        """The rows of a microbatch."""
        ids = MicrobatchIds(info.samples)
        ids.info = info
        return ids
