"""Image and text streams of a joint block in one launch, where both are ready.

    y = kernel(image, ..)                                  y, y' = joint kernel(image, .., text, ..)
    ..                                              ->     ..
    y' = kernel(text, ..)

A text stream has a few hundred rows: its kernel is over before it has filled the GPU, and its second stage as well.
Two launches of one generated kernel that do not depend on each other, one of them small (SMALL), become one
(codegen/joint.py), in the forward and in the backward.

By default forwards alone, of launches up to MOST: measured on an H200 (benchmarks/joint_launch.py) they gain 2 to 4 us
each, while a backward, whose programs stay on their multiprocessors, loses 5 to 30.

Runs on the graphs Inductor lowers.  Either what the second launch needs moves before the first, or what follows from
the first moves behind the second, whichever holds less memory longer, and never more than LONGER.  Programs, and the
order in which each adds, stay as they are, so the results do, bit by bit.
"""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass

import torch
from torch import fx

from graphopt import _compat_triton
from graphopt.codegen import compiler, joint, kernels
from graphopt.errors import CodegenError
from graphopt.passes.freeing_order import base, last_readers, mutates, nbytes

log = logging.getLogger(__name__)

SMALL = 24 << 20  # bytes of the largest tensor of the smaller launch
MOST = 96 << 20  # bytes of the largest tensor of the larger launch, by default
LONGER = 64 << 20  # bytes that may be held longer than before
AHEAD = 12  # launches looked at behind a first one


@dataclass(frozen=True)
class Pair:
    """Two launches, and the nodes between them that move: before the first, or behind the second."""

    first: fx.Node
    second: fx.Node
    moved: list[fx.Node]
    hoist: bool


def fold(graph: fx.Graph, small: int = SMALL, everything: bool = False) -> int:
    """Join in place; returns how many launches disappeared.  everything: backwards and large forwards, too."""
    joined = 0
    tried: set[fx.Node] = set()
    while (pair := find(graph, small, everything, tried)) is not None:
        if compiles(pair):
            rewrite(graph, pair)
            joined += 1
        else:
            tried.add(pair.first)
    if joined:
        log.info("graphopt: %d launches joined with those of another stream", joined)
        graph.eliminate_dead_code()
    return joined


def find(graph: fx.Graph, small: int, everything: bool, tried: set[fx.Node]) -> Pair | None:
    """The next two launches that can be one.  tried: firsts that found no second, kept from call to call."""
    nodes = list(graph.nodes)
    place = {n: i for i, n in enumerate(nodes)}
    calls = [n for n in nodes if launched(n)]
    last = last_readers(graph)
    for i, first in enumerate(calls):
        if first in tried:
            continue
        for second in calls[i + 1:i + 1 + AHEAD]:
            if (everything or gains(first, second)) and fits(first, second, small):
                between = nodes[place[first] + 1:place[second]]
                pair = plan(first, second, between, last)
                if pair is not None:
                    return pair
        tried.add(first)
    return None


def launched(node: fx.Node) -> bool:
    """Is a node a launch of a generated kernel with a static grid of one dimension?"""
    call = _compat_triton.triton_call(node)
    if call is None or not joint.joinable(call.kernel):
        return False
    grid = _compat_triton.triton_grid(node)
    return grid is not None and all(isinstance(g, int) for g in grid) and set(grid[1:]) <= {1}


def gains(first: fx.Node, second: fx.Node) -> bool:
    """Are two launches of the kind that is faster as one?"""
    calls = [_compat_triton.triton_call(n) for n in (first, second)]
    return all(c is not None and c.name.endswith("_forward") and "norm_rotate" not in c.name
               and largest(c.arguments) <= MOST for c in calls)


def fits(first: fx.Node, second: fx.Node, small: int) -> bool:
    """Do two launches run the same kernel in the same configuration, with equal dtypes, one of them on little data?"""
    a, b = _compat_triton.triton_call(first), _compat_triton.triton_call(second)
    if a is None or b is None or a.kernel is not b.kernel or a.written != b.written:
        return False
    if _compat_triton.triton_warps(first) != _compat_triton.triton_warps(second):
        return False
    if a.arguments.keys() != b.arguments.keys():
        return False
    for name, value in a.arguments.items():
        x, y = (n.meta.get("val") if isinstance(n, fx.Node) else n for n in (value, b.arguments[name]))
        if isinstance(x, torch.Tensor) != isinstance(y, torch.Tensor):
            return False
        if isinstance(x, torch.Tensor) and (x.dtype, x.device) != (y.dtype, y.device):
            return False
        if not isinstance(x, torch.Tensor) and not (isinstance(x, int) and isinstance(y, int)):
            return False
    return min(largest(a.arguments), largest(b.arguments)) <= small


def largest(arguments: dict) -> int:
    """Bytes of the largest tensor of a launch."""
    return max((nbytes(n) for n in arguments.values() if isinstance(n, fx.Node)), default=0)


def plan(first: fx.Node, second: fx.Node, between: list[fx.Node], last: dict[fx.Node, fx.Node]) -> Pair | None:
    """How two launches come to one place; None where they cannot, or would hold too much."""
    if any(mutates(n) and _compat_triton.triton_call(n) is None for n in between):
        return None
    after = {first}
    for n in between:
        if any(m in after for m in n.all_input_nodes):
            after.add(n)
    if any(m in after for m in second.all_input_nodes):
        return None
    before: set[fx.Node] = set()
    todo = list(second.all_input_nodes)
    inside = set(between)
    while todo:
        n = todo.pop()
        if n in inside and n not in before:
            before.add(n)
            todo += n.all_input_nodes
    hoisted = sum(nbytes(n) for n in before if base(n) is n)
    kept = {base(m) for n in after for m in n.all_input_nodes} - after
    sunk = sum(nbytes(m) for m in kept if last.get(m) in after and not m.name.startswith("primals"))
    hoist = hoisted <= sunk
    if min(hoisted, sunk) > LONGER:
        return None
    moved = [n for n in between if n in (before if hoist else after)]
    return Pair(first, second, moved, hoist)


def compiles(pair: Pair) -> bool:
    """Does the joint kernel compile?  (Asked where there is a GPU; a warning says so if not.)"""
    a, b = _compat_triton.triton_call(pair.first), _compat_triton.triton_call(pair.second)
    if a is None or b is None:
        return False
    tensors = {n: v.meta["val"] for n, v in a.arguments.items() if isinstance(v, fx.Node)}
    device = next(iter(tensors.values())).device
    if device.type != "cuda":
        return True
    shared = _compat_triton.equal_arguments(pair.first, pair.second)
    warps = _compat_triton.triton_warps(pair.first)
    unit = joint.unit(a.kernel, shared, {n: t.dtype for n, t in tensors.items()}, warps)
    try:
        compiler.compiled(unit, kernels.target_of(device))
    except CodegenError as error:
        log.warning("graphopt: two launches stay apart: %s", error.what)
        return False
    return True


def rewrite(graph: fx.Graph, pair: Pair) -> None:
    """Move what must move, and launch once."""
    first, second = pair.first, pair.second
    if pair.hoist:
        for node in pair.moved:
            first.prepend(node)
    anchor = first if pair.hoist else second
    call = _compat_triton.triton_call(first)
    if call is None:
        raise ValueError("a launch without a kernel")
    with graph.inserting_before(anchor):
        shared = _compat_triton.equal_arguments(first, second)
        kernel = joint.joint_kernel(call.kernel, shared)
        both = _compat_triton.join_calls(graph, first, second, kernel, shared, joint.SECOND, joint.COUNT)
        both.meta["val"] = {**first.meta["val"], **{k + joint.SECOND: v for k, v in second.meta["val"].items()}}
    tail = both
    for old, suffix in ((first, ""), (second, joint.SECOND)):
        for user in list(old.users):
            if user.target is not operator.getitem:
                raise ValueError(f"{old.name}: a launch is read as a whole")
            with graph.inserting_after(tail):
                new = graph.call_function(operator.getitem, (both, f"{user.args[1]}{suffix}"))
            new.meta = dict(user.meta)
            user.replace_all_uses_with(new)
            tail = new
    if not pair.hoist:
        for node in pair.moved:
            if node.users or node.target is not operator.getitem or node.args[0] is not first:
                tail.append(node)
                tail = node
    for old in (first, second):
        for user in list(old.users):
            graph.erase_node(user)
        graph.erase_node(old)
