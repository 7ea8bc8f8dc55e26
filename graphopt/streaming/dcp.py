"""torch.distributed.checkpoint with tensors that exist only while they are written or read.

Its planners look every tensor up when its turn comes; stand-ins of the right shape take their places in the state dict
until then.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader

Giving = Mapping[str, tuple[tuple[int, ...], torch.dtype, Callable[[], torch.Tensor]]]
Taking = Mapping[str, Callable[[torch.Tensor], None]]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Without torch's warning that a process without a group saves and loads for itself: so it should."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of that shape over one element."""
    return torch.zeros((), dtype=dtype, device="cpu").expand(shape)


class _Giver(DefaultSavePlanner):
    """Asks for a tensor when it is written."""

    def __init__(self, giving: Giving) -> None:
        super().__init__(flatten_state_dict=False)
        self._giving = giving

    def lookup_object(self, index: Any) -> Any:
        return self._giving[index.fqn][2]() if index.fqn in self._giving else super().lookup_object(index)


class _Taker(DefaultLoadPlanner):
    """Makes room for a tensor when it is read, and hands it over when it is whole."""

    def __init__(self, taking: Taking) -> None:
        super().__init__(flatten_state_dict=False)
        self._taking = taking
        self._room: dict[str, torch.Tensor] = {}
        self._left: dict[str, int] = {}

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        name = index.fqn
        if name not in self._room:
            wanted = super().lookup_tensor(index)
            self._room[name] = torch.empty(wanted.shape, dtype=wanted.dtype, device="cpu")
            self._left[name] = max(1, wanted.numel())
        return self._room[name]

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        name = read_item.dest_index.fqn
        self._left[name] -= max(1, math.prod(read_item.lengths))
        if self._left[name] <= 0:
            self._taking[name](self._room.pop(name))


def write(giving: Giving, texts: Mapping[str, str], folder: str | os.PathLike) -> None:
    """Write tensors and texts; the folder is whole or has no metadata file."""
    state: dict[str, Any] = {k: stand_in(shape, dtype) for k, (shape, dtype, _) in giving.items()}
    with alone():
        dcp.save({**state, **texts}, checkpoint_id=folder, planner=_Giver(giving), no_dist=True)


def shapes(folder: str | os.PathLike) -> dict[str, tuple[tuple[int, ...], torch.dtype] | None]:
    """What a checkpoint holds: shape and dtype of every tensor, None for a text."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype] | None] = {}
    for key, about in FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        size = getattr(about, "size", None)
        found[key] = None if size is None else (tuple(size), about.properties.dtype)  # type: ignore[union-attr]
    return found


def text(folder: str | os.PathLike, key: str) -> str:
    """One text of a checkpoint."""
    wanted: dict[str, Any] = {key: ""}
    with alone():
        dcp.load(wanted, checkpoint_id=folder, no_dist=True)
    return str(wanted[key])


def read(taking: Taking, folder: str | os.PathLike) -> None:
    """Hand every tensor that is asked for to what takes it, one at a time."""
    held = shapes(folder)
    state = {k: stand_in(*held[k]) for k in taking}  # type: ignore[misc]
    with alone():
        dcp.load(state, checkpoint_id=folder, planner=_Taker(taking), no_dist=True)
