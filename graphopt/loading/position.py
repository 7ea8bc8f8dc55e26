"""Where a job stands in its plans: epoch, step, and the plan that holds from here.

The trainer's step count is the truth.  A state is small: the plan's hash, the epoch, the trainer's step, and how the
current plan follows from the one on disk (rows carried into the epoch, changes of the world size).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphopt.errors import ConfigError, PlanInfeasible
from graphopt.schedule.plan import Plan
from graphopt.schedule.replan import following, owed, replan

log = logging.getLogger(__name__)
VERSION = 1
Source = str | Path | Plan | Callable[[int], "str | Path | Plan"]


class Position:
    """The current plan of a job, and how far it is done.

    Args:
        source: a plan, its folder, or a function epoch -> either.  With one plan, later epochs are planned from it.
        ranks: processes of the job; None takes the plan's.
        first_step: steps the trainer has done before.
    """

    def __init__(self, source: Source, ranks: int | None, first_step: int = 0) -> None:
        self.source = source
        self.base = _load(source(0) if callable(source) and not isinstance(source, Plan) else source)
        self.ranks = self.base.ranks if ranks is None else ranks
        self._begin(int(self.base.manifest["epoch"]), first_step, [])

    def _begin(self, epoch: int, step: int, carry: list[int]) -> None:
        """Stand at the start of an epoch; its plan is made when it is asked for."""
        self.epoch, self.first_step, self.epoch_step, self.carry_in = epoch, step, step, carry
        self.start, self.done = 0, 0
        self.segments: list[list[int]] = []  # [trainer step, ranks] of each re-plan within this epoch
        self.epoch_ranks = self.ranks
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        """The plan that holds now; its step 0 is the trainer's `first_step`.

        Raises:
            PlanInfeasible: it was made for another number of ranks, and no state says what is consumed.
        """
        if self._plan is None:
            self._plan = self._of_epoch(self.epoch, self.ranks, self.carry_in)
        if self._plan.ranks != self.ranks:
            raise PlanInfeasible(
                f"the plan is for {self._plan.ranks} ranks, and the job has {self.ranks}",
                where=f"plan {self._plan.hash[:12]}",
                remedy=f"plan again with ranks={self.ranks}; a resumed job (load_state_dict) re-plans what is left",
            )
        return self._plan

    def _of_epoch(self, epoch: int, ranks: int, carry: list[int]) -> Plan:
        if callable(self.source) and not isinstance(self.source, Plan):
            plan = _load(self.source(epoch))
            if plan.manifest["epoch"] != epoch:
                raise ConfigError(f"the plan given for epoch {epoch} is of epoch {plan.manifest['epoch']}")
            return plan
        if epoch == self.base.manifest["epoch"]:
            return self.base
        log.info("planning epoch %d for %d ranks", epoch, ranks)
        return following(self.base, epoch=epoch, carry_in=carry, ranks=ranks)

    def set_epoch(self, epoch: int) -> None:
        """Stand at the start of an epoch; nothing happens if the job is in it already."""
        if epoch == self.epoch:
            return
        if epoch < 0:
            raise ConfigError(f"epoch must not be negative, not {epoch}")
        step = self.first_step + self.done
        if self.done or self.start:
            log.warning("epoch %d is left after %d of %d steps", self.epoch, self.done, len(self.plan))
        carry = self.plan.carried if epoch == self.epoch + 1 else []
        self._begin(epoch, step, carry)

    def finish(self) -> None:
        """The epoch is done: stand at the start of the next."""
        plan = self.plan
        self._begin(self.epoch + 1, self.first_step + len(plan), plan.carried)

    def state(self, step: int | None) -> dict[str, Any]:
        """What `restore` needs to go on after `step` optimizer steps of the trainer (None: where this iteration
        started)."""
        plan = self.plan
        step = self.first_step + self.start if step is None else step
        if isinstance(step, bool) or not isinstance(step, int):
            raise ConfigError(
                f"the state needs the trainer's step count, an integer, not {step!r}",
                remedy="loader.state_dict(mb.step + 1) after the optimizer's step",
            )
        if not 0 <= step - self.first_step <= len(plan):
            raise ConfigError(
                f"step {step} is outside this plan, which covers the trainer's steps {self.first_step} to "
                f"{self.first_step + len(plan)}",
                where=f"epoch {self.epoch}",
                remedy="give the optimizer steps done since the loader was made (with first_step=, if it was not 0)",
            )
        return {
            "version": VERSION, "plan": plan.hash, "epoch": self.epoch, "step": step, "epoch_step": self.epoch_step,
            "ranks": self.epoch_ranks, "carry_in": self.carry_in, "segments": [list(s) for s in self.segments],
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken; all or nothing.

        Raises:
            PlanInfeasible: the state belongs to another plan. ConfigError: it is no state of this version.
        """
        if not isinstance(state, dict) or state.get("version") != VERSION:
            raise ConfigError(
                f"this is not a state of PlanLoader (version {VERSION})",
                remedy="load what loader.state_dict(step) returned",
            )
        missing = {"plan", "epoch", "step", "epoch_step", "ranks", "carry_in", "segments"} - set(state)
        if missing:
            raise ConfigError(f"the state lacks {', '.join(sorted(missing))}", remedy="load it whole")
        epoch, step = int(state["epoch"]), int(state["step"])
        plan, first = self._of_epoch(epoch, int(state["ranks"]), list(state["carry_in"])), int(state["epoch_step"])
        for at, ranks in state["segments"]:
            plan, first = replan(plan, step=at - first, ranks=ranks), at
        if plan.hash != state["plan"]:
            raise PlanInfeasible(
                f"the state was taken with plan {state['plan'][:12]}; this one is {plan.hash[:12]}",
                where=f"epoch {epoch}",
                remedy="give the plan the job was started with (re-planning needs the same version of graphopt)",
            )
        if not 0 <= step - first <= len(plan):
            raise ConfigError(f"the state's step {step} is outside its plan ({first} to {first + len(plan)})")
        if step - first == len(plan):
            self._begin(epoch + 1, step, plan.carried)
            return
        self._begin(epoch, first, list(state["carry_in"]))
        self.epoch_step, self.epoch_ranks = int(state["epoch_step"]), int(state["ranks"])
        self.segments = [list(s) for s in state["segments"]]
        self._plan, self.start = plan, step - first
        self.done = self.start
        if plan.ranks != self.ranks:
            self._change_world(plan, step)

    def _change_world(self, plan: Plan, step: int) -> None:
        """Cover what is left with a plan for this world."""
        done = step - self.first_step
        try:
            self._plan = replan(plan, step=done, ranks=self.ranks)
        except PlanInfeasible:
            rows, twice = owed(plan, done)
            if plan.manifest["tail"] != "carry" or len(rows) + len(twice) >= 2 * self.ranks * max(
                1, plan.manifest["layout"]["microbatches"]
            ):
                raise
            # Too little for one step of the new world: the next epoch takes it.
            log.warning("%d samples do not fill a step of %d ranks: carried on", len(rows) + len(twice), self.ranks)
            self._begin(self.epoch + 1, step, sorted([*rows.tolist(), *twice.tolist(), *plan.carried]))
            return
        self.segments.append([step, self.ranks])
        self.first_step, self.start, self.done = step, 0, 0


def _load(source: Any) -> Plan:
    return source if isinstance(source, Plan) else Plan.load(source)
