"""Host memory: exact sizes, pinned in pieces where a GPU reads it, on the GPU's NUMA node."""

from __future__ import annotations

import logging
import mmap
import weakref
from pathlib import Path

import torch

from graphopt.errors import StreamError
from graphopt.streaming import numa

log = logging.getLogger(__name__)
PAGE = mmap.PAGESIZE
# one registration of 512 GiB and more fails in current drivers; smaller pieces cost nothing
PIECE = 64 << 30
_warned = False


def available() -> int:
    """Bytes of host memory this process may still take: of the machine, and of its control group."""
    free = 1 << 62
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []:
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(0, free)


def require(needed: int, purpose: str, saved: int = 0) -> None:
    """Raise StreamError unless `needed` bytes fit, less `saved` bytes that are given back on the way."""
    have = available()
    if needed - saved > have:
        raise StreamError(
            f"{purpose} needs {needed / 1e9:.2f} GB of host memory ({needed} bytes), {have / 1e9:.2f} GB are free",
            remedy="see graphopt.stream_plan for the bytes of each part; freeze layers, or use a larger host",
        )


class Arena:
    """Host buffers of exact size; pinned registrations end with the arena."""

    def __init__(self, pin: bool, node: int | None = None) -> None:
        self.pin, self.node = pin, node
        self.nbytes = 0
        self._registered: list[int] = []
        if pin:
            weakref.finalize(self, _unregister, self._registered)

    def allocate(self, nbytes: int, pin: bool = True) -> torch.Tensor:
        """Zeroed uint8 memory of that size (rounded up to a page), pinned if asked and possible.

        A power-of-two caching allocator would take up to twice the bytes.  Where pinning is refused the memory stays
        pageable, with one warning: transfers are then slower and do not overlap.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        size = (nbytes + PAGE - 1) // PAGE * PAGE
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _advise(mapped, "MADV_HUGEPAGE")
        if self.pin:
            # a forked worker of a data loader would copy it: pinned pages at once, others as updates write them
            _advise(mapped, "MADV_DONTFORK")
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        numa.prefer(whole.data_ptr(), size, self.node)
        if self.pin and pin:
            _register(whole, self._registered)
        self.nbytes += size
        return whole[:nbytes]


def _advise(mapped: mmap.mmap, name: str) -> None:
    if not hasattr(mmap, name):
        return
    try:
        mapped.madvise(getattr(mmap, name))
    except OSError as error:  # the kernel was built without huge pages, say: small ones do as well
        log.debug("no %s: %s", name, error)


def _register(whole: torch.Tensor, registered: list[int]) -> None:
    global _warned
    runtime = torch.cuda.cudart()
    done: list[int] = []
    for a in range(0, whole.numel(), PIECE):
        address = whole.data_ptr() + a
        code = int(runtime.cudaHostRegister(address, min(PIECE, whole.numel() - a), 0))
        if code != 0:
            _unregister(done)
            if not _warned:
                _warned = True
                log.warning("graphopt: pinning host memory was refused (CUDA error %d): it stays pageable, so "
                            "transfers do not overlap; raise `ulimit -l`", code)
            return
        done.append(address)
    registered += done


def _unregister(addresses: list[int]) -> None:
    runtime = torch.cuda.cudart()
    for address in addresses:
        runtime.cudaHostUnregister(address)
