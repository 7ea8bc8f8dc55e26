"""A graph cut by layer: segments that each belong to one layer, and the glue between them.

    placeholders | glue_0 | blocks.0 | blocks.1 | .. | glue_1 | output

Works on the Dynamo graph before any fusion, from `nn_module_stack`.  Bodies of activation checkpoints that hold a
layer's weights are put in line first: a streamed layer is recomputed anyway, so the user's checkpoint would recompute
it twice.  A segment reads values made outside it and gives out the values read after it; nothing else crosses.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from graphopt.errors import StreamError
from graphopt.passes import facts, source


@dataclass
class Segment:
    """A run of nodes.

    layer: the layer's name, None for glue.  inputs: nodes outside it that it reads, in the order of their first use.
    outputs: its own nodes that are read after it, in graph order.
    """

    layer: str | None
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)

    @property
    def where(self) -> str | None:
        """The user's source line of its first node that has one."""
        return next((w for w in map(source.where, self.nodes) if w), None)


def layer_of(node: Node, layers: Iterable[str]) -> str | None:
    """The layer a node belongs to by its module stack, the innermost one; `layers` are names such as "blocks.3"."""
    known = layers if isinstance(layers, (set, frozenset, dict)) else set(layers)
    for path, _ in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
        parts = source.tidy(path).split(".")
        for i in range(len(parts)):
            name = ".".join(parts[i:])
            if name in known:
                return name
    return None


def inline_checkpoints(gm: fx.GraphModule, layer_at: Callable[[Node], str | None]) -> int:
    """Put in line the body of every activation checkpoint that reads a layer's weights; returns how many.

    layer_at: the layer whose weight this node (an operand of the checkpoint) is, None for what is no weight; "" for a
    weight whose layer is not known.
    """
    done = 0
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or getattr(node.target, "__name__", "") != "tag_activation_checkpoint":
            continue
        if all(layer_at(n) is None for n in node.all_input_nodes):
            continue
        copied, result = _put_in_line(gm, node)
        _own_call(copied, layer_at)
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise StreamError("a checkpoint's result is not unpacked", where=source.where(node),
                                  remedy="report this graph to graphopt")
            user.replace_all_uses_with(result[user.args[1]])
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)
        done += 1
    if done:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return done


def _own_call(body: list[Node], layer_at: Callable[[Node], str | None]) -> None:
    """Put a layer into the module stacks of a body that is the layer's own call (diffusers checkpoints so).

    Dynamo leaves its entry out there: submodules have a stack without it, its own operators none.  One of those that
    reads a layer's weight tells such a body from code of the root that calls layers.
    """
    bare = [n for n in body if not n.meta.get("nn_module_stack")]
    layer = next((at for n in bare for a in n.all_input_nodes if (at := layer_at(a))), None)
    if layer:
        for n in body:
            n.meta["nn_module_stack"] = {layer: (layer, torch.nn.Module), **(n.meta.get("nn_module_stack") or {})}


def _put_in_line(gm: fx.GraphModule, node: Node) -> tuple[list[Node], Any]:
    """Copy a checkpoint's body before it; returns its operators there, and what its output became."""
    named: Any = node.args[0]
    body: Any = gm.get_submodule(str(named.target))
    operands = iter(node.args[1:])
    env: dict[Node, Any] = {}
    copied: list[Node] = []
    result: Any = None
    with gm.graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                env[inner] = next(operands)
                continue
            if inner.op == "output":
                result = fx.node.map_arg(inner.args[0], lambda n: env[n])
                continue
            if inner.op == "get_attr":
                name = f"{named.target}_{inner.target}".replace(".", "_")
                setattr(gm, name, attribute(body, str(inner.target)))
                env[inner] = gm.graph.get_attr(name)
            else:
                env[inner] = gm.graph.node_copy(inner, lambda n: env[n])
            env[inner].meta = dict(inner.meta)
            if inner.op != "get_attr":
                copied.append(env[inner])
    return copied, result


def attribute(gm: torch.nn.Module, path: str) -> Any:
    """What stands at a dotted path of a module."""
    value: Any = gm
    for name in path.split("."):
        value = getattr(value, name)
    return value


def partition(gm: fx.GraphModule, layers: Iterable[str], only: str | None = None) -> list[Segment]:
    """Cut a graph into segments, in order.  Raises StreamError where a layer cannot be cut out.

    only: the one layer whose weights the graph reads; where no module stack names it, the graph is that layer (it was
    compiled by itself).
    """
    names = set(layers)
    _gather_unpacking(gm.graph)
    _settle_numbers(gm.graph)
    members = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    segments: list[Segment] = []
    owners = _owners(members, names)
    if only is not None and not any(owners):
        owners = [only] * len(owners)
    for node, name in zip(members, owners):
        if not segments or segments[-1].layer != name:
            segments.append(Segment(name))
        segments[-1].nodes.append(node)
    _connect(gm, segments)
    for s in segments:
        _check(gm, s)
    return segments


def _owners(nodes: list[Node], names: set[str]) -> list[str | None]:
    """The layer of every node.  One without a module stack is the root's own code, unless a layer goes on behind it."""
    owners = [layer_of(n, names) for n in nodes]
    known = [i for i, n in enumerate(nodes) if n.meta.get("nn_module_stack")]
    for a, b in pairwise(known):
        if owners[a] == owners[b]:
            owners[a + 1:b] = [owners[a]] * (b - a - 1)
    return owners


def _is_body(gm: fx.GraphModule, node: Node) -> bool:
    """The graph of a higher-order operator; other attributes are constants, values from outside like a placeholder."""
    return node.op == "get_attr" and isinstance(attribute(gm, str(node.target)), torch.nn.Module)


def example(node: object) -> object:
    """The (fake) value Dynamo traced a node with."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def _gather_unpacking(graph: fx.Graph) -> None:
    """Move every `getitem` of a tuple right behind the tuple, and give it the tuple's owner: tuples never cross."""
    for node in list(graph.nodes):
        if isinstance(example(node), (tuple, list)):
            for user in list(node.users):
                if user.target is operator.getitem and isinstance(user.args[1], int):
                    node.append(user)
                    if "nn_module_stack" in node.meta:
                        user.meta["nn_module_stack"] = node.meta["nn_module_stack"]
                    else:
                        user.meta.pop("nn_module_stack", None)


def _settle_numbers(graph: fx.Graph) -> None:
    """Put in the value of every number that is made of the model's own (eps, with dynamic=True), which guards it.

    Dynamo passes such a number as a tensor and reads it by `item()`; traced again on its own, a segment's item() is
    a value that nobody knows.
    """
    known: set[Any] = set()
    for node in list(graph.nodes):
        value = example(node)
        if not isinstance(value, torch.SymFloat) or node.op == "placeholder":
            continue
        symbols = value.node.expr.free_symbols
        if node.target == "item" and node.args[0].op == "placeholder":
            known |= symbols
        if symbols <= known:
            node.replace_all_uses_with(float(value))  # type: ignore[arg-type]
            graph.erase_node(node)


def _connect(gm: fx.GraphModule, segments: list[Segment]) -> None:
    owner = {n: s for s in segments for n in s.nodes}
    for s in segments:
        seen: set[Node] = set()
        for node in s.nodes:
            for i in node.all_input_nodes:
                outside = owner.get(i) is not s and not _is_body(gm, i)
                if outside and i not in seen:
                    seen.add(i)
                    s.inputs.append(i)
        s.inputs += _sizes(gm, s.inputs)
        s.outputs = [n for n in s.nodes if any(owner.get(u) is not s for u in n.users)]


def _sizes(gm: fx.GraphModule, inputs: list[Node]) -> list[Node]:
    """Arguments of the graph that are symbols which the inputs' sizes are made of and none of them is.

    Tokens of a video are T * (H // 2) * (W // 2): Inductor refuses a graph that gets this size and not T, H and W.
    """
    used: set[Any] = set()
    given: set[Any] = set()
    for value in map(example, inputs):
        for size in (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                used |= size.node.expr.free_symbols
                given |= {size.node.expr} if size.node.expr.is_Symbol else set()
    arguments = ((n, example(n)) for n in gm.graph.find_nodes(op="placeholder")) if used - given else ()
    return [n for n, value in arguments if isinstance(value, torch.SymInt) and value.node.expr in used - given]


def _check(gm: fx.GraphModule, segment: Segment) -> None:
    opened = 0
    for node in segment.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        opened += name.startswith("_enter_") - name.startswith("_exit_")
        if opened < 0:
            break
    if opened != 0:
        raise StreamError(
            f"a context (autocast, no_grad) opens in {segment.layer or 'the code between layers'} and does not close",
            where=segment.where, remedy="open and close it inside the layer, or around the whole model",
        )
    modes = [n.args[0] for n in segment.nodes
             if n.op == "call_function" and getattr(n.target, "__name__", "") == "_set_grad_enabled"]
    if modes and (len(modes) % 2 or not modes[-1]) and segment.layer is not None:
        raise StreamError(f"{segment.layer} switches gradients off and does not switch them on again",
                          where=segment.where, remedy="use torch.no_grad() as a context inside the layer")
    if segment.layer is None:
        return
    inside = set(segment.nodes)
    outside = frozenset().union(*(facts.storages_of(i) for i in segment.inputs)) if segment.inputs else frozenset()
    for node in segment.nodes:
        for target in facts.written(node, gm) or ():
            if not isinstance(target, Node) or target not in inside or facts.storages_of(target) & outside:
                raise StreamError(
                    f"{segment.layer} writes in place to {target}, which it was given: recomputing it in the backward "
                    "would apply the write twice", where=source.where(node),
                    remedy="compute a new tensor inside the layer",
                )
    for node in segment.outputs:
        value = example(node)
        if not isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, int, float, bool)):
            raise StreamError(f"{segment.layer} gives out a {type(value).__name__} ({node.name})",
                              where=source.where(node), remedy="give out tensors")


def extract(gm: fx.GraphModule, segment: Segment) -> fx.GraphModule:
    """A segment as a graph of its own: its inputs as placeholders, a tuple of its outputs."""
    graph = fx.Graph()
    env: dict[Node, Node] = {}
    for node in segment.inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = {k: v for k, v in node.meta.items() if k != "grapharg"}
    for node in segment.nodes:
        for body in node.all_input_nodes:
            if body not in env and _is_body(gm, body):
                env[body] = graph.get_attr(str(body.target))
        if node not in env:
            env[node] = graph.node_copy(node, lambda n: env[n])
            env[node].meta = dict(node.meta)
    graph.output(tuple(env[n] for n in segment.outputs))
    return fx.GraphModule(gm, graph)
