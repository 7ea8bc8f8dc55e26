"""The pattern language: small combinators that are matched from a root upwards, with backtracking.

    x, scale, shift = Var("x"), Var("scale"), Var("shift")
    norm = Op("layer_norm", x.cast(), bind="norm")
    ADALN = norm.cast() * (1 + scale.cast()).views("scale") + shift.cast()

`+` and `*` commute locally.  `.cast()` looks through any number of dtype casts, `.views()` through views of a
broadcast factor.  A matched node is either *core* (it computes something the rewrite replaces, so nothing outside may
read it) or *side* (a cast, a view or `1 + s` in front of an input: cheap, so others may keep using it).

Matching never mutates the graph.  The attempt that got furthest is kept in `Attempt.best`, so that every place that
looks like a site and is not one can say why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from graphopt.passes import ops_view


@dataclass
class Failure:
    """Why one attempt stopped: after how many satisfied nodes, where, and the reason in words."""

    depth: int
    node: Node | None
    reason: str | Callable[[], str]  # spelled out only when someone asks

    def __str__(self) -> str:
        return self.reason if isinstance(self.reason, str) else self.reason()


@dataclass
class Attempt:
    """The state of one attempt to match a pattern at one root."""

    env: dict[str, Any] = field(default_factory=dict)
    core: list[Node] = field(default_factory=list)
    side: list[Node] = field(default_factory=list)
    views: dict[str, list[Node]] = field(default_factory=dict)
    best: Failure | None = None

    def fail(self, node: object, reason: str | Callable[[], str]) -> None:
        """Keep the failure of the attempt that satisfied the most nodes."""
        depth = len(self.core) + len(self.side)
        if self.best is None or depth > self.best.depth:
            self.best = Failure(depth, node if isinstance(node, Node) else None, reason)

    def __getitem__(self, name: str) -> Any:
        return self.env[name]

    def get(self, name: str) -> Any:
        """What a name is bound to, or None."""
        return self.env.get(name)


class Pattern:
    """Base of the combinators."""

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """Yield once for each way `x` fits; bindings hold until the generator is resumed."""
        raise NotImplementedError

    def cast(self) -> Pattern:
        """The same, behind any number of dtype casts."""
        return Casts(self)

    def views(self, of: str) -> Pattern:
        """The same, behind any number of views of the broadcast factor named `of`."""
        return Views(self, of)

    def __add__(self, other: Pattern | float) -> Pattern:
        return Op("add", self, lift(other))

    def __radd__(self, other: float) -> Pattern:
        return Op("add", lift(other), self, side=True)

    def __mul__(self, other: Pattern | float) -> Pattern:
        return Op("mul", self, lift(other))

    def __or__(self, other: Pattern) -> Pattern:
        return Either(self, other)


def lift(x: Pattern | float) -> Pattern:
    """A number in a pattern stands for itself."""
    return x if isinstance(x, Pattern) else Const(x)


class Const(Pattern):
    """A literal number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """See Pattern."""
        if isinstance(x, (int, float)) and not isinstance(x, bool) and x == self.number:
            yield
        else:
            attempt.fail(x, lambda: f"expected the constant {self.number}, found {describe(x)}")


class Var(Pattern):
    """A captured input of the site: any tensor that satisfies `where` (which returns a reason, or None if it fits)."""

    def __init__(self, name: str, where: Callable[[Node, Attempt], str | None] | None = None) -> None:
        self.name, self.where = name, where

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """See Pattern."""
        if not isinstance(x, Node) or ops_view.value(x) is None:
            attempt.fail(x, lambda: f"{self.name} is {describe(x)}, not a tensor")
            return
        if self.name in attempt.env:
            if attempt.env[self.name] is x:
                yield
            else:
                attempt.fail(x, f"two different nodes for {self.name}")
            return
        reason = self.where(x, attempt) if self.where else None
        if reason:
            attempt.fail(x, reason)
            return
        attempt.env[self.name] = x
        yield
        del attempt.env[self.name]


class Op(Pattern):
    """One operation with its tensor operands; `add` and `mul` match in either order."""

    def __init__(
        self,
        name: str,
        *inputs: Pattern,
        bind: str | None = None,
        side: bool = False,
        where: Callable[[Node, Attempt], str | None] | None = None,
    ) -> None:
        self.name, self.inputs, self.bind, self.side, self.where = name, inputs, bind, side, where
        self.binary = name in ("add", "mul", "sub")

    def bound(self, name: str) -> Op:
        """The same, with the matched node bound to a name."""
        return Op(self.name, *self.inputs, bind=name, side=self.side, where=self.where)

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """See Pattern."""
        if not isinstance(x, Node) or ops_view.canonical(x) != self.name:
            attempt.fail(x, lambda: f"expected {self.name}, found {describe(x)}")
            return
        if self.binary and ops_view.has_alpha(x):
            attempt.fail(x, f"{self.name} scales an operand (alpha) or writes to out=")
            return
        reason = self.where(x, attempt) if self.where else None
        if reason:
            attempt.fail(x, reason)
            return
        taken = attempt.side if self.side else attempt.core
        taken.append(x)
        if self.bind:
            attempt.env[self.bind] = x
        if self.binary:
            a, b = ops_view.operands(x)
            orders: list[tuple[Any, ...]] = [(a, b), (b, a)] if self.name != "sub" else [(a, b)]
        else:
            orders = [tuple(ops_view.operand(x, i, "input") for i in range(len(self.inputs)))]
        for order in orders:
            yield from _all(self.inputs, order, attempt)
        taken.pop()
        if self.bind:
            del attempt.env[self.bind]


class Casts(Pattern):
    """`inner` behind any number of casts.

    In front of an input only casts that keep every value are looked through, as far as they go, so that the narrowest
    copy of it is read and saved; a narrowing cast is a rounding the model asked for, so its result is the input.
    Inside the chain every cast is looked through (the site rounds once).
    """

    def __init__(self, inner: Pattern) -> None:
        self.inner = inner
        self.input_side = not isinstance(inner, Op) or inner.side

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """See Pattern."""
        if not self.input_side:
            yield from self.inner.match(x, attempt)
        if isinstance(x, Node) and self.looks_through(x):
            taken = attempt.side if self.input_side else attempt.core
            taken.append(x)
            yield from self.match(x.args[0], attempt)
            taken.pop()
        if self.input_side:
            yield from self.inner.match(x, attempt)

    def looks_through(self, x: Node) -> bool:
        """Is x a cast that does not matter here?"""
        if ops_view.canonical(x) != "cast":
            return False
        source, target = ops_view.dtype_of(x.args[0]), ops_view.dtype_of(x)
        if source is None or target is None:
            return False
        return not self.input_side or (source.is_floating_point and ops_view.widens(source, target))


class Views(Pattern):
    """`inner` behind any number of views, which are kept under the name of the variable they are replayed on."""

    def __init__(self, inner: Pattern, name: str) -> None:
        self.inner, self.name = inner, name

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """See Pattern."""
        yield from self.inner.match(x, attempt)
        if isinstance(x, Node) and ops_view.canonical(x) in ops_view.VIEWS and isinstance(x.args[0], Node):
            attempt.side.append(x)
            attempt.views.setdefault(self.name, []).append(x)
            yield from self.match(x.args[0], attempt)
            attempt.views[self.name].pop()
            attempt.side.pop()


class Either(Pattern):
    """The first alternative that fits, then the others."""

    def __init__(self, *options: Pattern) -> None:
        self.options = options

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """See Pattern."""
        for option in self.options:
            yield from option.match(x, attempt)


def _all(patterns: tuple[Pattern, ...], xs: tuple[Any, ...], attempt: Attempt) -> Iterator[None]:
    if not patterns:
        yield
        return
    for _ in patterns[0].match(xs[0], attempt):
        yield from _all(patterns[1:], xs[1:], attempt)


def describe(x: object) -> str:
    """A node or a literal in words, for reasons."""
    if isinstance(x, Node):
        name = ops_view.canonical(x) or getattr(x.target, "__name__", str(x.target))
        v = ops_view.value(x)
        return f"{name} {list(v.shape)}" if v is not None else str(name)
    return repr(x)
