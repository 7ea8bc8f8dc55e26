"""Classes of equal segments: each is compiled once.

Two segments are of one class when their graphs are equal node by node and everything a compiler may specialise on is
equal too: shapes (symbolic ones by their expression), strides, dtypes, devices, `requires_grad` of every input, where
each weight lies in its layer, and the settings of the process (autocast, grad mode, TF32 and deterministic flags).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import fx
from torch.fx import Node

from graphopt.passes.partition import example


def settings() -> str:
    """Flags of the process that change what a compiler makes of a graph."""
    autocast = [(d, torch.is_autocast_enabled(d), str(torch.get_autocast_dtype(d))) for d in ("cpu", "cuda")]
    return repr((
        autocast, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(), str(torch.get_default_dtype()),
    ))


def structural_hash(gm: fx.GraphModule, role: Callable[[int], object]) -> str:
    """A digest of a segment's graph; equal for equal segments, whatever their nodes are called.

    role: what the n-th placeholder is beside its example value (for a weight: its place in the layer).
    """
    digest = hashlib.sha256(settings().encode())
    for line in _lines(gm, role):
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _lines(gm: fx.GraphModule, role: Callable[[int], object]) -> list[str]:
    number: dict[Node, int] = {}
    lines: list[str] = []
    for i, node in enumerate(gm.graph.nodes):
        number[node] = i
        if node.op == "placeholder":
            lines.append(f"{i} in {role(len(lines))!r} {describe(example(node))}")
            continue
        if node.op == "get_attr":
            inner = getattr(gm, str(node.target))
            lines.append(f"{i} body " + "|".join(_lines(inner, lambda n: n)))
            continue
        args = fx.node.map_arg((node.args, dict(sorted(node.kwargs.items()))), lambda n: _Ref(number[n]))
        lines.append(f"{i} {node.op} {_target(node)} {args!r} {describe(example(node))}")
    return lines


class _Ref:
    """A node by its place, so that names do not count."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __repr__(self) -> str:
        return f"%{self.n}"


def _target(node: Node) -> str:
    t = node.target
    if isinstance(t, str):
        return t
    name = getattr(t, "__qualname__", None) or getattr(t, "__name__", None) or str(t)
    return f"{getattr(t, '__module__', '')}.{name}"


def describe(value: object) -> str:
    """Everything of an example value that a compiler may specialise on."""
    if isinstance(value, torch.Tensor):
        size, stride = [str(s) for s in value.shape], [str(s) for s in value.stride()]
        return f"{value.dtype} {value.device} {size} {stride} grad={value.requires_grad}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(describe(v) for v in value) + ")"
    return f"{type(value).__name__} {value}"


def has_fixed_shapes(gm: fx.GraphModule) -> bool:
    """Is no size in this graph symbolic?  Then compiling it adds nothing to the guards of its frame."""

    def fixed(value: object) -> bool:
        if isinstance(value, torch.Tensor):
            return all(isinstance(n, int) for n in (*value.shape, *value.stride()))
        if isinstance(value, (tuple, list)):
            return all(map(fixed, value))
        return not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))

    return all(fixed(example(n)) for n in gm.graph.nodes)


RANDOM = ("dropout", "rand", "bernoulli", "normal_", "multinomial", "uniform_", "poisson", "rrelu", "exponential_")


def is_random(gm: fx.GraphModule) -> bool:
    """May this graph draw random numbers?  Dropout that is off for certain does not count."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op not in ("call_function", "call_method"):
                continue
            name = _target(node).rsplit(".", 1)[-1]
            if name == "scaled_dot_product_attention":
                p = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
                if p != 0.0:
                    return True
            elif "dropout" in name:
                p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
                training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
                if p != 0.0 and training is not False:
                    return True
            elif any(word in name for word in RANDOM):
                return True
    return False
