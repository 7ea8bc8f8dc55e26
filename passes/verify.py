"""Does a fused operator compute what the ops it replaces compute?  Asked with the real inputs of the graph.

The graph runs once as it came, in the model's dtype, without recording gradients and freeing every value after its
last reader.  Where all inputs of a site exist, the site is computed three ways from them: its ops in fp64, its ops as
they are, and the operator, each with the gradients of one random cotangent.  Then everything of the site is freed, so
the extra memory is one site in fp64 beside the activations that are alive there.

A tensor passes when its error against fp64 (relative L2) is at most 1.25 times that of the ops as they are, or at most
half a unit in the last place of the narrowest dtype of the site (1e-5 in fp32): one honest rounding is never an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from graphopt.passes import facts, ops_view, pipeline
from graphopt.passes.record import Checked
from graphopt.passes.rule import Match

RATIO = 1.25
# higher-order operators that call the graph they are given with the operands that follow, and do nothing else
CALLS = {"tag_activation_checkpoint": 1, "wrap": 1, "invoke_subgraph": 2, "wrap_activation_checkpoint": 1}


StandsFor = dict[Node, tuple[Node, ...]]


@dataclass(frozen=True)
class Placed:
    """One operator call that took the place of nodes.

    key: what a reader and the pass call it.  chain: the nodes it replaced and those in front of its inputs, in the
    graph as it was.  leaves: its inputs there.  results: node there -> node that stands for it.
    """

    key: str
    chain: frozenset[Node]
    leaves: tuple[Node, ...]
    results: dict[Node, Node]


def pair(
    gm: fx.GraphModule, trial: fx.GraphModule, matches: list[tuple[str, int, Match]], became: dict[Node, Node]
) -> tuple[dict[fx.Graph, list[Placed]], StandsFor]:
    """What `check` needs, from a graph and the rewritten copy of it.

    matches: (key, position of its graph among the nested ones, match).  became: replaced node -> what stands for it.
    """
    placed: dict[fx.Graph, list[Placed]] = {}
    stands_for: StandsFor = {}
    old_of: dict[Node, list[str]] = {}
    for old_node, new_node in became.items():  # a value and the cast of it may both be the same result
        old_of.setdefault(new_node, []).append(old_node.name)
    for i, (old, new) in enumerate(zip(pipeline.nested(gm), pipeline.nested(trial))):
        names = {n.name: n for n in old.graph.nodes}
        alive = set(new.graph.nodes)
        stands_for |= {n: tuple(names[m] for m in old_of.get(n, [n.name]) if m in names) for n in alive}
        for key, where, match in matches:
            if where != i or match.replacement is None:
                continue
            inputs = [n for n in match.replacement.inputs.values() if n is not None]
            leaves = dict.fromkeys(source for n in inputs for source in _sources(n, names))
            chain = _down_to({names[n.name] for n in (*match.core, *match.side)}, leaves)
            results = {names[n.name]: became[n] for n in match.replacement.results if became.get(n) in alive}
            placed.setdefault(old.graph, []).append(Placed(key, frozenset(chain), tuple(leaves), results))
    return placed, stands_for


def check(
    gm: fx.GraphModule, inputs: list[Any], placed: dict[fx.Graph, list[Placed]], stands_for: StandsFor
) -> list[Checked]:
    """Run `gm` on real inputs and check every call.

    placed: per graph of `gm` (and of the graphs nested in it).  stands_for: node of a rewritten graph -> the nodes of
    `gm` whose value it has, for inputs and for results of other calls.
    """
    devices = sorted({x.device.index or 0 for x in inputs if isinstance(x, Tensor) and x.device.type == "cuda"})
    checker = _Run(placed, stands_for)
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        checker.run(gm, _guarded(gm, inputs))
    return checker.found


def _guarded(gm: fx.GraphModule, inputs: list[Any]) -> list[Any]:
    """The inputs, those that the graph writes to as copies."""
    names = [n for n in gm.graph.nodes if n.op == "placeholder"]
    writes = facts.gather(gm).writes
    unknown = any(w.storages is None for w in writes)
    touched: set[int] = set().union(*(w.storages or () for w in writes)) if writes else set()
    return [
        x.detach().clone() if isinstance(x, Tensor) and (unknown or facts.storages_of(n) & touched) else x
        for n, x in zip(names, inputs)
    ]


def _sources(node: Node, names: dict[str, Node]) -> list[Node]:
    """A node of the rewritten graph as nodes of the graph before: itself, or what new nodes made it from."""
    if node.name in names:
        return [names[node.name]]
    return [source for up in node.all_input_nodes for source in _sources(up, names)]


# what may stand between an input of an operator and the nodes its pattern named: `weight.float()`, `table + embedding`
BETWEEN = ops_view.VIEWS | ops_view.PIECES | {"cast", "add"}


def _down_to(chain: set[Node], leaves: Iterable[Node]) -> set[Node]:
    """The chain with the cheap nodes between its inputs and it, which no pattern names."""
    reaches: dict[Node, bool] = dict.fromkeys(leaves, True)

    def reach(node: Node) -> bool:
        if node not in reaches:
            reaches[node] = False
            if ops_view.canonical(node) in BETWEEN:
                reaches[node] = any([reach(up) for up in node.all_input_nodes])
        return reaches[node]

    for first in {up for n in chain for up in n.all_input_nodes} - chain:
        reach(first)
    return chain | {n for n, there in reaches.items() if there} - set(leaves)


class _Run:
    """Interprets a graph, checking calls on the way."""

    def __init__(self, placed: dict[fx.Graph, list[Placed]], stands_for: StandsFor) -> None:
        self.placed, self.stands_for = placed, stands_for
        self.found: list[Checked] = []

    def run(self, gm: fx.GraphModule, inputs: Iterable[Any]) -> Any:
        nodes = list(gm.graph.nodes)
        index = {n: i for i, n in enumerate(nodes)}
        due: dict[Node, list[Placed]] = {}
        last = {up: node for node in nodes for up in node.all_input_nodes}
        for p in self.placed.get(gm.graph, []):
            needed = [*p.leaves, *_context(p)]
            at = nodes[max(index[n] for n in (*needed, *p.results))]  # inside the autocast region of the chain
            due.setdefault(at, []).append(p)
            for n in needed:  # alive until the call is checked
                if index[last.get(n, n)] < index[at]:
                    last[n] = at
        dying: dict[Node, list[Node]] = {}
        for value, reader in last.items():
            dying.setdefault(reader, []).append(value)
        given, env = iter(inputs), {}
        for node in nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], env.__getitem__)
            else:
                env[node] = self.compute(gm, node, env)
            for p in due.get(node, []):
                self.found.append(_compare(p, env, self.stands_for))
            for value in dying.get(node, []):
                env.pop(value, None)
            if node not in last:
                env.pop(node, None)
        return None

    def compute(self, gm: fx.GraphModule, node: Node, env: dict[Node, Any]) -> Any:
        if node.op == "get_attr":
            return attribute(gm, str(node.target))
        name = getattr(node.target, "__name__", "")
        if name == "_set_grad_enabled":
            return None  # nothing is recorded here anyway
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
        skip = CALLS.get(name)
        if skip is not None and isinstance(args[0], fx.GraphModule):
            return self.run(args[0], args[skip:])
        return call(gm, node, args, kwargs)


def attribute(gm: fx.GraphModule, path: str) -> Any:
    """An attribute by its dotted path."""
    x: Any = gm
    for part in path.split("."):
        x = getattr(x, part)
    return x


def call(gm: fx.GraphModule, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a node computes from values."""
    if node.op == "call_function":
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return gm.get_submodule(str(node.target))(*args, **kwargs)


def _context(p: Placed) -> set[Node]:
    """What the chain reads beside its inputs: sizes, the `x` of `type_as(x)`."""
    return {up for n in p.chain for up in n.all_input_nodes if up not in p.chain} - set(p.leaves)


# -- one site three ways -------------------------------------------------------------------------------


def _compare(p: Placed, env: dict[Node, Any], stands_for: StandsFor) -> Checked:
    values = {n: env[n] for n in (*p.leaves, *_context(p)) if n in env}
    try:
        ours = _differentiated(p, values, lambda leaf: _rewritten(p, leaf, stands_for), torch.Tensor.clone)
    except Exception as error:  # whatever an operator raises is a reason to leave the site alone
        return Checked(p.key, "", 0.0, 0.0, 0.0, f"the operator raised {type(error).__name__}: {error}")
    eager = _differentiated(p, values, lambda leaf: _original(p, leaf, exact=False), torch.Tensor.clone)
    for name, a, b in _pairs(ours, eager):
        if (a is None) != (b is None) or (a is not None and b is not None and (a.shape, a.dtype) != (b.shape, b.dtype)):
            return Checked(p.key, name, 0.0, 0.0, 0.0, f"{_kind(a)} where the ops give {_kind(b)}")
    exact = _differentiated(p, values, lambda leaf: _original(p, leaf, exact=True), torch.Tensor.double)
    least = floor(t.dtype for t in (*values.values(), *ours.values()) if isinstance(t, Tensor))
    worst = Checked(p.key, "", 0.0, 0.0, float("inf"))
    for (name, mine), theirs, true in zip(ours.items(), eager.values(), exact.values()):
        if mine is None or theirs is None or true is None:
            continue
        off, reference = relative(mine, true), relative(theirs, true)
        if not math.isfinite(reference):
            continue  # the model itself overflows here: nothing to compare with
        limit = max(RATIO * reference, least)
        if not off <= limit or off / limit >= worst.error / worst.limit:
            worst = Checked(p.key, name, off, reference, limit)
        if not off <= limit:
            break
    return worst if worst.tensor else Checked(p.key, "", 0.0, 0.0, 0.0)


def floor(dtypes: Iterable[torch.dtype]) -> float:
    """The relative error that one honest rounding to the narrowest of some dtypes may have."""
    return max([1e-5, *(torch.finfo(d).eps / 2 for d in dtypes if d.is_floating_point)])


def relative(a: Tensor, true: Tensor) -> float:
    """Relative L2 error; the absolute one where the truth is zero."""
    gap = torch.linalg.vector_norm(a.double() - true).item()
    size = torch.linalg.vector_norm(true).item()
    return gap / size if size > 0 else gap


def _pairs(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> Iterator[tuple[str, Any, Any]]:
    for name in a:
        yield name, a[name], b[name]


def _kind(t: Tensor | None) -> str:
    return "nothing" if t is None else f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def _differentiated(
    p: Placed,
    values: dict[Node, Any],
    compute: Callable[[dict[Node, Any]], dict[Node, Tensor]],
    prepare: Callable[[Tensor], Tensor],
) -> dict[str, Tensor | None]:
    """Results and gradients by name, from fresh leaves."""
    leaf: dict[Node, Any] = {}
    for n, v in values.items():
        floating = isinstance(v, Tensor) and v.is_floating_point()
        leaf[n] = prepare(v.detach()) if floating else v
    wanted = [n for n in p.leaves if isinstance(leaf[n], Tensor) and leaf[n].is_floating_point() and _learns(n)]
    for n in wanted:
        leaf[n].requires_grad_()
    with torch.enable_grad():
        results = compute(leaf)
    out: dict[str, Tensor | None] = {f"{n.name}": t.detach() for n, t in results.items()}
    live = [t for t in results.values() if t.requires_grad]
    if wanted and live:
        generator = torch.Generator(live[0].device).manual_seed(0)
        # drawn in fp32 and rounded to the result's own dtype, so that all three ways get the same numbers
        cotangents = [
            torch.randn(t.shape, generator=generator, device=t.device).to(_dtype(n, t)).to(t.dtype)
            for n, t in results.items() if t.requires_grad
        ]
        grads = torch.autograd.grad(live, [leaf[n] for n in wanted], cotangents, allow_unused=True)
        out |= {f"gradient of {n.name}": g for n, g in zip(wanted, grads)}
    return out


def _learns(n: Node) -> bool:
    v = ops_view.value(n)
    return v is not None and v.requires_grad


def _dtype(n: Node, t: Tensor) -> torch.dtype:
    return ops_view.dtype_of(n) or t.dtype


def _rewritten(p: Placed, leaf: dict[Node, Any], stands_for: StandsFor) -> dict[Node, Tensor]:
    """The results from the nodes of the rewritten graph."""
    known: dict[Node, Any] = {}

    def value(node: Node) -> Any:
        if node not in known:
            old = next((n for n in stands_for.get(node, ()) if n in leaf), None)
            known[node] = _apply(node, value) if old is None else leaf[old]
        return known[node]

    def of(result: Node) -> Tensor:  # it stands for a result itself, so it is computed and not looked up
        return _apply(result, value)

    return {old: of(new) for old, new in p.results.items()}


def _original(p: Placed, leaf: dict[Node, Any], exact: bool) -> dict[Node, Tensor]:
    """The results from the nodes of the graph as it was; `exact`: in fp64, where casts do nothing."""
    known: dict[Node, Any] = dict(leaf)

    def value(node: Node) -> Any:
        if node not in known:
            if exact and ops_view.canonical(node) == "cast":
                known[node] = value(node.args[0])  # type: ignore[arg-type]
            else:
                known[node] = _apply(node, value, _exact_arguments if exact else None)
        return known[node]

    return {old: value(old) for old in p.results}


def _apply(node: Node, value: Callable[[Node], Any], change: Callable[[Node, Any, Any], Any] | None = None) -> Any:
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value)
    if change is not None:
        args, kwargs = change(node, args, kwargs)
    return call(node.graph.owning_module, node, args, kwargs)


def _exact_arguments(node: Node, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Arguments that depend on the dtype: rms_norm's default eps is that of its input, `dtype=` would round."""
    kwargs = {k: v for k, v in kwargs.items() if k != "dtype"}
    if ops_view.canonical(node) == "rms_norm" and ops_view.operand(node, 3, "eps") is None:
        dtype = ops_view.dtype_of(node.args[0] if node.args else node.kwargs.get("input"))
        args, kwargs = tuple(args[:3]), {**kwargs, "eps": torch.finfo(dtype or torch.float32).eps}
    return args, kwargs


