"""What graphopt did to one compiled callable, over all of its graphs.

A callable has one graph per frame, per graph break and per recompilation.  Its Report grows with each of them.
"""

from __future__ import annotations

import difflib
import json
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from graphopt import _compat
from graphopt.errors import ConfigError, GraphoptError
from graphopt.frames import Missed
from graphopt.passes import user_rules
from graphopt.passes.record import Kernel, NearMiss, PassRecord, Reject, Site
from graphopt.schedule.costmodel import write_whole

VERSION = 1


@dataclass
class GraphRecord:
    """One graph the backend was handed.

    compile_id: torch's name of it (frame/recompilation); attempt: restarts of its frame before it.
    passes: what each pass did.  calls: how often it ran.
    """

    compile_id: str
    passes: list[PassRecord]
    attempt: int = 0
    calls: int = 0
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """The record of this graph as JSON."""
        return json.dumps({"version": VERSION, **asdict(self)})

    @property
    def sites(self) -> list[Site]:
        """Its sites, in graph order."""
        return [s for p in self.passes for s in p.sites]


@dataclass(frozen=True)
class Why:
    """What became of one norm or one gated sum.

    status: "rewritten", "declined" (a site that Inductor does faster), "refused" (a site that could not be replaced) or
    "no site"; rule: which rule, where one matched; reason: why it was not rewritten.
    """

    fqn: str
    kind: str
    node: str
    where: str | None
    status: str
    rule: str | None
    reason: str | None

    def __str__(self) -> str:
        by = f" by {self.rule}" if self.rule and self.status == "rewritten" else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.fqn or '(root)'} ({self.where or self.node}) {self.kind}: {self.status}{by}{reason}"


def _reasons(report: Report) -> Iterator[Why]:
    """All a report knows of norms and gates, one record each; a norm covered by a gate's kernel is listed too."""
    for p in (p for g in report.graphs for p in g.passes):
        for s in p.sites:
            yield Why(s.fqn, s.kind, s.node, s.where, s.status, s.rule, s.reason)
        modulated = {s.fqn for s in p.sites if s.kind == "modulate"}
        for s in p.sites:
            for name in s.norms:
                if name not in modulated:
                    yield Why(name, "norm", s.node, s.where, s.status, s.rule, s.reason)
        for r in p.rejects:
            yield Why(r.fqn, "site", r.node, r.where, "refused", r.rule, r.reason)
        known = {(r.fqn, r.node) for r in p.rejects}
        for m in p.near_misses:
            if (m.fqn, m.node) not in known:
                yield Why(m.fqn, m.kind, m.node, m.where, "no site", None, m.reason)


def _alike(s: Site) -> tuple[Any, ...]:
    """What the sites on one line of a report have in common."""
    return s.kind, s.rule, s.status, s.reason, s.dtype, s.shape


@dataclass
class Report:
    """Everything graphopt did to one compiled callable.

    `missed`: the frames of it that torch kept from the backend, as of the last `graphopt.check`.
    """

    graphs: list[GraphRecord] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)
    codes: set[CodeType] = field(default_factory=set, repr=False)

    def add(self, record: GraphRecord) -> None:
        """Add a graph; those of an earlier attempt at the same frame never ran and are dropped."""
        self.graphs = [
            g for g in self.graphs if g.compile_id != record.compile_id or g.attempt >= record.attempt
        ] + [record]

    @property
    def sites(self) -> list[Site]:
        """All sites, over all graphs."""
        return [s for g in self.graphs for s in g.sites]

    @property
    def rejects(self) -> list[Reject]:
        """Places that looked like a site and were left alone, with the reason."""
        return [r for g in self.graphs for p in g.passes for r in p.rejects]

    @property
    def near_misses(self) -> list[NearMiss]:
        """Norms that are not modulated and sums with a product that are no gate, with the reason of each."""
        return [m for g in self.graphs for p in g.passes for m in p.near_misses]

    @property
    def declined(self) -> list[Site]:
        """Sites left to Inductor because it is predicted to be faster there."""
        return [s for s in self.sites if s.status == "declined"]

    @property
    def kernels(self) -> list[Kernel]:
        """Fused operators, one entry per direction, each with its sites."""
        return [k for g in self.graphs for p in g.passes for k in p.kernels]

    def count(self, kind: str, what: str = "matched", executed: bool = False) -> int:
        """Number of sites of a kind: "modulate", "gate", "rotary", or the name of a registered rule.

        what: "matched" counts rewritten and declined ones, "rewritten" and "declined" one of them.
        executed: count a graph's sites once per call of the graph instead of once.
        """
        known = {"modulate", "gate", "rotary", *(s.kind for s in self.sites)}
        known |= {r.name for r in user_rules.registered()}
        if kind not in known:
            remedy = f"use one of {', '.join(map(repr, sorted(known)))}"
            raise ConfigError(f"unknown kind of site {kind!r}", remedy=remedy)
        if what not in ("matched", "rewritten", "declined"):
            raise ConfigError(f"unknown count {what!r}", remedy="use 'matched', 'rewritten' or 'declined'")
        return sum(
            (g.calls if executed else 1)
            for g in self.graphs for s in g.sites if s.kind == kind and what in ("matched", s.status)
        )

    def why(self, fqn: str) -> list[Why]:
        """What became of the norms and gated sums of one module (or, if it has none of its own, of those inside it).

        fqn: qualified name of a module, such as "blocks.3.norm1"; "" is the root.
        Returns one record per norm and gated sum, in graph order; `print(*report.why(..), sep="\\n")` reads well.
        GraphoptError names the nearest known names when there is none.
        """
        known: dict[str, list[Why]] = {}
        for record in _reasons(self):
            known.setdefault(record.fqn, []).append(record)
        inside = [r for name, records in known.items() if name.startswith(fqn + ".") or not fqn for r in records]
        found = known.get(fqn) or inside
        if not found:
            close = difflib.get_close_matches(fqn, [n for n in known if n], n=5, cutoff=0.4)
            raise GraphoptError(
                f"no norm and no gated sum at {fqn!r}",
                where=self.summary(),
                remedy=f"did you mean {', '.join(map(repr, close))}?" if close else
                f"known are {', '.join(map(repr, sorted(known)[:8]))}" if known else "no graph holds a norm or a gate",
            )
        return found

    def to_json(self, indent: int | None = 1) -> str:
        """The whole report as JSON: version, then graphs in the order they were compiled."""
        graphs, missed = [asdict(g) for g in self.graphs], [asdict(m) for m in self.missed]
        return json.dumps({"version": VERSION, "graphs": graphs, "missed": missed}, indent=indent)

    def to_html(self, path: str | Path | None = None, title: str = "graphopt report") -> str:
        """One self-contained page, also written to `path`.  (`graphopt.inspect(..).to_html` also shows the graphs.)"""
        from graphopt.inspecting import page

        made = page.render(self, title)
        if path is not None:
            write(path, made)
        return made

    def summary(self) -> str:
        """One line."""
        parts = [f"{len(self.graphs)} graph{'s' * (len(self.graphs) != 1)}"]
        for kind in ("modulate", "gate"):
            parts.append(f"{self.count(kind)} {kind} sites ({self.count(kind, 'rewritten')} rewritten)")
        parts.append(f"{len(self.rejects)} rejected")
        return ", ".join(parts)

    def __str__(self) -> str:
        lines = [self.summary(), *(f"not handed over  {m}" for m in self.missed)]
        for i, g in enumerate(self.graphs):
            before, after = (g.passes[0].nodes_before, g.passes[-1].nodes_after) if g.passes else (0, 0)
            lines.append(f"graph {i} [{g.compile_id}]  nodes {before} -> {after}  ran {g.calls} times")
            lines += [f"  note: {n}" for n in g.notes]
            if not g.sites:
                lines.append("  no site: the graph goes through the compiler as it is")
            for group, n in Counter(map(_alike, g.sites)).items():
                kind, rule, status, reason, dtype, shape = group
                first = next(s for s in g.sites if _alike(s) == group)
                size = ",".join(map(str, shape))
                lines.append(f"  {n:4d} {kind:9} {status:9} {rule:19} {dtype}[{size}]  {first.fqn or '(root)'} ..")
                if reason:
                    lines.append(f"       {reason}")
                if first.predicted:
                    lines.append(f"       predicted {first.predicted.graphopt_us:.0f} us a step, "
                                 f"Inductor {first.predicted.inductor_us:.0f} us")
            verified = [c for p in g.passes for c in p.verified]
            if verified:
                closest = max(verified, key=lambda c: c.error / c.limit if c.limit else 0.0)
                lines.append(f"  verified {len(verified)} operators; closest to its limit: {closest}")
            kernels = Counter((k.operator, k.direction) for p in g.passes for k in p.kernels)
            for (operator, direction), n in kernels.items():
                lines.append(f"  {n:4d} kernels   {operator} {direction}")
            rejects = [r for p in g.passes for r in p.rejects]
            for r in rejects[:20]:
                lines.append(f"  left alone  {r.rule} at {r.fqn or '(root)'} ({r.where or r.node}): {r.reason}")
            if len(rejects) > 20:
                lines.append(f"  .. and {len(rejects) - 20} more (see .rejects)")
        return "\n".join(lines)

    def __iter__(self) -> Iterator[GraphRecord]:
        return iter(self.graphs)


# torch's wrapper of a compiled callable -> its report.  The wrapper compares equal to others and does not hash, so
# entries are found by identity; each dies with its wrapper.
_reports: list[tuple[weakref.ref[Any], Report]] = []
_last: Report | None = None


def current() -> Report:
    """The report of the callable that is being compiled now (a new one for a new callable)."""
    global _last
    owner = _compat.calling_wrapper()
    _reports[:] = [(ref, r) for ref, r in _reports if ref() is not None]
    found = next((r for ref, r in _reports if ref() is owner), None) if owner is not None else None
    if found is None:
        found = Report()
        if owner is not None:
            _reports.append((weakref.ref(owner), found))
    code = _compat.compiling_code()
    if code is not None:
        found.codes.add(code)
    _last = found
    return found


def report(compiled: Any) -> Report:
    """The Report over all graphs of what `torch.compile` (or `module.compile`) returned.

    Raises GraphoptError if it was not compiled by graphopt or has not run yet.
    """
    owner = _compat.wrapper_of(compiled)
    if owner is None:
        raise GraphoptError(
            f"{describe(compiled)} was not made by torch.compile",
            remedy="pass what torch.compile(..., backend='graphopt') returned, or the module compiled in place",
        )
    for ref, found in reversed(_reports):
        if ref() is owner:
            return found
    # torch shares compiled code between callables with equal settings, and then calls the backend for the first only
    code = _compat.code_of(compiled)
    for ref, found in reversed(_reports):
        if code is not None and ref() == owner and code in found.codes and _compat.has_compiled_code(code):
            return found
    raise GraphoptError(
        f"torch never called graphopt for {describe(compiled)}",
        remedy="run it once first; `graphopt.check` names the reason if it did run",
    )


def last_report() -> Report:
    """The report of the callable that was compiled last."""
    if _last is None:
        raise GraphoptError("nothing has been compiled by graphopt in this process", remedy="run the model once first")
    return _last


def write(path: str | Path, content: str) -> None:
    """Write a text file whole or not at all; ConfigError if it cannot be written."""
    try:
        write_whole(path, content.encode())
    except OSError as error:
        raise ConfigError(f"the file cannot be written: {error.strerror or error}", where=str(path),
                          remedy="choose a folder that exists and can be written") from error


def describe(compiled: Any) -> str:
    """What a compiled callable is, and where its code stands."""
    inner = getattr(compiled, "_orig_mod", compiled)
    inner = getattr(inner, "_torchdynamo_orig_callable", inner)
    code = _compat.code_of(compiled)
    name = type(inner).__name__ if code is None or hasattr(inner, "forward") else code.co_qualname
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"
