"""The numerics contract of a whole model: how far is a compiled training step from fp64, measured in eager's error.

Geometric mean over tensors (output and every parameter's gradient) at most 1.05, no tensor above 2, tensors under 64
elements pooled; dtypes, shapes and strides are eager's.

Truth is the same eager step with fp64 parameters under `Wide`.  A plain `model.double()` is none: models cast to fp32
around their norms, gates and embeddings, whatever their parameters are, and Cosmos refuses to run at all.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

MEAN, MOST, SMALL = 1.05, 2.0, 64
_NARROW = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
Result = dict[str, torch.Tensor]


class Wide(TorchFunctionMode):
    """fp64 from the first use of an fp64 parameter on: no cast narrows, and what meets an fp64 tensor is widened.

    What is made from the inputs alone (time and position tables) keeps the model's precision: it is the same number
    on every side, and its rounding, far larger than that of any norm, would hide the error that is measured.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchFunctionMode."""
        kwargs = dict(kwargs or {})
        found = torch.utils._pytree.tree_leaves((args, kwargs))
        if not any(t.dtype == torch.float64 if isinstance(t, torch.Tensor) else _beyond_fp32(t) for t in found):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__set__", "__get__", "requires_grad_", "backward", "__delete__"):
            return func(*args, **kwargs)
        if name in ("float", "half", "bfloat16", "type_as") or (name == "to" and args[0].dtype == torch.float64):
            return self._cast(name, func, args, kwargs)
        if name in ("copy_", "__setitem__", "fill_") and args[0].is_floating_point() and args[0].dtype != torch.float64:
            raise TypeError(f"an fp64 value is written into a {args[0].dtype} buffer: the reference would be rounded")
        return func(*tree_map(_widen, args), **tree_map(_widen, kwargs))

    def _cast(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == "type_as" and args[0].dtype != torch.float64:
            return func(*args, **kwargs)
        if name in _NARROW or name == "type_as":
            return args[0]
        return func(args[0], *(_widen(_dtype_like(a)) for a in args[1:]), **tree_map(_widen, kwargs))


def _beyond_fp32(x: Any) -> bool:
    """A mask's `finfo(float64).min`, which would overflow in an fp32 mask."""
    return isinstance(x, float) and math.isfinite(x) and abs(x) > torch.finfo(torch.float32).max


def _dtype_like(x: Any) -> Any:
    return x.dtype if isinstance(x, torch.Tensor) else x


def _widen(x: Any) -> Any:
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        return x if x.dtype == torch.float64 else x.double()
    return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x


def run(f: Callable[..., Any], model: nn.Module, inputs: dict[str, Any], seed: int = 7) -> Result:
    """Output and every gradient of one training step with a fixed random cotangent."""
    model.zero_grad()
    torch.manual_seed(seed)  # DiT drops class labels
    out = f(**inputs, return_dict=False)[0]
    generator = torch.Generator().manual_seed(seed)
    out.backward(torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out.dtype))
    return {"output": out.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def truth(model: nn.Module, inputs: dict[str, Any], seed: int = 7, cotangent: torch.dtype = torch.float64) -> Result:
    """The same step in fp64, on the same (already rounded) parameters and inputs; `cotangent` is the output's dtype."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    for p in twin.parameters():
        p.data = p.data.double()
    torch.manual_seed(seed)
    with Wide():
        out = twin(**inputs, return_dict=False)[0]
    if out.dtype != torch.float64:
        raise TypeError(f"the reference's output is {out.dtype}: something narrowed it")
    generator = torch.Generator().manual_seed(seed)
    out.backward(torch.randn(out.shape, dtype=torch.float64, generator=generator).to(cotangent).double())
    return {"output": out.detach()} | {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}


@dataclass
class Errors:
    """Squared error and squared norm per tensor, summed over steps; tensors under 64 elements pooled into one."""

    parts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, got: Result, true: Result) -> None:
        """One more step."""
        for n, t in true.items():
            part = self.parts.setdefault(n if t.numel() >= SMALL else "small tensors", [0.0, 0.0])
            part[0] += (got[n].double() - t).square().sum().item()
            part[1] += t.square().sum().item()

    def relative(self) -> dict[str, float]:
        """Relative L2 per tensor."""
        return {n: math.sqrt(d / s) for n, (d, s) in self.parts.items() if s}


@dataclass
class Verdict:
    """Ratios of our error to eager's."""

    ratios: dict[str, float]

    @property
    def mean(self) -> float:
        """Geometric mean."""
        return math.exp(sum(map(math.log, self.ratios.values())) / len(self.ratios))

    @property
    def worst(self) -> tuple[str, float]:
        """The tensor with the largest ratio."""
        return max(self.ratios.items(), key=lambda kv: kv[1])

    @property
    def holds(self) -> bool:
        """Is it within the contract?"""
        return self.mean <= MEAN and self.worst[1] <= MOST


def compare(ours: Errors, eager: Errors) -> Verdict:
    """Per tensor: our error over eager's."""
    a, b = ours.relative(), eager.relative()
    return Verdict({n: max(a[n], 1e-12) / max(b[n], 1e-12) for n in a})


def same_form(got: Result, eager: Result) -> None:
    """Raise AssertionError unless dtypes, shapes and strides are eager's."""
    assert got.keys() == eager.keys(), got.keys() ^ eager.keys()
    for n in got:
        form = [(t.dtype, t.shape, t.stride()) for t in (got[n], eager[n])]
        assert form[0] == form[1], (n, *form)


def measure(f: Callable[..., Any], model: nn.Module, batches: Iterable[dict[str, Any]]) -> Verdict:
    """Compare `f`, a compiled `model`, with eager over several batches; forms are asserted on each."""
    ours, theirs = Errors(), Errors()
    for seed, inputs in enumerate(batches):
        eager, got = run(model, model, inputs, seed), run(f, model, inputs, seed)
        same_form(got, eager)
        true = truth(model, inputs, seed, eager["output"].dtype)
        assert true.keys() == got.keys(), true.keys() ^ got.keys()
        ours.add(got, true)
        theirs.add(eager, true)
    return compare(ours, theirs)
