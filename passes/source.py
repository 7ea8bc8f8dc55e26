"""From a node to the words a user knows: the module that owns it and the line of their code."""

from __future__ import annotations

import os
import re

import torch
from torch.fx import Node

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>\S+)')
_STATE = re.compile(r"^l_self_(?:dict_)?(?P<path>.*?)_?(?:parameters|buffers)_(?P<name>\w+?)_?\d*$")
_MODULES = re.compile(r"(?:\.__dict__)?(?:\.|\[['\"])_modules(?:['\"]\])?\[?")

# a module whose forward was replaced by a wrapper is reached through the wrapper from its second call on
_WRAPPED = re.compile(r"\.forward\.__closure__\[\d+\]\.cell_contents\.__self__|@\d+")


def fqn(node: Node) -> str:
    """The fully qualified name of the module a node belongs to, "" for the root.

    Dynamo writes `L['self'].__dict__['_modules']['blocks'].0.norm1` or `L['self']._modules['blocks']._modules['0']`;
    both become `blocks.0.norm1`-like names.
    """
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    name = next(reversed(stack.values()))[0]
    return tidy(name)


def tidy(name: str) -> str:
    """`L['self'].__dict__['_modules']['blocks'].0.norm1` -> `blocks.0.norm1`."""
    name = _MODULES.sub(".", _WRAPPED.sub("", name))
    root = re.match(r"^[LG]\[['\"][^'\"]*['\"]\]", name)
    if root:
        name = name[root.end():]
    name = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]?", r".\1", name).replace("'", "").replace('"', "").replace("]", "")
    name = re.sub(r"^self(\.|$)", "", name.strip("."))
    return re.sub(r"\.{2,}", ".", name).strip(".")


def where(node: Node) -> str | None:
    """`file:line` of the innermost frame outside torch, or None when the capture kept no trace."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return None
    for line in reversed(trace.splitlines()):
        found = _FRAME.match(line)
        if found and not found["file"].startswith(_TORCH):
            return f"{found['file']}:{found['line']}"
    return None


def named(node: Node) -> str:
    """What a user calls a node: the qualified name of a parameter or buffer, else the node's own name.

    Dynamo's placeholders of parameters are called `l_self_modules_blocks_modules_0_modules_norm1_parameters_weight_`.
    """
    found = _STATE.match(node.name) if node.op == "placeholder" else None
    if not found:
        return node.name
    path = [part for part in re.split(r"(?:^|_)modules_", found["path"]) if part]
    return ".".join([*path, found["name"]])
