"""`graphopt.stream`: choose the layers, move their weights to the host store, leave handles in the model."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from graphopt.errors import ConfigError, StreamError
from graphopt.streaming import eager, handles, memory, numa, replay, state
from graphopt.streaming.engine import Engine
from graphopt.streaming.link import Link, link_for
from graphopt.streaming.store import Entry, HostLayer, HostStore

# families of layers that hold less than this part of all layers' bytes stay on the device under resident="auto"
SMALL = 0.05
# part of the free device memory that first layers may take with their gradients and state under resident="auto"
FIRST = 0.05
# hosts with fewer CPUs for the optimizer keep four first layers on the device, not two: measured with 14 and 28
FEW_CPUS = 20
# attributes by which other systems that move weights mark a module: accelerate, diffusers, DeepSpeed, FSDP
FOREIGN = ("_hf_hook", "_diffusers_hook", "ds_id", "_fsdp_wrapped_module")


def stream(
    model: nn.Module, device: str | torch.device = "cuda", slots: int | str = 2,
    resident: str | int | Sequence[str] = "auto", *, layers: Sequence[str] | None = None, weights: Any = None,
    link: Link | None = None, graphs: str = "auto",
) -> nn.Module:
    """Move the layers' weights of a model to host memory, to be uploaded layer by layer; returns the same model.

    Call it before torch.compile and before the optimizer is made.  Everything else moves to `device`.

    model: may be on any device, also on meta (then load weights by `load_state_dict`, or pass `weights`).
    device: where it computes.  slots: layers on the device at once; 2 overlaps upload and compute; "auto" begins with 2
    and takes device memory that the first step left unused, so that layers stay between forward and backward.
    resident: what stays on the device beside everything outside the layers and weights shared between layers: "auto"
    (families of layers that are a small part of the model; on a GPU also the first two layers, four where the host has
    few CPUs, as far as they take little of its free memory, so that a forward need not wait for the updates of the step
    before), a number of first layers (stream_plan advises one), or names (`blocks.0`, globs).  A resident layer is
    recomputed in the backward as streamed ones are.
    layers: names (globs) of the modules that are layers; default: the members of every nn.ModuleList of two and more.
    weights: a safetensors file, several, a folder of them, or a state dict, loaded straight into the host store.
    link: how copies are made (see streaming.link); default: that of the device.
    graphs: "auto" replays a layer's kernels as CUDA graphs once launching them one by one keeps the GPU waiting; "on"
    does from the fourth call on, "off" never.  Graphs keep one layer's activations in a memory pool of their own.
    Raises StreamError, and leaves the model as it was, if there are no layers, host memory is too small, another
    system has hooks on the model, or it is distributed.
    """
    target = torch.device(device)
    _refuse(model, slots)
    if graphs not in replay.MODES:
        raise ConfigError(f"graphs is {graphs!r}", remedy=f"use one of {', '.join(map(repr, replay.MODES))}")
    planned = plan(model, layers, resident, target)
    streamed = [x for x in planned if not x.resident]
    on_cpu = sum(e.handle.numel() * e.handle.element_size() for x in streamed for e in x.entries
                 if e.handle.device.type == "cpu")
    memory.require(sum(x.nbytes for x in streamed), "the host store", saved=on_cpu)
    link = link or link_for(target)
    store = HostStore(streamed, link.pin, numa.node_of(link.device))
    pool = handles.Pool(store.entries, link.device)
    for layer in streamed:
        store.allocate_weights(layer)
        for entry in layer.entries:
            _move(entry, pool)
    _rest(model, link.device)
    first = 2 if isinstance(slots, str) else slots
    engine = Engine(store, link, first, [x for x in planned if x.resident], grows=slots == "auto",
                    graphs="off" if graphs == "auto" and link.device.type != "cuda" else graphs)
    for layer in planned:
        layer.engine = engine
    for entry in (e for x in engine.resident for e in x.entries):
        module, name = entry.sites[0]
        handles.join_layer(module._parameters[name], entry)  # type: ignore[arg-type]
    state.hook(model, engine)
    eager.guard(model, engine)
    if weights is not None:
        from graphopt.streaming.loading import load

        load(model, weights)
    return model


def plan(
    model: nn.Module, layers: Sequence[str] | None, resident: str | int | Sequence[str],
    device: torch.device | None = None,
) -> list[HostLayer]:
    """The layers that would be streamed, and resident ones of their families, laid out; nothing is moved.

    Raises StreamError if none would be streamed.
    """
    found = _plan(model, _layers(model, layers), resident, device or torch.device("cpu"))
    if all(x.resident for x in found):
        raise StreamError("no layers to stream were found", where=type(model).__name__,
                          remedy="name them: graphopt.stream(model, layers=['blocks.*'])")
    return found


def engine_of(model: nn.Module) -> Engine:
    """The runtime of a streamed model.  Raises StreamError if it is not one."""
    for p in model.parameters():
        entry = handles.entry_of(p)
        if entry is not None:
            return entry.layer.engine
    raise StreamError(f"{type(model).__name__} is not streamed", remedy="call graphopt.stream(model) first")


def _refuse(model: nn.Module, slots: int | str) -> None:
    if slots != "auto" and (not isinstance(slots, int) or slots < 1):
        raise StreamError(f"slots is {slots!r}",
                          remedy="use a whole number from 1 up, or 'auto'; 2 overlaps upload and compute")
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if ranks > 1:
        raise StreamError(
            f"streaming works in one process, this is one of {ranks}",
            remedy="use FSDP2 (torch.distributed.fsdp.fully_shard, with CPUOffloadPolicy), compiled by graphopt",
        )
    for name, module in model.named_modules():
        other = next((h for h in FOREIGN if hasattr(module, h)), None)
        if other:
            raise StreamError(
                f"another system manages this model's weights ({other})", where=name or type(model).__name__,
                remedy="do not combine graphopt.stream with other offloading or sharding")
    for name, p in model.named_parameters():
        if handles.entry_of(p) is not None:
            raise StreamError("the model is streamed already", where=name, remedy="call graphopt.stream once")
        if type(p) is not nn.Parameter or type(p.data) is not torch.Tensor:
            raise StreamError(f"{name} is a {type(p.data).__name__}", where=name,
                              remedy="stream plain tensors: before quantising, sharding or wrapping")


def _layers(model: nn.Module, named: Sequence[str] | None) -> dict[str, nn.Module]:
    """Name -> module of every layer."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f + ".") for f in found):
            continue
        if named is not None:
            if name and any(fnmatch(name, pattern) for pattern in named):
                found[name] = module
        elif isinstance(module, nn.ModuleList) and len(module) >= 2:
            children = {f"{name}.{k}" if name else k: m for k, m in module.named_children()}
            if all(any(True for _ in m.parameters()) for m in children.values()):
                found |= children
    if named is not None and not found:
        raise StreamError(f"no module matches layers={list(named)}", remedy="use names of model.named_modules()")
    return found


def _plan(
    model: nn.Module, chosen: dict[str, nn.Module], resident: str | int | Sequence[str], device: torch.device
) -> list[HostLayer]:
    """The layers, laid out; shared parameters and whole families that stay are left out."""
    owner: dict[int, set[str]] = {}
    sites: dict[int, list[tuple[nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        layer = next((n for n in chosen if prefix == n or prefix.startswith(n + ".")), "")
        for name, p in module._parameters.items():
            if p is not None:
                owner.setdefault(id(p), set()).add(layer)
                sites.setdefault(id(p), []).append((module, name))
    size = {n: sum(p.numel() * p.element_size() for p in m.parameters()) for n, m in chosen.items()}
    stays = _resident(size, resident, device)
    streamed_families = {n.rpartition(".")[0] for n in chosen if n not in stays}
    plan: list[HostLayer] = []
    for fqn, module in chosen.items():
        if fqn in stays and fqn.rpartition(".")[0] not in streamed_families:
            continue
        entries = []
        for name, p in module.named_parameters():
            if len(owner[id(p)]) > 1 or p.numel() == 0:
                continue
            _check_dtype(p, f"{fqn}.{name}")
            stride = p.stride() if fqn in stays or _dense(p) else torch.empty(p.shape, device="meta").stride()
            e = Entry(name, f"{fqn}.{name}", p.shape, tuple(stride), p.dtype, p.requires_grad)
            e.handle, e.sites = p, sites[id(p)]
            entries.append(e)
        if entries:
            plan.append(HostLayer(fqn, len(plan), entries, resident=fqn in stays))
    return plan


def _resident(size: dict[str, int], resident: str | int | Sequence[str], device: torch.device) -> set[str]:
    if resident == "auto":
        family: dict[str, int] = {}
        for n, b in size.items():
            family[n.rsplit(".", 1)[0]] = family.get(n.rsplit(".", 1)[0], 0) + b
        small = {n for n in size if family[n.rsplit(".", 1)[0]] < SMALL * sum(size.values())}
        large = [n for n in size if n not in small]
        return small | set(large[:_first_layers([size[n] for n in large], device)])
    if isinstance(resident, (bool, str)):
        raise StreamError(f"resident is {resident!r}",
                          remedy="use 'auto', a number of first layers, or a list of names")
    if isinstance(resident, int):
        if not 0 <= resident < len(size):
            raise StreamError(f"resident={resident} of {len(size)} layers", remedy="leave at least one layer to stream")
        return set(list(size)[:resident])
    found = {n for n in size for pattern in resident if fnmatch(n, pattern)}
    unmatched = [p for p in resident if not any(fnmatch(n, p) for n in size)]
    if unmatched:
        raise StreamError(f"resident names no layer: {unmatched}", remedy=f"layers are {', '.join(list(size)[:4])}, ..")
    return found


def _first_layers(sizes: list[int], device: torch.device) -> int:
    """How many first layers stay on a GPU: two, four on a host of few CPUs, fewer where they would take much memory.

    The first layer's gradient, update and upload are the chain that a forward waits for at the turn of two steps; it is
    as long as the backward of about two layers (measured on an H200: docs/streaming.md).  Where the CPU optimizer binds
    the step, every layer more is one less for it.  How long a step computes is not known here: stream_plan, which is
    told the tokens, says how many layers would hide the optimizer.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    most = 4 if len(numa.pool_cpus(device)) < FEW_CPUS else 2
    # per 2-byte weight: the gradient 2, the residual 2, the moments 8
    return sum(7 * sum(sizes[:k]) <= FIRST * free for k in range(1, most + 1) if k < len(sizes) - 1)


def _check_dtype(p: nn.Parameter, name: str) -> None:
    if p.requires_grad and p.dtype not in (torch.float32, torch.bfloat16):
        raise StreamError(f"{name} is trained in {p.dtype}", where=name,
                          remedy="cast the model to bfloat16 (its masters are fp32 anyway), or freeze it")


def _dense(p: torch.Tensor) -> bool:
    """Does the tensor cover its memory without gaps or overlap, in any order of dimensions?"""
    expected = 1
    for size, stride in sorted(((n, s) for n, s in zip(p.shape, p.stride()) if n != 1), key=lambda x: x[1]):
        if stride != expected:
            return False
        expected *= size
    return True


def _move(entry: Entry, pool: handles.Pool) -> None:
    """Copy one parameter into the store and leave a handle."""
    p = entry.handle
    if p.is_meta:
        entry.layer.missing.add(entry.name)
    else:
        with torch.no_grad():
            entry.layer.weight(entry).copy_(p)
    p.grad = None
    handle = handles.make(p, entry, pool)
    if handle is not p:
        for module, name in entry.sites:
            module._parameters[name] = handle
    entry.handle = handle


def _rest(model: nn.Module, device: torch.device) -> None:
    """Everything that is not streamed goes to the device; meta tensors get room there, to be loaded."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None or handles.entry_of(p) is not None:
                continue
            if p.is_meta:
                if id(p) not in moved:
                    moved[id(p)] = nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
                module._parameters[name] = moved[id(p)]
            else:
                p.data = p.data.to(device)
                if not _dense(p):  # a slice of another tensor: the optimizer goes through memory as it lies
                    p.data = torch.empty(p.shape, dtype=p.dtype, device=device).copy_(p.data)
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = torch.empty_like(b, device=device) if b.is_meta else b.to(device)
