"""The backend: a Dynamo graph in, a compiled callable out.  It reads like the picture in docs/design.md.

    options -> Config -> copy of the graph -> passes -> Report -> Inductor (or another compiler of torch)
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from graphopt import _compat, reporting
from graphopt.config import Config, parse
from graphopt.errors import GraphoptError, RewriteError
from graphopt.passes import catalogue, pipeline
from graphopt.passes.adaln import AdaLN
from graphopt.passes.record import PassRecord

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
    else:
        rewritten = rewrite(gm, config, record)
        compiled = hand_over(rewritten, example_inputs, config, inductor_options)
    log.info("graph %s: %s", record.compile_id, of_callable.summary())
    log.debug("%s", of_callable)
    return counted(compiled, record)


def rewrite(gm: fx.GraphModule, config: Config, record: reporting.GraphRecord) -> fx.GraphModule:
    """Run the passes on a copy.  When one fails, the graph goes on as it came (or the error is raised)."""

    def warn(message: str) -> None:
        record.notes.append(message)
        log.warning("graphopt: %s", message)

    context = pipeline.PassContext(
        rules=catalogue.select(config.rules, config.disable),
        select=config.select,
        numerics=config.numerics,
        on_error=config.on_error,
        warn=warn,
    )
    twin = pipeline.copy(gm)
    try:
        record.passes += pipeline.run(twin, passes(), context)
    except Exception as error:
        if config.on_error == "raise":
            if isinstance(error, GraphoptError):
                raise
            what = f"a pass failed: {type(error).__name__}: {error}"
            raise RewriteError(what, where=f"graph {record.compile_id}") from error
        warn(f"graph {record.compile_id} is left as it was: {type(error).__name__}: {error}")
        size = len(gm.graph.nodes)
        record.passes[:] = [PassRecord("adaln", size, size)]
        return gm
    return twin


def passes() -> list[pipeline.Pass]:
    """The passes of a graph, in order."""
    return [AdaLN()]


def hand_over(
    gm: fx.GraphModule, example_inputs: list[Any], config: Config, inductor_options: dict[str, Any]
) -> Callable[..., Any]:
    """Give the rewritten graph to what compiles it."""
    if config.compiler == "inductor":
        return _compat.inductor_compile(gm, example_inputs, inductor_options)
    if config.compiler == "eager":
        return gm.forward
    return _compat.named_backend(config.compiler)(gm, example_inputs)


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

    def one(part: fx.GraphModule) -> tuple[fx.GraphModule, list[PassRecord]]:
        of_part = reporting.GraphRecord(record.compile_id, [], notes=record.notes)
        return rewrite(part, config, of_part), of_part.passes

    result = compile_streamed(gm, example_inputs, engine, one,
                              lambda part, inputs: hand_over(part, inputs, config, inductor_options),
                              frame=record.compile_id.split("/")[0])
    record.passes += result.records
    record.notes += result.notes
    return result.program


def counted(compiled: Callable[..., Any], record: reporting.GraphRecord) -> Callable[..., Any]:
    """The compiled graph, counting its calls for `Report.count(executed=True)`."""

    def run(*args: Any) -> Any:
        record.calls += 1
        return compiled(*args)

    return run
