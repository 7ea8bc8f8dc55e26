"""Host memory and NUMA: sizes, pinning that is refused, nodes that can or cannot be read."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from graphopt.streaming import attach, memory, numa
from graphopt.streaming.link import CpuLink
from graphopt.streaming.store import HostStore
from graphopt.streaming.updates import Updates


class Runtime:
    """A CUDA runtime that registers memory, or refuses after so many times."""

    def __init__(self, refuse_after=0) -> None:
        self.left, self.registered, self.ended = refuse_after, [], []

    def __call__(self):
        return self

    def cudaHostRegister(self, address, nbytes, flags):
        if self.left == 0:
            return 2
        self.left -= 1
        self.registered.append((address, nbytes))
        return 0

    def cudaHostUnregister(self, address):
        self.ended.append(address)


def test_refused_pinning_stays_pageable_with_one_warning(monkeypatch, caplog) -> None:
    monkeypatch.setattr(memory, "_warned", False)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime())
    with caplog.at_level("WARNING"):
        arena = memory.Arena(pin=True)
        a, b = arena.allocate(5000), arena.allocate(70)
    assert caplog.text.count("it stays pageable") == 1
    assert "ulimit -l" in caplog.text
    a.fill_(3)
    assert a.numel() == 5000
    assert b.sum() == 0
    assert arena.nbytes == 3 * memory.PAGE


def test_registration_is_in_pieces_and_undone_when_one_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(memory, "PIECE", memory.PAGE)
    monkeypatch.setattr(memory, "_warned", True)
    runtime = Runtime(refuse_after=2)
    monkeypatch.setattr(torch.cuda, "cudart", runtime)
    arena = memory.Arena(pin=True)
    whole = arena.allocate(3 * memory.PAGE)
    assert [n for _, n in runtime.registered] == [memory.PAGE] * 2
    assert runtime.ended == [a for a, _ in runtime.registered], "nothing is half pinned"
    runtime.left = 3
    again = arena.allocate(2 * memory.PAGE + 1)
    pinned = [a for a, _ in runtime.registered[2:]]
    assert pinned == [again.data_ptr() + i * memory.PAGE for i in range(3)]
    assert whole.data_ptr() not in pinned
    del arena
    assert sorted(runtime.ended[2:]) == sorted(pinned), "registrations end with the arena"


@pytest.mark.parametrize("pin", [True, False])
def test_forked_workers_do_not_copy_the_store(pin, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", Runtime(refuse_after=9))
    arena = memory.Arena(pin)
    buffers = [arena.allocate(3 * memory.PAGE, pin=pinned) for pinned in (True, False)]  # weights, and moments
    for b in buffers:
        b.fill_(1)

    def mapped() -> int:
        ranges = [[int(x, 16) for x in line.split()[0].split("-")] for line in Path("/proc/self/maps").read_text().splitlines()]
        return sum(any(a <= b.data_ptr() < z for a, z in ranges) for b in buffers)

    assert mapped() == 2
    child = os.fork()
    if child == 0:
        os._exit(mapped())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if pin else 2)
    assert all(b.sum() == 3 * memory.PAGE for b in buffers)


def test_the_control_group_counts(monkeypatch) -> None:
    have = memory.available()
    assert 0 < have <= int(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    for n, cpus in ((0, "0-1"), (1, "2,3,100-101")):
        folder = tmp_path / f"devices/system/node/node{n}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    device = tmp_path / "bus/pci/devices/0000:4c:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    monkeypatch.setattr(numa, "SYS", tmp_path)
    monkeypatch.setattr(numa, "_warned", False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: type("P", (), dict(
        pci_domain_id=0, pci_bus_id=0x4C, pci_device_id=0)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    return device / "numa_node"


def test_the_gpus_node(two_nodes, caplog) -> None:
    assert numa.nodes() == {0: frozenset({0, 1}), 1: frozenset({2, 3, 100, 101})}
    gpu = torch.device("cuda", 0)
    assert numa.node_of(gpu) == 1
    assert numa.cpus_near(1) == [2, 3]
    assert numa.cpus_near(None) == [0, 1, 2, 3]
    assert numa.node_of(torch.device("cpu")) is None
    with caplog.at_level("WARNING"):
        for unreadable in ("-1\n", "seven\n", None):
            two_nodes.unlink() if unreadable is None else two_nodes.write_text(unreadable)
            assert numa.node_of(gpu) is None
    assert caplog.text.count("not bound to a node") == 1


def test_memory_that_cannot_be_placed_is_used_as_it_is(monkeypatch, caplog) -> None:
    monkeypatch.setattr(numa, "_warned", False)
    arena = memory.Arena(pin=False, node=900)  # no such node
    with caplog.at_level("WARNING"):
        a = arena.allocate(100)
        arena.allocate(100)
    assert a.fill_(1).sum() == 100
    assert caplog.text.count("cannot be placed") == 1


def test_memory_is_placed(caplog, monkeypatch) -> None:
    monkeypatch.setattr(numa, "_warned", False)
    node = next(iter(numa.nodes()), None)
    with caplog.at_level("WARNING"):
        assert memory.Arena(pin=False, node=node).allocate(100).sum() == 0


def test_threads_that_cannot_be_bound_work_anywhere(monkeypatch, caplog) -> None:
    """A thread that died of it would leave everybody waiting."""

    def refuse(pid, cpus):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(numa, "_warned", False)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    link, store, done = CpuLink(), HostStore([], pin=False), []
    link.device = torch.device("cuda", 0)  # a pool of its own CPUs
    with caplog.at_level("WARNING"):
        pool = Updates(store, link, {}, lambda pieces: None)
        pool.call(lambda: done.append(1))
        for _ in range(100):
            if pool._busy == 0:
                break
            time.sleep(0.1)
    assert done == [1]
    assert caplog.text.count("cannot be bound") == 1


def test_the_pool_spares_whole_cores(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(numa, "SYS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    assert numa.pool_cpus(torch.device("cpu")) == list(range(4, 32)), "the system names no cores: the first CPUs"
    for cpu in range(32):  # CPU n and n + 16 are one core
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 16},{cpu % 16 + 16}\n")
    assert numa.pool_cpus(torch.device("cpu")) == [*range(2, 16), *range(18, 32)]
    assert numa.pool_cpus(torch.device("cpu"), 12) == numa.pool_cpus(torch.device("cpu"), 28) == [
        *range(2, 16), *range(18, 32)]
    assert numa.pool_cpus(torch.device("cpu"), 29) == [*range(1, 16), *range(17, 32)], "more threads spare fewer cores"
    assert numa.pool_cpus(torch.device("cpu"), 31) == numa.pool_cpus(torch.device("cpu"), 99) == list(range(32))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 16})
    assert numa.pool_cpus(torch.device("cpu")) == [0, 16], "a core is all there is"


@pytest.mark.parametrize(("cpus", "spared"), [(1, 0), (2, 0), (4, 2), (8, 2), (16, 2), (24, 3), (32, 4), (128, 4)])
def test_one_cpu_in_eight_is_spared(cpus: int, spared: int, tmp_path, monkeypatch) -> None:
    """14 threads of 16 CPUs were faster than 12; 28 of 32 are what is measured there."""
    monkeypatch.setattr(numa, "SYS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    assert numa.pool_cpus(torch.device("cpu")) == list(range(spared, cpus))


@pytest.mark.parametrize(("cpus", "free", "first"), [
    (16, 100e9, 4), (32, 100e9, 2), (16, 45e9, 3), (16, 30e9, 2), (16, 15e9, 1), (32, 15e9, 1), (16, 1e9, 0)])
def test_first_layers_that_stay(cpus: int, free: float, first: int, tmp_path, monkeypatch) -> None:
    """Two, four on hosts of few CPUs, as far as weights, gradients and state take a twentieth of the free memory."""
    monkeypatch.setattr(numa, "SYS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free), 0))
    assert attach._first_layers([93_000_000] * 30, torch.device("cuda", 0)) == first
    assert attach._first_layers([93_000_000] * 30, torch.device("cpu")) == 0
