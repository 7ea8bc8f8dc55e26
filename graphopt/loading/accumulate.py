"""`accumulate`: gradient accumulation where ranks run different numbers of microbatches in a step.

Under FSDP2 a collective that one rank issues and another does not is a deadlock.  In the mode used here (ZeRO-1 style)
a step has one all-gather per group of parameters, in its first forward, and one reduction, in its last backward,
whatever K is: parameters are neither freed after the forward nor after a backward before the last, and gradients are
not reduced before the last.  `set_is_last_backward` must stay alone: with it, K = 1 frees and K = 3 gathers anew.
The price is that each rank holds whole parameters and gradients over the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from graphopt.errors import ConfigError
from graphopt.loading.microbatch import MicrobatchInfo

_last: WeakKeyDictionary[torch.nn.Module, MicrobatchInfo] = WeakKeyDictionary()


@contextmanager
def accumulate(
    model: torch.nn.Module | Sequence[torch.nn.Module], mb: MicrobatchInfo, *, reshard: bool | None = None
) -> Iterator[None]:
    """Run one microbatch's forward and backward; gradients are reduced with the step's last one on each rank (with
    `reshard`, at each one).

    Args:
        model: wrapped by `fully_shard` (FSDP2) or DistributedDataParallel, compiled or not; a plain module is left
            alone.  Several models of one step may be given together.
        mb: the microbatch's info, from PlanLoader.
        reshard: FSDP2: free parameters between forward and backward and between microbatches (ZeRO-3), which needs
            equal K on all ranks; by default as the plan's `sync` says: "microbatch" True, "step" False.

    The reduced gradient is the sum over the step's microbatches of loss * mb.loss_scale, averaged over ranks: the mean
    over the global batch's tokens (or samples), the same as one process would compute.

    Raises:
        ConfigError: microbatches come out of order (the loader is sharded twice, or one was skipped), which would hang
            the job at the next collective; or reshard=True with a plan of unequal K.
    """
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    if reshard and mb.sync == "step":
        raise ConfigError(
            "reshard=True gathers parameters at each microbatch, and this plan's ranks run different numbers of them",
            remedy='plan with sync="microbatch"',
        )
    free = mb.sync == "microbatch" if reshard is None else reshard
    for m in models:
        _in_order(m, mb)
    with ExitStack() as stack:
        for m in models:
            for part in m.modules():
                if isinstance(part, FSDPModule):
                    _fsdp2(part, mb, free)
                elif isinstance(part, DistributedDataParallel) and not mb.last:
                    stack.enter_context(part.no_sync())
        try:
            yield
        except BaseException:
            for m in models:
                _last.pop(m, None)
            raise


def _fsdp2(part: FSDPModule, mb: MicrobatchInfo, free: bool) -> None:
    """Set one sharded module up for this microbatch."""
    # Where parameters are freed between microbatches, gradients are too: they accumulate in shards.
    part.set_requires_gradient_sync(mb.last or free, recurse=False)
    if free:
        return
    if mb.first:
        part.set_reshard_after_forward(False, recurse=False)
    part.set_reshard_after_backward(mb.last, recurse=False)


def _in_order(model: torch.nn.Module, mb: MicrobatchInfo) -> None:
    """Every microbatch of a step, in order: ranks agree on the collectives of a step only if none is missing."""
    before = _last.get(model)
    _last[model] = mb
    if before is None or before.iteration != mb.iteration or before.last:
        expected = 0
    else:
        expected = before.k + 1
    same_step = before is None or before.iteration != mb.iteration or before.last or before.step == mb.step
    if mb.k == expected and same_step:
        return
    after = "at the start" if before is None else f"after {before.k + 1} of {before.K} of step {before.step}"
    del _last[model]
    raise ConfigError(
        f"microbatch {mb.k + 1} of {mb.K} of step {mb.step} comes {after}",
        remedy="run every microbatch once and in order; is the loader sharded twice (accelerate), or a batch skipped?",
    )
