"""A matrix product that is written where its reader wants it: the gradient of a weight, straight into a slab.

`graphopt::landing_mm(a, b, argument)` is `a @ b`.  Inside `into(places)` the product is written to the place given for
that argument, and what the operator returns views it; without one (or where it does not fit) it is a new tensor.  The
operator is put into compiled backward graphs by passes/land_gradients.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

_library = torch.library.Library("graphopt", "FRAGMENT")
_library.define("landing_mm(Tensor a, Tensor b, int argument) -> Tensor")
_now = threading.local()  # a backward runs in one thread, of many


@contextmanager
def into(places: Sequence[torch.Tensor | None] | None) -> Iterator[None]:
    """Products for argument i land in `places[i]`, a contiguous matrix; None: in new tensors."""
    before = getattr(_now, "places", None)
    _now.places = places
    try:
        yield
    finally:
        _now.places = before


def _landing_mm(a: torch.Tensor, b: torch.Tensor, argument: int) -> torch.Tensor:
    places = getattr(_now, "places", None)
    place = places[argument] if places is not None else None
    if place is None or place.dtype != a.dtype or not place.is_contiguous() or place.shape != (a.shape[0], b.shape[1]):
        return torch.mm(a, b)
    torch.mm(a, b, out=place)
    return place.detach()


def _meta(a: torch.Tensor, b: torch.Tensor, argument: int) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


_library.impl("landing_mm", _landing_mm, "CPU")
_library.impl("landing_mm", _landing_mm, "CUDA")
_library.impl("landing_mm", _meta, "Meta")
landing_mm = torch.ops.graphopt.landing_mm.default
