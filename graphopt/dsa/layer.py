"""A converted attention module, and the model around it: their classes are replaced by subclasses made here.

A subclass, not a wrapped `forward`: names of modules and parameters stay, copies and FSDP2 (which does the same) work.

Eager: while the module's forward runs, its call of scaled_dot_product_attention becomes sliding attention.  Traced by
Dynamo: the module's input is marked (codegen/dsa/marker.py) and the pass lower_video_attention does the replacement.
"""

from __future__ import annotations

import inspect
import logging
import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graphopt import _compat_capture
from graphopt.codegen.dsa.marker import MARK
from graphopt.dsa.attention import video_attention
from graphopt.dsa.grid import CELLS, Grid, Scope
from graphopt.dsa.head import OffsetHead
from graphopt.errors import ConfigError

log = logging.getLogger(__name__)
SDPA = F.scaled_dot_product_attention
CAT = (torch.cat, torch.concat, torch.concatenate)


class Sliding:
    """Mixed into the class of a converted attention module; `self.dsa` is its OffsetHead."""

    dsa: OffsetHead

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, its attention replaced."""
        head, scope = self.dsa, self.dsa.scope
        if scope.dense and scope.recorder is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        name = head.input_name
        x = kwargs[name] if name in kwargs else args[0]
        grid = scope.current()
        offsets = head(_video_part(head, x, grid), grid)
        if torch.compiler.is_dynamo_compiling():
            if scope.distilling or scope.recorder is not None:
                _eager_only(head)
            config = head.config
            marked = MARK(x, offsets, grid[0], grid[1], grid[2], list(config.window), config.text, config.boundary,
                          type(self).__qualname__)
            if name in kwargs:
                kwargs = {**kwargs, name: marked}
            else:
                args = (marked, *args[1:])
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with Redirect(head, grid, offsets) as redirect:
            out = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not redirect.hits:
            raise ConfigError(
                "no self-attention through scaled_dot_product_attention was called in this module", where=head.fqn,
                remedy="give it a processor that calls it (diffusers: set_attn_processor with AttnProcessor2_0, "
                "attention backend 'native'), or leave it out of convert's select")
        return out


def _eager_only(head: OffsetHead) -> None:
    # in a function of its own: torch 2.11 fails on a `raise` in the frame that it goes on with behind a graph break
    raise ConfigError("distillation and probing run eagerly", where=head.fqn,
                      remedy="call the model itself, not its compiled form, while they are on")


def _video_part(head: OffsetHead, x: Tensor, grid: Grid) -> Tensor:
    """The video's tokens of the hidden states [B, N, C]."""
    video = grid[0] * grid[1] * grid[2]
    if x.is_nested:
        raise ConfigError("packed (nested) sequences have no grid", where=head.fqn,
                          remedy="give each grid a batch of its own")
    if x.dim() != 3 or x.shape[-1] != head.channels:
        raise ConfigError(f"the input is {list(x.shape)}, not [B, N, {head.channels}]", where=head.fqn,
                          remedy="convert modules whose first argument is the hidden states")
    if x.shape[1] == video:
        return x
    if head.config.text == "first" and x.shape[1] > video:
        return x[:, x.shape[1] - video :]
    if head.config.text == "last" and x.shape[1] > video:
        return x[:, :video]
    raise ConfigError(
        f"the grid {tuple(grid)} has {video} tokens, the input has {x.shape[1]}", where=head.fqn,
        remedy="pass the grid after patching; text tokens in the input need DSAConfig(text='first') or 'last'")


class Redirect(TorchFunctionMode):
    """While it is entered, self-attention of one module becomes sliding attention."""

    def __init__(self, head: OffsetHead, grid: Grid, offsets: Tensor | None) -> None:
        super().__init__()
        self.head, self.grid, self.offsets, self.hits = head, grid, offsets, 0
        self.text_first: bool | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is SDPA:
            given = _BINDING.bind(*args, **kwargs).arguments
            if given["query"].shape[-2] == given["key"].shape[-2]:
                self.hits += 1
                return self.attend(**given)
        elif func in CAT and self.text_first is None:
            self._order(*args, **kwargs)
        return func(*args, **kwargs)

    def _order(self, tensors: Any = (), dim: int = 0, **rest: Any) -> None:
        """A video and a text sequence are put one behind the other: which is first?"""
        if len(tensors) != 2:
            return
        video = self.grid[0] * self.grid[1] * self.grid[2]
        sizes = [t.shape[dim] for t in tensors]
        if sizes.count(video) == 1 and tensors[0].dim() >= 3:
            self.text_first = sizes[1] == video

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
        """What the module gets in place of scaled_dot_product_attention."""
        head, scope = self.head, self.head.scope
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            low = torch.get_autocast_dtype(kind)
            query, key, value = (t.to(low) for t in (query, key, value))
        text, first = self._text(query.shape[2])
        self._check_mask(attn_mask, text, first)
        same = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        def dense() -> Tensor:
            return (SDPA(query, key, value, **same, enable_gqa=enable_gqa))
        if scope.dense:
            y = dense()
        else:
            try:
                with torch.autocast(kind, enabled=False):
                    y = video_attention(
                        query, key, value, self.offsets, grid=self.grid, window=head.config.window, text=text,
                        text_first=first, boundary=head.config.boundary, **same)  # type: ignore[arg-type]
            except ConfigError as error:
                raise ConfigError(error.what, where=f"{head.fqn}: {error.where}", remedy=error.remedy) from error
        if scope.distilling:
            with torch.no_grad():
                target = dense()
            loss = (y - target).float().square().mean() / target.float().square().mean()
            if _compat_capture.backward_id() < 0:  # not where a checkpointed block runs again
                scope.losses[head.fqn] = loss
        if scope.recorder is not None:
            scope.recorder(head, query, key, value, self.offsets, self.grid, text, first, scale, attn_mask, y)
        return y

    def _text(self, tokens: int) -> tuple[int, bool]:
        """(text tokens, do they stand first)."""
        video = self.grid[0] * self.grid[1] * self.grid[2]
        place = self.head.config.text
        text = tokens - video
        if text == 0:
            return 0, False
        if text < 0 or place == "none":
            raise ConfigError(f"the grid {tuple(self.grid)} has {video} tokens, the sequence has {tokens}",
                              where=self.head.fqn, remedy="pass the grid after patching, in tokens")
        if place != "auto":
            return text, place == "first"
        if self.text_first is None:
            raise ConfigError(f"the sequence has {tokens} tokens, {text} more than the video: where do they stand?",
                              where=self.head.fqn, remedy="say DSAConfig(text='first') or DSAConfig(text='last')")
        return text, self.text_first

    def _check_mask(self, mask: Tensor | None, text: int, first: bool) -> None:
        """Once per layer: a mask may hide text tokens only.  Later a sample that breaks this becomes NaN."""
        if mask is None or self.head.mask_checked or mask.dtype != torch.bool or mask.dim() != 4 or mask.is_meta:
            return
        self.head.mask_checked = True
        video = mask[..., text:] if first else mask[..., : mask.shape[-1] - text]
        if not bool(video.all()):
            raise ConfigError("the attention mask hides video tokens (padded or packed sequences)", where=self.head.fqn,
                              remedy="give each sample its own grid in a batch of its own; text tokens may be hidden")


def _signature(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
               scale: Any = None, enable_gqa: bool = False) -> None: ...


_BINDING = inspect.signature(_signature)


class Around:
    """Mixed into the class of a converted model: reads the grid from the inputs of each forward."""

    _graphopt_dsa: Any  # the Handle

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, with the grid known inside."""
        handle = self._graphopt_dsa
        scope: Scope = handle.scope
        grid = CELLS[0].read()
        if grid is None:
            grid = handle.read_grid(args, kwargs)
        if grid is not None and not torch.compiler.is_dynamo_compiling():
            _compare(handle.shown(args, kwargs), grid, type(self).__qualname__)
        cell, keep = CELLS[scope.cell], False
        outer = cell.push(grid)
        try:
            out = super().forward(*args, **kwargs)  # type: ignore[misc]
            if grid is not None and not torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
                keep = scope.remember(out, grid)
        finally:
            if not keep:
                cell.pop(outer)
        return out


def _compare(shown: Grid | None, given: Grid, model: str) -> None:
    """Given and shown grids of the same number of tokens in another shape: one of the two orders is not the tokens'."""
    if shown is not None and tuple(shown) != tuple(given) and math.prod(shown) == math.prod(given):
        _tell(tuple(given), tuple(shown), model)


@cache
def _tell(given: Grid, shown: Grid, model: str) -> None:
    log.warning("graphopt.dsa: %s runs with the grid %s it was given, and its inputs look like %s: as many tokens in "
                "another order. If tokens do not lie in raster order of %s, windows are wrong: leave video_grid and "
                "convert's grid= out", model, given, shown, given)


_MIXED: dict[tuple[type, type], type] = {}


def mixed(cls: type, mixin: type) -> type:
    """A subclass of `cls` with the mixin in front, under the same name (checkpoints of diffusers name the class).

    One for all modules of a class: code compiled for one block then serves the others.
    """
    if (cls, mixin) not in _MIXED:
        name = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _MIXED[cls, mixin] = type(cls.__name__, (mixin, cls), name)
    return _MIXED[cls, mixin]


def taken_back(module: nn.Module, mixin: type) -> type | None:
    """The class a module had before `mixed`; None if something else replaced its class since."""
    bases = type(module).__bases__
    return bases[1] if len(bases) == 2 and bases[0] is mixin else None

