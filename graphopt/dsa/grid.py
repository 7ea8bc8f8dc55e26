"""The latent grid (T, H, W) of the video that is going through a model: given by the user, or read from the inputs.

A grid is never made up from a number of tokens.  Every attention checks it against its sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphopt import _compat, _compat_capture
from graphopt.codegen.dsa import checks
from graphopt.errors import ConfigError

Grid = tuple[int, int, int]
Reader = Callable[[tuple[Any, ...], dict[str, Any]], Grid | None]

class Cell:
    """A grid that may be known.

    It is kept as the shape of an empty tensor: Dynamo makes sizes of tensors symbols when they change (of plain numbers
    that a module reaches it makes constants), so a block compiled by itself serves every resolution.  A grid that is
    written while a whole model is traced consists of sizes already.
    """

    def __init__(self) -> None:
        self.known = False
        self.carrier = torch.empty(1, 1, 1, 0)
        self.traced: Grid | None = None

    def read(self) -> Grid | None:
        """The grid, if it is known."""
        if self.traced is not None:
            return self.traced
        if not self.known:
            return None
        T, H, W, _ = self.carrier.shape
        return T, H, W

    def write(self, grid: Grid | None) -> None:
        """None: not known any more."""
        self.known = grid is not None
        if grid is not None:
            self.carrier = torch.empty(*grid, 0)

    def push(self, grid: Grid | None) -> Any:
        """Write a grid; returns what `pop` needs to undo it (a graph break may lie between)."""
        before = self.known, self.carrier, self.traced
        if torch.compiler.is_dynamo_compiling():
            self.traced = grid
        else:
            self.write(grid)
        return before

    def pop(self, before: Any) -> None:
        """Undo a `push`."""
        self.known, self.carrier, self.traced = before


def known(grid: Any, where: str) -> Grid:
    """A grid somebody gave, as three whole numbers; ConfigError for anything else."""
    try:
        return checks.sizes(grid, "a grid")
    except ConfigError as error:
        raise ConfigError(error.what, where=where, remedy=error.remedy) from None


CELLS = [Cell()]  # the first is that of `video_grid`, one more for each converted model


class video_grid:
    """`with graphopt.dsa.video_grid(T, H, W):` says the grid of the videos inside, in tokens after patching.

    Needed where a converted block is called or compiled by itself, without the converted model around it.  With
    activation checkpointing in eager mode the backward belongs inside as well, since it runs the block again.
    """

    def __init__(self, T: int, H: int, W: int) -> None:
        self.grid = (T, H, W) if torch.compiler.is_compiling() else known((T, H, W), "video_grid")
        self.outer: list[Any] = []  # one object may be entered again inside itself

    def __enter__(self) -> Grid:
        self.outer.append(CELLS[0].push(self.grid))
        return self.grid

    def __exit__(self, *error: Any) -> None:
        CELLS[0].pop(self.outer.pop())


class Scope:
    """What the converted layers of one model share: the grid of the forward that is running.

    Eager activation checkpointing runs a block again inside the backward, when no forward is running.  So the grid of a
    forward holds until its backward ends, and is set again when that backward begins.  There is one field for it: code
    compiled per block is guarded by what it read, and must be the same code when it runs again.
    """

    def __init__(self) -> None:
        CELLS.append(Cell())
        self.cell = len(CELLS) - 1
        self.backward: int = -1
        self.ambiguous = False
        self.dense = False
        self.distilling = False
        self.recorder: Callable[..., None] | None = None
        self.losses: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Scope:
        """A copied model knows its own grid."""
        memo[id(self)] = twin = Scope()
        twin.dense, twin.distilling = self.dense, self.distilling
        return twin

    def current(self) -> Grid:
        """The grid that holds now; ConfigError if there is none."""
        grid = CELLS[0].read()
        if grid is not None:
            return grid
        if self.ambiguous:
            raise ConfigError(
                "one backward runs checkpointed blocks of two forwards with different grids again",
                remedy="call backward once per forward, or wrap forward and backward in graphopt.dsa.video_grid",
            )
        grid = CELLS[self.cell].read()
        if grid is None:
            raise ConfigError(
                "the grid of the video is not known here: a converted block runs without the model around it",
                remedy="wrap the call in `with graphopt.dsa.video_grid(T, H, W):`, in tokens after patching",
            )
        return grid

    def remember(self, outputs: Any, grid: Grid) -> bool:
        """When the backward of this forward begins, its grid holds again.  False if there can be no backward."""
        tensors = [t for t in _compat.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
        for tensor in tensors:
            tensor.register_hook(lambda grad: self._begin(grid))
        return bool(tensors)

    def _begin(self, grid: Grid) -> None:
        this = _compat_capture.backward_id()
        self.ambiguous = this == self.backward and grid != CELLS[self.cell].read()
        if this != self.backward:
            _compat_capture.after_backward(self._end)
        self.backward = this
        CELLS[self.cell].write(grid)

    def _end(self) -> None:
        CELLS[self.cell].write(None)
        self.backward, self.ambiguous = -1, False


def reader_of(model: nn.Module) -> Callable[[tuple[Any, ...], dict[str, Any]], Grid | None]:
    """How to read the grid from the inputs of a forward: (args, kwargs) -> grid, or None if they do not show it.

    Either the inputs are tokens with `num_frames`, `height` and `width` (LTX), or a latent [B, C, T, H, W] or
    [B, T, C, H, W] whose patch size is in the model's config or in its patch embedding.
    """
    found = _patch(model)

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Grid | None:
        sizes = (kwargs.get("num_frames"), kwargs.get("height"), kwargs.get("width"))
        latent = _latent(args, kwargs)
        if latent is None:
            return None if None in sizes else sizes  # type: ignore[return-value]
        if found is None:
            return None
        (pt, ph, pw), channels = found
        if latent.shape[1] == channels:
            T = latent.shape[2]
        elif latent.shape[2] == channels:
            T = latent.shape[1]
        else:
            return None
        return T // pt, latent.shape[3] // ph, latent.shape[4] // pw

    return read


def _latent(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    for value in (kwargs.get("hidden_states"), *args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() == 5:
            return value
    return None


def _patch(model: nn.Module) -> tuple[Grid, int] | None:
    """((pt, ph, pw), channels of the latent)."""
    config = getattr(model, "config", None)
    size = getattr(config, "patch_size", None)
    channels = getattr(config, "in_channels", None)
    if isinstance(channels, int) and isinstance(size, (int, tuple, list)):
        if not isinstance(size, int):
            return (tuple(size), channels) if len(size) == 3 else None  # type: ignore[return-value]
        return (getattr(config, "patch_size_t", None) or 1, size, size), channels
    for module in model.modules():
        if isinstance(module, nn.Conv3d) and module.kernel_size == module.stride:
            return module.kernel_size, module.in_channels  # type: ignore[return-value]
    return None
