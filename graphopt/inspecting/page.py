"""A report as one self-contained HTML page: no network, no other file.

Tables are in the page as it stands; the nodes of the graphs are data that a short script draws when a block is opened,
so that the page of a 40-block model stays small and opens at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import Any

import torch
from torch import fx

from graphopt.codegen import listing
from graphopt.inspecting import diff, text
from graphopt.inspecting.capture import Captured, Graph
from graphopt.inspecting.nodes import joined, rows, sections, short, short_dtype
from graphopt.inspecting.streaming import Schedule
from graphopt.passes.record import Kernel, Site
from graphopt.reporting import Report


def render(
    report: Report, title: str, target: str | None = None, captured: Captured | None = None,
    schedule: Schedule | None = None,
) -> str:
    """The page.  With what `inspect` captured it shows the graphs, too; with a schedule, how it would be streamed."""
    import jinja2

    folder = files("graphopt.inspecting")
    css, js, template = (folder.joinpath(f"page.{x}").read_text() for x in ("css", "js", "html.j2"))
    environment = jinja2.Environment(autoescape=True, trim_blocks=False)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "separators": (",", ":")}  # stages in order
    graphs = captured.graphs if captured else []
    kernels = text.kernel_groups(report.kernels)
    return environment.from_string(template).render(
        title=title, facts=_facts(report, target, captured), cards=_cards(report, captured is not None),
        notes=_notes(report, captured),
        site_groups=[_site_group(g, report) for g in text.site_groups(report.sites)],
        alone_groups=_alone(report),
        kernel_groups=[_kernel_row(g) for g in kernels], sources=_sources(report.kernels),
        graphs=graphs, changes=_changes(graphs), data=_data(graphs), short=short, kernel_name=kernel_name,
        short_dtype=short_dtype,
        schedule=schedule, picture=_safe(schedule.to_svg()) if schedule else "", css=_safe(css), js=_safe(js),
    )


def _safe(asset: str) -> Any:
    import markupsafe

    return markupsafe.Markup(asset)  # our own files, not text from a model


def _facts(report: Report, target: str | None, captured: Captured | None) -> list[str]:
    out = [f"graphopt on torch {torch.__version__}"]
    if target:
        out.append(f"target {target}")
    if captured:
        why = f", because the meta device does not do: {captured.device_reason}" if captured.device_reason else ""
        out.append(f"captured on {captured.device}{why}")
    count = len(report.graphs)
    out.append(f"{count} graph{'s' * (count != 1)}")
    for g in report.graphs[:1] if count == 1 else []:
        if g.passes:
            out.append(f"{g.passes[0].nodes_before} → {g.passes[-1].nodes_after} nodes")
    return out


def _cards(report: Report, inspected: bool) -> list[tuple[str, str]]:
    """Numbers at the top.  An inspection runs one forward, so each graph counts as often as it ran in it."""
    cards = []
    for kind in ("modulate", "gate"):
        n, done = report.count(kind), report.count(kind, "rewritten")
        cards.append((f"{done} of {n}" if done != n else str(n), f"{kind} sites rewritten"))
    kernels = text.kernels_run(report, inspected)
    calls = [(k, n) for k, n in kernels if k.direction == "forward"]
    cards.append((str(sum(n for _, n in calls)), "kernel calls forward"))
    saved = 0.0
    for k, n in calls:
        times = next((s.predicted for s in k.sites if s.predicted), None)
        saved += n * (times.inductor_us - times.graphopt_us) if times else 0.0
    if saved:
        cards.append((f"{saved / 1e3:.1f} ms", "saved a step, predicted against Inductor"))
    fused, eager = text.traffic(kernels)
    if eager:
        label = f"less memory traffic a step than the same ops in eager mode ({text.gib(eager)})"
        cards.append((text.gib(eager - fused), label))
    cards.append((f"{len(report.rejects)} + {len(report.near_misses)}", "places refused, near misses"))
    return cards


def _notes(report: Report, captured: Captured | None) -> list[str]:
    out = [n for g in report.graphs for n in g.notes]
    if captured:
        out += text.breaks(captured.breaks)
        if captured.device == "cpu" and not captured.executed:
            out.append("The graphs were not executed: values that Python reads between graphs are zeros.")
    return out


def _site_group(group: list[Site], report: Report) -> dict[str, Any]:
    members = []
    files_: dict[str, None] = {}
    for site in group:
        graph = next(i for i, g in enumerate(report.graphs) if any(site is s for s in g.sites))
        own = [k for p in report.graphs[graph].passes for k in p.kernels if any(site is s for s in k.sites)]
        files_ |= dict.fromkeys(f for k in own for f in k.sources)
        members.append({"site": site, "graph": graph, "call": own[0].node if own else ""})
    return {"first": group[0], "title": joined(s.fqn for s in group), "members": members, "files": list(files_)}


def _alone(report: Report) -> list[dict[str, Any]]:
    groups = [(f"refused, rule {g[0].rule}", g) for g in text.reject_groups(report.rejects)]
    near = [(f"no {g[0].kind}", g) for g in text.miss_groups(report.near_misses)]
    return [{"what": what, "first": g[0], "title": joined(x.fqn for x in g), "members": g} for what, g in groups + near]


def kernel_name(file: str) -> str:
    """`gate_norm_forward_0123456789ab.py` -> `gate_norm_forward`."""
    return file.rsplit("_", 1)[0]


def _kernel_row(group: list[Kernel]) -> dict[str, Any]:
    k = group[0]
    fused, eager = (sum(getattr(x.traffic, n) for x in group if x.traffic) for n in ("fused", "op_by_op"))
    return {"calls": len(group), "operator": k.operator, "direction": k.direction, "files": k.sources,
            "resources": k.resources, "fused": text.gib(fused), "eager": text.gib(eager)}


def _sources(kernels: Iterable[Kernel]) -> dict[str, str]:
    names = dict.fromkeys(f for k in kernels for f in k.sources)
    found = {name: listing.source_of(name) for name in names}
    return {name: source for name, source in found.items() if source is not None}


def _changes(graphs: list[Graph]) -> list[dict[str, Any]]:
    out = []
    for i, graph in enumerate(graphs):
        before, before_name = graph.before, "before"
        for record in graph.record.passes:
            after = graph.stages.get(record.name, before)
            found = [
                {"graph": i, "times": 1 + len(c.same), "heading": c.heading or "(graph)", "rule": c.rule,
                 "before": c.before, "after": c.after}
                for c in diff.folded(diff.changes(before, after, record))
            ]
            head = f"graph {i}: {record.name}" if len(graphs) > 1 else record.name
            out.append({"title": head, "note": f"{record.nodes_before} → {record.nodes_after} nodes", "changes": found,
                        "before": before_name, "after": record.name})
            if _changed(before, after):
                before, before_name = after, record.name
    return out


def _changed(before: fx.GraphModule, after: fx.GraphModule) -> bool:
    return rows(before) != rows(after)


def _stages(graph: Graph) -> dict[str, fx.GraphModule]:
    """The graph before, and after each pass that changed it."""
    out = {"before": graph.before}
    for name, gm in graph.stages.items():
        if _changed(list(out.values())[-1], gm):
            out[name] = gm
    return out


def _data(graphs: list[Graph]) -> dict[str, Any]:
    """Nodes for the script: repeated strings once, operands by position."""
    words: dict[str, int] = {"": 0}

    def word(s: str | None) -> int:
        return words.setdefault(s or "", len(words))

    def stage(gm: fx.GraphModule) -> dict[str, Any]:
        lines = rows(gm)
        index = {r.name: i for i, r in enumerate(lines)}
        out, first, at = [], {}, 0
        starts: dict[int, int] = {id(r): i for i, r in enumerate(lines)}
        for s in sections(lines):
            at = starts[id(s.rows[0])]
            same = [[o.block, starts[id(o.rows[0])]] for o in s.same]
            out.append([s.title, at, len(s.rows), same])
            if same:
                first[at] = s.block
        table = [[r.name, word(r.text), [index[n] for n in r.inputs if n in index], word(r.value), word(r.fqn),
                  word(short(r.where)), int(r.fused)] for r in lines]
        return {"rows": table, "sections": out, "first": first}

    made = []
    for g in graphs:
        stages = {name: stage(gm) for name, gm in _stages(g).items()}
        ended = f"{g.ended[0]} ({short(g.ended[1])})" if g.ended else ""
        made.append({"name": g.record.compile_id, "stages": stages, "ended": ended})
    return {"graphs": made, "words": list(words)}
