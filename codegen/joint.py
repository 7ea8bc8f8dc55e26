"""Two launches of one kernel become one: the programs of the second follow those of the first.

    kernel[g](X, Y, N); kernel[k](X', Y', N')     ->     joint[g + k](X, Y, N, X', Y', N', g)

A program picks its arguments once, by its number, so that the body of the kernel stays as it was.  What both launches
share is one argument.  For kernels with a grid of one dimension.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache
from typing import Any

import torch

from graphopt.codegen import store
from graphopt.codegen.compiler import Unit

SECOND = "_of_second"
COUNT = "programs_of_first"


def joinable(kernel: Any) -> bool:
    """Has the kernel a grid of one dimension, and was it generated here?"""
    if not kernel.fn.__module__.startswith("graphopt_kernels.") or kernel.fn.__name__.endswith("_joint"):
        return False
    text = source_of(kernel)
    return "tl.program_id(0)" in text and "tl.program_id(1)" not in text


def source_of(kernel: Any) -> str:
    """The module a generated kernel lies in."""
    return inspect.getsource(sys.modules[kernel.fn.__module__])


@cache
def joint_kernel(kernel: Any, shared: frozenset[str]) -> Any:
    """The kernel for two launches.  shared: arguments that are the same for both."""
    name = f"{kernel.fn.__name__}_joint"
    return getattr(store.load(name, emit(source_of(kernel), kernel.fn.__name__, shared)), name)


def unit(kernel: Any, shared: frozenset[str], dtypes: dict[str, torch.dtype], warps: int | None) -> Unit:
    """The joint kernel as the compiler needs it; dtypes of the tensors of one launch."""
    name = kernel.fn.__name__
    pointers = [(n + suffix, dtype) for suffix in ("", SECOND) for n, dtype in dtypes.items()]
    return Unit(f"{name}_joint", 0, emit(source_of(kernel), name, shared), tuple(pointers), (), warps or 4)


def emit(source: str, name: str, shared: frozenset[str]) -> str:
    """The source of the joint kernel from that of the kernel `name`."""
    head = re.search(rf"^def {name}\((.*)\):\n", source, re.M)
    if head is None:
        raise ValueError(f"no kernel {name} in its module")
    arguments = head[1].split(", ")
    own = [a for a in arguments if a not in shared]
    lines = [
        f"def {name}_joint({', '.join([*arguments, *(a + SECOND for a in own), COUNT])}):",
        "    program = tl.program_id(0)",
        f"    second = program >= {COUNT}",
        *(f"    {a} = tl.where(second, {a + SECOND}, {a})" for a in own),
        f"    program = tl.where(second, program - {COUNT}, program)",
    ]
    body = source[head.end():].replace("tl.program_id(0)", "program")
    return source[:head.start()] + "\n".join(lines) + "\n" + body
