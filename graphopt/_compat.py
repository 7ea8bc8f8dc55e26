"""Every private or moving API of torch that graphopt touches, each with a contract test in tests/contracts.

Known to hold on torch 2.11 and 2.13.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.autograd import forward_ad

# what an FX node calls: one overload of an operator, and operators that take whole graphs
OpOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator


def statically_true(condition: Any) -> bool:
    """Is a (symbolic) condition true for certain, without adding a guard?"""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


UNBACKED = 8192  # what Inductor assumes too (torch._inductor.config.unbacked_symint_fallback)


def size_hint(size: Any) -> int:
    """The number behind a size: itself, or the value a symbolic size was traced with.  Adds no guard.

    A size that data decides (tokens kept by a mask) has no such value: UNBACKED stands for it.
    """
    if isinstance(size, int):
        return size
    return UNBACKED if size.node.hint is None else int(size.node.hint)


def inductor_compile(gm: fx.GraphModule, example_inputs: list[Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Hand a graph to Inductor.

    Settings travel in `options=` only: a config context does not reach the backward, which is lowered later.
    """
    import torch._inductor

    return torch._inductor.compile(gm, example_inputs, options=options)


def inductor_parameters() -> list[str]:
    """The parameters of what `inductor_compile` calls."""
    import torch._inductor

    return list(inspect.signature(torch._inductor.compile).parameters)


def uses_cudagraphs(options: dict[str, Any]) -> bool:
    """Would Inductor record CUDA graphs under these options?"""
    import torch._inductor.config as inductor_config

    return bool(options.get("triton.cudagraphs", inductor_config.triton.cudagraphs))


def inductor_mode_options(mode: str) -> dict[str, Any]:
    """Inductor's settings for a mode such as "max-autotune"."""
    import torch._inductor

    return dict(torch._inductor.list_mode_options(mode))


def inductor_settings() -> str:
    """A digest of Inductor's process-wide settings."""
    import torch._inductor.config as inductor_config

    return inductor_config.get_hash().hex()  # type: ignore[attr-defined,no-any-return]


def inductor_option_names() -> list[str]:
    """Every key Inductor accepts in `options=`."""
    import torch._inductor

    return list(torch._inductor.list_options())


def inductor_option_type(name: str) -> Any:
    """What a value of one of Inductor's options must be, as torch.compile(backend="inductor") asks it to; object where
    torch does not ask."""
    import typing

    from torch._inductor import config

    kind = config.get_type(name) if hasattr(config, "get_type") else object
    return object if typing.get_origin(kind) is not None or kind is typing.Any else kind


def inductor_mode_names() -> list[str]:
    """Every mode Inductor knows."""
    import torch._inductor

    return list(torch._inductor.list_mode_options())


POST_GRAD = "post_grad_custom_post_pass"


def post_grad_pass(change: Callable[[fx.Graph], Any], version: str, users: Any = None) -> Any:
    """`change` as the value of Inductor's option POST_GRAD; `users` is the user's own pass, which runs after it.

    version: names what `change` does; Inductor's cache of compiled graphs depends on it.  Without a version of the
    user's pass (a plain callable has none) Inductor does not cache, as it does for that pass alone.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    theirs = [] if users is None else (list(users) if isinstance(users, (list, tuple)) else [users])

    class PostGrad(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            change(graph)
            for run in theirs:
                run(graph)

        def uuid(self) -> Any:
            names = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in theirs]
            return None if None in names else repr((version, names)).encode()

    return PostGrad()


MIX_ORDER = "triton.mix_order_reduction"


def mix_order_is_wrong() -> bool:
    """Does this torch have the mix-order reduction that returns wrong gradients (pytorch#193061)?

    Regression of 2.10; 2.13.0 still has it and no later version has been checked, so every later one counts as wrong.
    """
    return MIX_ORDER in inductor_option_names()


def named_backend(name: str) -> Callable[..., Any]:
    """A backend of torch by its name, such as "aot_eager"."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def calling_wrapper() -> Any | None:
    """The object `torch.compile` made for the callable whose frame is being compiled now.

    torch gives a backend named by a string no way to tell two compiled callables apart; the wrapper that calls it is
    the one object that belongs to exactly one `torch.compile` call.  It is found on the Python stack.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__call__":
            owner = frame.f_locals.get("self")
            if type(owner).__name__ == "_TorchCompileWrapper":
                return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def compiling_code() -> CodeType | None:
    """The code object of the frame that is being compiled now."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_compile" and isinstance(frame.f_locals.get("code"), CodeType):
            return frame.f_locals["code"]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def code_of(compiled: Any) -> CodeType | None:
    """The code object of what was compiled: a function's, a method's, or a module's forward."""
    inner = compiled.func if isinstance(compiled, functools.partial) else compiled
    inner = getattr(inner, "_orig_mod", inner)
    inner = getattr(inner, "forward", inner)  # torch.compile may have been given just that
    inner = getattr(inner, "_torchdynamo_orig_callable", inner)
    return getattr(getattr(inner, "forward", inner), "__code__", None)


def wrapper_of(compiled: Any) -> Any | None:
    """The same object, found from what `torch.compile` returned, from a module compiled in place or one whose `forward`
    is what it returned, or from a functools.partial of any of these."""
    seen: set[int] = set()
    todo = [compiled]
    while todo:
        x = todo.pop(0)
        if x is None or id(x) in seen:
            continue
        seen.add(id(x))
        if type(x).__name__ == "_TorchCompileWrapper":
            return x
        slots = getattr(x, "__dict__", {})
        todo += [slots.get(k) for k in (
            "_compiled_call_impl", "dynamo_ctx", "callback", "_torchdynamo_orig_backend", "_torchdynamo_orig_callable",
            "_inner_convert", "compiler_fn", "_compiler_fn", "forward")]
        if isinstance(x, functools.partial):
            todo.append(x.func)
        todo += [cell.cell_contents for cell in getattr(x, "__closure__", None) or () if _filled(cell)]
        todo.append(getattr(x, "__self__", None))
    return None


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # an empty cell
        return False


def forward_mode_ad() -> str | None:
    """"forward-mode AD" inside `torch.autograd.forward_ad.dual_level()`.  torch sets no guard on it."""
    return "forward-mode AD" if forward_ad._current_level >= 0 else None


def has_tangent(args: tuple[Any, ...]) -> bool:
    """Does one of these arguments carry a tangent of forward-mode AD?"""
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(a, torch.Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in args)


def current_compile_id() -> str:
    """Torch's name of the frame being compiled, such as "0/1" (frame / recompilation)."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return "?" if current is None else str(current)


def current_attempt() -> int:
    """How often torch has restarted the frame being compiled; a restart makes the graphs handed over before void."""
    from torch._guards import CompileContext

    trace_id = CompileContext.current_trace_id()
    return 0 if trace_id is None else int(trace_id.attempt)


def has_compiled_code(code: CodeType) -> bool:
    """Does torch hold compiled code for this code object?"""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(code)) > 0


def is_fake(tensor: torch.Tensor) -> bool:
    """Is this the plain fake tensor of a dense tensor (and not of a DTensor or another subclass)?"""
    from torch._subclasses.fake_tensor import FakeTensor

    return type(tensor) in (FakeTensor, torch.Tensor, torch.nn.Parameter) or isinstance(tensor, FakeTensor)


@contextmanager
def fake_mode_of(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Run operators on the fake tensors of a graph."""
    from torch._subclasses.fake_tensor import FakeTensor

    modes = [t.fake_mode for t in tensors if isinstance(t, FakeTensor)]
    if not modes:
        yield
        return
    with modes[0]:
        yield



class FrameAttempt(NamedTuple):
    """One frame torch tried to trace: its code, and why and where it gave up (None: it did not)."""

    name: str
    file: str
    line: int
    failed: str | None
    place: str | None
    ops: int | None


def frame_attempts() -> list[FrameAttempt]:
    """The frames torch tried to trace since it was last reset (it keeps the newest 64), in order."""
    from torch._dynamo.utils import get_compilation_metrics

    metrics = [m for m in get_compilation_metrics() if m.co_name is not None]
    starts = [i for i, m in enumerate(metrics) if m.compile_id == "0/0"]  # a reset numbers frames from 0 again
    return [
        FrameAttempt(
            m.co_name or "", m.co_filename or "", m.co_firstlineno or 0,
            None if m.fail_type is None else (m.fail_reason or m.fail_type),
            None if m.fail_user_frame_filename is None else f"{m.fail_user_frame_filename}:{m.fail_user_frame_lineno}",
            m.graph_op_count,
        )
        for m in metrics[starts[-1] if starts else 0:]
    ]


def graph_breaks() -> list[tuple[str, list[tuple[str, int, str]]]]:
    """Why and where torch broke graphs since it was last reset: (reason, [(file, line, function), ..innermost])."""
    from torch._dynamo.utils import graph_break_reasons

    return [(r.reason, [(f.filename, f.lineno or 0, f.name) for f in r.user_stack]) for r in graph_break_reasons]


def recompile_limit(code: CodeType) -> int | None:
    """The limit on compiled versions of a code object, if torch hit it (it runs eagerly from then on), else None."""
    from torch._dynamo import config
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.utils import counters

    hit = any(str(k).startswith("Dynamo recompile limit exceeded") for k in counters.get("unimplemented", {}))
    return config.recompile_limit if hit and len(_debug_get_cache_entry_list(code)) >= config.recompile_limit else None


def compiling_is_off() -> str | None:
    """What switched torch.compile off in this process, or None."""
    from torch._dynamo import config, eval_frame

    if config.disable:
        return "torch.compile is switched off (torch._dynamo.config.disable or TORCH_COMPILE_DISABLE)"
    stance = eval_frame._stance.stance
    return None if stance in ("default", "fail_on_recompile") else f"torch.compiler.set_stance({stance!r}) is in force"


def aot_autograd(forward: Callable[..., Any], backward: Callable[..., Any], partition: Callable[..., Any]) -> Any:
    """A backend that hands the joint graph to `partition` and its halves to the two compilers."""
    from torch._dynamo.backends.common import aot_autograd as make

    return make(fw_compiler=forward, bw_compiler=backward, partition_fn=partition)


@contextmanager
def every_size_its_own_symbol() -> Iterator[None]:
    """Trace so that equal sizes of different dimensions do not become one symbol, and errors are not swallowed."""
    from torch._dynamo import config as dynamo_config
    from torch.fx.experimental import _config as shape_config

    with shape_config.patch(use_duck_shape=False), dynamo_config.patch(suppress_errors=False):
        yield


def default_store() -> Any:
    """The key-value store that the default process group was made with."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def floor_div_and_max() -> tuple[Any, Any]:
    """The sympy functions torch writes sizes with."""
    from torch.utils._sympy.functions import FloorDiv, Max

    return FloorDiv, Max


def graph_target(function: Any) -> Any:
    """What an FX graph can call for a function: the overload of a custom operator, else the function itself."""
    from torch.library import CustomOpDef

    return function._opoverload if isinstance(function, CustomOpDef) else function


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Put a JSON text into torch's structured trace (TORCH_TRACE), where tlparse shows it beside the graph."""
    from torch._logging import trace_structured

    # not inside a compile when `graphopt doctor` asks
    about = {"name": name, "encoding": "json"}
    trace_structured("artifact", expect_trace_id=False, metadata_fn=lambda: about, payload_fn=payload)


def inductor_cache_folder() -> str:
    """Where Inductor keeps compiled code."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """Nested containers with every leaf changed."""
    from torch.utils import _pytree

    return _pytree.tree_map(change, tree)


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of nested containers."""
    from torch.utils import _pytree

    return _pytree.tree_leaves(tree)
