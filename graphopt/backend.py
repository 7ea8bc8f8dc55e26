"""The backend: a Dynamo graph in, a compiled callable out.  It reads like the picture in docs/design.md.

    options -> Config -> copy of the graph -> passes -> Report -> Inductor (or another compiler of torch)
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import fx

from graphopt import _compat, _compat_capture, reporting
from graphopt.codegen import landing, operators
from graphopt.config import Config, parse
from graphopt.errors import GraphoptError, RewriteError, RuleError, StreamError
from graphopt.passes import (
    catalogue,
    column_sums,
    freeing_order,
    gradient_addends,
    joint_launch,
    land_gradients,
    pipeline,
    reuse_gradients,
    stack_gradients,
)
from graphopt.passes.adaln import AdaLN
from graphopt.passes.canonical import Canonicalize
from graphopt.passes.head_norm_rotate import HeadNormRotate
from graphopt.passes.lower_video_attention import LowerVideoAttention, MatchGlobalAttention, has_mark
from graphopt.passes.norm_rotate import NormRotate
from graphopt.passes.record import PassRecord, Site

log = logging.getLogger(__name__)


def graphopt(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph; registered as "graphopt" in the entry point group `torch_dynamo_backends`.

    gm: the graph, before AOTAutograd; it is left as it was.
    example_inputs: (fake) tensors and symbolic sizes.
    mode, options: as torch.compile hands them over (see config.py).
    """
    config, inductor_options = parse(mode, options)
    record = reporting.GraphRecord(_compat.current_compile_id(), [], _compat.current_attempt())
    of_callable = reporting.current()
    of_callable.add(record)
    engine = streamed(example_inputs)
    if engine is not None:
        compiled = by_layer(gm, example_inputs, engine, config, inductor_options, record)
    elif (regions := by_region(gm, example_inputs, config, inductor_options, record)) is not None:
        compiled = regions
    else:
        rewritten = rewrite(gm, config, record)
        compiled = hand_over(rewritten, example_inputs, config, with_order(inductor_options, config, record.sites))
    _compat.trace_artifact("graphopt_report", record.to_json)
    log.info("graph %s: %s", record.compile_id, of_callable.summary())
    log.debug("%s", of_callable)
    return counted(compiled, record)


def rewrite(
    gm: fx.GraphModule,
    config: Config,
    record: reporting.GraphRecord,
    target: str | None = None,
    observe: Callable[[str, fx.GraphModule], None] | None = None,
) -> fx.GraphModule:
    """Run the passes on a copy.  When one fails, the graph goes on as it came (or the error is raised).

    target: a GPU that need not be here, such as "sm90".  observe: shown the graph after each pass.
    """

    def warn(message: str) -> None:
        record.notes.append(message)
        log.warning("graphopt: %s", message)

    context = pipeline.PassContext(
        rules=catalogue.select(config.rules, config.disable),
        select=config.select,
        numerics=config.numerics,
        on_error=config.on_error,
        target=target,
        inputs=verifiable(gm, warn) if config.verify else None,
        warn=warn,
    )
    twin = pipeline.copy(gm)
    # a pass may run new nodes on fake tensors; under a checkpoint around this module their saved tensors would be
    # counted as the model's, and the recomputation, which compiles nothing, would miss them
    own = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    try:
        with own:
            record.passes += pipeline.run(twin, passes(gm, config), context, observe)
    except Exception as error:
        # a graph that was to slide and stays dense would be another model
        if config.on_error == "raise" or isinstance(error, RuleError) or slides(gm, config):
            if isinstance(error, GraphoptError):
                raise
            what = f"a pass failed: {type(error).__name__}: {error}"
            raise RewriteError(what, where=f"graph {record.compile_id}") from error
        warn(f"graph {record.compile_id} is left as it was: {type(error).__name__}: {error}")
        size = len(gm.graph.nodes)
        record.passes[:] = [PassRecord("adaln", size, size)]
        return gm
    return twin


def verifiable(gm: fx.GraphModule, warn: Callable[[str], None]) -> list[Any] | None:
    """The real inputs of a graph, or None with a warning where torch does not hold them."""
    inputs = _compat_capture.real_inputs(gm)
    if inputs is None:
        warn("graphopt.verify: torch holds no values for the inputs of this graph, so its sites are not verified")
    return inputs


def passes(gm: fx.GraphModule, config: Config) -> list[pipeline.Pass]:
    """The passes of a graph, in order.  Those of sliding attention run only where something asks for it.

    Attention is matched first: what the tokens are is read from the model's own operators.
    """
    slide = slides(gm, config)
    order: list[pipeline.Pass] = [Canonicalize(), *([MatchGlobalAttention()] if slide else [])]
    order += [p for p in (NormRotate(), HeadNormRotate()) if p.name in beside(config)]
    return [*order, AdaLN(), *([LowerVideoAttention(config.dsa)] if slide else [])]


def beside(config: Config) -> set[str]:
    """The passes beside the sites that run: none where eager's roundings are asked for, or only certain rules."""
    if config.numerics != "fp32":
        return set()
    usual = catalogue.BESIDE if config.rules is None else frozenset()
    # the first one's chain writes in place, which verify does not replay; and it knows the sites of rules alone
    unverified = {"norm_rotate", "head_norm_rotate"} if config.verify else set()
    return {*usual, *config.experimental} - {*config.disable} - unverified


def slides(gm: fx.GraphModule, config: Config) -> bool:
    """Does the option `graphopt.dsa` or a converted module ask for sliding attention?"""
    return config.dsa is not None or has_mark(gm)


def with_order(
    inductor_options: dict[str, Any], config: Config, sites: list[Site], lands: bool = False
) -> dict[str, Any]:
    """Inductor's options for a graph where sites were rewritten: matmuls are put into the order that frees early, and
    kernels write gradients over gradients that die; where asked for, sums of gradients first go into the kernels that
    read or make them, gradients that are stacked are written where they are, and two streams share a launch.
    lands: gradients of weights are written where a streamed model wants them."""
    fused = any(site.status == "rewritten" for site in sites)
    if config.compiler != "inductor" or not (fused or lands):
        return inductor_options
    run = late_passes(config, fused, lands)

    def change(graph: fx.Graph) -> None:
        for _, apply in run:
            apply(graph)

    versions = [(_name(m), version(m)) for m, _ in run]
    landed = version(landing) if lands else ""
    key = (versions, landed, joins_everything(config), operators.source_hash())
    order = _compat.post_grad_pass(change, repr(key), inductor_options.get(_compat.POST_GRAD))
    return {**inductor_options, _compat.POST_GRAD: order}


def late_passes(
    config: Config, fused: bool, lands: bool
) -> list[tuple[ModuleType, Callable[[fx.Graph], object]]]:
    """The passes over the graphs that Inductor lowers, in order: the module of each, and what it does to a graph."""
    table: list[tuple[ModuleType, Callable[[fx.Graph], object]]] = [
        (gradient_addends, gradient_addends.fold),
        (column_sums, column_sums.fold),
        (freeing_order, freeing_order.free_early),
        (reuse_gradients, reuse_gradients.reuse),
        (stack_gradients, stack_gradients.fold),
        (joint_launch, partial(joint_launch.fold, everything=joins_everything(config))),
    ]
    running = beside(config) | {_name(freeing_order)} | (catalogue.LATE - {*config.disable})
    chosen = [(module, apply) for module, apply in table if fused and _name(module) in running]
    return [*chosen, *([(land_gradients, land_gradients.land)] if lands else [])]


def joins_everything(config: Config) -> bool:
    """Does joint_launch join backwards and large forwards, too?"""
    return _name(joint_launch) in config.experimental


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


@cache
def version(module: ModuleType) -> str:
    """A hash of a module's source, for caches that depend on what it does."""
    return hashlib.sha256(inspect.getsource(module).encode()).hexdigest()[:12]


def hand_over(
    gm: fx.GraphModule, example_inputs: list[Any], config: Config, inductor_options: dict[str, Any]
) -> Callable[..., Any]:
    """Give the rewritten graph to what compiles it."""
    if config.compiler == "inductor":
        return _compat.inductor_compile(gm, example_inputs, inductor_options)
    if config.compiler == "eager":
        return gm.forward
    return _compat.named_backend(config.compiler)(gm, example_inputs)


Compile = Callable[..., Callable[..., Any]]  # graph, inputs, lands (see with_order)


def streamed(example_inputs: list[Any]) -> Any | None:
    """The runtime behind a graph whose inputs are handles of a streamed model; None for any other graph."""
    if "graphopt.streaming.attach" not in sys.modules:  # no model of this process is streamed
        return None
    from graphopt.streaming.compile import engine_of

    return engine_of(example_inputs)


def by_layer(
    gm: fx.GraphModule, example_inputs: list[Any], engine: Any, config: Config, inductor_options: dict[str, Any],
    record: reporting.GraphRecord,
) -> Callable[..., Any]:
    """Compile the graph of a streamed model: cut it by layer, each class of equal layers once."""
    from graphopt.streaming.compile import compile_streamed

    if _compat.uses_cudagraphs(inductor_options):
        raise StreamError(
            "CUDA graphs (reduce-overhead, triton.cudagraphs) with a streamed model: a replay would overwrite the "
            "inputs that layers keep for their backward",
            remedy="use graphopt.mode='max-autotune-no-cudagraphs', or no mode",
        )
    one = by_part(config, inductor_options, record)
    rules = [(rule.name, id(rule)) for rule in catalogue.select(config.rules, config.disable)]
    settings = f"{config!r} {sorted(inductor_options.items(), key=str)!r} {rules!r} {_compat.inductor_settings()} "
    result = compile_streamed(gm, example_inputs, engine, one, record.compile_id.split("/")[0], settings)
    record.passes += result.records
    record.notes += result.notes
    return result.program


def by_region(
    gm: fx.GraphModule, example_inputs: list[Any], config: Config, inductor_options: dict[str, Any],
    record: reporting.GraphRecord,
) -> Callable[..., Any] | None:
    """Compile each class of equal layers once; None where that is off, or nothing repeats (noted in the report)."""
    if config.regions != "auto":
        return None
    from graphopt.regions import compile_regions

    result = compile_regions(gm, example_inputs, by_part(config, inductor_options, record))
    if isinstance(result, str):
        record.notes.append(f"regions: the graph is compiled as one, {result}")
        return None
    record.passes += result.records
    record.notes += result.notes
    return result


def by_part(config: Config, inductor_options: dict[str, Any], record: reporting.GraphRecord) -> Any:
    """How a part of a graph is rewritten and compiled: gives it rewritten, its records, and its compiler."""

    def one(part: fx.GraphModule) -> tuple[fx.GraphModule, list[PassRecord], Compile]:
        of_part = reporting.GraphRecord(record.compile_id, [], notes=record.notes)
        rewritten = rewrite(part, config, of_part)

        def compile_one(graph: fx.GraphModule, inputs: list[Any], lands: bool = False) -> Callable[..., Any]:
            return hand_over(graph, inputs, config, with_order(inductor_options, config, of_part.sites, lands))

        return rewritten, of_part.passes, compile_one

    return one


def counted(compiled: Callable[..., Any], record: reporting.GraphRecord) -> Callable[..., Any]:
    """The compiled graph, counting its calls for `Report.count(executed=True)`."""
    fused = any(site.status == "rewritten" for site in record.sites)

    def run(*args: Any) -> Any:
        record.calls += 1
        if fused and _compat.has_tangent(args):
            raise GraphoptError(
                "forward-mode AD through a graph that was compiled without it: fused operators would drop the tangents",
                where=f"graph {record.compile_id}",
                remedy="call torch._dynamo.reset() and run it under dual_level first, or run it eagerly there "
                "(torch.compiler.set_stance('force_eager'))",
            )
        return compiled(*args)

    return run
