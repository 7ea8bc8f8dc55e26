"""A schedule of transfers, kernels and optimizer work on a fake clock.

Tasks wait for the tasks they name and for the task before them on their stream; the CPU pool takes any task that may
start, the lowest rank first, else the earliest in the list.  The times tell the length of a step, what it waits for,
and whether two uses of one buffer ever overlap.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import networkx as nx

from graphopt.errors import PlanInfeasible

POOL = "cpu"


@dataclass(frozen=True)
class Task:
    """One piece of work.

    seconds: how long it takes.  after: names of tasks it waits for.  reads, writes: buffers it uses.  nbytes: what it
    moves, for accounts.  label, kind: for pictures.  rank: what the pool takes first
    among tasks that may start; None: as they stand.
    """

    name: str
    stream: str
    seconds: float
    after: tuple[str, ...] = ()
    reads: tuple[Hashable, ...] = ()
    writes: tuple[Hashable, ...] = ()
    nbytes: int = 0
    label: str = ""
    kind: str = ""
    rank: int | None = None


@dataclass(frozen=True)
class Timeline:
    """When each task started and ended, in seconds."""

    tasks: tuple[Task, ...]
    start: dict[str, float]
    end: dict[str, float]

    @property
    def seconds(self) -> float:
        """From zero to the end of the last task."""
        return max(self.end.values(), default=0.0)

    def busy(self, stream: str) -> float:
        """Seconds a stream works."""
        return sum(t.seconds for t in self.tasks if t.stream == stream)

    def overlaps(self) -> list[tuple[str, str, Hashable]]:
        """Pairs of tasks that use one buffer at the same time or in the wrong order, one of them writing it."""
        uses: dict[Hashable, list[tuple[Task, bool]]] = {}
        found = []
        for t in self.tasks:  # in the order of the schedule
            for buffer, writes in [*((b, False) for b in t.reads), *((b, True) for b in t.writes)]:
                for other, wrote in uses.get(buffer, ()):
                    if (writes or wrote) and other is not t and self.start[t.name] < self.end[other.name] - 1e-12:
                        found.append((other.name, t.name, buffer))
                uses.setdefault(buffer, []).append((t, writes))
        return found


def dag(tasks: Sequence[Task]) -> nx.DiGraph:
    """Tasks as a graph: edges from what is waited for, the order of streams included (but not the pool's)."""
    graph = nx.DiGraph()
    last: dict[str, str] = {}
    for t in tasks:
        graph.add_node(t.name, seconds=t.seconds, stream=t.stream)
        for a in t.after:
            graph.add_edge(a, t.name)
        if t.stream != POOL:
            if t.stream in last:
                graph.add_edge(last[t.stream], t.name)
            last[t.stream] = t.name
    if not nx.is_directed_acyclic_graph(graph):
        cycle = " -> ".join(a for a, _ in nx.find_cycle(graph))
        raise PlanInfeasible("tasks wait for each other in a circle", where=cycle, remedy="check the schedule's edges")
    return graph


def simulate(tasks: Sequence[Task]) -> Timeline:
    """Run the tasks on the fake clock."""
    graph = dag(tasks)
    order = {t.name: i for i, t in enumerate(tasks)}
    by_name = {t.name: t for t in tasks}
    missing = {t.name: graph.in_degree(t.name) for t in tasks}
    ready_at = dict.fromkeys(order, 0.0)
    start: dict[str, float] = {}
    end: dict[str, float] = {}
    events: list[tuple[float, int, str]] = []  # when, order, name: a task may start
    pool_free = 0.0
    waiting: list[tuple[int, int, str]] = []

    def begin(name: str, at: float) -> None:
        start[name], end[name] = at, at + by_name[name].seconds

    def finish(name: str) -> None:
        for other in graph.successors(name):
            missing[other] -= 1
            ready_at[other] = max(ready_at[other], end[name])
            if not missing[other]:
                heapq.heappush(events, (ready_at[other], order[other], other))

    for t in tasks:
        if not missing[t.name]:
            heapq.heappush(events, (0.0, order[t.name], t.name))
    while events or waiting:
        if waiting and (not events or pool_free < events[0][0]):
            _, _, name = heapq.heappop(waiting)
            begin(name, max(pool_free, ready_at[name]))
            pool_free = end[name]
            finish(name)
            continue
        now, i, name = heapq.heappop(events)
        if by_name[name].stream == POOL:
            pool_free = max(pool_free, now) if not waiting else pool_free
            rank = by_name[name].rank
            heapq.heappush(waiting, (i if rank is None else rank, i, name))
            continue
        begin(name, now)
        finish(name)
    return Timeline(tuple(tasks), start, end)


def critical_path(timeline: Timeline) -> list[str]:
    """The chain of tasks that ends last, first to last: each one waited for the end of the one before."""
    graph = dag(timeline.tasks)
    if not timeline.end:
        return []
    name = max(timeline.end, key=lambda n: timeline.end[n])
    path = [name]
    while True:
        before = [p for p in graph.predecessors(name) if timeline.end[p] >= timeline.start[name] - 1e-12]
        if not before:
            return path[::-1]
        name = max(before, key=lambda n: timeline.end[n])
        path.append(name)
