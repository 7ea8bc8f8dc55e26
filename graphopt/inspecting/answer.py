"""Why a module was or was not rewritten, in words."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from graphopt.errors import ConfigError
from graphopt.inspecting.capture import Captured
from graphopt.inspecting.nodes import short
from graphopt.passes import pipeline, source
from graphopt.passes.record import NearMiss, Reject, Site


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
    entries += [covered_lines(n, s) for s in found.report.sites for n in s.norms if within(n, fqn) and n != s.fqn]
    entries += [miss_lines(m) for m in found.report.near_misses if within(m.fqn, fqn)]
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


def covered_lines(norm: str, site: Site) -> list[str]:
    """A norm that belongs to a site of another module, such as the gate in front of it."""
    kernel = "computed in the kernel of" if site.status == "rewritten" else "part of"
    return [f"{norm}: {kernel} the {site.kind} of {site.fqn or '(root)'}, {site.status} by rule {site.rule}",
            *([f"  reason: {site.reason}"] if site.reason else [])]


def miss_lines(miss: NearMiss) -> list[str]:
    """A near miss in words."""
    place = f" ({short(miss.where)})" if miss.where else ""
    return [f"{miss.fqn or '(root)'}: no {miss.kind}{place}", f"  reason: {miss.reason}"]
