"""The spellings of a norm: `layer_norm`, `rms_norm`, and both written out, with or without weight and bias.

    v = mean(x.float() ** 2, -1, keepdim=True)        m = mean(x, -1, keepdim=True)
    n = x * rsqrt(v + eps)                            n = (x - m) * rsqrt(var(x, -1, unbiased=False) + eps)
    n = n * weight                                    n = n * weight + bias            (any casts between)

diffusers writes most RMS norms like this.  `/ sqrt(..)`, `** -0.5` and mean((x - m) ** 2) are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from graphopt.passes import ops_view
from graphopt.passes.pattern import Attempt, Bound, Op, Pattern, Var


class WrittenOut(Pattern):
    """A norm written out, of an x that fits `inner`; binds `norm` (its last node), `eps`, `normed` (x) and `kind`."""

    def __init__(self, inner: Pattern, prefix: str) -> None:
        self.inner, self.prefix = inner, prefix

    def roots(self) -> list[Any]:
        """See Pattern."""
        return ["mul", "div"]

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """See Pattern."""
        if not isinstance(x, Node) or ops_view.canonical(x) not in ("mul", "div"):
            return  # the functional spellings give the reason
        a, b = ops_view.operands(x)
        for value, factor in ((a, b), (b, a)):
            if not _is_root(factor):
                continue
            found = _Parts().read(value, factor, divides=ops_view.canonical(x) == "div")
            if found is None:
                continue
            core = [x, *(n for n in found.core if n is not x)]
            attempt.core += core
            attempt.side += found.side
            bound = {"norm": x, "eps": found.eps, "normed": found.source, "kind": found.kind}
            attempt.env |= {self.prefix + name: v for name, v in bound.items()}
            yield from self.inner.match(found.source, attempt)
            for name in bound:
                del attempt.env[self.prefix + name]
            del attempt.core[len(attempt.core) - len(core):]
            if found.side:
                del attempt.side[-len(found.side):]


def _is_root(x: object) -> bool:
    """Is x one of the ops that end 1 / sqrt(..), casts aside?"""
    while isinstance(x, Node):
        name = ops_view.canonical(x)
        if name != "cast":
            return name in ("rsqrt", "sqrt", "pow")
        x = x.args[0]
    return False


class _Parts:
    """The nodes of one written-out norm: what it computes (core), casts in front of x (side), x and eps."""

    def __init__(self) -> None:
        self.core: list[Node] = []
        self.side: list[Node] = []
        self.source: Node | None = None
        self.eps: Any = None
        self.kind = "rms_norm"

    def read(self, value: object, factor: object, divides: bool) -> _Parts | None:
        """Itself, filled, when `factor` is 1 / sqrt(mean of squares + eps) of `value`."""
        root = self.inside(factor)
        if not isinstance(root, Node):
            return None
        name = ops_view.canonical(root)
        if not (name == "sqrt" if divides else name == "rsqrt" or (name == "pow" and _power(root) == -0.5)):
            return None
        total = self.inside(self.take(root).args[0])
        if not isinstance(total, Node) or ops_view.canonical(total) != "add" or ops_view.has_alpha(total):
            return None
        self.take(total)
        a, b = ops_view.operands(total)
        spread, self.eps = (a, b) if isinstance(a, Node) and not _number(a) else (b, a)
        if not isinstance(spread, Node) or not _number(self.eps):
            return None
        return self if self.spread(spread, value) else None

    def spread(self, spread: Node, value: object) -> bool:
        """Is `spread` the mean square, or the variance, of what `value` is (less its mean)?"""
        name = ops_view.canonical(spread)
        if name not in ("mean", "var") or not _last(spread):
            return False
        self.take(spread)
        if name == "var":
            return _biased(spread) and self.layer_norm(value, _widened(spread.args[0], self.side))
        power = spread.args[0]
        if not isinstance(power, Node):
            return False
        name = ops_view.canonical(power)
        if (name == "pow" and _power(power) != 2.0) or name not in ("pow", "mul", "square"):
            return False
        if name == "mul" and ops_view.operands(power)[0] is not ops_view.operands(power)[1]:
            return False
        if ops_view.dtype_of(power) not in (torch.float32, torch.float64):
            return False  # squares rounded to half precision are not the norm the operator computes
        base = self.take(power).args[0]
        centred = _widened(base, [])
        if isinstance(centred, Node) and ops_view.canonical(centred) == "sub" and _widened(value, []) is centred:
            self.inside(base)
            return self.layer_norm(value, None)
        self.source = _widened(base, self.side)  # type: ignore[assignment]
        return isinstance(self.source, Node) and _widened(value, self.side) is self.source

    def layer_norm(self, value: object, source: object) -> bool:
        """Is `value` x - mean(x), with x the source (if that is known)?"""
        self.kind = "layer_norm"
        centred = self.inside(value)
        if not isinstance(centred, Node) or ops_view.canonical(centred) != "sub" or ops_view.has_alpha(centred):
            return False
        x, mean = ops_view.operands(self.take(centred))
        mean = self.inside(mean)
        if not isinstance(mean, Node) or ops_view.canonical(mean) != "mean" or not _last(mean):
            return False
        self.source = _widened(x, self.side)  # type: ignore[assignment]
        same = _widened(self.take(mean).args[0], self.side) is self.source
        return same and isinstance(self.source, Node) and source in (None, self.source)

    def take(self, node: Node) -> Node:
        """Count a node to the norm."""
        if node not in self.core:
            self.core.append(node)
        return node

    def inside(self, x: object) -> object:
        """What casts inside the norm were applied to."""
        while isinstance(x, Node) and ops_view.canonical(x) == "cast" and x.args:
            x = self.take(x).args[0]
        return x


def _widened(x: object, side: list[Node]) -> object:
    """What casts that keep every value were applied to; the casts are added to `side`."""
    while isinstance(x, Node) and ops_view.canonical(x) == "cast":
        source, target = ops_view.dtype_of(x.args[0]), ops_view.dtype_of(x)
        if source is None or target is None or not ops_view.widens(source, target):
            break
        if ops_view.detaches(x):
            break
        if x not in side:
            side.append(x)
        x = x.args[0]
    return x


def _number(x: object) -> bool:
    if isinstance(x, Node):
        v = x.meta.get("example_value")
        return v is not None and not isinstance(v, torch.Tensor)
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _power(node: Node) -> float | None:
    exponent = ops_view.operand(node, 1, "exponent")
    if not _number(exponent):
        return None
    return float(exponent.meta["example_value"] if isinstance(exponent, Node) else exponent)


def _biased(var: Node) -> bool:
    """Does a variance divide by D (and not by D - 1)?"""
    return (
        var.kwargs.get("unbiased") is False or var.kwargs.get("correction") == 0
        or (len(var.args) > 2 and var.args[2] is False)
    )


def _last(mean: Node) -> bool:
    dims = ops_view.operand(mean, 1, "dim")
    dims = (dims,) if isinstance(dims, int) else tuple(dims or ())
    v = ops_view.value(mean.args[0])
    keep = ops_view.operand(mean, 3 if ops_view.canonical(mean) == "var" else 2, "keepdim", False)
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
        self.is_input = inner.is_input

    def roots(self) -> list[Any]:
        """See Pattern."""
        inner = self.inner.roots()
        return [*inner, "index"] if inner else []

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


def norm_of(x: Pattern, prefix: str = "") -> Pattern:
    """A norm of x; weight and bias of the functional forms are read off the node.  `prefix` begins all names bound."""
    name = prefix + "norm"
    functional = Op("layer_norm", x.cast(), bind=name) | Op("rms_norm", x.cast(), bind=name)
    written = WrittenOut(x.cast(), prefix)
    weighted = Op("mul", written.cast(), _weight(name + "_weight"), bind=prefix + "weighted")
    biased = Op("add", weighted.cast(), _weight(name + "_bias"))
    return Bound(functional | written | weighted | biased, prefix + "result")


def _weight(name: str) -> Pattern:
    return Var(name, _per_channel).cast()
