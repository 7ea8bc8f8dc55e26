"""Ranks compare what they are about to run, through the job's key-value store.

Not a collective: a rank that failed to read its plan still reports, and one that is gone is named after a time limit,
where a collective would hang until the process group's.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from graphopt import _compat
from graphopt.errors import PlanInfeasible

_round = itertools.count()  # every rank makes the same loaders in the same order


def world() -> tuple[int, int] | None:
    """(rank, world size) of the process group, None without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size()


def agree(facts: Callable[[], dict[str, Any]], *, timeout_s: float = 600.0) -> None:
    """Raise the same error on every rank unless all ranks' facts are equal.

    Args:
        facts: makes this rank's facts (JSON); what it raises is reported to all ranks. "rank" must differ over ranks,
            everything else must be equal.
        timeout_s: how long to wait for a rank that does not report.

    Raises:
        PlanInfeasible: on all ranks, naming the first rank that differs or failed. The rank that failed raises its
            own error.
    """
    here = world()
    if here is None or here[1] == 1:
        facts()
        return
    rank, size = here
    own: Exception | None = None
    try:
        report: dict[str, Any] = {"facts": facts()}
    except Exception as e:  # whatever it is, the others must not wait for this rank
        own, report = e, {"error": f"{type(e).__name__}: {e}"}
    store, key = _compat.default_store(), f"graphopt/plan/{next(_round)}"
    limit = timedelta(seconds=timeout_s)
    store.set(f"{key}/{rank}", json.dumps(report))
    if rank == 0:
        verdict = _judge(store, key, size, limit)
        store.set(f"{key}/verdict", verdict)
    else:
        verdict = _read(store, f"{key}/verdict", limit)
        store.add(f"{key}/heard", 1)
    if verdict and rank == 0:
        # The store may live in this process: it stays until the others have heard, a while.
        end = time.monotonic() + 3
        while store.add(f"{key}/heard", 0) < size - 1 and time.monotonic() < end:
            time.sleep(0.05)
    if own is not None:
        raise own
    if verdict:
        remedy = "give every rank the same plan and data set"
        raise PlanInfeasible(verdict, where=f"rank {rank} of {size}", remedy=remedy)


def _read(store: Any, key: str, limit: timedelta) -> str:
    """A value of the store, waited for."""
    try:
        store.wait([key], limit)
    except (RuntimeError, dist.DistError) as e:
        return f"rank 0 has not compared the plans in {limit.total_seconds():g} s ({type(e).__name__}): is it alive?"
    return store.get(key).decode()


def _judge(store: Any, key: str, size: int, limit: timedelta) -> str:
    """What is wrong, in words; empty if nothing."""
    keys = [f"{key}/{r}" for r in range(size)]
    try:
        store.wait(keys, limit)
    except (RuntimeError, dist.DistError):
        late = [str(r) for r, k in enumerate(keys) if not store.check([k])]
        shown = ", ".join(late[:8]) + (", ..." if len(late) > 8 else "")
        return f"rank {shown} has not reported its plan in {limit.total_seconds():g} s"
    reports = [json.loads(store.get(k)) for k in keys]
    for r, report in enumerate(reports):
        if "error" in report:
            return f"rank {r} cannot run its plan: {report['error']}"
    first = reports[0]["facts"]
    seen: dict[int, int] = {}
    for r, facts in enumerate(x["facts"] for x in reports):
        for name in sorted({*first, *facts} - {"rank"}):
            if first.get(name) != facts.get(name):
                return f"rank {r} has another {name} than rank 0: {facts.get(name)!r} instead of {first.get(name)!r}"
        if facts["rank"] in seen:
            return f"ranks {seen[facts['rank']]} and {r} both run the plan's rank {facts['rank']}"
        seen[facts["rank"]] = r
    return ""
