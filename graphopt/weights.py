"""`save_weights`: a trained model as diffusers reads it, from shards, from host memory, or only its adapters."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from graphopt.errors import CheckpointError, ConfigError
from graphopt.loading import agreement
from graphopt.streaming import handles, loading

LORA_FILE = "pytorch_lora_weights.safetensors"
DSA_FILE = "graphopt_dsa_heads.safetensors"  # beside adapters; otherwise the heads stand among the model's weights


def save_weights(model: torch.nn.Module, folder: str | Path, *, adapter: bool | None = None) -> Path:
    """Write safetensors under the model's own names; every process calls it, the first one writes.

    A diffusers model becomes a folder for `from_pretrained` (`config.json` beside the weights).  A model with LoRA
    adapters becomes `pytorch_lora_weights.safetensors` with the names `load_lora_weights` reads; a scale other than 1
    (lora_alpha != rank) stands in the file's metadata as diffusers writes it.  A model with sliding attention also gets
    `graphopt_dsa.json`, which `graphopt.dsa.convert(model, folder)` reads.

    Args:
        model: plain, compiled in place, under FSDP2 or DDP (gathered to the first process's host memory), or streamed
            (one file per layer).
        folder: made if it is not there.
        adapter: only the adapters; by default if the model has some.

    Returns the file, or the index of several.  A file is whole or absent.  Raises CheckpointError if it cannot be
    written.
    """
    bare = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    has = bool(getattr(bare, "peft_config", None))
    adapter = has if adapter is None else adapter
    if adapter and not has:
        raise ConfigError("the model has no adapters", remedy="model.add_adapter(LoraConfig(...)), or adapter=False")
    folder, here = Path(folder), agreement.world()
    streamed = any(handles.entry_of(p) is not None for p in bare.parameters())
    if streamed:
        weights = {k: v for k, v in bare.state_dict().items() if not adapter or "lora_" in k or ".dsa." in k}
    else:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapter)
        weights = get_model_state_dict(model, options=options)
    target = folder / (LORA_FILE if adapter else "diffusion_pytorch_model.safetensors")
    if here is not None and here[0] > 0:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not adapter and hasattr(bare, "config"):
            _config(bare, folder)
        if (sliding := getattr(bare, "_graphopt_dsa", None)) is not None:
            sliding.save(folder)
        if streamed and not adapter:
            return loading.save_safetensors(bare, folder)
        heads = {k: v for k, v in weights.items() if ".dsa." in k}
        if adapter and heads:
            _write(heads, None, folder / DSA_FILE)
        return _write(_stock_names(bare, weights) if adapter else weights, bare if adapter else None, target)
    except OSError as e:
        raise CheckpointError(f"the weights could not be written: {e}", where=str(folder),
                              remedy="free space or give another folder") from e


def _stock_names(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from peft.utils import get_peft_model_state_dict

    return {f"transformer.{k}": v for k, v in get_peft_model_state_dict(model, state_dict=weights).items()}


def _write(weights: dict[str, torch.Tensor], adapted: torch.nn.Module | None, target: Path) -> Path:
    from safetensors.torch import save_file

    metadata = {"format": "pt"}
    if adapted is not None:
        (config,) = adapted.peft_config.values()
        plain = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
        told = {f"transformer.{k}": v for k, v in plain.items()}
        metadata["lora_adapter_metadata"] = json.dumps(told, indent=2, sort_keys=True, default=str)
    part = f"{target}.part"
    try:
        save_file({k: v.detach().cpu().contiguous() for k, v in weights.items()}, part, metadata=metadata)
        os.replace(part, target)
    finally:
        Path(part).unlink(missing_ok=True)
    return target


def _config(model: torch.nn.Module, folder: Path) -> None:
    """config.json as diffusers writes it; a class made at run time (FSDP2's) is named as the one it came from."""
    config = json.loads(model.to_json_string())  # type: ignore[operator]
    with_config = (c for c in type(model).__mro__ if hasattr(c, "load_config"))
    written = (c for c in with_config if getattr(sys.modules.get(c.__module__), c.__name__, None) is c)
    config["_class_name"] = next(written).__name__
    part = folder / ".config.json.part"
    part.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    os.replace(part, folder / "config.json")
