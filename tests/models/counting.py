"""What the matcher finds in a model of the zoo, held against the oracle's count, site by site."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import oracle
import torch
import zoo

from graphopt.passes import canonical, catalogue, near_miss, ops_view, pipeline, rewrite


@dataclass
class Count:
    """Sites the oracle counts (wanted), those of them that were matched, what else was matched, reasons of the rest."""

    wanted: int = 0
    matched: int = 0
    extra: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    unexplained: list[str] = field(default_factory=list)
    rules: dict[str, int] = field(default_factory=dict)


def graphs(gm: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """A graph and those nested in it."""
    yield from pipeline.nested(gm)


def count(gm: torch.fx.GraphModule, into: Count) -> None:
    """Add one captured graph."""
    for g in graphs(gm):
        report = oracle.count(g)
        wanted = {(kind, s.node) for kind, sites in (("modulate", report.modulates), ("gate", report.gates)) for s in sites}
        if canonical.out_of_place(g):
            raise AssertionError("an in-place chain: the oracle counted another graph")
        found = rewrite.find(g, catalogue.RULES)
        got = set()
        for match in found.matches:
            into.rules[match.rule.name] = into.rules.get(match.rule.name, 0) + 1
            for kind, node in match.rule.sites(match):
                # the oracle names the last sum or product, a site may end in the cast behind it
                while (kind, node.name) not in wanted and ops_view.canonical(node) == "cast":
                    node = node.args[0]
                if (kind, node.name) in got:
                    into.extra.append(f"{kind} {node.name} twice")
                got.add((kind, node.name))
        misses = {m.node: m.reason for m in near_miss.explain(g, found)}
        reasons = misses | {r.node: r.reason for r in found.rejects}
        into.wanted += len(wanted)
        into.matched += len(wanted & got)
        into.extra += [f"{kind} {node}" for kind, node in sorted(got - wanted)]
        into.missing |= {f"{kind} {node}": reasons.get(node, "") for kind, node in wanted - got}
        covered = {n for m in found.matches for n in m.core}
        covered |= {n for m in found.matches for name in ("norm", "branch_norm") if (n := m.get(name)) is not None}
        norms = oracle.Oracle(g)
        into.unexplained += [n.name for n in norms.find_norms() if n not in covered and n.name not in misses]


def of_model(name: str, dtype: torch.dtype, dynamic: bool) -> Count:
    """The count of one zoo entry."""
    model, inputs = zoo.ZOO[name].build(dtype)
    total = Count()
    for graph in zoo.capture(model, inputs, dynamic=dynamic or None):
        count(graph.gm, total)
    return total
