"""The fake clock, on schedules small enough to do by hand."""

from __future__ import annotations

import pytest

from graphopt.errors import PlanInfeasible
from graphopt.schedule.stream_sim import Task, critical_path, simulate


def test_streams_are_in_order_and_wait() -> None:
    line = simulate([
        Task("a", "upload", 2.0), Task("b", "upload", 3.0), Task("x", "compute", 4.0, ("a",)), Task("y", "compute", 1.0, ("b",)),
    ])
    assert line.start == {"a": 0.0, "b": 2.0, "x": 2.0, "y": 6.0}
    assert line.seconds == 7.0
    assert line.busy("upload") == 5.0
    assert critical_path(line) == ["a", "x", "y"]


def test_the_pool_takes_the_earliest_that_may_start() -> None:
    line = simulate([
        Task("c", "compute", 1.0), Task("first", "cpu", 1.0, ("c",)), Task("second", "cpu", 5.0),
        Task("d", "compute", 0.5, ("c",)), Task("third", "cpu", 1.0, ("d",)),
    ])
    assert line.start["second"] == 0.0
    assert line.start["first"] == 5.0
    assert line.start["third"] == 6.0


def test_the_pool_takes_the_lowest_rank_that_may_start() -> None:
    line = simulate([
        Task("c", "compute", 1.0), Task("high", "cpu", 2.0, ("c",), rank=7), Task("low", "cpu", 2.0, ("c",), rank=1),
        Task("d", "compute", 1.5, ("c",)), Task("lowest", "cpu", 1.0, ("d",), rank=0),
    ])
    assert line.start["low"] == 1.0
    assert line.start["lowest"] == 3.0
    assert line.start["high"] == 4.0


def test_overlaps_and_circles() -> None:
    line = simulate([Task("w", "upload", 2.0, writes=("s",)), Task("r", "compute", 1.0, reads=("s",))])
    assert line.overlaps() == [("w", "r", "s")]
    assert simulate([Task("w", "upload", 2.0, writes=("s",)), Task("r", "compute", 1.0, ("w",), reads=("s",))]).overlaps() == []
    with pytest.raises(PlanInfeasible, match="circle"):
        simulate([Task("a", "x", 1.0, ("b",)), Task("b", "y", 1.0, ("a",))])
