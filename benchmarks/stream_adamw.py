"""The CPU optimizer's kernel against what memory allows and against torch's, interleaved in one process.

    python benchmarks/stream_adamw.py [--elements 46000000] [--threads 8,14,30] [--seconds 4]

Rates in GB/s of the bytes each kernel needs: read-modify-write of three fp32 arrays (24 B per element; the ceiling),
split master (26), fp32 master (28), torch's fused AdamW with the casts it needs (28 useful).  stall_ms: the longest
time the main thread stood still while a kernel ran beside it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import threading
import time
from pathlib import Path

import torch
from _results import save

from graphopt.codegen import adamw_cpp
from graphopt.codegen.adamw import Hyper, Piece, split

HYPER = Hyper(1e-4, 0.9, 0.999, 1e-8, 0.01, 3)


class Work:
    """Two layers' state, so that no cache holds it; `run` names a kernel."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.layers = []
        for _ in range(2):
            master = torch.randn(n) * 0.02
            high, rest = split(master)
            self.layers.append(dict(master=master, high=high, rest=rest, g=(torch.randn(n) * 1e-3).bfloat16(),
                                    m=torch.zeros(n), v=torch.zeros(n), m2=torch.zeros(n), v2=torch.zeros(n)))
        self.g32 = torch.empty(n)
        self.library = adamw_cpp.library()
        self.kernels = {}

    def run(self, kernel: str, threads: int) -> float:
        """GB/s of one pass over both layers."""
        start = time.perf_counter()
        for x in self.layers:
            if kernel == "sweep":
                pointers = [ctypes.c_void_p(x[k].data_ptr()) for k in ("m2", "v2", "master")]
                sizes = ctypes.c_int64(self.n), ctypes.c_int64(adamw_cpp.CHUNK), ctypes.c_int(threads)
                self.library.sweep(*pointers, *sizes)
            elif kernel == "torch":
                torch.set_num_threads(threads)
                self.g32.copy_(x["g"])
                torch._fused_adamw_(
                    [x["master"]], [self.g32], [x["m2"]], [x["v2"]], [], [torch.tensor(3.0)], amsgrad=False, lr=1e-4,
                    beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, maximize=False)
                x["high"].copy_(x["master"])
            else:
                update = self.kernels.setdefault(threads, None) or adamw_cpp.load(threads)
                self.kernels[threads] = update
                weight = (x["high"], x["rest"]) if kernel == "split" else (x["master"], None)
                update([Piece(*weight, x["g"], x["m"], x["v"], HYPER)])
        nbytes = {"sweep": 24, "split": 26, "fp32": 28, "torch": 28}[kernel]
        return 2 * nbytes * self.n / (time.perf_counter() - start) / 1e9


def stall(work: Work, threads: int) -> float:
    """The longest pause of the main thread, ms, while the kernel runs in another thread."""
    thread = threading.Thread(target=lambda: [work.run("split", threads) for _ in range(3)])
    thread.start()
    longest, last = 0.0, time.perf_counter()
    while thread.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return 1e3 * longest


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--elements", type=int, default=46_000_000)
    cores = len(os.sched_getaffinity(0))
    p.add_argument("--threads", default=",".join(str(t) for t in sorted({max(1, cores // 2), max(1, cores - 2)})))
    p.add_argument("--seconds", type=float, default=4.0, help="of each number of threads")
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    work = Work(a.elements)
    rows = []
    for threads in map(int, a.threads.split(",")):
        found: dict[str, list[float]] = {k: [] for k in ("sweep", "split", "fp32", "torch")}
        until = time.perf_counter() + a.seconds
        rounds = 0
        while time.perf_counter() < until or rounds < 3:
            for kernel, rates in found.items():
                rates.append(work.run(kernel, threads))
            rounds += 1
        gb = {k: statistics.median(v[1:]) for k, v in found.items()}
        row = dict(kernel="adamw", isa=adamw_cpp.instruction_set(), threads=threads, elements=a.elements, gb_per_s=gb,
                   of_ceiling=gb["split"] / gb["sweep"], times_torch=(gb["split"] / 26) / (gb["torch"] / 28),
                   stall_ms=stall(work, threads))
        print(row, flush=True)
        rows.append(row)
    save("stream_adamw", rows, ("kernel", "threads", "elements"), {}, a.out)


if __name__ == "__main__":
    main()
