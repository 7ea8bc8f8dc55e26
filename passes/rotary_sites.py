"""What the passes over rotary embeddings share: a chain, the checks before it goes, and the call that takes its place.

A chain is found by norm_rotate.py (a norm over all heads) or head_norm_rotate.py (a norm per head).  It becomes one
operator only where the operator would see the same values, its kernels compile, and the GPU gains by it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from graphopt import _compat
from graphopt.codegen import compiler
from graphopt.codegen.operators import has_triton
from graphopt.codegen.readiness import local_target
from graphopt.errors import CodegenError
from graphopt.passes import ops_view, source
from graphopt.passes.facts import Facts, gather
from graphopt.passes.pipeline import PassContext, nested
from graphopt.passes.record import PassRecord, Site

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SMALLEST = 4 << 20  # bytes of the result: below, launches decide


@dataclass
class Chain:
    """One chain: its norms, what the operator reads, the result, and the nodes that go.

    inputs: tensors read, None for absent ones.  units: the kernels for a target.  call: operator (of an engine) and its
    arguments.  pick: which result of the operator, or None where it returns one tensor.
    """

    norms: list[Node]
    inputs: list[Node]
    result: Node
    core: list[Node]
    units: Callable[[str], list[compiler.Unit]]
    call: Callable[[str], tuple[Any, tuple[Any, ...]]]
    pick: int | None = None


class RotaryPass:
    """A norm and a rotary embedding in one kernel per direction."""

    name = ""
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    conflicts = frozenset({"partitioned"})

    def chains(self, graph: fx.Graph) -> Iterable[Chain]:
        """The chains of one graph."""
        raise NotImplementedError

    def run(self, gm: fx.GraphModule, context: PassContext) -> PassRecord:
        """See Pass."""
        graphs = nested(gm)
        record = PassRecord(self.name, sum(len(g.graph.nodes) for g in graphs))
        for g in graphs:
            self.one(g, context, record)
        record.nodes_after = sum(len(g.graph.nodes) for g in graphs)
        return record

    def one(self, g: fx.GraphModule, context: PassContext, record: PassRecord) -> None:
        """Rewrite one graph."""
        found = list(self.chains(g.graph))
        facts, changed = gather(g) if found else None, False
        for chain in found:
            if facts is None or unsafe(chain, facts):
                continue
            engine = engine_for(chain, context)
            if engine is None or (engine == "triton" and not builds(chain, context, record)):
                continue
            record.sites.append(site(chain, self.name))
            put(g.graph, chain, engine, self.name)
            changed = True
        if changed:
            g.graph.lint()
            g.recompile()


def unsafe(chain: Chain, facts: Facts) -> bool:
    """Would the operator see other values, or stand where it cannot?"""
    values = [ops_view.value(n) for n in (*chain.inputs, chain.result)]
    if any(v is None or v.dtype not in DTYPES for v in values):
        return True
    if not all(_compat.is_fake(v) for v in values[:-1]) or len({v.device for v in values if v is not None}) > 1:
        return True
    if len({facts.region[n] for n in chain.core}) > 1 or facts.transform(chain.result) is not None:
        return True
    if _compat.forward_mode_ad() is not None:
        return True
    index = [facts.index[n] for n in chain.core]
    return facts.write_between(min(index), max(index), [*chain.inputs, *chain.norms]) is not None


def engine_for(chain: Chain, context: PassContext) -> str | None:
    """Which operator to call, or None where the site is better left alone."""
    value = ops_view.value(chain.result)
    if value is None:
        return None
    here = value.device.type == "cuda" or context.target is not None
    if not has_triton() or not here:
        return "reference" if context.select == "all" else None
    target = context.target or local_target()
    size = value.dtype.itemsize
    for s in value.shape:
        size *= _compat.size_hint(s)
    large = size >= SMALLEST
    return "triton" if context.select == "all" or (large and not target.startswith("gfx")) else None


def builds(chain: Chain, context: PassContext, record: PassRecord) -> bool:
    """Do all kernels compile?  If not: one warning, or the error."""
    target = context.target or local_target()
    try:
        for unit in chain.units(target):
            compiler.compiled(unit, target)
    except CodegenError as error:
        if context.on_error == "raise":
            raise
        norm = chain.norms[0]
        place = source.where(norm) or norm.name
        context.warn(f"{source.fqn(norm)} ({place}): {error.what}; the site is left to Inductor")
        record.dropped.append(chain.result.name)
        return False
    return True


def site(chain: Chain, name: str) -> Site:
    """What the report says."""
    value = ops_view.value(chain.result)
    shape = () if value is None else tuple(s if isinstance(s, int) else str(s) for s in value.shape)
    dtype = str(ops_view.dtype_of(chain.result)).removeprefix("torch.")
    fqns = tuple(source.fqn(n) for n in chain.norms)
    where = source.where(chain.norms[0])
    return Site("rotary", name, fqns[0], chain.result.name, where, shape, dtype, "rewritten", norms=fqns)


def put(graph: fx.Graph, chain: Chain, engine: str, name: str) -> None:
    """The call in, the chain out."""
    target, arguments = chain.call(engine)
    with graph.inserting_before(chain.result):
        call = graph.create_node("call_function", target, arguments, name=name)
        new = call if chain.pick is None else graph.call_function(operator.getitem, (call, chain.pick))
    new.meta = dict(chain.result.meta)
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
        if key in chain.norms[0].meta:
            call.meta[key] = chain.norms[0].meta[key]
    chain.result.replace_all_uses_with(new)
    place = {n: i for i, n in enumerate(graph.nodes)}
    for node in sorted(dict.fromkeys(chain.core), key=place.__getitem__, reverse=True):
        graph.erase_node(node)


def only_user(node: Node) -> Node | None:
    """The one reader of a node."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def halves_of(pairs: Node) -> tuple[Node, Node] | None:
    """(even, odd) of a view in pairs."""
    unbound = only_user(pairs)
    if unbound is None or ops_view.canonical(unbound) != "unbind":
        return None
    if ops_view.operand(unbound, 1, "dim", 0) not in (-1, 4):
        return None
    picks = {u.args[1]: u for u in unbound.users if ops_view.canonical(u) == "pick"}
    return (picks[0], picks[1]) if set(picks) == {0, 1} and len(unbound.users) == 2 else None
