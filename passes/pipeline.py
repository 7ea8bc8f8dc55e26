"""Passes, their contracts, and running them in order.

A pass is a named object that changes a GraphModule in place and returns what it did.  It declares what it requires and
provides, and what it conflicts with; the order is checked before anything runs.  A pass must depend on nothing but the
graph and the context: torch may call the backend again for the same frame.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import fx

from graphopt.errors import PassOrderError
from graphopt.passes.record import PassRecord
from graphopt.passes.rule import Rule


@dataclass(frozen=True)
class PassContext:
    """What passes may depend on beside the graph.

    `target` compiles for a GPU that need not be here ("sm90"); None takes the device of the example values.
    `inputs` are the graph's real inputs when sites are to be verified with them, else None.
    """

    rules: tuple[Rule, ...]
    select: str = "profitable"
    numerics: str = "fp32"
    on_error: str = "fallback"
    target: str | None = None
    inputs: list[Any] | None = field(default=None, compare=False)
    warn: Callable[[str], None] = field(default=lambda message: None, compare=False)


class Pass(Protocol):
    """One pass."""

    name: str
    requires: frozenset[str]
    provides: frozenset[str]
    conflicts: frozenset[str]

    def run(self, gm: fx.GraphModule, context: PassContext) -> PassRecord:
        """Change `gm` in place and return the record."""
        ...


def check_order(passes: Sequence[Pass]) -> None:
    """Raise PassOrderError unless every pass finds what it requires and meets nothing it conflicts with."""
    provided: set[str] = set()
    seen: list[str] = []
    for p in passes:
        missing = p.requires - provided
        if missing:
            raise PassOrderError(
                f"pass {p.name} requires {', '.join(sorted(missing))}, which no pass before it provides",
                where=" -> ".join([*seen, p.name]),
                remedy="move the pass that provides it to an earlier place",
            )
        clash = p.conflicts & (provided | set(seen))
        if clash:
            raise PassOrderError(
                f"pass {p.name} conflicts with {', '.join(sorted(clash))}",
                where=" -> ".join([*seen, p.name]),
                remedy="leave one of them out",
            )
        provided |= p.provides
        seen.append(p.name)


def run(
    gm: fx.GraphModule,
    passes: Iterable[Pass],
    context: PassContext,
    observe: Callable[[str, fx.GraphModule], None] | None = None,
) -> list[PassRecord]:
    """Run the passes on one graph, in order, timed.  `observe` is shown the graph after each pass, by its name."""
    order = list(passes)
    check_order(order)
    records = []
    for p in order:
        start = time.perf_counter()
        record = p.run(gm, context)
        record.milliseconds = 1e3 * (time.perf_counter() - start)
        records.append(record)
        if observe is not None:
            observe(p.name, gm)
    return records


def nested(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """A graph and all graphs inside it (bodies of higher-order operators such as activation checkpointing)."""
    found, todo = [], [gm]
    while todo:
        g = todo.pop()
        if g not in found:
            found.append(g)
            todo += [child for child in g.children() if isinstance(child, fx.GraphModule)]
    return found


def copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy whose graphs can be changed while the original stays as it was; parameters are shared."""
    graph = fx.Graph()
    graph._codegen = gm.graph._codegen
    mapping: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, mapping, return_output_node=True)
    if isinstance(result, tuple):
        value, old = result
        new = graph.output(value)
        new.meta = dict(old.meta)
    for old_node, new_node in mapping.items():
        new_node.meta = dict(old_node.meta)
    # Dynamo hands over a GraphModule that writes its Python code only when it is called; the copy is of the same kind
    kind = next(c for c in type(gm).__mro__ if not c.__qualname__.endswith("GraphModuleImpl"))
    twin = kind(gm, graph, class_name=type(gm).__name__)
    twin.meta = dict(gm.meta)
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(twin, name, copy(child))
    return twin
