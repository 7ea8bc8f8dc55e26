"""Which CPUs and which memory are near a GPU: read from /sys, once; a box with one node has nothing to choose."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from pathlib import Path

import torch

log = logging.getLogger(__name__)
SYS = Path("/sys")
PREFERRED = 1  # mbind's policy: this node first, others when it is full
MBIND = {"x86_64": 237, "aarch64": 235}
_warned = False


def node_of(device: torch.device) -> int | None:
    """The NUMA node a GPU hangs at; None on a box with one node, for a CPU, or where it is unknown (one warning)."""
    if device.type != "cuda" or len(nodes()) < 2:
        return None
    try:
        p = torch.cuda.get_device_properties(device)
        name = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
        node = int((SYS / "bus/pci/devices" / name / "numa_node").read_text())
    except (OSError, ValueError, AttributeError) as error:
        _unknown(f"the NUMA node of {device} cannot be read ({error})")
        return None
    if node not in nodes():
        _unknown(f"the system names no NUMA node for {device} ({node})")
        return None
    return node


def nodes() -> dict[int, frozenset[int]]:
    """Node -> its CPUs."""
    found = {}
    for folder in sorted((SYS / "devices/system/node").glob("node[0-9]*")):
        try:
            found[int(folder.name[4:])] = _cpus((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
    return found


def cpus_near(node: int | None) -> list[int]:
    """The CPUs this process may use, of that node if there are any of it."""
    mine = os.sched_getaffinity(0)
    near = mine & nodes().get(node, frozenset()) if node is not None else mine
    return sorted(near or mine)


def pool_cpus(device: torch.device, threads: int | None = None) -> list[int]:
    """The CPUs of the optimizer's threads: those near a device but for the first cores.

    These stay for the threads that launch kernels and queue copies: an optimizer thread that shares a core with one of
    them slows the launches down and holds up its whole team.  One in eight is spared, two to four of them: 14 threads
    were faster than 12 on 16 CPUs, 28 are measured on 32.  CPUs that are threads of one core are spared together.
    threads: how many threads there will be; fewer cores are spared where they would share CPUs with one another.
    """
    near = cpus_near(node_of(device))
    spare = max(2, min(4, len(near) // 8)) if len(near) > 2 else 0
    spared: set[int] = set()
    for cpu in near:
        more = spared | siblings(cpu)
        if len(spared) < spare and len(set(near) - more) >= (threads or 1):
            spared = more
    return [c for c in near if c not in spared]


def siblings(cpu: int) -> frozenset[int]:
    """The CPUs that share a core with this one (itself among them); only itself where the system does not say."""
    try:
        return _cpus((SYS / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()) | {cpu}
    except (OSError, ValueError):
        return frozenset({cpu})


def bind(cpus: list[int]) -> None:
    """Let the calling thread, and threads that it starts, run on these CPUs only; anywhere if the kernel refuses (one
    warning)."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:  # the control group's CPUs have changed, or the container may not ask
        _unknown(f"the optimizer's threads cannot be bound to {len(cpus)} CPUs ({error})")


def prefer(address: int, nbytes: int, node: int | None) -> None:
    """Ask that untouched pages come from a node; memory stays where the kernel puts it if it refuses (one warning)."""
    number = MBIND.get(platform.machine())
    if node is None or number is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << node % 64
    code = libc.syscall(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_int(PREFERRED), mask,
        ctypes.c_ulong(1024), ctypes.c_uint(0))
    if code != 0:
        _unknown(f"host memory cannot be placed on NUMA node {node} (errno {ctypes.get_errno()})")


def _cpus(text: str) -> frozenset[int]:
    """A list such as "0-3,8,10-11"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _unknown(what: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        log.warning("graphopt: %s: host memory and the optimizer's threads are not bound to a node", what)
