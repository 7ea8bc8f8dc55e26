"""Random programs of norms, modulates, gates and residuals, as FX graphs with the metadata Dynamo would give them.

A program is built step by step from choices that hypothesis draws: norms in every spelling, modulates and gates in any
operand order, casts, slices, views, broadcast factors, in-place writes, shared and escaping values, no_grad regions.
Each step is run at once, so that later steps know dtypes and shapes; a step that does not fit leaves no trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

FLOATS = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
Draw = Callable[[int], int]  # a number below the argument


@dataclass
class Program:
    """A graph under construction: `full` holds activations [B, S, D], `factors` what broadcasts to them."""

    draw: Draw
    graph: fx.Graph = field(default_factory=fx.Graph)
    now: dict[Node, Any] = field(default_factory=dict)
    inputs: list[Tensor] = field(default_factory=list)
    full: list[Node] = field(default_factory=list)
    normed: list[Node] = field(default_factory=list)
    branches: list[Node] = field(default_factory=list)
    factors: list[Node] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def pick(self, options: Any) -> Any:
        """One of several."""
        options = list(options)
        return options[self.draw(len(options))]

    def recent(self, values: list[Node]) -> Node:
        """One of the values, the newest most often, so that chains grow."""
        back = min(self.draw(4), self.draw(4), len(values) - 1)
        return values[-1 - back]

    def maybe(self, one_in: int = 2) -> bool:
        """True once in so many."""
        return self.draw(one_in) == one_in - 1

    def input(self, value: Tensor) -> Node:
        """A new placeholder."""
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        self.inputs.append(value)
        self.now[node] = value.clone()
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A node, run at once; strings are methods."""
        real = fx.node.map_arg((args, kwargs), lambda n: self.now[n])
        with torch.no_grad():
            value = getattr(real[0][0], target)(*real[0][1:], **real[1]) if isinstance(target, str) else target(
                *real[0], **real[1])
        make = self.graph.call_method if isinstance(target, str) else self.graph.call_function
        node = make(target, args, kwargs)
        self.now[node] = value
        return node

    # -- the steps ------------------------------------------------------------------------------------

    def cast(self, x: Node) -> Node:
        """Often nothing; else one of the ways to change a dtype."""
        how = self.draw(8)
        if how == 0:
            return self.call("float", x)
        if how == 1:
            return self.call("to", x, self.pick(FLOATS[:2]))
        if how == 2:
            return self.call("type_as", x, self.recent(self.full))
        return x

    def norm(self, of: Node | None = None) -> Node:
        """A norm of an activation, in one of its spellings."""
        x = self.recent(self.full) if of is None else of
        if of is None and self.now[x].shape[1] > 1 and self.maybe(6):
            x = self.call(operator.getitem, x, (slice(None), slice(0, self.now[x].shape[1] - 1)))
        x = self.cast(x)
        D = self.now[x].shape[-1]
        eps = self.pick((1e-6, 1e-5))
        kind = self.pick(("layer", "layer", "layer", "affine", "rms", "weighted rms", "written", "written weighted"))
        if kind == "layer":
            n = self.call(F.layer_norm, x, (D,), eps=eps) if self.maybe() else self.call(F.layer_norm, x, [D], None, None, eps)
        elif kind == "affine":
            n = self.call(F.layer_norm, x, (D,), self.weight(x), self.weight(x), eps)
        elif kind == "rms":
            n = self.call(F.rms_norm, x, (D,), eps=eps)
        elif kind == "weighted rms":
            n = self.call(F.rms_norm, x, (D,), self.weight(x), eps)
        else:
            wide = self.call("float", x)
            v = self.call("mean", self.call("pow", wide, 2), -1, keepdim=True)
            n = self.call(operator.mul, x, self.call(torch.rsqrt, self.call(operator.add, v, eps)))
            if kind == "written weighted":
                n = self.call(operator.mul, n, self.weight(x))
        n = self.cast(n)
        self.normed.append(n)
        if self.maybe(5):
            self.full.append(n)
        return n

    def weight(self, x: Node) -> Node:
        """A weight of one value per channel, in the dtype of x."""
        v = self.now[x]
        return self.input(1 + 0.2 * torch.randn(v.shape[-1]).to(v.dtype))

    def factor(self) -> Node:
        """A scale, shift or gate."""
        f = self.recent(self.factors) if self.maybe(3) else self.pick(self.factors)
        if self.maybe(10):
            f = self.call("expand", f, *self.now[self.full[0]].shape)
        return self.cast(f) if self.maybe(4) else f

    def product(self, a: Node, b: Node) -> Node:
        """a * b in some order and spelling."""
        if self.maybe():
            a, b = b, a
        return self.call(self.pick((operator.mul, torch.mul, "mul")), a, b)

    def sum(self, a: Node, b: Node) -> Node:
        """a + b in some order and spelling."""
        if self.maybe():
            a, b = b, a
        return self.call(self.pick((operator.add, torch.add, "add")), a, b)

    def modulate(self, of: Node | None = None) -> Node:
        """norm * (1 + scale) + shift, or a look-alike."""
        if of is not None:
            n = of
        else:
            n = self.recent(self.normed) if self.normed and self.maybe() else self.norm()
        scale = self.factor()
        gain = scale
        how = self.draw(6)
        if how < 4:
            gain = self.call(operator.add, 1, scale) if self.maybe() else self.call(operator.add, scale, 1.0)
        elif how == 4:
            self.call(torch._C._set_grad_enabled, False)
            gain = self.call(operator.add, scale, 1)
            self.call(torch._C._set_grad_enabled, True)
        if self.maybe(10):
            return self.keep(self.call(torch.addcmul, self.factor(), n, gain))
        y = self.cast(self.product(n, gain))
        if not self.maybe(4):
            y = self.sum(y, self.factor())
        elif self.maybe(4):
            y = self.sum(y, self.recent(self.full))
        return self.keep(self.cast(y))

    def branch(self) -> Node:
        """What stands between a modulate and its gate."""
        x = self.recent(self.full)
        v = self.now[x]
        how = self.draw(4)
        if how == 0:
            y = self.call(F.gelu, x)
        elif how == 1:
            y = self.call("tanh", x)
        else:
            y = self.call(F.linear, x, self.input((torch.randn(v.shape[-1], v.shape[-1]) / v.shape[-1] ** 0.5).to(v.dtype)))
        self.branches.append(y)
        return y

    def gate(self) -> Node:
        """residual + gate * branch, or a look-alike."""
        b = self.recent(self.branches) if self.branches and self.maybe() else self.branch()
        g, r = self.factor(), self.pick(self.full)
        how = self.draw(6)
        if how == 0:
            g = self.call(torch.tanh, g)
        elif how == 1:
            b = self.call(F.rms_norm, b, (self.now[b].shape[-1],), None, 1e-6)
        elif how == 2:
            return self.keep(self.sum(r, b))
        return self.keep(self.cast(self.sum(r, self.cast(self.product(self.cast(b), g)))))

    def block(self) -> Node:
        """A gate or a residual, the norm of the sum, and up to two modulates of that norm."""
        h = self.gate()
        n = self.norm(of=h)
        for _ in range(self.pick((1, 1, 1, 2, 0))):
            self.modulate(of=n)
        return n

    def write(self) -> Node:
        """An in-place write to some value, or to a part of it."""
        target = self.pick([*self.full, *self.factors, *self.normed, *self.branches])
        how = self.draw(5)
        if how == 0:
            return self.call("add_", target, self.factor())
        if how == 1:
            return self.call("mul_", target, 0.5)
        if how == 2:
            return self.call(operator.iadd, target, 0.25)
        piece = (Ellipsis, slice(0, 1 + self.draw(2)))
        if how == 3:
            return self.call(operator.setitem, target, piece, 0.125)
        return self.call("add_", self.call(operator.getitem, target, piece), 1.0)

    def halves(self) -> Node:
        """Two slices of an activation, modulated apart and joined."""
        x = self.recent(self.full)
        S, D = self.now[x].shape[1], self.now[x].shape[-1]
        if S < 2:
            return self.modulate()
        n = self.call(F.layer_norm, x, (D,), eps=1e-6)
        parts = [self.call(operator.getitem, n, (slice(None), s)) for s in (slice(None, 1), slice(1, None))]
        short = [f for f in self.factors if self.now[f].dim() < 2 or self.now[f].shape[-2] == 1]
        parts = [self.sum(self.product(p, self.call(operator.add, 1, self.pick(short))), self.pick(short)) for p in parts]
        return self.keep(self.call(torch.cat, parts, 1))

    def keep(self, x: Node) -> Node:
        """Make a value available to later steps, if it is an activation."""
        if self.now[x].shape == self.now[self.full[0]].shape:
            self.full.append(x)
        return x


STEPS = ("block", "modulate", "gate", "block", "modulate", "gate", "norm", "branch", "write", "halves")


def build(draw: Draw) -> tuple[fx.GraphModule, list[Tensor], list[str]]:
    """(graph, inputs, the steps in words)."""
    p = Program(draw)
    B, S, D = p.pick((1, 2, 3)), p.pick((1, 3, 6)), p.pick((4, 8, 17))
    torch.manual_seed(draw(1 << 16))
    dtype, other = p.pick((*FLOATS[:2] * 2, *FLOATS)), p.pick((*FLOATS[:2] * 2, *FLOATS))
    layout = p.pick(("rows", "rows", "rows", "channels", "gaps"))
    if layout == "channels":
        x = p.call("transpose", p.input(torch.randn(B, D, S).to(dtype)), 1, 2)
    elif layout == "gaps":
        x = p.call(operator.getitem, p.input(torch.randn(B, S, 2 * D).to(dtype)), (Ellipsis, slice(None, D)))
    else:
        x = p.input(torch.randn(B, S, D).to(dtype))
    p.full.append(x)
    wide = p.input(0.3 * torch.randn(B, 1 if p.maybe() else S, 6 * D).to(other))
    chunks = p.call("chunk", wide, 6, -1)
    p.factors += [p.call(operator.getitem, chunks, i) for i in range(4)]
    p.factors.append(p.input(0.3 * torch.randn(D).to(dtype)))
    flat = p.input(0.3 * torch.randn(B, D).to(other))
    p.factors.append(p.call(operator.getitem, flat, (slice(None), None)) if p.maybe() else p.call("unsqueeze", flat, 1))
    p.branch()
    for _ in range(2 + draw(5)):
        step = p.pick(STEPS)
        mark = len(p.graph.nodes)
        kept = [list(v) for v in (p.full, p.normed, p.branches)]
        try:
            getattr(p, step)()
            p.steps.append(step)
        except (RuntimeError, ValueError, IndexError):  # shapes or dtypes that do not fit
            for node in reversed(list(p.graph.nodes)[mark:]):
                if node.op != "placeholder":
                    p.graph.erase_node(node)
            p.full, p.normed, p.branches = kept
    known = [n for n in p.now if n in set(p.graph.nodes) and isinstance(p.now[n], Tensor)]
    results = [p.full[-1], *(n for n in known if n.op != "placeholder" and p.draw(12) == 0)]
    p.graph.output(tuple(dict.fromkeys(results)))
    inputs = [n for n in p.graph.nodes if n.op == "placeholder"]
    first = next(n for n in p.graph.nodes if n.op != "placeholder")
    for n in inputs:  # steps add inputs as they go
        first.prepend(n)
    return fx.GraphModule(torch.nn.Module(), p.graph), p.inputs, p.steps


def annotate(gm: fx.GraphModule, inputs: list[Tensor]) -> None:
    """Give every node the fake value Dynamo would have seen."""

    class Interpreter(fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            n.meta["example_value"] = value
            return value

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        Interpreter(gm).run(*(mode.from_tensor(x).requires_grad_().clone() for x in inputs))
