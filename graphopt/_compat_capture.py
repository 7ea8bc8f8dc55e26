"""The private or moving APIs of torch that capturing a model touches; the rest stands in _compat.py.

Each has a contract test in tests/contracts.  Known to hold on torch 2.11 and 2.13.
"""

from __future__ import annotations

import pathlib
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from graphopt._compat import size_hint


@contextmanager
def capture_settings() -> Iterator[None]:
    """Settings for capturing a model once: static sizes, no limit on recompilations, constants on the meta device.

    `torch.as_tensor(3, device="meta")` inside a traced function makes a tensor that is not fake; without the override
    Dynamo refuses it (on every other device it is fake).
    """
    from torch._dynamo import config as dynamo_config
    from torch._subclasses import fake_tensor

    make = fake_tensor.FakeTensorMode.__init__

    def lenient(self: Any, **settings: Any) -> None:
        make(self, **{**settings, "allow_non_fake_inputs": True})

    fake_tensor.FakeTensorMode.__init__ = lenient  # type: ignore[method-assign]
    try:
        with dynamo_config.patch(
            recompile_limit=1 << 16, accumulated_recompile_limit=1 << 20, automatic_dynamic_shapes=False,
            assume_static_by_default=True, suppress_errors=False,
        ):
            yield
    finally:
        fake_tensor.FakeTensorMode.__init__ = make  # type: ignore[method-assign]


class GraphBreaks:
    """What broke graphs, and what made torch skip whole frames, since this object was made."""

    def __init__(self) -> None:
        from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons

        self.breaks = len(graph_break_reasons)
        self.compiles = [id(m) for m in get_compilation_metrics()]
        self.held = get_compilation_metrics()  # keeps their ids from being used again

    def found(self) -> list[tuple[str, str | None]]:
        """(reason, file:line of the user's code), frames that were skipped last."""
        from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons

        out = [(_first_line(r.reason), _user_line(r.user_stack)) for r in graph_break_reasons[self.breaks:]]
        for m in get_compilation_metrics():
            if id(m) not in self.compiles and m.fail_reason:
                file = m.fail_user_frame_filename or m.co_filename
                place = f"{file}:{m.fail_user_frame_lineno or m.co_firstlineno}"
                out.append((f"torch runs {m.co_name} uncompiled: {_first_line(m.fail_reason)}", place))
        return out


def is_disabled(model: Any) -> bool:
    """Is a callable, or a module's forward, marked with `torch.compiler.disable`?"""
    return bool(getattr(getattr(model, "forward", model), "_torchdynamo_disable", False))


def break_of(gm: fx.GraphModule) -> tuple[str, str | None] | None:
    """(reason, file:line) of the break that ended a graph, None when the frame returned."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return _first_line(reason.reason), _user_line(reason.user_stack)


def _first_line(text: str) -> str:
    lines = [x.strip() for x in str(text).splitlines() if x.strip()]
    detail = next((x.removeprefix("Explanation:").strip() for x in lines if x.startswith("Explanation:")), "")
    return f"{lines[0]}: {detail}" if lines and detail else (lines[0] if lines else "")


def _user_line(stack: Any) -> str | None:
    frames = list(stack or ())
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


_USER_LINE = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)


def error_line(error: BaseException) -> str | None:
    """file:line in the user's code of an error torch raised while tracing it, or of an error the code raised itself."""
    _, marker, traced = str(error).partition("from user code:")
    if marker:
        found = _USER_LINE.findall(traced)
        return f"{found[-1][0]}:{found[-1][1]}" if found else None
    own = str(pathlib.Path(torch.__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((own, "<"))]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def real_inputs(gm: fx.GraphModule) -> list[Any] | None:
    """The values a Dynamo graph is being compiled for, in the order of its placeholders; None if torch let them go."""
    values = []
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            continue
        arg = node.meta.get("grapharg")
        if arg is None:
            return None
        try:
            value = arg.example
        except AssertionError:  # the tensor is gone
            return None
        if isinstance(value, torch.SymInt):
            value = size_hint(value)
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            return None
        values.append(value)
    return values


def runs_in_this_backward(node: Any) -> bool:
    """Will the backward that is running execute this autograd node?  Not where `inputs` of torch.autograd.grad or of
    `backward` leave it out."""
    return bool(torch._C._will_engine_execute_node(node))


def backward_id() -> int:
    """A number of the backward pass that is running in this thread, -1 outside of one."""
    return torch._C._current_graph_task_id()


def after_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that is running ends."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]
