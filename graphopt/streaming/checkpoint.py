"""Checkpoints of model and optimizer by torch.distributed.checkpoint, one tensor at a time.

Nothing is held twice: a tensor is taken from the host store, or put together (an fp32 master), when it is written, and
goes back into the store when it has been read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from graphopt.codegen.adamw import join, split
from graphopt.errors import StreamError
from graphopt.streaming import dcp, handles, state
from graphopt.streaming.store import Entry

if TYPE_CHECKING:
    from graphopt.streaming.optimizer import HostAdamW

GROUPS = "groups"


class Part(NamedTuple):
    """One tensor of a checkpoint: its shape and dtype, what gives it, and what takes it back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    give: Callable[[], torch.Tensor]
    take: Callable[[torch.Tensor], None]


def save_checkpoint(model: nn.Module, optimizer: HostAdamW, folder: str | os.PathLike, frozen: bool = True) -> None:
    """Write model and optimizer with torch.distributed.checkpoint: `model.<name>` and `optimizer.<name>/<state>`.

    Beside the host store it takes the memory of the largest tensor.  frozen: parameters that are not trained, too.
    """
    optimizer.check_whole()
    optimizer.flush()
    leave = set() if frozen else _frozen(model)
    parts = {k: p for k, p in _parts(model, optimizer) if k not in leave and not _untouched(optimizer, k, model)}
    giving = {k: (p.shape, p.dtype, p.give) for k, p in parts.items()}
    dcp.write(giving, {GROUPS: json.dumps(_groups(optimizer))}, folder)


def load_checkpoint(model: nn.Module, optimizer: HostAdamW, folder: str | os.PathLike, frozen: bool = True) -> None:
    """Read what `save_checkpoint` wrote; training goes on bit by bit as it would have.

    Names and shapes are checked before anything is written.  frozen: False lets parameters that are not trained be
    absent (they keep the values they have).  Raises StreamError if it is not of this model and optimizer.
    """
    optimizer.flush()
    found = {k: about[0] for k, about in dcp.shapes(folder).items() if about is not None}
    parts = _places(model, optimizer)
    given = json.loads(dcp.text(folder, GROUPS))
    _check(found, parts, given, optimizer, set() if frozen else _frozen(model))
    for mine, theirs in zip(optimizer.param_groups, given):
        mine.update({k: tuple(v) if isinstance(v, list) else v for k, v in theirs.items() if k != "params"})
    optimizer.abandon()
    engine = optimizer.engine
    for layer in engine.store.layers:
        engine.link.join(layer.reading)
    with torch.no_grad():
        for p in (q for g in optimizer.param_groups for q in g["params"]):
            _forget(optimizer, p)
        dcp.read({k: parts[k].take for k in found}, folder)
        _first_averages(optimizer, found, model)
    for layer in engine.store.layers:
        engine.store.replaced(layer)


def _check(
    found: dict[str, tuple[int, ...]], parts: dict[str, Part], given: list[dict[str, Any]], optimizer: HostAdamW,
    optional: set[str],
) -> None:
    missing = [k for k in parts if k.startswith("model.") and k not in found and k not in optional]
    unknown = [k for k in found if k not in parts]
    bad = [k for k, shape in found.items() if k in parts and tuple(shape) != tuple(parts[k].shape)]
    for what, names in (("missing", missing), ("unknown here", unknown), ("of another shape", bad)):
        if names:
            raise StreamError(f"{len(names)} tensors of the checkpoint are {what}: {', '.join(names[:3])}",
                              remedy="load the checkpoint of this very model, made with the same optimizer settings")
    sizes = [len(g["params"]) for g in optimizer.param_groups]
    if [g["params"] for g in given] != sizes:
        theirs = [g["params"] for g in given]
        raise StreamError(f"the checkpoint has groups of {theirs} parameters, this optimizer {sizes}",
                          remedy="make the optimizer with the same groups")


def _groups(optimizer: HostAdamW) -> list[dict[str, Any]]:
    return [{k: len(v) if k == "params" else float(v) if isinstance(v, torch.Tensor) else v for k, v in g.items()}
            for g in optimizer.param_groups]


def _frozen(model: nn.Module) -> set[str]:
    """Keys of the parameters that are not trained."""
    return {f"model.{n}" for n, p in model.named_parameters() if not p.requires_grad}


def _parts(model: nn.Module, optimizer: HostAdamW) -> Iterator[tuple[str, Part]]:
    """Every tensor that a checkpoint may hold."""
    entries = {e.fqn: e for e in optimizer.store.entries}
    for key, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            yield f"model.{key}", _part(value.detach(), _loaded(entries.get(key)))
    names = {id(p): n for n, p in model.named_parameters()}
    for p in (q for g in optimizer.param_groups for q in g["params"]):
        if p.requires_grad:
            kind = _streamed(optimizer, p) if handles.entry_of(p) is not None else _resident(optimizer, p)
            for what, part in kind:
                yield f"optimizer.{names[id(p)]}/{what}", part


def _places(model: nn.Module, optimizer: HostAdamW) -> dict[str, Part]:
    """Where a checkpoint goes: also over the weights of a step that failed half-way."""
    half, optimizer._updated = optimizer._updated, set()
    try:
        return dict(_parts(model, optimizer))
    finally:
        optimizer._updated = half


def _part(value: torch.Tensor, then: Callable[[], None] = lambda: None) -> Part:
    def take(given: torch.Tensor) -> None:
        value.copy_(given)
        then()

    return Part(tuple(value.shape), value.dtype, lambda: value, take)


def _loaded(entry: Entry | None) -> Callable[[], None]:
    return lambda: entry.layer.missing.discard(entry.name) if entry is not None else None


def _streamed(optimizer: HostAdamW, p: nn.Parameter) -> Iterable[tuple[str, Part]]:
    entry = handles.entry_of(p)
    assert entry is not None
    if not entry.trained:
        return
    s = optimizer.states[entry.layer]
    shaped = lambda flat: s.of(flat, entry).as_strided(entry.shape, entry.stride)  # noqa: E731

    def steps(t: torch.Tensor) -> None:
        s.steps[entry] = int(t)

    yield "step", Part((), torch.float32, lambda: state.count(s.steps[entry]), steps)
    yield "exp_avg", _part(shaped(s.exp_avg))
    yield "exp_avg_sq", _part(shaped(s.exp_avg_sq))
    if s.average is not None:
        yield "ema", _part(shaped(s.average))
    if entry.dtype == torch.bfloat16:
        assert s.residual is not None
        weight, residual = state.flattened(entry.layer.weight(entry)), s.of(s.residual, entry)

        def take(given: torch.Tensor) -> None:
            whole = torch.empty_strided(entry.shape, entry.stride, dtype=torch.float32, device="cpu").copy_(given)
            high, rest = split(state.flattened(whole))
            weight.copy_(high)
            residual.copy_(rest)

        yield "master", Part(tuple(entry.shape), torch.float32,
                             lambda: join(weight, residual).as_strided(entry.shape, entry.stride), take)


def _resident(optimizer: HostAdamW, p: nn.Parameter) -> Iterable[tuple[str, Part]]:
    states = optimizer.resident

    def steps(t: torch.Tensor) -> None:
        states.get(p)["step"] = int(t)

    def part(name: str) -> Part:
        return Part(tuple(p.shape), torch.float32, lambda: states.get(p)[name], lambda t: states.get(p)[name].copy_(t))

    yield "step", Part((), torch.float32, lambda: state.count(states.steps(p)), steps)
    for name in ("exp_avg", "exp_avg_sq", *(("ema",) if optimizer.ema is not None else ())):
        yield name, part(name)
    if p.dtype == torch.bfloat16:
        yield "master", Part(tuple(p.shape), torch.float32, lambda: join(p.detach(), states.get(p)["residual"]),
                             lambda t: states.load_master(p, t))


def _untouched(optimizer: HostAdamW, key: str, model: nn.Module) -> bool:
    """Is this the state of a parameter that was never updated?"""
    if not key.startswith("optimizer."):
        return False
    p = model.get_parameter(key.removeprefix("optimizer.").rpartition("/")[0])
    entry = handles.entry_of(p)
    return (optimizer.resident.steps(p) if entry is None else optimizer.states[entry.layer].steps[entry]) == 0


def _forget(optimizer: HostAdamW, p: nn.Parameter) -> None:
    """As new: what a checkpoint does not hold was never updated."""
    entry = handles.entry_of(p)
    if entry is None:
        optimizer.resident.of.pop(p, None)
    elif entry.trained:
        s = optimizer.states[entry.layer]
        s.steps[entry] = 0
        for flat in (s.exp_avg, s.exp_avg_sq, s.residual):
            if flat is not None:
                s.of(flat, entry).zero_()


def _first_averages(optimizer: HostAdamW, found: Iterable[str], model: nn.Module) -> None:
    """A moving average that the checkpoint does not hold starts at the loaded weights."""
    held = set(found)
    names = {id(p): n for n, p in model.named_parameters()}
    for p in (q for g in optimizer.param_groups for q in g["params"]):
        entry = handles.entry_of(p)
        if entry is None or not entry.trained or f"optimizer.{names[id(p)]}/ema" in held:
            continue
        s = optimizer.states[entry.layer]
        if s.average is not None:
            s.of(s.average, entry).copy_(state.flattened(entry.layer.weight(entry)))
