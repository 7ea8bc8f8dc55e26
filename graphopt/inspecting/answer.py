"""Why a module was or was not rewritten, in words."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from torch import fx

from graphopt.errors import ConfigError
from graphopt.inspecting.capture import Captured
from graphopt.inspecting.nodes import short
from graphopt.passes import ops_view, pipeline, source
from graphopt.passes.record import Reject, Site

NORMS = ("layer_norm", "rms_norm")


def why(found: Captured, fqn: str) -> str:
    """Every site, reject and norm of a module and of the modules inside it, each with what was done and the reason.

    ConfigError names the nearest modules when there is none of that name.
    """
    known = names(found)
    if fqn not in known:
        close = near(fqn, known)
        raise ConfigError(f"the model has no module {fqn!r}",
                          remedy=f"did you mean {' or '.join(map(repr, close))}?" if close else "see .fqns")
    entries: list[list[str]] = [site_lines(s, found) for s in found.report.sites if within(s.fqn, fqn)]
    entries += [reject_lines(r) for r in found.report.rejects if within(r.fqn, fqn)]
    entries += norm_lines(found, fqn)
    if not entries:
        kind = found.modules.get(fqn, "")
        entries = [[f"{fqn or '(root)'} {kind}: no norm and no gated addition was captured in it"]]
    return "\n".join(line for entry in unique(entries) for line in entry)


def unique(entries: list[list[str]]) -> list[list[str]]:
    """Equal entries once."""
    return [list(e) for e in dict.fromkeys(map(tuple, entries))]


def within(place: str, fqn: str) -> bool:
    """Is a place in a module?"""
    return not fqn or place == fqn or place.startswith(fqn + ".")


def names(found: Captured) -> list[str]:
    """Every FQN that can be asked about: modules, and owners of captured nodes."""
    owners = {source.fqn(n) for g in found.graphs for sub in pipeline.nested(g.before) for n in sub.graph.nodes}
    return sorted({*found.modules, *owners})


def near(word: str, known: Sequence[str]) -> list[str]:
    """The names closest to one nobody knows: same parts first, then by spelling."""
    parts = word.split(".")
    same = [k for k in known if k.split(".")[-1] == parts[-1]] if parts[-1] and not parts[-1].isdigit() else []
    close = difflib.get_close_matches(word, same or list(known), n=3, cutoff=0.3)
    return close or difflib.get_close_matches(word, list(known), n=3, cutoff=0.3)


def site_lines(site: Site, found: Captured) -> list[str]:
    """A site in words."""
    size = ", ".join(map(str, site.shape))
    place = f" ({short(site.where)})" if site.where else ""
    head = f"{site.fqn or '(root)'}: {site.kind} of {site.dtype}[{size}] {site.status} by rule {site.rule}{place}"
    lines = [head]
    if site.reason:
        lines.append(f"  reason: {site.reason}")
    if site.predicted:
        lines.append(f"  predicted {site.predicted.graphopt_us:.0f} us a step here, "
                     f"{site.predicted.inductor_us:.0f} us left to Inductor")
    for kernel in found.report.kernels:
        if site in kernel.sites:
            file = f"  {', '.join(kernel.sources)}" if kernel.sources else ""
            lines.append(f"  {kernel.direction}: {kernel.operator}{file}")
    return lines


def reject_lines(reject: Reject) -> list[str]:
    """A reject in words."""
    place = f" ({short(reject.where)})" if reject.where else ""
    return [f"{reject.fqn or '(root)'}: left alone by rule {reject.rule}{place}", f"  reason: {reject.reason}"]


def norm_lines(found: Captured, fqn: str) -> list[list[str]]:
    """The norms of a module that end in no modulate: inside a kernel of another site, or why nothing was looked for."""
    known = {s.fqn for s in found.report.sites if s.kind == "modulate"} | {r.fqn for r in found.report.rejects}
    inside = {n: k for k in found.report.kernels for n in k.replaced if k.direction == "forward"}
    entries = []
    for graph in found.graphs:
        for sub in pipeline.nested(graph.before):
            for node in sub.graph.nodes:
                place = source.fqn(node)
                if ops_view.canonical(node) not in NORMS or not within(place, fqn) or place in known:
                    continue
                where = f" ({short(source.where(node))})" if source.where(node) else ""
                head = f"{place or '(root)'}: {ops_view.canonical(node)}{where}"
                if node.name in inside:
                    k = inside[node.name]
                    owners = ", ".join(f"the {s.kind} of {s.fqn or '(root)'}" for s in k.sites)
                    entries.append([f"{head} computed inside {k.operator}, with {owners}"])
                    continue
                entries.append([f"{head} left alone", f"  reason: its result is read by {readers(node)}, and not "
                                "multiplied by a factor that depends on an input: no modulate"])
    return entries


def readers(node: fx.Node) -> str:
    """What reads a node, casts looked through."""
    names: dict[str, None] = {}
    todo = list(node.users)
    while todo:
        user = todo.pop(0)
        name = ops_view.canonical(user)
        if name == "cast":
            todo += list(user.users)
            continue
        names[name or str(getattr(user.target, "__name__", user.target))] = None
    return ", ".join(names) or "nothing"
