"""Frames that torch never handed to the backend: skipped, broken into pieces, beyond a limit, or never traced.

torch keeps a record of every frame it tries, for the whole process.  Frames of one compiled callable are told by their
code: what the backend was called for, the callable itself, and the forwards of its submodules.
"""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

import torch
from torch import nn

from graphopt import _compat

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


@dataclass(frozen=True)
class Missed:
    """Code that runs without graphopt.

    kind: "skipped" (torch ran the frame eagerly; what it calls is still tried), "graph break" (the frame was cut in
    pieces; no site spans two of them), "limit" (torch stopped compiling it), "empty" (nothing to compile in it),
    "not traced" (torch never looked at it).
    frame: function (file:line).  where: the line to blame.  ours: is it code of the callable that was asked about?
    """

    kind: Literal["skipped", "graph break", "limit", "empty", "not traced"]
    frame: str
    where: str | None
    reason: str
    ours: bool

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where and self.where not in self.frame else ""
        return f"{self.kind}: {self.frame}{place}: {self.reason}"


def missed(compiled: Any, codes: Iterable[CodeType] = ()) -> list[Missed]:
    """What torch kept from the backend, the callable's own code first.

    compiled: what `torch.compile` returned, or a module compiled in place.
    codes: code objects the backend was called for.
    """
    own = {*codes, *_codes(compiled)}
    lines = {(c.co_filename, c.co_firstlineno) for c in own}
    # a piece after a graph break is named after its function but starts at another line
    functions = {(c.co_filename, c.co_name) for c in own}

    def is_ours(file: str, line: int, name: str) -> bool:
        whole = name.removeprefix("torch_dynamo_resume_in_").rsplit("_at_", 1)[0]
        return (file, line) in lines or (file, whole) in functions

    found: list[Missed] = []
    for a in _compat.frame_attempts():
        if a.failed is not None:
            found.append(Missed("skipped", f"{a.name} ({a.file}:{a.line})", a.place, _short(a.failed),
                                is_ours(a.file, a.line, a.name)))
    for reason, stack in _compat.graph_breaks():
        user = [f for f in stack if not f[0].startswith(_TORCH)] or stack
        file, line, name = user[-1] if user else ("?", 0, "?")
        ours = any(is_ours(f, at, n) for f, at, n in stack)
        found.append(Missed("graph break", f"{name} ({file}:{line})", f"{file}:{line}", _short(reason), ours))
    for code in sorted(own, key=lambda c: (c.co_filename, c.co_firstlineno)):
        limit = _compat.recompile_limit(code)
        if limit is not None:
            reason = (f"compiled {limit} times, torch's limit: further inputs run eagerly (dynamic=True, or raise "
                      "torch._dynamo.config.recompile_limit)")
            found.append(Missed("limit", _frame(code), None, reason, True))
    unique = list(dict.fromkeys(found))
    return sorted(unique, key=lambda m: not m.ours)


def untouched(compiled: Any) -> Missed | None:
    """Why torch never called the backend for a callable whose frames did not fail, or None when it is not known."""
    code = _compat.code_of(compiled)
    if code is None:
        return None
    off = _compat.compiling_is_off()
    if off is not None:
        return Missed("not traced", _frame(code), None, off, True)
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        reason = "torch does not trace generators and coroutines: compile what they call"
        return Missed("not traced", _frame(code), None, reason, True)
    tried = [a for a in _compat.frame_attempts() if (a.file, a.line) == (code.co_filename, code.co_firstlineno)]
    if any(a.failed is None and not a.ops for a in tried):
        return Missed("empty", _frame(code), None, "torch traced it and found no tensor operation in it", True)
    if not tried:
        return Missed("not traced", _frame(code), None, "it has not run yet, or torch skips its file", True)
    return None


def _codes(compiled: Any) -> set[CodeType]:
    """The callable's code and the forwards of the modules in it."""
    inner = getattr(compiled, "_orig_mod", compiled)
    inner = getattr(inner, "_torchdynamo_orig_callable", inner)
    owner = getattr(inner, "__self__", inner)
    modules = list(owner.modules()) if isinstance(owner, nn.Module) else []
    found = {getattr(type(m).forward, "__code__", None) for m in modules} | {_compat.code_of(compiled)}
    return {c for c in found if c is not None and not c.co_filename.startswith(_TORCH)}


def _frame(code: CodeType) -> str:
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


def _short(reason: str) -> str:
    """Torch's message up to its debugging context, on one line."""
    text = reason.split("Developer debug context")[0]
    lines = [line.strip().removeprefix("Explanation: ").removeprefix("Hint: ") for line in text.splitlines()]
    return textwrap.shorten(" ".join(line for line in lines if line), 400, placeholder=" ..")
