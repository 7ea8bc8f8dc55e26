"""A streamed model outside torch.compile: layers fetch their weights on demand, or say why they cannot run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphopt.errors import StreamError
from graphopt.streaming import handles, ring
from graphopt.streaming.engine import Engine
from graphopt.streaming.store import HostLayer


def guard(model: nn.Module, engine: Engine) -> None:
    """Wrap the forward of every layer, and refuse what would move or copy handles."""
    modules = dict(model.named_modules())
    for layer in engine.store.layers:
        module = modules[layer.fqn]
        module.forward = _wrapped(module.forward, engine, layer)  # type: ignore[method-assign]
    for part in model.modules():  # a block that is cast or copied by itself would be NaN, or run with foreign weights
        if part is not model and not any(handles.entry_of(p) for p in part.parameters()):
            continue
        for name, what in (("__deepcopy__", "copied"), ("__reduce_ex__", "pickled")):
            setattr(part, name, _refuse_copy(part, what))
        part._apply = _refuse_apply(part, engine)  # type: ignore[method-assign,assignment]


def _wrapped(forward: Callable[..., Any], engine: Engine, layer: HostLayer) -> Callable[..., Any]:
    # Dynamo reuses compiled code for another model of the same class and shapes; a string that the traced code reads is
    # guarded by value, so code compiled for this model's host store runs for this model only
    owner = str(id(engine))

    @functools.wraps(forward)
    def fetch_then_run(*args: Any, **kwargs: Any) -> Any:
        if owner != "" and torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        with materialized(engine, layer):
            return forward(*args, **kwargs)

    return fetch_then_run


@contextmanager
def materialized(engine: Engine, layer: HostLayer) -> Iterator[None]:
    """A layer with real weights on the device, for a forward without gradients."""
    if torch.is_grad_enabled() and any(e.trained for e in layer.entries):
        raise StreamError(
            "a streamed layer was called in eager mode with gradients on", where=layer.fqn,
            remedy="train through torch.compile(model, backend='graphopt'); for an eager forward use torch.no_grad()",
        )
    engine.check_whole()
    slot = engine.ring.acquire(layer)
    try:
        for entry, view in zip(layer.entries, engine.ring.views(slot, layer)):
            for module, name in entry.sites:
                module._parameters[name] = nn.Parameter(view, requires_grad=entry.trained)
        with ring.casts_not_kept(engine.link.device):
            yield
    finally:
        for entry in layer.entries:
            for module, name in entry.sites:
                module._parameters[name] = entry.handle
        engine.ring.release(slot)


def _refuse_copy(model: nn.Module, what: str) -> Callable[..., Any]:
    def refuse(_: Any) -> Any:
        raise StreamError(f"a streamed model cannot be {what}", where=type(model).__name__,
                          remedy="copy it before graphopt.stream, keep an average with HostAdamW(ema=...), "
                          "save model.state_dict()")

    return refuse


def _refuse_apply(model: nn.Module, engine: Engine) -> Callable[..., Any]:
    def apply(function: Callable[..., Any], recurse: bool = True) -> nn.Module:
        # .to(device) of accelerate and others is harmless when it changes nothing
        probe = torch.empty(0, device=engine.link.device)
        if function(probe).device == engine.link.device and function(probe).dtype == probe.dtype:
            half = torch.empty(0, device=engine.link.device, dtype=torch.bfloat16)
            if function(half).dtype == half.dtype:
                return model
        raise StreamError("a streamed model cannot be moved or cast", where=type(model).__name__,
                          remedy="move and cast it before graphopt.stream")

    return apply
