"""A name in, a model and its inputs out: built-in models (schedule/builtin.py) and `package.module:factory`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from graphopt.errors import ConfigError
from graphopt.schedule.builtin import BUILTIN, Builtin, Shape


@dataclass(frozen=True)
class Made:
    """A model with the inputs of one forward."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    title: str


def nearest(word: str, known: Sequence[str], most: int = 3) -> str:
    """`did you mean ...?` for a name nobody knows."""
    close = difflib.get_close_matches(word, known, n=most, cutoff=0.4)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"known are {', '.join(list(known)[:12])}{', ..' if len(known) > 12 else ''}"


def parse_shape(texts: Sequence[str]) -> dict[str, int]:
    """`frames=81,height=480` (several, or one option a time) as numbers."""
    sizes: dict[str, int] = {}
    for item in ",".join(texts).split(","):
        key, equals, value = item.strip().partition("=")
        if not item.strip():
            continue
        if not equals or not value.isdigit() or not key.isidentifier():
            raise ConfigError(f"--shape {item!r} is not name=number", remedy="for example --shape frames=49,height=480")
        sizes[key] = int(value)
    return sizes


def make(name: str, sizes: Mapping[str, int] | None = None) -> Made:
    """The model and inputs of a built-in name or of `package.module:factory`, with some sizes set.

    A factory is called with `sizes` as keyword arguments and returns a module and its inputs (a dict of keyword
    arguments, a tuple, or one tensor).  ConfigError says what is wrong with a name, a size or a factory.
    """
    sizes = dict(sizes or {})
    if name in BUILTIN:
        return builtin(name, sizes)
    module, colon, factory = name.partition(":")
    if not colon or not module or not factory:
        raise ConfigError(
            f"there is no built-in model {name!r}",
            remedy=f"{nearest(name, list(BUILTIN))} For your own: package.module:factory",
        )
    return _called(name, sizes)


def builtin(name: str, sizes: Mapping[str, int], depth: Mapping[str, int] | None = None) -> Made:
    """A built-in model on the meta device in bf16, modules that diffusers keeps in fp32 left so; in train mode."""
    b = BUILTIN[name]
    shape = _shape(name, b, sizes)
    latent = b.latent(shape)
    try:
        import diffusers
    except ImportError as error:
        raise ConfigError("built-in models need diffusers", remedy="pip install 'graphopt[diffusers]'") from error
    if not hasattr(diffusers, b.cls):
        raise ConfigError(f"diffusers {diffusers.__version__} has no {b.cls}", remedy="pip install -U diffusers")
    diffusers.utils.logging.set_verbosity_error()
    with torch.device("meta"):
        model = to_bf16(b.build(**(depth or {})))
        inputs = b.inputs(b, shape, latent)
    cast = {k: torch.utils._pytree.tree_map(lambda x, k=k: _float_to_bf16(k, x), v) for k, v in inputs.items()}
    sizes_text = " ".join(f"{f.name}={getattr(shape, f.name)}" for f in fields(Shape) if f.name not in b.fixed)
    return Made(model.train(), (), {**cast, "return_dict": False}, f"{name} ({b.source}), bf16, {sizes_text}")


def to_bf16(model: torch.nn.Module) -> torch.nn.Module:
    """Cast as `from_pretrained(torch_dtype=torch.bfloat16)` does: modules the class keeps in fp32 stay there."""
    keep = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for prefix, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            if p.dtype == torch.float32 and not keep & {*prefix.split("."), key}:
                module._parameters[key] = torch.nn.Parameter(p.detach().bfloat16(), requires_grad=p.requires_grad)
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.dtype == torch.float32 and not keep & {*prefix.split("."), key}:
                module._buffers[key] = buffer.bfloat16()
    return model


# positions, masks, guidance and rotary tables stay in fp32, as the pipelines hand them over
_FP32 = ("guidance", "img_ids", "txt_ids", "image_rotary_emb", "encoder_attention_mask")


def _float_to_bf16(name: str, x: Any) -> Any:
    floats = isinstance(x, torch.Tensor) and x.dtype == torch.float32
    return x.bfloat16() if floats and name not in _FP32 else x


def _shape(name: str, b: Builtin, sizes: Mapping[str, int]) -> Shape:
    known = [f.name for f in fields(Shape) if f.name not in b.fixed]
    for key in sizes:
        if key in b.fixed:
            raise ConfigError(f"{name} has {key}={getattr(b.default, key)}, fixed by its architecture",
                              remedy=f"sizes that can be set: {', '.join(known)}")
        if key not in known:
            raise ConfigError(f"{name} has no size {key!r}", remedy=nearest(key, known))
    return replace(b.default, **sizes)


def _called(name: str, sizes: Mapping[str, int]) -> Made:
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `python -m` finds modules of the working folder, and so does this
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        own = module_name == missing or module_name.startswith(missing + ".")
        what = f"there is no module {missing!r}" if own else f"{module_name} needs {missing!r}, which is not installed"
        raise ConfigError(what, where=name, remedy="run where it can be imported, or set PYTHONPATH") from error
    except Exception as error:
        raise ConfigError(f"importing {module_name} raised {type(error).__name__}: {error}",
                          where=_last_line(error, name), remedy="mend the module") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        callables = [n for n in vars(module) if callable(getattr(module, n)) and not n.startswith("_")]
        what = f"{module_name} has no {attribute!r}" if factory is None else f"{name} is not callable"
        raise ConfigError(what, where=getattr(module, "__file__", None), remedy=nearest(attribute, callables))
    try:
        inspect.signature(factory).bind(**sizes)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} cannot be called with {dict(sizes)}: {error}",
                          remedy="--shape sizes are its keyword arguments") from error
    try:
        with torch.device("meta"):
            made = factory(**sizes)
    except Exception as error:
        raise ConfigError(f"the factory {name} raised {type(error).__name__}: {error}",
                          where=_last_line(error, name),
                          remedy="it is called under torch.device('meta') and returns (model, inputs)") from error
    return _unpacked(name, made)


def _unpacked(name: str, made: Any) -> Made:
    ok = isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)
    if not ok:
        raise ConfigError(f"the factory {name} returned {type(made).__name__}",
                          remedy="return (module, inputs); inputs: a dict of keyword arguments, a tuple, or a tensor")
    model, inputs = made
    if isinstance(inputs, Mapping):
        return Made(model, (), dict(inputs), name)
    return Made(model, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}, name)


def _last_line(error: BaseException, name: str) -> str:
    """file:line where an error of the user's code was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith("<") and os.sep + "graphopt" + os.sep not in f.filename]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else name
