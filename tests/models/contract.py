"""The numerics contract of a whole model: how far is a compiled training step from fp64, measured in eager's error.

Geometric mean over tensors (output and every parameter's gradient) at most 1.05, no tensor above 2, tensors under 64
elements pooled; dtypes, shapes and strides are eager's.  Both are averaged over batches of fresh inputs: in one batch
all tensors share the error of a few early values, so the ratio of a single batch scatters by up to 20 %.

Truth is the same eager step with fp64 parameters under `Wide`.  A plain `model.double()` is none: models cast to fp32
around their norms, gates and embeddings, whatever their parameters are, and Cosmos refuses to run at all.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
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
    out.backward(torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out.device, out.dtype))
    return {"output": out.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def wide_twin(model: nn.Module) -> nn.Module:
    """A copy with fp64 parameters, for `truth`; buffers stay as they are."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    for p in twin.parameters():
        p.data = p.data.double()
    return twin


def truth(twin: nn.Module, inputs: dict[str, Any], seed: int = 7, cotangent: torch.dtype = torch.float64) -> Result:
    """The same step in fp64, on the same (already rounded) parameters and inputs; `cotangent` is the output's dtype."""
    twin.zero_grad()
    torch.manual_seed(seed)
    with Wide():
        out = twin(**inputs, return_dict=False)[0]
    if out.dtype != torch.float64:
        raise TypeError(f"the reference's output is {out.dtype}: something narrowed it")
    generator = torch.Generator().manual_seed(seed)
    out.backward(torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out.device, cotangent).double())
    return {"output": out.detach()} | {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}


def errors(got: Result, true: Result) -> dict[str, float]:
    """Relative L2 per tensor; tensors under 64 elements pooled into one."""
    parts: dict[str, list[float]] = {}
    squares = [s for n, t in true.items() for s in ((got[n].double() - t).square().sum(), t.square().sum().double())]
    values = torch.stack(squares).tolist()  # one wait for the device
    for k, (n, t) in enumerate(true.items()):
        part = parts.setdefault(n if t.numel() >= SMALL else "small tensors", [0.0, 0.0])
        part[0] += values[2 * k]
        part[1] += values[2 * k + 1]
    wrong = [n for n, (d, s) in parts.items() if d and not s]
    assert not wrong, f"not zero, as they should be: {wrong}"
    return {n: math.sqrt(d / s) for n, (d, s) in parts.items() if s}


@dataclass
class Verdict:
    """Ratios of our error to eager's, per tensor and batch, as logarithms."""

    logs: dict[str, list[float]] = field(default_factory=dict)

    def add(self, ours: dict[str, float], eager: dict[str, float]) -> None:
        """One more batch."""
        for n in ours:
            self.logs.setdefault(n, []).append(math.log(max(ours[n], 1e-12) / max(eager[n], 1e-12)))

    @property
    def ratios(self) -> dict[str, float]:
        """Per tensor: geometric mean over batches."""
        return {n: math.exp(statistics.fmean(xs)) for n, xs in self.logs.items()}

    @property
    def batches(self) -> int:
        """How many batches went in."""
        return max(map(len, self.logs.values()), default=0)

    @property
    def mean(self) -> float:
        """Geometric mean over tensors and batches."""
        return math.exp(statistics.fmean(map(statistics.fmean, self.logs.values())))

    @property
    def uncertainty(self) -> float:
        """Standard error of log(mean): rounding errors of one batch share their causes, so one batch says little."""
        if self.batches < 2:
            return math.inf
        means = [statistics.fmean(xs) for xs in zip(*self.logs.values(), strict=True)]
        return statistics.stdev(means) / math.sqrt(self.batches)

    @property
    def worst(self) -> tuple[str, float]:
        """The tensor with the largest ratio."""
        return max(self.ratios.items(), key=lambda kv: kv[1])

    @property
    def holds(self) -> bool:
        """Is it within the contract?"""
        return self.mean <= MEAN and self.worst[1] <= MOST

    def __str__(self) -> str:
        name, most = self.worst
        return f"mean {self.mean:.3f} (1 +- {self.uncertainty:.3f}, {self.batches} batches), worst {most:.2f} at {name}"


class NotFinite(AssertionError):
    """A side of the comparison, `side`, has values that are not finite."""

    def __init__(self, side: str, message: str) -> None:
        super().__init__(message)
        self.side = side


def finite(side: str, tensors: Result) -> None:
    """Raise NotFinite where a tensor has a value that is not finite."""
    right = torch.stack([torch.isfinite(t).all() for t in tensors.values()]).tolist()
    bad = [n for n, ok in zip(tensors, right, strict=True) if not ok]
    if bad:
        raise NotFinite(side, f"{side} is not finite: {len(bad)} of {len(tensors)} tensors, {', '.join(bad[:4])}")


def same_form(got: Result, eager: Result) -> None:
    """Raise AssertionError unless dtypes, shapes and strides are eager's."""
    assert got.keys() == eager.keys(), got.keys() ^ eager.keys()
    finite("eager", eager)
    finite("compiled", got)
    for n in got:
        form = [(t.dtype, t.shape, t.stride()) for t in (got[n], eager[n])]
        assert form[0] == form[1], (n, *form)


def measure(
    f: Callable[..., Any], model: nn.Module, batches: Iterable[dict[str, Any]], eager: nn.Module | None = None,
    least: int = 5, most: int = 64, uncertainty: float = 0.02,
) -> Verdict:
    """Compare `f`, a compiled `model`, with eager over batches, until the mean is known to `uncertainty`.

    eager: the model to compare with, where `model` itself was changed by compiling.  Forms are asserted on each batch.
    least, most: numbers of batches; `batches` may be endless.
    """
    eager = model if eager is None else eager
    twin, verdict = wide_twin(eager), Verdict()
    for seed, inputs in enumerate(batches):
        want, got = run(eager, eager, inputs, seed), run(f, model, inputs, seed)
        same_form(got, want)
        true = truth(twin, inputs, seed, want["output"].dtype)
        assert true.keys() == got.keys(), true.keys() ^ got.keys()
        finite("fp64", true)
        verdict.add(errors(got, true), errors(want, true))
        if seed + 1 >= most or (seed + 1 >= least and verdict.uncertainty <= uncertainty):
            break
    return verdict


def fresh_inputs(entry: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Iterator[dict[str, Any]]:
    """Endless batches for a model of the zoo that was built with seed 0."""
    move = lambda v: v.to(device) if isinstance(v, torch.Tensor) else v
    return (tree_map(move, entry.build(dtype, seed)[1]) for seed in itertools.count())
