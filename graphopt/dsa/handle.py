"""What `convert` returns: the converted layers of a model and what one does with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.dsa import options
from graphopt.dsa.grid import Reader, Scope
from graphopt.dsa.head import OffsetHead
from graphopt.dsa.layer import Around, Sliding, taken_back
from graphopt.errors import ConfigError


class Handle:
    """The converted layers of a model.  `layers`: name -> OffsetHead."""

    def __init__(self, model: nn.Module, scope: Scope, layers: dict[str, OffsetHead], read_grid: Reader,
                 shown: Reader) -> None:
        self.model, self.scope, self.layers, self.read_grid, self.shown = model, scope, layers, read_grid, shown
        self.reverted = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        """A copied model has its own handle: the copy's layers and scope."""
        import copy

        twin = Handle.__new__(Handle)
        memo[id(self)] = twin
        twin.read_grid, twin.shown, twin.reverted = self.read_grid, self.shown, self.reverted
        twin.scope = copy.deepcopy(self.scope, memo)
        twin.layers = {n: copy.deepcopy(h, memo) for n, h in self.layers.items()}
        twin.model = copy.deepcopy(self.model, memo)
        return twin

    def parameters(self) -> Iterator[nn.Parameter]:
        """The heads' parameters.  Give them a group of their own, without weight decay (`param_groups`)."""
        self._converted()
        return (p for head in self.layers.values() for p in head.parameters())

    def param_groups(self, lr: float, head_lr: float | None = None, **rest: Any) -> list[dict[str, Any]]:
        """Two groups for an optimizer: the model's parameters at `lr`, the heads' at `head_lr` without weight decay.

        head_lr: default lr / 10, which is careful.  Offsets start at zero and move by learning only: at such a rate
        they had not moved after 1,000 steps of the adaptation run (docs/dsa.md), at ten times lr they had.
        """
        heads = [p for p in self.parameters() if p.requires_grad]
        own = {id(p) for p in heads}
        others = [p for p in self.model.parameters() if p.requires_grad and id(p) not in own]
        head_lr = lr / 10 if head_lr is None else head_lr
        return [{"params": others, "lr": lr, **rest}, {"params": heads, **rest, "lr": head_lr, "weight_decay": 0.0}]

    def save(self, path: str | Path) -> Path:
        """Write the configuration beside a checkpoint (graphopt_dsa.json); `convert(model, path)` reads it."""
        self._converted()
        return options.save(path, {name: head.config for name, head in self.layers.items()})

    def revert(self) -> nn.Module:
        """The dense model again: heads are dropped, all other weights stay.

        ConfigError if something else replaced its classes since.
        """
        self._converted()
        modules = dict(self.model.named_modules())
        places = [(modules[n], Sliding) for n in self.layers if n in modules] + [(self.model, Around)]
        for module, mixin in places:
            if taken_back(module, mixin) is None:
                raise ConfigError("something replaced a converted module's class since (FSDP?), or it was reverted",
                                  where=type(module).__name__, remedy="revert before wrapping the model")
        for module, mixin in places:
            module.__class__ = taken_back(module, mixin)
            if mixin is Sliding:
                del module.dsa
        del self.model._graphopt_dsa
        self.reverted = True
        return self.model

    def _converted(self) -> None:
        if self.reverted:
            raise ConfigError("the model was reverted: it has no converted layers any more",
                              where=type(self.model).__name__, remedy="graphopt.dsa.convert it again, for a new handle")

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Inside, the converted layers compute dense attention: the teacher, or the model before conversion."""
        self._converted()
        before, self.scope.dense = self.scope.dense, True
        try:
            yield
        finally:
            self.scope.dense = before

    @contextmanager
    def distilling(self) -> Iterator[None]:
        """Inside, every converted layer also computes dense attention on its own q, k, v, for `distill_loss`.

        Eager only.  With activation checkpointing the backward belongs inside as well.
        """
        self._converted()
        before, self.scope.distilling = self.scope.distilling, True
        try:
            yield
        finally:
            self.scope.distilling = before

    def distill_loss(self) -> Tensor:
        """The mean over layers of |y - dense|^2 / |dense|^2 of the attention outputs of the last forward.

        ConfigError outside of `distilling()`.  A call takes the recorded losses; the next needs another forward.
        """
        losses = list(self.scope.losses.values())
        self.scope.losses = {}
        if not losses:
            raise ConfigError("no layer recorded a loss", where="distill_loss",
                              remedy="run the forward inside `with handle.distilling():`, eagerly")
        return torch.stack(losses).mean()

    def verify(self, *args: Any, **kwargs: Any) -> Any:
        """See graphopt.dsa.verify."""
        from graphopt.dsa import measure

        self._converted()
        return measure.verify(self, args, kwargs)

    def probe(self, *args: Any, **kwargs: Any) -> Any:
        """See graphopt.dsa.probe."""
        from graphopt.dsa import measure

        self._converted()
        return measure.probe(self, args, kwargs)

    def __repr__(self) -> str:
        windows = sorted({h.config.window for h in self.layers.values()})
        numbers = sum(p.numel() for p in self.parameters())
        return f"Handle({len(self.layers)} layers, windows {windows}, {numbers:,} parameters)"


def handle_of(model: Any) -> Handle:
    """The handle of a converted model (or a Handle itself); ConfigError if it is not converted."""
    if isinstance(model, Handle):
        return model
    inner = getattr(model, "_orig_mod", model)
    handle = getattr(inner, "_graphopt_dsa", None)
    if not isinstance(handle, Handle):
        inside = next((n for n, m in inner.named_modules() if isinstance(m, Around)), None) if isinstance(
            inner, nn.Module) else None
        raise ConfigError(f"{type(inner).__name__} is not converted", where=inside,
                          remedy="graphopt.dsa.convert(model, ...) first" if inside is None else
                          f"the model inside it is: give that one (.{inside})")
    return handle
