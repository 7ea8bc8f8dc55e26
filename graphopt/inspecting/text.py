"""An inspection as text: one screen, equal blocks collapsed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from graphopt.inspecting.nodes import joined, relative, short
from graphopt.passes.record import Kernel, NearMiss, Reject, Site

if TYPE_CHECKING:
    from graphopt._inspect import Inspection
    from graphopt.reporting import Report


def render(seen: Inspection) -> str:
    """The whole inspection."""
    found, report = seen.captured, seen.report
    lines = [seen.title, f"target {seen.target}   device {found.device}" + (
        f", because the meta device does not do: {found.device_reason}" if found.device_reason else "")]
    if found.device == "cpu" and not found.executed:
        lines.append("the graphs were not executed: values that Python reads between graphs are zeros")
    for i, graph in enumerate(found.graphs):
        record = graph.record
        before, after = (record.passes[0].nodes_before, record.passes[-1].nodes_after) if record.passes else (0, 0)
        lines.append(f"graph {i}   nodes {before} -> {after}   passes {', '.join(p.name for p in record.passes)}"
                     + (f"   ran {record.calls} times" if record.calls > 1 else ""))
        lines += [f"  note: {n}" for n in record.notes]
    lines += breaks(found.breaks)
    lines.append("")
    for kind in ("modulate", "gate"):
        counts = [f"{report.count(kind)} {kind} sites"]
        counts += [f"{report.count(kind, w)} {w}" for w in ("rewritten", "declined") if report.count(kind, w)]
        run = report.count(kind, executed=True)
        counts += [f"{run} in one forward, graphs as often as they ran"] if run > report.count(kind) else []
        lines.append(", ".join(counts))
    for group in site_groups(report.sites):
        lines += site_line(group)
    rejects = reject_groups(report.rejects)
    if rejects:
        lines += ["", f"left alone: {len(report.rejects)}"]
    for left in rejects:
        r = left[0]
        lines.append(f"  {len(left):4d} {joined(g.fqn for g in left)}  rule {r.rule}")
        lines.append(f"       {r.reason}" + (f"  ({short(r.where)})" if r.where else ""))
    misses = miss_groups(report.near_misses)
    if misses:
        lines += ["", f"near misses: {len(report.near_misses)} norms and gated sums that are no site"]
    for near in misses:
        m = near[0]
        lines.append(f"  {len(near):4d} no {m.kind:8} {joined(g.fqn for g in near)}")
        lines.append(f"       {m.reason}" + (f"  ({short(m.where)})" if m.where else ""))
    lines += kernels(report)
    return "\n".join(lines)


def breaks(found: list[tuple[str, str | None]]) -> list[str]:
    """Graph breaks, equal ones once."""
    counts: dict[tuple[str, str | None], int] = {}
    for b in found:
        counts[b] = counts.get(b, 0) + 1
    return [f"graph break{f' (x{n})' if n > 1 else ''}: {reason}" + (f"  ({short(where)})" if where else "")
            for (reason, where), n in counts.items()]


def site_groups(sites: Iterable[Site]) -> list[list[Site]]:
    """Sites that differ in nothing but the number of their block."""
    groups: dict[Any, list[Site]] = {}
    for s in sites:
        key = (s.kind, s.rule, s.status, s.reason, s.dtype, s.shape, s.where, relative(s.fqn))
        groups.setdefault(key, []).append(s)
    return list(groups.values())


def reject_groups(rejects: Iterable[Reject]) -> list[list[Reject]]:
    """Rejects that differ in nothing but the number of their block."""
    groups: dict[Any, list[Reject]] = {}
    for r in rejects:
        groups.setdefault((r.rule, bare(r.reason), r.where, relative(r.fqn)), []).append(r)
    return list(groups.values())


def miss_groups(misses: Iterable[NearMiss]) -> list[list[NearMiss]]:
    """Near misses that differ in nothing but the number of their block."""
    groups: dict[Any, list[NearMiss]] = {}
    for m in misses:
        groups.setdefault((m.kind, bare(m.reason), m.where, relative(m.fqn)), []).append(m)
    return list(groups.values())


def bare(reason: str) -> str:
    """A reason without the running numbers of nodes and blocks."""
    return re.sub(r"(?<=[._])\d+\b", "#", reason)


def site_line(group: list[Site]) -> list[str]:
    """One group of equal sites."""
    s = group[0]
    size = ", ".join(map(str, s.shape))
    lines = [f"  {len(group):4d} {s.kind:8} {s.status:9} {joined(g.fqn for g in group)}",
             f"       {s.dtype}[{size}]  rule {s.rule}" + (f"  {short(s.where)}" if s.where else "")]
    if s.reason:
        lines.append(f"       {s.reason}")
    if s.predicted:
        lines.append(f"       predicted {s.predicted.graphopt_us:.0f} us a step, "
                     f"{s.predicted.inductor_us:.0f} us left to Inductor")
    return lines


def kernel_groups(found: Iterable[Kernel]) -> list[list[Kernel]]:
    """Kernels of one operator, direction and source."""
    groups: dict[Any, list[Kernel]] = {}
    for k in found:
        groups.setdefault((k.operator, k.direction, k.sources), []).append(k)
    return list(groups.values())


def kernels_run(report: Report, executed: bool = True) -> list[tuple[Kernel, int]]:
    """The kernels, each with how often its graph ran in the forward that was captured (`executed`; else once)."""
    return [(k, max(1, g.calls) if executed else 1) for g in report.graphs for p in g.passes for k in p.kernels]


def traffic(kernels: Iterable[tuple[Kernel, int]]) -> tuple[float, float]:
    """Bytes of kernels that run so often: fused, and op by op."""
    moved = [(k.traffic, n) for k, n in kernels if k.traffic]
    return sum(t.fused * n for t, n in moved), sum(t.op_by_op * n for t, n in moved)


def kernels(report: Report) -> list[str]:
    """Kernels by operator and direction, with the bytes of one forward and backward of the model."""
    found = report.kernels
    if not found:
        return []
    calls = sum(k.direction == "forward" for k in found)
    lines = ["", f"kernels: {calls} calls forward, {len(found) - calls} backward"]
    for group in kernel_groups(found):
        k = group[0]
        line = f"  {len(group):4d} {k.operator} {k.direction}"
        if k.sources:
            line += "".join(f"\n       {f}  {r}" for f, r in zip(k.sources, k.resources))
        lines.append(line)
    fused, eager = traffic(kernels_run(report))
    if eager:
        lines.append(f"predicted memory traffic of these sites: {gib(fused)} a step, {gib(eager)} op by op as in eager "
                     f"mode ({gib(eager - fused)} saved)")
    return lines


def gib(n: float) -> str:
    """Bytes in words."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(n) >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n:.0f} B"
