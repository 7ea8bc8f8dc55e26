"""Gradients of weights are written where a streamed model wants them.

    %mm = aten.mm(%permute, %x); return (.., %mm, ..)   ->   %mm = graphopt.landing_mm(%permute, %x, position)

Runs on the backward graphs that Inductor lowers, last of our passes: a linear's weight gradient is a product that is
an output and nothing else; its position among the outputs is that of the weight among the graph's arguments.  What
has other readers, or is no product (biases, tables), stays and is copied.
"""

from __future__ import annotations

from torch import fx

from graphopt.codegen.landing import landing_mm
from graphopt.passes.freeing_order import aten


def is_backward(graph: fx.Graph) -> bool:
    """Is this the backward half of a training graph?"""
    return any(n.name.startswith("tangents_") for n in graph.find_nodes(op="placeholder"))


def land(graph: fx.Graph) -> int:
    """Put the operator in; returns how many products land."""
    if not is_backward(graph):
        return 0
    found = 0
    (results,) = graph.output_node().args
    for position, node in enumerate(results if isinstance(results, (list, tuple)) else ()):
        if not isinstance(node, fx.Node) or node.target is not aten.mm.default or list(results).count(node) > 1:
            continue
        if any(user.op != "output" for user in node.users):
            continue
        node.target, node.args = landing_mm, (*node.args, position)
        found += 1
    return found
