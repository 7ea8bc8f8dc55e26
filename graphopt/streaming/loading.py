"""Weights from files straight into the host store, and out of it again, one tensor at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphopt.errors import StreamError
from graphopt.streaming import handles, state

Source = str | os.PathLike | Sequence[Any] | Mapping[str, torch.Tensor]


def load(model: nn.Module, weights: Source) -> None:
    """Fill a streamed model.

    weights: a safetensors file, several, a folder of them, or a state dict, with the model's own names.  Each tensor is
    read once and cast to the parameter's dtype on the way.  Everything is checked before anything is written.
    Raises StreamError for missing, unknown or misshapen tensors.
    """
    targets: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    kept = {n: b for n, b in model.named_buffers(remove_duplicate=False) if _persistent(model, n)}
    targets |= kept
    shapes = {name: shape for name, shape, _ in _tensors(weights, read=False)}
    tied = _tied(model)
    missing = [n for n in targets if n not in shapes and not any(t in shapes for t in tied.get(n, ()))]
    unknown = [n for n in shapes if n not in targets]
    bad = [n for n in shapes if n in targets and tuple(shapes[n]) != tuple(targets[n].shape)]
    for what, names in (("missing", missing), ("unknown to the model", unknown), ("of another shape", bad)):
        if names:
            raise StreamError(f"{len(names)} tensors are {what}: {', '.join(names[:3])}", where=type(model).__name__,
                              remedy="load the checkpoint of this very model, with its own names")
    touched = set()
    with torch.no_grad():
        for name, _, value in _tensors(weights, read=True):
            entry = handles.entry_of(targets[name])
            if entry is None:
                targets[name].copy_(value)
                continue
            entry.layer.engine.link.join(entry.layer.reading)
            entry.layer.weight(entry).copy_(value)
            entry.layer.missing.discard(entry.name)
            state.reset_master(entry.layer.engine, entry)
            touched.add(entry.layer)
    for layer in touched:
        layer.engine.store.replaced(layer)


def _persistent(model: nn.Module, name: str) -> bool:
    prefix, _, last = name.rpartition(".")
    return last not in model.get_submodule(prefix)._non_persistent_buffers_set


def _tied(model: nn.Module) -> dict[str, set[str]]:
    """Name -> the other names of the same parameter."""
    names: dict[int, set[str]] = {}
    for n, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), set()).add(n)
    return {n: group - {n} for group in names.values() for n in group}


def _tensors(weights: Source, read: bool) -> Iterator[tuple[str, Sequence[int], Any]]:
    """Name, shape and (if asked) value of every tensor, one at a time."""
    if isinstance(weights, Mapping):
        for name, value in weights.items():
            yield name, tuple(value.shape), value if read else None
        return
    from safetensors import safe_open

    for file in _files(weights):
        with safe_open(str(file), framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118  a safetensors file is not a mapping
                yield name, opened.get_slice(name).get_shape(), opened.get_tensor(name) if read else None


def _files(weights: Any) -> list[Path]:
    if not isinstance(weights, (str, os.PathLike)):
        return [Path(w) for w in weights]
    path = Path(weights)
    if path.is_dir():
        found = sorted(path.glob("*.safetensors"))
        if not found:
            raise StreamError(f"no safetensors file in {path}", remedy="pass the folder that holds the weights")
        return found
    if not path.exists():
        raise StreamError(f"{path} does not exist", remedy="pass a safetensors file, a folder of them, or a state dict")
    return [path]


def save_safetensors(model: nn.Module, folder: str | os.PathLike, name: str = "diffusion_pytorch_model") -> Path:
    """Write the weights of a streamed model as safetensors, one file per layer and one for the rest, with the index
    that diffusers and transformers read.

    Nothing is copied beside what is being written; a file is complete or absent.  Returns the index.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    from safetensors.torch import save_file

    parts: dict[str, dict[str, torch.Tensor]] = {}
    seen: set[int] = set()
    layer_of = {e.fqn: e.layer.fqn for e in map(handles.entry_of, model.parameters()) if e is not None}
    for key, value in model.state_dict().items():
        if value.data_ptr() in seen and value.numel():  # tied: one of the names is enough, as diffusers saves it
            continue
        seen.add(value.data_ptr())
        parts.setdefault(layer_of.get(key, ""), {})[key] = value.detach().contiguous()
    index: dict[str, Any] = {"metadata": {"total_size": 0}, "weight_map": {}}
    for i, tensors in enumerate(parts.values()):
        file = f"{name}-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        save_file(tensors, folder / (file + ".part"), metadata={"format": "pt"})
        os.replace(folder / (file + ".part"), folder / file)
        index["weight_map"] |= dict.fromkeys(tensors, file)
        index["metadata"]["total_size"] += sum(t.nbytes for t in tensors.values())
    target = folder / f"{name}.safetensors.index.json"
    part = target.with_suffix(".part")
    part.write_text(json.dumps(index, indent=1))
    os.replace(part, target)
    return target
