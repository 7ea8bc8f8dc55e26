"""`graphopt.regions="auto"`: one of N equal layers of a resident model is compiled, once, for all of them.

    graph -> segments by layer (passes/partition.py) -> classes of equal segments, each rewritten and compiled once
    -> the segments in order, under torch's autograd

Layers are the members of module lists that are called in the graph.  The compiled layer gets its weights as arguments;
nothing is fused across layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.fx import Node

from graphopt import segments
from graphopt.errors import StreamError
from graphopt.passes import partition, pipeline, source, stream_classes
from graphopt.passes.partition import Segment, example
from graphopt.passes.record import PassRecord
from graphopt.segments import Step

Compile = Callable[..., Callable[..., Any]]
Rewrite = Callable[[fx.GraphModule], tuple[fx.GraphModule, list[PassRecord], Compile]]


class Regions:
    """A compiled graph as its segments; `records` are the passes of every segment, `notes` for the report."""

    def __init__(
        self, steps: list[Step], constants: dict[int, Any], results: tuple[Any, ...], size: int,
        records: list[PassRecord], notes: list[str],
    ) -> None:
        self.steps, self.constants, self.results, self.size = steps, constants, results, size
        self.records, self.notes = records, notes

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        values: list[Any] = [None] * self.size
        values[:len(args)] = args
        for i, constant in self.constants.items():
            values[i] = constant
        for step in self.steps:
            out = step.call(*[values[i] for i in step.inputs])
            for i, value in zip(step.outputs, out):
                values[i] = value
            del out
            for i in step.dead:
                values[i] = None
        return [values[r] if isinstance(r, int) else r[0] for r in self.results]


def layer_names(gm: fx.GraphModule) -> list[str]:
    """Names of the layers called in a graph: outermost modules whose last name is a number, two and more of a list."""
    found: dict[str, None] = {}
    for node in gm.graph.nodes:
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            name = source.tidy(path)
            if name.rpartition(".")[2].isdigit():
                found.setdefault(name)
                break
    lists: dict[str, int] = {}
    for name in found:
        lists[name.rpartition(".")[0]] = lists.get(name.rpartition(".")[0], 0) + 1
    return [n for n in found if lists[n.rpartition(".")[0]] > 1]


def compile_regions(gm: fx.GraphModule, inputs: list[Any], rewrite: Rewrite) -> Regions | str:
    """Compile one graph by regions; a text instead says why the whole graph is better compiled as one.

    rewrite: runs the passes on a segment; gives the rewritten one, what was done, and what compiles it.
    """
    names = layer_names(gm)
    if not names:
        return "no layers repeat"
    twin = pipeline.copy(gm)
    try:
        parts = partition.partition(twin, names)
    except StreamError as error:
        return error.what
    nodes = twin.graph.find_nodes(op="placeholder")
    real = dict(zip(nodes, inputs))
    subs = [partition.extract(twin, p) for p in parts]
    keys = [_key(s, p, real) for s, p in zip(subs, parts)]
    layers = [k for k, p in zip(keys, parts) if p.layer is not None]
    if not layers:  # their code is in the bodies of checkpoints
        return "its layers run inside activation checkpoints, which stay whole"
    if len(layers) == len(set(layers)):
        return "no two layers are equal"
    number = segments.numbers(twin, parts)
    built: dict[str, tuple[Callable[..., Any], list[PassRecord], str]] = {}
    steps, records = [], []
    for part, sub, key in zip(parts, subs, keys):
        if part.layer is None and all(segments.is_trivial(n) for n in part.nodes):
            call: Callable[..., Any] = sub.forward
        elif key in built:
            call, made, first = built[key]
            records += [segments.renamed(r, first, part.layer or "") for r in made]
        else:
            rewritten, made, compile_one = rewrite(sub)
            call = compile_one(rewritten, [_input(n, part, real) for n in part.inputs])
            built[key] = (call, made, part.layer or "")
            records += made
        steps.append(Step(call, tuple(number[n] for n in part.inputs), tuple(number[n] for n in part.outputs)))
    results = segments.results(twin, number)
    segments.mark_dead(steps, results)
    constants = {number[n]: partition.attribute(twin, str(n.target)) for n in number if n.op == "get_attr"}
    note = f"regions: {len(layers)} layers in {len(set(layers))} classes"
    return Regions(steps, constants, results, len(number), records, [note])


def _key(sub: fx.GraphModule, part: Segment, real: dict[Node, Any]) -> str:
    def role(i: int) -> object:
        node = part.inputs[i]
        if part.layer is None:
            return node.name
        return "parameter" if isinstance(real.get(node), nn.Parameter) else "value"

    return stream_classes.structural_hash(sub, role)


def _input(node: Node, part: Segment, real: dict[Node, Any]) -> Any:
    # glue is compiled with the graph's own inputs; a layer's class must not remember those of its first member
    return real[node] if part.layer is None and node in real else segments.fresh(example(node))
