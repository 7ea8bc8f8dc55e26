"""Rewriting the one graph of a function, for tests of the passes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from graphopt.codegen.operators import operator
from graphopt.passes import catalogue, rewrite

D = 8


def capture(f, *inputs, dynamic=None):
    """The one Dynamo graph of f, in the grad mode of the caller."""
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(f, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    (gm,) = graphs
    return gm


def operands():
    return torch.randn(2, 5, D), torch.randn(2, 1, D), torch.randn(2, 1, D)


def rewritten(f, *inputs, dynamic=None):
    """(the rewritten graph, what was found, what the rewritten graph returns)."""
    seen = []

    def backend(gm, example_inputs):
        found = rewrite.find(gm, catalogue.RULES)
        rewrite.apply(gm, found.matches, lambda m: operator(m.replacement.fusion, "reference"))
        seen.append((gm, found))
        return gm.forward

    torch._dynamo.reset()
    out = torch.compile(f, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    gm, found = seen[-1]
    return gm, found, out


def names(found):
    return [m.rule.name for m in found.matches]


def adaln(x, s, b):
    return F.layer_norm(x, (D,)) * (1 + s) + b


def refused(f, *inputs):
    """The reasons given; asserts that the graph was left alone."""
    gm, found, _out = rewritten(f, *inputs)
    assert found.matches == []
    assert not any("graphopt" in str(n.target) for n in gm.graph.nodes)
    return " / ".join(r.reason for r in found.rejects)
