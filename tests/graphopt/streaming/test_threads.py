"""Threads of a streamed model: on which CPUs they run, and that none outlives what it serves."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from resident import OPTIONS
from tiny_dit import TinyDiT

import graphopt
from graphopt.streaming import attach, numa, optimizer
from graphopt.streaming.link import CpuLink
from graphopt.streaming.store import HostStore
from graphopt.streaming.updates import Updates

TASKS = Path("/proc/self/task")


def threads() -> dict[int, float]:
    """Seconds of CPU time by thread of this process."""
    found = {}
    for task in TASKS.iterdir():
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except (OSError, ValueError):  # it has ended
            continue
    return found


def ends(name: str) -> bool:
    """Wait for the last thread of that name."""
    until = time.monotonic() + 20
    while any(t.name == name for t in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(t.name == name for t in threading.enumerate())


def train(step, opt) -> None:
    step(torch.randn(2, 5, 8), torch.rand(2)).square().mean().backward()
    opt.step()
    opt.flush()
    opt.zero_grad()


@pytest.mark.skipif(not (TASKS / str(os.getpid()) / "schedstat").exists(), reason="Linux tells the time of a thread")
def test_an_optimizer_that_is_gone_leaves_no_threads() -> None:
    """In a process of its own: optimizers of other tests, which something may keep alive, have threads, too."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def one_after_another() -> None:
    """Several in one process, with teams of other sizes and rings of other lengths, as a benchmark makes them."""
    model = graphopt.stream(TinyDiT(), "cpu", resident=[])
    step = torch.compile(model, backend="graphopt", options=OPTIONS)
    opt = graphopt.HostAdamW(model.parameters(), kernel="torch")
    train(step, opt)  # what torch starts for itself stays
    del opt
    gc.collect()
    assert ends("graphopt-adamw")
    here = set(threads())
    for settings in (dict(threads=3), dict(threads=5), dict(threads=2, update="priority"), dict(threads=4)):
        opt = graphopt.HostAdamW(model.parameters(), kernel="cpp", **settings)
        attach.engine_of(model).set_slots(settings["threads"])
        train(step, opt)
        before = threads()
        assert len(before) >= len(here) + settings["threads"], "the optimizer's thread and its team"
        time.sleep(0.5)
        assert all(s - before[t] < 0.25 for t, s in threads().items() if t in set(before) - here), "idle ones sleep"
        del opt
        gc.collect()
        assert ends("graphopt-adamw")
        until = time.monotonic() + 10
        while len(threads()) > len(here) and time.monotonic() < until:
            time.sleep(0.05)
        assert len(threads()) <= len(here), settings


def test_as_many_threads_as_asked_for_have_a_cpu_each(monkeypatch, tmp_path) -> None:
    """15 threads on 16 CPUs were bound to those that the default uses."""
    monkeypatch.setattr(numa, "SYS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    bound: list[list[int]] = []
    monkeypatch.setattr(numa, "bind", bound.append)
    link, store = CpuLink(), HostStore([], pin=False)
    link.device = torch.device("cuda", 0)
    for asked in (None, 8, 13, 15, 16, 20):
        pool = Updates(store, link, {}, lambda pieces: None, asked)
        pool.call(lambda: None)
        pool.drain()
    assert [len(cpus) for cpus in bound] == [14, 14, 14, 15, 16, 16]

    asked_for = []

    class Noted(Updates):
        def __init__(self, *args) -> None:
            asked_for.append(args[4])
            super().__init__(*args)

    monkeypatch.setattr(optimizer, "Updates", Noted)
    model = graphopt.stream(TinyDiT(), "cpu", resident=[])
    opt = graphopt.HostAdamW(model.parameters(), kernel="torch", threads=3)
    assert asked_for == [3]
    del opt


if __name__ == "__main__":
    one_after_another()
