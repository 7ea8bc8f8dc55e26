"""Everything an operator hands to a device, as text, without the device: launches, tensor ops, memory layouts.

A result is of the current kernels exactly when this text is unchanged, whatever the commit says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphopt.codegen import kernels, operators, tuned
from graphopt.codegen.emit import emit
from graphopt.codegen.emit_sums import emit_sums
from graphopt.codegen.form import FUSIONS, OPERANDS


@dataclass(frozen=True)
class Place:
    """What the kernels ask about a device: target, name of the GPU ("" for the interpreter), multiprocessors."""

    target: str
    gpu: str
    multiprocessors: int


INTERPRETER = Place("sm90", "", kernels.INTERPRETER_SMS)
# where the committed results come from; a GPU of this machine describes itself
H200 = Place("sm90", "NVIDIA H200", 132)


def this_gpu() -> Place:
    """The GPU of this process."""
    device = torch.device("cuda", torch.cuda.current_device())
    return Place(**kernels.place_of(device), multiprocessors=kernels.multiprocessors(device))


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {tuple(value.stride())} {value.storage_offset()}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


class _Ops(TorchDispatchMode):
    """Writes every tensor op down."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.lines.append(f"{func} -> {_text(out)}")
        return out


@contextmanager
def _recording(place: Place, lines: list[str]) -> Iterator[None]:
    """Kernels are their source, and a launch is a line."""

    class Launch:
        def __init__(self, source: str) -> None:
            self.source = source

        def __getitem__(self, grid: Any) -> Any:
            digest = hashlib.sha256(self.source.encode()).hexdigest()
            return lambda *args, **settings: lines.append(f"{digest} {grid} {_text(args)} {settings}")

    def kernel_of(spec: Any) -> Any:
        config = tuned.configuration(spec)
        return emit(spec, config), config

    replaced = {
        (kernels, "kernel_of"): kernel_of, (kernels, "sum_kernel"): emit_sums, (torch.library, "wrap_triton"): Launch,
        (kernels, "multiprocessors"): lambda device: place.multiprocessors,
        (kernels, "place_of"): lambda device: {"target": place.target, "gpu": place.gpu},
    }
    before = {(owner, name): getattr(owner, name) for owner, name in replaced}
    try:
        for (owner, name), new in replaced.items():
            setattr(owner, name, new)
        with torch.no_grad(), _Ops(lines):
            yield
    finally:
        for (owner, name), old in before.items():
            setattr(owner, name, old)


class _Context(SimpleNamespace):
    """What autograd keeps between a forward and its backward."""

    def set_materialize_grads(self, value: bool) -> None:
        pass

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        pass

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


def launches(fusion: str, t: dict[str, Any], attributes: tuple[Any, ...], place: Place) -> list[str]:
    """One line per tensor op and kernel launch of a forward and of its backward (every gradient arrives, contiguous).

    `t`: meta tensors by operand name, `modulation` a list; `attributes`: the operator's arguments after the tensors.
    """
    lines: list[str] = []
    single, modulation = [t[n] for n in OPERANDS], list(t["modulation"])
    with _recording(place, lines):
        outputs = kernels.forward(*single, modulation, *attributes)
        context = _Context()
        operators._setup_context(context, (*single, modulation, *attributes), outputs)
        front, norm = FUSIONS[fusion].front != "none", attributes[1] != "none"
        ys = outputs[5:] if norm else []
        arriving = [torch.empty_like(outputs[0]) if front else None, *[None] * 4, *map(torch.empty_like, ys)]
        operators._autograd(lambda: kernels.backward)(context, arriving)
    return lines
