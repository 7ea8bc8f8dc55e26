"""The spellings of a norm: `layer_norm`, `rms_norm`, and an RMS norm written out, with or without a weight.

    v = mean(x.float() ** 2, -1, keepdim=True)
    n = x * rsqrt(v + eps)              diffusers writes most RMS norms like this
    n = n * weight                      (any casts between)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from graphopt.passes import ops_view
from graphopt.passes.pattern import Attempt, Casts, Op, Pattern, Var


class WrittenOutRMS(Pattern):
    """x * rsqrt(mean(x^2) + eps), where x fits `inner`; binds `norm`, `eps` and `normed`."""

    def __init__(self, inner: Pattern) -> None:
        self.inner = inner

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """See Pattern."""
        if not isinstance(x, Node) or ops_view.canonical(x) != "mul":
            return  # the functional spellings give the reason
        for value, factor in (ops_view.operands(x), ops_view.operands(x)[::-1]):
            found = _statistics(value, factor)
            if found is None:
                continue
            core, side, source, eps = found
            attempt.core += [x, *core]
            attempt.side += side
            attempt.env |= {"norm": x, "eps": eps, "normed": source}
            yield from self.inner.match(source, attempt)
            for name in ("norm", "eps", "normed"):
                del attempt.env[name]
            del attempt.core[len(attempt.core) - len(core) - 1:]
            if side:
                del attempt.side[-len(side):]


def _widened(x: object, side: list[Node]) -> object:
    """What casts that keep every value were applied to; the casts are added to `side`."""
    while isinstance(x, Node) and ops_view.canonical(x) == "cast":
        source, target = ops_view.dtype_of(x.args[0]), ops_view.dtype_of(x)
        if source is None or target is None or not ops_view.widens(source, target):
            break
        side.append(x)
        x = x.args[0]
    return x


def _statistics(value: object, factor: object) -> tuple[list[Node], list[Node], Node, Any] | None:
    """(nodes of rsqrt(mean(x^2) + eps), casts in front of x, x, eps) when `factor` is that of `value`."""
    side: list[Node] = []
    core: list[Node] = []
    while isinstance(factor, Node) and ops_view.canonical(factor) == "cast":
        core.append(factor)
        factor = factor.args[0]
    if not isinstance(factor, Node) or ops_view.canonical(factor) != "rsqrt":
        return None
    core.append(factor)
    total = factor.args[0]
    if not isinstance(total, Node) or ops_view.canonical(total) != "add" or ops_view.has_alpha(total):
        return None
    core.append(total)
    mean, eps = ops_view.operands(total)
    if not isinstance(mean, Node) or ops_view.canonical(mean) != "mean" or not _number(eps) or not _last(mean):
        return None
    core.append(mean)
    power = mean.args[0]
    if not isinstance(power, Node):
        return None
    name = ops_view.canonical(power)
    if name == "pow":
        exponent = ops_view.operand(power, 1, "exponent")
        if not _number(exponent) or _as_float(exponent) != 2.0:
            return None
    elif name == "mul":
        a, b = ops_view.operands(power)
        if a is not b:
            return None
    elif name != "square":
        return None
    core.append(power)
    if ops_view.dtype_of(power) not in (torch.float32, torch.float64):
        return None  # squares rounded to half precision are not the norm the operator computes
    source = _widened(power.args[0], side)
    if not isinstance(source, Node) or _widened(value, side) is not source:
        return None
    return core, side, source, eps


def _number(x: object) -> bool:
    if isinstance(x, Node):
        v = x.meta.get("example_value")
        return v is not None and not isinstance(v, torch.Tensor)
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _as_float(x: Any) -> float:
    return float(x.meta["example_value"] if isinstance(x, Node) else x)


def _last(mean: Node) -> bool:
    dims = ops_view.operand(mean, 1, "dim")
    dims = (dims,) if isinstance(dims, int) else tuple(dims or ())
    v = ops_view.value(mean.args[0])
    keep = ops_view.operand(mean, 2, "keepdim", False)
    return v is not None and keep is True and dims in ((-1,), (v.dim() - 1,)) and mean.kwargs.get("dtype") is None


def _per_channel(x: Node, attempt: Attempt) -> str | None:
    v = ops_view.value(x)
    return None if v is not None and v.dim() == 1 else f"{x.name} is not a weight of one value per channel"


class Slices(Pattern):
    """`inner` behind slices of rows: a norm works on each row, so it is the norm of the slice.

    The slices are kept under the name `x`, so that the operator gets the sliced activation.
    """

    def __init__(self, inner: Pattern) -> None:
        self.inner = inner

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """See Pattern."""
        yield from self.inner.match(x, attempt)
        if isinstance(x, Node) and slices_rows(x):
            attempt.side.append(x)
            attempt.views.setdefault("x", []).append(x)
            yield from self.match(x.args[0], attempt)
            attempt.views["x"].pop()
            attempt.side.pop()


def slices_rows(x: Node) -> bool:
    """Is x `t[:, a:b]` or the like, with the last dimension whole?"""
    if ops_view.canonical(x) != "index":
        return False
    before, after = ops_view.value(x.args[0]), ops_view.value(x)
    index = x.args[1] if isinstance(x.args[1], tuple) else (x.args[1],)
    return (
        before is not None and after is not None and before.dim() == after.dim()
        and len(index) < before.dim() and all(isinstance(i, slice) for i in index)
    )


def norm_of(x: Pattern) -> Pattern:
    """A norm of x; weight and bias of the functional forms are read off the node."""
    functional = Op("layer_norm", x.cast(), bind="norm") | Op("rms_norm", x.cast(), bind="norm")
    written = WrittenOutRMS(x.cast())
    weight = Var("norm_weight", _per_channel).cast()
    return functional | written | Op("mul", InnerCasts(written), weight, bind="weighted")


class InnerCasts(Casts):
    """Casts inside the chain, in front of something that is no Op."""

    def __init__(self, inner: Pattern) -> None:
        super().__init__(inner)
        self.input_side = False
