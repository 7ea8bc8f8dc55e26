"""Gradients of factors with a row per token are written where they are stacked.

    dscale, dshift = kernel(..)                            stack = kernel(.., rows of k * D, slot by slot)
    d = cat([unsqueeze(dscale, 2), unsqueeze(dshift, 2)], 2)       ->      d = stack

Factors are pieces of one tensor [B, N, k, D] or [B, N, k * D], so their gradients meet in a `cat`, which would read and
write all of them once more: as much again as the kernel moves.  Runs on the graphs Inductor lowers, where results start
as `empty`: a cat whose pieces are all results of generated kernels becomes one tensor that each kernel writes its slots
of, in the order they run in.  Values are the same bit by bit.

The one tensor is there from the first kernel on, where the pieces would have come one by one.  In the block whose
backward has the graph's peak that costs memory, so such a cat stays.
"""

from __future__ import annotations

import logging
import operator
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from graphopt import _compat_triton
from graphopt._compat import statically_true
from graphopt.codegen import joint, store
from graphopt.passes.live_bytes import LiveBytes

log = logging.getLogger(__name__)
aten = torch.ops.aten
STACK = "STACK"


@dataclass(frozen=True)
class Slot:
    """One piece of a cat: the kernel call that makes it, its argument there, and the result as the graph has it."""

    call: fx.Node
    argument: str
    result: fx.Node

    @property
    def empty(self) -> fx.Node:
        """What the result starts as."""
        call = _compat_triton.triton_call(self.call)
        if call is None:
            raise ValueError("no launch")
        return call.arguments[self.argument]


def fold(graph: fx.Graph) -> int:
    """Rewrite in place; returns how many cats disappeared."""
    done = 0
    for node in list(graph.find_nodes(op="call_function", target=aten.cat.default)):
        slots = slots_of(node)
        if slots is None:
            continue
        if not fits(graph, node, slots):
            log.info("graphopt: %s stays a copy: written in place it would raise the peak of its graph", node.name)
        elif land(graph, node, slots):
            done += 1
    if done:
        log.info("graphopt: %d stacks of gradients written by their kernels", done)
        graph.eliminate_dead_code()
    return done


def slots_of(cat: fx.Node) -> list[Slot] | None:
    """The pieces of a cat along its last dimensions, where each is a whole result of a generated kernel."""
    pieces: Any = cat.args[0]
    value, dim = cat.meta.get("val"), cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    if not isinstance(value, torch.Tensor) or not isinstance(dim, int) or len(set(pieces)) != len(pieces):
        return None
    dim %= value.dim()
    slots = []
    for piece in pieces:
        v = piece.meta.get("val")
        inner = piece
        while inner.target in (aten.unsqueeze.default, aten.view.default, aten.reshape.default):
            if len(inner.users) != 1:
                return None
            inner = inner.args[0]
        D = result_width(inner)
        if D is None or v is None or v.dtype != value.dtype or v.shape[-1] != D:
            return None
        stacked = dim == value.dim() - 2 and v.shape[-2] == 1
        if not (stacked or dim == value.dim() - 1) or not value.is_contiguous():
            return None
        slots.append(Slot(inner.args[0], inner.args[1], inner))
    widths = {s.result.meta["val"].shape[-1] for s in slots}
    return slots if len(slots) > 1 and len(widths) == 1 else None


def fits(graph: fx.Graph, cat: fx.Node, slots: list[Slot]) -> bool:
    """Is the graph's peak as low with one tensor from the first kernel on as with pieces and a copy?"""
    live = LiveBytes(graph)
    first = min((s.call for s in slots), key=live.place.__getitem__)
    return live.peak_if([s.empty for s in slots], live.size(cat), first, cat) <= live.peak()


def result_width(node: fx.Node) -> int | None:
    """D, if a node is a result [.., D] of a generated kernel that only one node reads and that starts as `empty`."""
    if node.target is not operator.getitem or len(node.users) != 1:
        return None
    maker, name = node.args
    call = _compat_triton.triton_call(maker) if isinstance(maker, fx.Node) else None
    if call is None or not call.module.startswith("graphopt_kernels.") or name not in call.written:
        return None
    empty, v = call.arguments.get(str(name)), node.meta.get("val")
    if not isinstance(empty, fx.Node) or empty.target is not aten.empty.memory_format or len(empty.users) != 1:
        return None
    if not isinstance(v, torch.Tensor) or not isinstance(v.shape[-1], int) or not v.is_contiguous():
        return None
    return v.shape[-1]


def land(graph: fx.Graph, cat: fx.Node, slots: list[Slot]) -> bool:
    """Let the kernels write one tensor; False where a kernel cannot."""
    place = {n: i for i, n in enumerate(graph.nodes)}
    calls = sorted({s.call for s in slots}, key=place.__getitem__)
    D = slots[0].result.meta["val"].shape[-1]
    kernels = []
    for node in calls:
        call = _compat_triton.triton_call(node)
        mine = tuple((s.argument, k) for k, s in enumerate(slots) if s.call is node)
        kernel = None if call is None else stacking(call.kernel, mine, len(slots), D)
        if call is None or kernel is None or _compat_triton.triton_grid(node) is None:
            return False
        kernels.append((node, kernel, {name for name, _ in mine}))
    empty = next(s for s in slots if s.call is calls[0]).empty
    shape = shape_of(cat, empty)
    if shape is None:
        return False
    with graph.inserting_before(calls[0]):
        now = graph.call_function(aten.empty.memory_format, (shape,), dict(empty.kwargs))
    now.meta["val"] = fresh(cat.meta["val"])
    for node, kernel, names in kernels:
        now = write(graph, node, kernel, names, now)
    pieces: Any = cat.args[0]
    cat.replace_all_uses_with(now)
    graph.erase_node(cat)
    for piece, slot in zip(pieces, slots):
        while piece is not slot.result:
            piece, gone = piece.args[0], piece
            graph.erase_node(gone)
        graph.erase_node(piece)
    for node in calls:
        graph.erase_node(node)
    return True


def fresh(value: torch.Tensor) -> torch.Tensor:
    """A value of the same form with memory of its own, or Inductor would find its argument read later and clone it."""
    return torch.empty_like(value)


def shape_of(cat: fx.Node, empty: fx.Node) -> list[Any] | None:
    """The sizes of a cat, symbolic ones as the nodes that a result of the first kernel has them from."""
    known: Any = empty.args[0]
    shape: list[Any] = []
    for i, size in enumerate(cat.meta["val"].shape):
        if isinstance(size, int):
            shape.append(size)
        elif i < len(known) and statically_true(empty.meta["val"].shape[i] == size):
            shape.append(known[i])
        else:
            return None
    return shape


def write(graph: fx.Graph, node: fx.Node, kernel: Any, names: set[str], stack: fx.Node) -> fx.Node:
    """Launch the kernel that writes its slots of `stack`; what the stack is then.  The old launch keeps its pieces."""
    call = _compat_triton.triton_call(node)
    if call is None:
        raise ValueError("no launch")
    arguments: dict[str, Any] = {}
    for name, value in call.arguments.items():
        if name not in names:
            arguments[name] = value
        elif STACK not in arguments:
            arguments[STACK] = stack
    written = [*dict.fromkeys(STACK if n in names else n for n in call.written)]
    grid: Any = _compat_triton.triton_grid(node)
    with graph.inserting_before(node):
        new = _compat_triton.add_triton_call(graph, kernel, _compat_triton.triton_warps(node), grid, arguments, written)
        new.meta["val"] = {n: fresh(arguments[n].meta["val"]) for n in written}
        result = graph.call_function(operator.getitem, (new, STACK))
        result.meta["val"] = fresh(stack.meta["val"])
    for user in list(node.users):
        if user.args[1] not in names:
            user.args = (new, user.args[1])
    return result


@cache
def stacking(kernel: Any, slots: tuple[tuple[str, int], ...], count: int, D: int) -> Any:
    """The kernel with these arguments as slots of one tensor [rows, count, D]; None where its text does not say how.

    slots: (argument, slot).
    """
    function = kernel.fn.__name__
    text = emit(joint.source_of(kernel), function, slots, count, D)
    if text is None:
        return None
    name = f"{function}_stacked"
    return getattr(store.load(name, text), name)


def emit(source: str, function: str, slots: tuple[tuple[str, int], ...], count: int, D: int) -> str | None:
    """The source of the kernel that stacks, from that of the kernel."""
    head = re.search(rf"^def {function}\((.*)\):\n", source, re.M)
    if head is None:
        return None
    arguments, body = head[1].split(", "), source[head.end():]
    for argument, slot in slots:
        pattern = rf"tl\.store\({argument} \+ (row(?:\[:, None\])?) \* {D} \+ "
        body, stores = re.subn(pattern, rf"tl.store({STACK} + \1 * {count * D} + {slot * D} + ", body)
        if stores == 0 or re.search(rf"\b{argument}\b", body):
            return None
    names = [*dict.fromkeys(STACK if a in dict(slots) else a for a in arguments)]
    return f"{source[:head.start()]}def {function}_stacked({', '.join(names)}):\n{body}"
