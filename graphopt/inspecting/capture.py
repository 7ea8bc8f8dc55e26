"""Run a model once without its weights and keep every graph the backend would be handed.

On the meta device nothing is computed.  On the CPU a small model runs for real; of a large one, memory is reserved but
never touched: the graphs return zeros of the right shape, and only integers and masks are computed, because Python
code between graphs may branch on them.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphopt import _compat, backend
from graphopt._compat_capture import GraphBreaks, break_of, capture_settings, error_line, is_disabled
from graphopt.config import Config
from graphopt.errors import GraphoptError
from graphopt.inspecting.nodes import short
from graphopt.passes import facts, ops_view, pipeline, verify
from graphopt.reporting import GraphRecord, Report

log = logging.getLogger(__name__)

# above this a CPU run only goes through the motions
SMALL_BYTES = 1 << 30


class CaptureError(GraphoptError):
    """A model could not be captured; the message names the place and the reason."""


@dataclass
class Graph:
    """One captured graph.

    before: as Dynamo handed it over.  stages: after each pass, by its name, in order.
    ended: why it ended before the frame returned (the reason and the user's line), None if it did not.
    """

    record: GraphRecord
    before: fx.GraphModule
    stages: dict[str, fx.GraphModule] = field(default_factory=dict)
    ended: tuple[str, str | None] | None = None


@dataclass
class Captured:
    """All graphs of one forward, what broke them, and where the model ran."""

    graphs: list[Graph]
    report: Report
    breaks: list[tuple[str, str | None]]
    device: str
    device_reason: str | None = None
    executed: bool = False
    modules: dict[str, str] = field(default_factory=dict)


def capture(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str, config: Config, target: str
) -> Captured:
    """Capture on a device; where the meta device cannot, on the CPU, with the reason kept."""
    if device == "cpu":
        return _on(model, args, kwargs, "cpu", config, target)
    try:
        return _on(model, args, kwargs, "meta", config, target)
    except GraphoptError:
        raise
    except Exception as error:
        reason = explain(error)
        log.info("graphopt: the meta device does not do (%s); capturing on the CPU", reason)
    found = _on(model, args, kwargs, "cpu", config, target)
    found.device_reason = reason
    return found


def _on(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str, config: Config, target: str
) -> Captured:
    twin = placed(model, device)
    args, kwargs = _compat.tree_map(lambda x: _like_on(x, device), (args, kwargs))
    own = _bytes(twin)
    executed = device == "cpu" and own <= SMALL_BYTES and twin is model
    report = Report()
    graphs: list[Graph] = []

    def compile_graph(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        record = GraphRecord(_compat.current_compile_id(), [], _compat.current_attempt())
        report.add(record)
        graph = Graph(record, pipeline.copy(gm), ended=break_of(gm))
        graphs.append(graph)

        def keep(name: str, now: fx.GraphModule) -> None:
            graph.stages[name] = pipeline.copy(now)

        result = backend.rewrite(gm, config, record, target, keep)
        if not graph.stages:  # a pass failed, and the graph goes on as it came
            graph.stages = {p.name: result for p in record.passes}
        return backend.counted(gm.forward if executed else stand_in(gm), record)

    met = GraphBreaks()
    run = torch.compile(twin, backend=compile_graph)
    with capture_settings(), torch.random.fork_rng(devices=[]), _not_compiled(twin):
        try:
            run(*args, **kwargs)
        except Exception as error:
            if device == "meta":
                raise
            raise CaptureError(f"the model cannot be captured: {explain(error)}", where=error_line(error),
                               remedy="run it eagerly with the same inputs first; the error is usually the same"
                               ) from error
    breaks = met.found()
    live = [g for g in graphs if any(g.record is r for r in report.graphs)]
    if not live:
        why = "its forward is marked with torch.compiler.disable" if is_disabled(model) else "none was traced"
        reasons = "; ".join(f"{r} ({w})" for r, w in breaks) or why
        raise CaptureError(f"torch captured no graph: {reasons}", where=breaks[0][1] if breaks else None,
                           remedy="move what breaks the graph out of forward; TORCH_LOGS=graph_breaks shows more")
    return Captured(live, report, breaks, device, None, executed, module_kinds(twin))


def explain(error: BaseException) -> str:
    """The first line of an error, with the user's line where torch tells it."""
    text = " ".join(str(error).split("from user code:")[0].split())
    detail = re.search(r"got (\w*(?:Error|Exception)\(.*)", text)
    text = (detail[1] if detail else text)[:240]
    place = error_line(error)
    return f"{text} ({short(place)})" if place else text


def module_kinds(model: Any) -> dict[str, str]:
    """FQN -> class name of every module."""
    if not isinstance(model, torch.nn.Module):
        return {}
    return {name: type(module).__name__ for name, module in model.named_modules()}


# -- a model without weights --------------------------------------------------------------------------


def placed(model: Any, device: str) -> Any:
    """The model on a device: itself if it is there, else a copy whose parameters and buffers hold no values."""
    if not isinstance(model, torch.nn.Module):
        return model
    tensors = [*model.parameters(), *model.buffers()]
    if all(t.device.type == device for t in tensors):
        return model
    memo: dict[int, Any] = {}
    for module in model.modules():
        for x in _compat.tree_leaves([v for v in vars(module).values()]):
            if isinstance(x, torch.Tensor) and id(x) not in memo:
                memo[id(x)] = _like_on(x, device)
    return copy.deepcopy(model, memo)


@contextmanager
def _not_compiled(model: Any) -> Iterator[None]:
    """A module that was compiled in place goes through its own compiled call; here it is called as it was written."""
    own = vars(model).get("_compiled_call_impl") if isinstance(model, torch.nn.Module) else None
    if own is None:
        yield
        return
    model._compiled_call_impl = None
    try:
        yield
    finally:
        model._compiled_call_impl = own


def _like_on(x: Any, device: str) -> Any:
    """A tensor of the same kind on a device.  Values come along only where they are there to be read (small ones)."""
    if not isinstance(x, torch.Tensor) or x.device.type == device:
        return x
    keeps_values = x.device.type != "meta" and device != "meta" and not isinstance(x, torch.nn.Parameter)
    with torch.no_grad():
        if keeps_values:
            new = x.detach().to(device)
        elif x.is_floating_point() or device == "meta":
            new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        else:  # masks and positions that came from the meta device: everything is there, in order
            new = torch.ones_like(x, device=device)
    if isinstance(x, torch.nn.Parameter):
        return torch.nn.Parameter(new, requires_grad=x.requires_grad)
    return new.requires_grad_(x.requires_grad) if x.is_leaf else new


def _bytes(model: Any) -> int:
    if not isinstance(model, torch.nn.Module):
        return 0
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


# -- a graph that is not run --------------------------------------------------------------------------


def stand_in(gm: fx.GraphModule) -> Callable[..., Any]:
    """A callable with the graph's results: zeros for floats, the real values of integers and masks on the CPU."""
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    exact = _cone([n for n in output.all_input_nodes if _is_exact(n)], gm)
    order = [n for n in gm.graph.nodes if n in exact and n.op != "placeholder"]
    names = [n for n in gm.graph.nodes if n.op == "placeholder"]

    def run(*inputs: Any) -> Any:
        env: dict[fx.Node, Any] = dict(zip(names, inputs))
        for node in order:
            if node.op == "get_attr":
                env[node] = verify.attribute(gm, str(node.target))
                continue
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
            env[node] = verify.call(gm, node, args, kwargs)
        return fx.node.map_arg(output.args[0], lambda n: env[n] if n in env else blank(n))

    return run


def blank(node: fx.Node) -> Any:
    """Zeros of a node's shape; memory that is never touched is never taken."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        shape = [_compat.size_hint(s) for s in value.shape]
        new = torch.zeros(shape, dtype=value.dtype, device=value.device)
        return new.requires_grad_() if value.requires_grad and value.is_floating_point() else new
    if isinstance(value, torch.SymInt):
        return _compat.size_hint(value)
    return value


def _is_exact(node: fx.Node) -> bool:
    value = ops_view.value(node)
    return value is not None and value.device.type == "cpu" and not (value.is_floating_point() or value.is_complex())


def _cone(roots: list[fx.Node], gm: fx.GraphModule) -> set[fx.Node]:
    """What the roots are computed from, in-place writes to it included."""
    writes = [(n, facts.written(n, gm)) for n in gm.graph.nodes]
    cone: set[fx.Node] = set()
    todo = list(roots)
    while todo:
        while todo:
            node = todo.pop()
            if node not in cone:
                cone.add(node)
                todo += node.all_input_nodes
        todo = [n for n, targets in writes if n not in cone and any(t in cone for t in targets or ())] if roots else []
    return cone
