"""`graphopt.inspect`: what would be done to a model and why, without a GPU and without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import fx

from graphopt import config as settings
from graphopt.codegen.compiler import gpu_target
from graphopt.errors import CodegenError, ConfigError
from graphopt.inspecting import answer, dot, nodes, page, text
from graphopt.inspecting.capture import Captured, Graph, capture
from graphopt.inspecting.diff import Change, changes, folded, side_by_side
from graphopt.inspecting.streaming import Schedule, planned
from graphopt.passes import stream_graph
from graphopt.passes.catalogue import names as rule_names
from graphopt.reporting import Report, write
from graphopt.streaming import handles

VERSION = 1


class Inspection:
    """What `inspect` found.  `print(seen)` shows it on one screen; equal blocks are collapsed.

    schedule: how the model would be streamed (with stream= only): `.plan`, `.graph`, `.text`, `.to_svg()`.
    report: the Report over all graphs.  captured: the graphs before and after each pass, graph breaks, and where the
    model ran.  title, target: what was inspected, and the GPU it was compiled for.
    """

    def __init__(self, captured: Captured, title: str, target: str, schedule: Schedule | None = None) -> None:
        self.captured, self.title, self.target, self.schedule = captured, title, target, schedule

    @property
    def report(self) -> Report:
        """Sites, rejects and kernels, as `graphopt.report` gives them after a real compile."""
        return self.captured.report

    @property
    def graphs(self) -> list[Graph]:
        """The captured graphs, in the order they ran."""
        return self.captured.graphs

    @property
    def fqns(self) -> list[str]:
        """Every name `why` answers for."""
        return answer.names(self.captured)

    @property
    def passes(self) -> list[str]:
        """The passes that ran, in order."""
        return list(dict.fromkeys(p.name for g in self.graphs for p in g.record.passes))

    def graph(self, which: str = "after", index: int = 0) -> fx.GraphModule:
        """A graph "before", "after", or after a pass by its name; `index` picks one of several graphs.

        Returns a copy of the GraphModule; ConfigError names the passes that ran.
        """
        if not 0 <= index < len(self.graphs):
            raise ConfigError(f"there is no graph {index}", remedy=f"the model has {len(self.graphs)} graphs, from 0")
        graph = self.graphs[index]
        if which == "before":
            return graph.before
        if which == "after":
            return list(graph.stages.values())[-1]
        if which not in graph.stages:
            raise self._unknown(which, ["before", "after", *graph.stages])
        return graph.stages[which]

    def diff(self, name: str, width: int = 160) -> str:
        """What a pass (or one rule of it) replaced, side by side; equal blocks once."""
        lines = []
        for index, found in enumerate(self.changes(name)):
            if len(self.graphs) > 1:
                lines.append(f"== graph {index}")
            for change in folded(found):
                lines.append(f"-- {change.heading or '(graph)'}  {change.rule}  x{1 + len(change.same)}")
                lines += side_by_side(change, width)
        return "\n".join(lines) if lines else f"{name} changed nothing"

    def changes(self, name: str) -> list[list[Change]]:
        """The changes of a pass or a rule, one list per graph."""
        rule = None if name in self.passes else name
        if rule is not None and rule not in rule_names():
            raise self._unknown(name, [*self.passes, *sorted(rule_names())])
        out = []
        for graph in self.graphs:
            before, found = graph.before, []
            for record in graph.record.passes:
                after = graph.stages.get(record.name, before)
                if rule is not None or record.name == name:
                    found += changes(before, after, record, rule)
                before = after
            out.append(found)
        return out

    def why(self, fqn: str) -> str:
        """Why a module's norms and gates were or were not rewritten; ConfigError names the nearest modules."""
        return answer.why(self.captured, fqn)

    def to_json(self, nodes_too: bool = False, indent: int | None = 1) -> str:
        """Everything as JSON with a version field, in graph order; `nodes_too` adds every node before and after."""
        found = self.captured
        data: dict[str, Any] = {
            "version": VERSION, "title": self.title, "target": self.target, "device": found.device,
            "device_reason": found.device_reason, "executed": found.executed, "torch": torch.__version__,
            "breaks": [{"reason": r, "where": w} for r, w in found.breaks], "graphs": [],
        }
        for graph in found.graphs:
            entry = asdict(graph.record)
            if nodes_too:
                stages = {"before": graph.before, **graph.stages}
                entry["nodes"] = {name: [asdict(r) for r in nodes.rows(gm)] for name, gm in stages.items()}
            data["graphs"].append(entry)
        return json.dumps(data, indent=indent)

    def to_dot(
        self, which: str = "after", path: str | Path | None = None, index: int = 0, collapse: bool = True
    ) -> str:
        """A graph in Graphviz's language, also written to `path`; equal blocks are drawn once (`collapse`).

        which: as in `graph`, or "schedule" (with stream=).
        """
        if which == "schedule":
            if self.schedule is None:
                raise ConfigError("no schedule was made", remedy="graphopt.inspect(..., stream={'slots': 2})")
            made = stream_graph.to_dot(self.schedule.graph)
        else:
            made = dot.dot(self.graph(which, index), f"{self.title}: {which}", collapse)
        if path is not None:
            write(path, made)
        return made

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained page, also written to `path`: sites, reasons, kernels, changes per pass, graphs."""
        made = page.render(self.report, self.title, self.target, self.captured, self.schedule)
        if path is not None:
            write(path, made)
        return made

    def __str__(self) -> str:
        streaming = "" if self.schedule is None else f"\n\nstreamed:\n{self.schedule.plan}"
        return text.render(self) + streaming

    @staticmethod
    def _unknown(name: str, known: list[str]) -> ConfigError:
        close = answer.near(name, known)
        return ConfigError(f"no pass or rule is called {name!r}",
                           remedy=f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}")


def inspect(
    model: Any,
    *args: Any,
    device: str = "meta",
    target: str = "sm90",
    options: Mapping[str, Any] | None = None,
    title: str | None = None,
    stream: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Inspection:
    """Capture a model without running it and show what graphopt does to it on a GPU, and why.

        with torch.device("meta"):
            model = WanTransformer3DModel(...)
        seen = graphopt.inspect(model, hidden_states=..., timestep=..., encoder_hidden_states=...)
        print(seen); print(seen.why("blocks.3.norm1"))

    model: a module (on any device; one with weights is copied without them) or a function.
    args, kwargs: the inputs of one forward; of tensors only shape and dtype matter.
    device: "meta", and where the model does not allow it "cpu" is taken and the reason named; or "cpu" at once.
    target: the GPU whose kernels are chosen: sm80, sm90, sm100, gfx942.
    options: as torch.compile takes them.
    stream: also plan its streaming: settings of graphopt.stream, HostAdamW and stream_plan, e.g. dict(slots=2).

    Errors: ConfigError for an option; CaptureError, with the place, for a model that torch cannot capture.
    """
    if device not in ("meta", "cpu"):
        raise ConfigError(f"device is {device!r}", remedy="use 'meta' or 'cpu'")
    try:
        gpu_target(target)
    except CodegenError as error:
        raise ConfigError(error.what, remedy="use sm80, sm90, sm100 or gfx942") from error
    parsed, _ = settings.parse(None, options)
    if parsed.verify:
        raise ConfigError("inspect does not run the model, so it cannot verify", where="graphopt.verify",
                          remedy="leave the option out here, and set it in torch.compile's options for one run")
    if is_streamed(model):
        raise ConfigError("the model is streamed, so its weights are not here to be traced", where=type(model).__name__,
                          remedy="inspect it before graphopt.stream, with stream={'slots': 2}")
    found = capture(model, args, kwargs, device, parsed, target)
    schedule = None if stream is None else planned(model, [g.before for g in found.graphs], stream)
    return Inspection(found, title or type(model).__name__, target, schedule)


def is_streamed(model: Any) -> bool:
    """Did this model go through graphopt.stream?"""
    return isinstance(model, torch.nn.Module) and any(handles.entry_of(p) is not None for p in model.parameters())
