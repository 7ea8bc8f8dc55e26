"""`graphopt.check`: turn "did anything happen?" into an error when the answer is no."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphopt import _compat, frames
from graphopt.errors import ConfigError, GraphoptError
from graphopt.reporting import Report, describe, report

LISTED = 5  # frames named in one message


class CheckFailed(GraphoptError):
    """A compiled callable has fewer sites than required, or torch never handed it over."""


def check(
    compiled: Any, require: Mapping[str, int] | None = None, what: str = "matched", executed: bool = False
) -> Report:
    """After a first step: raise CheckFailed unless graphopt saw the callable and found at least the required sites.

    compiled: what `torch.compile` returned, or a module compiled in place.
    require: kind of site -> least number, such as {"modulate": 81, "gate": 80}.
    what, executed: as in Report.count.
    Returns the report; its `missed` names the frames of the callable that torch kept from the backend: skipped ones,
    graph breaks with their place, recompile limits.
    """
    if not isinstance(require or {}, Mapping) or not all(isinstance(n, int) for n in (require or {}).values()):
        raise ConfigError(f"require is {require!r}", remedy='give the least number of each kind: {"modulate": 81}')
    owner = _compat.wrapper_of(compiled)
    if owner is None:
        report(compiled)  # raises, saying what to pass
    try:
        found = report(compiled)
    except GraphoptError:
        lost = frames.missed(compiled)
        why = frames.untouched(compiled)
        named = ([] if why is None else [why]) + [m for m in lost if m.ours] + [m for m in lost if not m.ours]
        raise CheckFailed(
            f"torch never called the backend for {describe(compiled)}",
            where="; ".join(map(str, named[:LISTED])) or None,
            remedy="run it once before the check; compile the module before DDP or FSDP wrap it "
            "(model.compile(backend='graphopt')); TORCH_LOGS=graph_breaks names what torch skipped",
        ) from None
    found.missed = [m for m in frames.missed(compiled, found.codes) if m.ours]
    for kind, least in (require or {}).items():
        have = found.count(kind, what, executed)
        if have < least:
            reasons = [str(m) for m in found.missed[:LISTED]]
            reasons += [f"{r.rule} at {r.fqn or '(root)'} ({r.where or r.node}): {r.reason}" for r in found.rejects[:5]]
            reasons += [f"declined at {s.fqn}: {s.reason}" for s in found.declined[:3] if what == "rewritten"]
            raise CheckFailed(
                f"{have} {kind} sites {what}, {least} required",
                where=describe(compiled),
                remedy="; ".join(reasons) or f"no{' other' if have else ''} norm or gate of this model looked like a "
                "site: see print(report)",
            )
    return found
