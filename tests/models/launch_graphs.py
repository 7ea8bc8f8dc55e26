"""Graphs of kernel launches built by hand, as Inductor's passes meet them, over tensors that run."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from graphopt import _compat_triton


class LaunchGraph:
    """An fx graph whose nodes know their values.  Subclasses add the kernels of a test."""

    def __init__(self, device: str) -> None:
        self.device, self.graph, self.root = device, fx.Graph(), torch.nn.Module()

    def tensor(self, value: Tensor) -> fx.Node:
        name = f"t{len(self.graph.nodes)}"
        setattr(self.root, name, value)
        node = self.graph.get_attr(name)
        node.meta["val"] = value
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return node

    def launch(self, kernel: Any, warps: int, grid: int, arguments: dict[str, Any], written: list[str]) -> dict[str, fx.Node]:
        """What a launch leaves, by argument."""
        node = _compat_triton.add_triton_call(self.graph, kernel, warps, (grid, 1, 1), arguments, written)
        node.meta["val"] = {n: arguments[n].meta["val"] for n in written}
        found = {}
        for n in written:
            found[n] = self.graph.call_function(operator.getitem, (node, n))
            found[n].meta["val"] = arguments[n].meta["val"]
        return found


def launches(gm: fx.GraphModule) -> list[str]:
    """Names of the kernels launched, in order."""
    return [c.name for n in gm.graph.nodes if (c := _compat_triton.triton_call(n)) is not None]
