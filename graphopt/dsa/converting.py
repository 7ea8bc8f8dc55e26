"""`graphopt.dsa.convert`: chosen attention modules of a model become sliding, each with its own offset head."""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphopt.dsa import options
from graphopt.dsa.grid import Grid, Scope, known, reader_of
from graphopt.dsa.handle import Handle
from graphopt.dsa.head import LINEAR_INPUTS, OffsetHead
from graphopt.dsa.layer import Around, Sliding, mixed
from graphopt.dsa.options import DSAConfig
from graphopt.errors import ConfigError

log = logging.getLogger(__name__)
HEADS = ("heads", "num_heads", "n_heads", "num_attention_heads")


def convert(
    model: nn.Module, config: DSAConfig | Mapping[str, DSAConfig] | str | Path | None = None,
    select: str | Sequence[str] | None = None, keep_dense: Sequence[int] | int = (),
    grid: str | Grid | Callable[..., Grid] = "auto",
) -> Handle:
    """Make self-attention modules of a model slide, in place.  Before the optimizer, before FSDP and torch.compile.

    From then on a selected module attends to a window: this is NOT the pretrained dense model (unless the window covers
    the grid), and needs finetuning; see docs/dsa.md for the recipe.  The new heads start at zero offsets.

    model: the whole model, so that the grid can be read from its inputs.
    config: a DSAConfig for all layers, or one per pattern of names (`{"blocks.1?.attn1": DSAConfig(...)}`), or the file
        or folder `handle.save` wrote.
    select: names (globs) of attention modules that take the hidden states first, such as "blocks.*.attn1".
    keep_dense: which of the selected modules stay dense, by position: (0, -1) are the first and the last.
    grid: "auto" reads (T, H, W) from the model's inputs; or the grid itself; or a function of the forward's arguments.

    Returns the Handle (`.parameters()`, `.verify()`, `.probe()`, `.distilling()`, `.revert()`, `.save()`).
    Raises ConfigError, and leaves the model as it was, for a selection that matches nothing or no attention, a model
    that is compiled, sharded, streamed or converted already, and one whose parameters an optimizer holds.
    """
    if isinstance(config, (str, Path)):
        config = options.load(config)
    configs = _configs(config, select)
    _refuse(model)
    chosen = _chosen(model, configs, _positions(keep_dense))
    scope = Scope()
    heads = {name: _head(module, name, c, scope) for name, (module, c) in chosen.items()}
    handle = Handle(model, scope, heads, _reader(model, grid), shown_by(model))
    for name, (module, _) in chosen.items():
        heads[name].train(module.training)
        module.dsa = heads[name]
        module.__class__ = mixed(type(module), Sliding)
    object.__setattr__(model, "_graphopt_dsa", handle)
    model.__class__ = mixed(type(model), Around)
    windows = sorted({h.config.window for h in heads.values()})
    log.warning("graphopt.dsa: %d attention modules now see a window %s of the video; before finetuning this is not "
                "the dense model", len(heads), ", ".join(map(str, windows)))
    return handle


def _configs(config: Any, select: str | Sequence[str] | None) -> dict[str, DSAConfig]:
    """Pattern -> configuration."""
    if isinstance(config, Mapping):
        if select is not None:
            raise ConfigError("select beside a configuration per layer", where="graphopt.dsa.convert",
                              remedy="the keys of the configuration are the selection; leave select out")
        wrong = next((n for n, c in config.items() if not isinstance(c, DSAConfig)), None)
        if wrong is not None:
            raise ConfigError(f"the configuration of {wrong!r} is {config[wrong]!r}", where="graphopt.dsa.convert",
                              remedy="give a graphopt.dsa.DSAConfig for each pattern")
        return _some(dict(config))
    if config is not None and not isinstance(config, DSAConfig):
        raise ConfigError(f"config is {config!r}", where="graphopt.dsa.convert", remedy="give a graphopt.dsa.DSAConfig")
    if select is None:
        raise ConfigError("which modules are to slide?", where="graphopt.dsa.convert",
                          remedy="select='blocks.*.attn1', for example; graphopt.dsa.plan lists every attention")
    patterns = [select] if isinstance(select, str) else list(select) if isinstance(select, Iterable) else [None]
    if not all(isinstance(p, str) for p in patterns):
        raise ConfigError(f"select is {select!r}", where="graphopt.dsa.convert",
                          remedy="a pattern of names such as 'blocks.*.attn1', or several")
    return _some(dict.fromkeys(patterns, config or DSAConfig()))


def _some(configs: dict[str, DSAConfig]) -> dict[str, DSAConfig]:
    if not configs:
        raise ConfigError("the selection is empty", where="graphopt.dsa.convert",
                          remedy="select='blocks.*.attn1', for example; graphopt.dsa.plan lists every attention")
    return configs


def _positions(keep: Any) -> tuple[int, ...]:
    """`keep_dense` as positions."""
    given = (keep,) if isinstance(keep, int) else tuple(keep) if isinstance(keep, Iterable) else (None,)
    if not all(type(i) is int for i in given):
        raise ConfigError(f"keep_dense is {keep!r}", where="graphopt.dsa.convert",
                          remedy="positions among the selected modules, such as (0, -1); () keeps none")
    return given


def _refuse(model: nn.Module) -> None:
    from graphopt.streaming.handles import entry_of

    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name} is no torch.nn.Module", where="graphopt.dsa.convert",
                          remedy="give the model itself, not a function that calls it")
    if isinstance(model, Around) or any(isinstance(m, Sliding) for m in model.modules()):
        raise ConfigError("the model is converted already", where=name, remedy="handle.revert() first")
    if any(getattr(m, "_compiled_call_impl", None) is not None or hasattr(m, "_orig_mod") for m in model.modules()):
        raise ConfigError("the model, or a part of it, is compiled", where=name,
                          remedy="call convert first, torch.compile after it")
    ring = next((n for n, m in model.named_modules() if context_parallel(m)), None)
    if ring is not None:
        raise ConfigError("context parallelism splits the sequence over ranks; windows cross the cuts", where=ring,
                          remedy="use FSDP2 or data parallelism: sliding attention is linear in tokens")
    held = {id(p): n for n, p in model.named_parameters()}
    for n, p in model.named_parameters():
        if entry_of(p) is not None:
            raise ConfigError("the model is streamed", where=n, remedy="call convert before graphopt.stream")
        if type(p.data) is not torch.Tensor or hasattr(p, "_local_tensor"):
            raise ConfigError(f"{n} is a {type(p.data).__name__}", where=n,
                              remedy="call convert before FSDP, tensor parallelism and quantisation")
    for optimizer in _optimizers():
        theirs = next((held[id(p)] for g in optimizer.param_groups for p in g["params"] if id(p) in held), None)
        if theirs is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} was made before convert, so it would never train the offset heads",
                where=theirs, remedy="call convert first, then make the optimizer (handle.parameters() are its heads')")


def context_parallel(module: nn.Module) -> bool:
    """Did diffusers' `enable_parallelism` give an attention module a part of the sequence (ring, Ulysses)?"""
    return getattr(getattr(module, "processor", None), "_parallel_config", None) is not None


def _optimizers() -> Iterable[torch.optim.Optimizer]:
    """Every optimizer that is alive."""
    return [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]


def _chosen(model: nn.Module, configs: dict[str, DSAConfig],
            keep: tuple[int, ...]) -> dict[str, tuple[nn.Module, DSAConfig]]:
    """Name -> module and configuration of what is converted."""
    modules = dict(model.named_modules())
    found: dict[str, tuple[nn.Module, DSAConfig]] = {}
    for pattern, config in configs.items():
        names = [n for n in modules if n and fnmatch(n, pattern)]
        if not names:
            some = ", ".join(_candidates(modules)[:4]) or "none that look like attention"
            raise ConfigError(f"no module matches {pattern!r}", where=type(model).__name__,
                              remedy=f"attention modules here: {some}")
        found |= {n: (modules[n], config) for n in names}
    order = [n for n in modules if n in found]
    for i in keep:
        if not -len(order) <= i < len(order):
            raise ConfigError(f"keep_dense names layer {i} of {len(order)}", where=type(model).__name__,
                              remedy=f"positions are -{len(order)} .. {len(order) - 1}")
    kept = {order[i] for i in keep}
    if kept >= set(order):
        raise ConfigError("keep_dense keeps every selected layer dense", where=type(model).__name__,
                          remedy="select more layers, or keep fewer dense")
    return {n: found[n] for n in order if n not in kept}


def _candidates(modules: dict[str, nn.Module]) -> list[str]:
    return [n for n, m in modules.items() if input_layer(m) is not None and not getattr(m, "is_cross_attention", False)]


def head_count(module: nn.Module) -> int | None:
    """How many heads an attention module has, None if it does not say."""
    return next((h for n in HEADS if isinstance(h := getattr(module, n, None), int)), None)


def input_layer(module: nn.Module) -> nn.Module | None:
    """The linear layer that makes an attention module's queries, None if there is none by a usual name."""
    return next((c for n in LINEAR_INPUTS if hasattr(c := getattr(module, n, None), "in_features")), None)


def _head(module: nn.Module, name: str, config: DSAConfig, scope: Scope) -> OffsetHead:
    layer = input_layer(module)
    heads = head_count(module) if layer is not None else None
    if layer is None or heads is None:
        raise ConfigError(f"{type(module).__name__} is no attention module that can be read", where=name,
                          remedy=f"it needs a linear layer called {', '.join(LINEAR_INPUTS[:4])}, .. and one of "
                          f"{', '.join(HEADS)}")
    if getattr(module, "is_cross_attention", False):
        raise ConfigError("cross-attention has no window", where=name, remedy="select self-attention modules only")
    if hasattr(module, "dsa"):
        raise ConfigError("the module has an attribute `dsa` of its own", where=name, remedy="leave it out of select")
    groups = config.groups or heads
    if heads % groups:
        raise ConfigError(f"{groups} groups do not divide {heads} heads", where=name, remedy="groups=1, or a divisor")
    device = next((p.device for p in module.parameters()), None)
    head = OffsetHead(config, layer.in_features, groups, scope, name, device)  # type: ignore[arg-type]
    head.input_name = next(iter(inspect.signature(module.forward).parameters))
    return head


def _reader(model: nn.Module, grid: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], Grid | None]:
    if callable(grid):
        return lambda args, kwargs: _returned(grid(*args, **kwargs))
    if isinstance(grid, (tuple, list)):
        fixed = known(grid, "graphopt.dsa.convert")
        return lambda args, kwargs: fixed
    if grid != "auto":
        raise ConfigError(f"grid is {grid!r}", where="graphopt.dsa.convert",
                          remedy="'auto', (T, H, W) after patching, or a function of the forward's arguments")
    return shown_by(model)


def _returned(grid: Any) -> Grid | None:
    """What the user's function of the forward's arguments gave: a grid, or None for one it cannot tell."""
    if grid is None or torch.compiler.is_dynamo_compiling():  # sizes may be symbols there
        return grid
    return known(grid, "the function given as grid= to graphopt.dsa.convert")


def shown_by(model: nn.Module) -> Callable[[tuple[Any, ...], dict[str, Any]], Grid | None]:
    """How the grid is read from a forward's arguments, by position or by name."""
    names = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    read = reader_of(model)
    return lambda args, kwargs: read((), {**dict(zip(names, args)), **kwargs})
