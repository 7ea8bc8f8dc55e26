"""The pattern language: small combinators that are matched from a root upwards, with backtracking.

    x, scale, shift = Var("x"), Var("scale"), Var("shift")
    norm = Op("layer_norm", x.cast(), bind="norm")
    ADALN = norm.cast() * (1 + scale.cast()).views("scale") + shift.cast()

`+` and `*` commute locally; functions stand for themselves (`Op(F.silu, Var("x"))`).  `.cast()` looks through dtype
casts, `.views()` through views of a broadcast factor, any number of each.  A matched node is either *core* (it computes
something the rewrite replaces, so nothing outside may read it) or *side* (a cast, a view or `1 + s` in front of an
input: cheap, so others may keep using it).

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

    def copy(self) -> Attempt:
        """What is bound now; an attempt undoes its bindings when its generator goes on."""
        views = {k: list(v) for k, v in self.views.items()}
        return Attempt(dict(self.env), list(self.core), list(self.side), views)

    def __getitem__(self, name: str) -> Any:
        return self.env[name]

    def get(self, name: str) -> Any:
        """What a name is bound to, or None."""
        return self.env.get(name)


class Pattern:
    """Base of the combinators.

    `is_input`: does it stand in front of the chain (a captured input, or something cheap on the way to one)?
    """

    is_input = False

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """Yield once for each way `x` fits; bindings hold until the generator is resumed."""
        raise NotImplementedError

    def roots(self) -> list[Any]:
        """The canonical names (or functions) a match can end in; an empty list for anything at all."""
        return []

    def variables(self) -> list[str]:
        """The names of the inputs it captures, in order."""
        inside = [getattr(self, "inner", None), *getattr(self, "inputs", ()), *getattr(self, "options", ())]
        return list(dict.fromkeys(n for p in inside if isinstance(p, Pattern) for n in p.variables()))

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

    is_input = True

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

    is_input = True

    def __init__(self, name: str, where: Callable[[Node, Attempt], str | None] | None = None) -> None:
        self.name, self.where = name, where

    def variables(self) -> list[str]:
        """See Pattern."""
        return [self.name]

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
    """One operation with its tensor operands.

    `name` is a canonical name of ops_view.py, or a function itself (`torch.nn.functional.silu`).  `add`, `mul` and the
    product inside `addcmul` match in either order.
    """

    def __init__(
        self,
        name: str | Callable[..., Any],
        *inputs: Pattern | float,
        bind: str | None = None,
        side: bool = False,
        where: Callable[[Node, Attempt], str | None] | None = None,
    ) -> None:
        self.name, self.bind, self.side, self.where = name, bind, side, where
        self.inputs, self.is_input = tuple(lift(p) for p in inputs), side
        self.binary = name in ("add", "mul", "sub")

    def roots(self) -> list[Any]:
        """See Pattern."""
        return [self.name]

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """See Pattern."""
        if not isinstance(x, Node) or not self.fits(x):
            attempt.fail(x, lambda: f"expected {self.called}, found {describe(x)}")
            return
        if (self.binary or self.name == "addcmul") and ops_view.has_alpha(x):
            attempt.fail(x, f"{self.name} scales an operand (alpha, value) or writes to out=")
            return
        reason = self.where(x, attempt) if self.where else None
        if self.side and ops_view.detaches(x):
            reason = f"{x.name} cuts a gradient off"
        if reason:
            attempt.fail(x, reason)
            return
        taken = attempt.side if self.side else attempt.core
        taken.append(x)
        if self.bind:
            attempt.env[self.bind] = x
        for order in self.orders(x):
            yield from _all(self.inputs, order, attempt)
        taken.pop()
        if self.bind:
            del attempt.env[self.bind]

    @property
    def called(self) -> str:
        """The operation in words."""
        return self.name if isinstance(self.name, str) else getattr(self.name, "__name__", str(self.name))

    def fits(self, x: Node) -> bool:
        """Is x this operation?"""
        if isinstance(self.name, str):
            return ops_view.canonical(x) == self.name
        return x.op == "call_function" and x.target is self.name

    def orders(self, x: Node) -> list[tuple[Any, ...]]:
        """The operands of x in every order they may be matched in."""
        if self.binary:
            a, b = ops_view.operands(x)
            return [(a, b), (b, a)] if self.name != "sub" else [(a, b)]
        if self.name == "addcmul":
            a, b, c = (ops_view.operand(x, i, k) for i, k in enumerate(("input", "tensor1", "tensor2")))
            return [(a, b, c), (a, c, b)]
        return [tuple(ops_view.operand(x, i, "input") for i in range(len(self.inputs)))]


class Bound(Pattern):
    """`inner`, with the node it matched at bound to a name."""

    def __init__(self, inner: Pattern, name: str) -> None:
        self.inner, self.name = inner, name
        self.is_input = inner.is_input

    def roots(self) -> list[Any]:
        """See Pattern."""
        return self.inner.roots()

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """See Pattern."""
        if self.name in attempt.env:
            attempt.fail(x, f"{self.name} occurs twice")
            return
        attempt.env[self.name] = x
        yield from self.inner.match(x, attempt)
        del attempt.env[self.name]


class Again(Pattern):
    """The node a name is bound to, or one that computes the same from the same inputs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """See Pattern."""
        first = attempt.env.get(self.name)
        if x is first:
            yield
        elif isinstance(x, Node) and isinstance(first, Node) and _same_call(x, first):
            attempt.core.append(x)
            yield
            attempt.core.pop()
        else:
            attempt.fail(x, lambda: f"{describe(x)} is not the same {self.name}")


def _same_call(a: Node, b: Node) -> bool:
    pure = ops_view.canonical(a) in ("layer_norm", "rms_norm")
    return pure and a.target is b.target and a.args == b.args and a.kwargs == b.kwargs


class Casts(Pattern):
    """`inner` behind any number of casts.

    In front of an input only casts that keep every value are looked through, and all of those, so that the narrowest
    copy of it is read and saved; a narrowing cast is a rounding the model asked for, so its result is the input.
    Inside the chain every cast is looked through (the site rounds once).
    """

    def __init__(self, inner: Pattern) -> None:
        self.inner, self.is_input = inner, inner.is_input

    def roots(self) -> list[Any]:
        """See Pattern."""
        inner = self.inner.roots()
        return [*inner, "cast"] if inner else []

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """See Pattern."""
        casts = 0
        taken = attempt.side if self.is_input else attempt.core
        while isinstance(x, Node) and ops_view.canonical(x) == "cast" and self.looks_through(x):
            taken.append(x)
            casts += 1
            x = x.args[0]
        yield from self.inner.match(x, attempt)
        if casts:
            del taken[-casts:]

    def looks_through(self, x: Node) -> bool:
        """Does a cast not matter here?"""
        source, target = ops_view.dtype_of(x.args[0]), ops_view.dtype_of(x)
        if source is None or target is None:
            return False
        keeps = source.is_floating_point and ops_view.widens(source, target) and not ops_view.detaches(x)
        return not self.is_input or keeps


class Views(Pattern):
    """`inner` behind any number of views, which are kept under the name of the variable they are replayed on."""

    is_input = True

    def __init__(self, inner: Pattern, name: str) -> None:
        self.inner, self.name = inner, name

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """See Pattern."""
        yield from self.inner.match(x, attempt)
        if not isinstance(x, Node) or ops_view.canonical(x) not in ops_view.VIEWS or ops_view.detaches(x):
            return
        if isinstance(x.args[0], Node):
            attempt.side.append(x)
            attempt.views.setdefault(self.name, []).append(x)
            yield from self.match(x.args[0], attempt)
            attempt.views[self.name].pop()
            attempt.side.pop()


class Either(Pattern):
    """The first alternative that fits, then the others."""

    def __init__(self, *options: Pattern) -> None:
        self.options: list[Pattern] = [o for p in options for o in (p.options if isinstance(p, Either) else [p])]
        self.is_input = all(p.is_input for p in self.options)
        # by canonical name: what an alternative can end in (None: anything), so that most are not even tried
        self.ends = [frozenset(p.roots()) or None for p in self.options]

    def roots(self) -> list[Any]:
        """See Pattern."""
        ends = [p.roots() for p in self.options]
        return [root for each in ends for root in each] if all(ends) else []

    def match(self, x: object, attempt: Attempt) -> Iterator[None]:
        """See Pattern."""
        name = (ops_view.canonical(x) or x.target) if isinstance(x, Node) else None
        tried = False
        for option, ends in zip(self.options, self.ends):
            if ends is None or name in ends:
                tried = True
                yield from option.match(x, attempt)
        if not tried:
            attempt.fail(x, lambda: f"expected {self.expected()}, found {describe(x)}")

    def expected(self) -> str:
        """What it can be, in words."""
        names = dict.fromkeys(r for p in self.options for r in p.roots() if r != "cast")
        return " or ".join(n if isinstance(n, str) else getattr(n, "__name__", str(n)) for n in names)


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
