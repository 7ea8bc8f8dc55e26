"""Parts of a graph that was cut by layer (passes/partition.py): what streaming and regions share.

Values that cross a segment are numbered: the graph's arguments first, then its constants, then what segments give out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from graphopt import _compat
from graphopt.passes import partition
from graphopt.passes.partition import Segment, example
from graphopt.passes.record import PassRecord


@dataclass
class Step:
    """One segment: what runs, where its inputs come from and its outputs go, and what is dead afterwards."""

    call: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...] = ()


def numbers(gm: fx.GraphModule, parts: list[Segment]) -> dict[Node, int]:
    """A number for every value that crosses a segment: arguments first, then constants, then outputs of segments."""
    crossing = list(gm.graph.find_nodes(op="placeholder"))
    crossing += [n for n in gm.graph.find_nodes(op="get_attr")
                 if not isinstance(partition.attribute(gm, str(n.target)), torch.nn.Module)]
    crossing += [n for s in parts for n in s.outputs]
    return {n: i for i, n in enumerate(crossing)}


def results(gm: fx.GraphModule, number: dict[Node, int]) -> tuple[Any, ...]:
    """What a graph returns: a number stands for a value, (x,) for a constant x."""
    output = next(n for n in gm.graph.nodes if n.op == "output")
    return tuple(number[r] if isinstance(r, Node) else (r,) for r in output.args[0])


def mark_dead(steps: list[Step], returned: tuple[Any, ...]) -> None:
    """Note after which step a value is not read again, so that it is freed there."""
    alive = {r for r in returned if isinstance(r, int)}
    for step in reversed(steps):
        last = {i for i in (*step.inputs, *step.outputs) if i not in alive}
        step.dead = tuple(sorted(last))
        alive |= last


def carries(value: object) -> bool:
    """Is this a tensor that needs a gradient?"""
    return isinstance(value, torch.Tensor) and value.requires_grad


def is_trivial(node: Node) -> bool:
    """Does a node compute no tensor (sizes, and what is made of them)?"""
    value = example(node)
    if isinstance(value, torch.Tensor):
        return False
    return not isinstance(value, (tuple, list)) and value is not None


def fresh(value: object, grad: bool = True) -> object:
    """A new fake tensor like a traced one, a leaf with the same requires_grad; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return fake(value, value.shape, value.stride(), value.dtype, grad and value.requires_grad)


def fake(like: object, shape: Any, stride: Any, dtype: torch.dtype, grad: bool) -> torch.Tensor:
    """A new fake tensor in the fake mode and on the device of a traced one."""
    assert isinstance(like, torch.Tensor)
    with _compat.fake_mode_of([like]):
        return torch.empty_strided(shape, stride, dtype=dtype, device=like.device, requires_grad=grad)


def renamed(record: PassRecord, old: str, new: str) -> PassRecord:
    """The record of a class's first member, for another member of it."""

    def name(fqn: str) -> str:
        for a in (old,):
            at = fqn.find(a)
            if at >= 0 and (at == 0 or fqn[at - 1] == ".") and fqn[at + len(a):at + len(a) + 1] in ("", "."):
                return fqn[:at] + new + fqn[at + len(a):]
        return fqn

    sites = {s: replace(s, fqn=name(s.fqn)) for s in record.sites}
    return replace(
        record, milliseconds=0.0, sites=list(sites.values()),
        rejects=[replace(r, fqn=name(r.fqn)) for r in record.rejects],
        kernels=[replace(k, sites=tuple(sites.get(s, s) for s in k.sites)) for k in record.kernels],
    )
