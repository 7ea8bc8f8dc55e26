"""The functions of a handle by the model: `graphopt.dsa.verify(model, ...)` is `handle_of(model).verify(...)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from graphopt.dsa.handle import handle_of
from graphopt.dsa.measure import Probe, Verified


def parameters(model: Any) -> Iterator[nn.Parameter]:
    """The parameters of the offset heads of a converted model."""
    return handle_of(model).parameters()


def revert(model: Any) -> nn.Module:
    """The dense model again; see Handle.revert."""
    return handle_of(model).revert()


def distill_loss(model: Any) -> Tensor:
    """See Handle.distill_loss."""
    return handle_of(model).distill_loss()


def verify(model: Any, *args: Any, **kwargs: Any) -> list[Verified]:
    """Run one forward and hold every converted layer against the definition in fp64, on sampled queries.

    args, kwargs: of the model's forward.  Returns one entry per layer; raises VerifyError for the first that differs by
    more than its limit.
    """
    return handle_of(model).verify(*args, **kwargs)


def probe(model: Any, *args: Any, **kwargs: Any) -> Probe:
    """Run one forward with dense attention and measure what the windows would see of it; see measure.Probe."""
    return handle_of(model).probe(*args, **kwargs)
