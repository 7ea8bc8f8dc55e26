"""The CPU optimizer's loop with prefetches of several distances and with none, interleaved, on the CPUs of an order.

    python benchmarks/stream_adamw_ahead.py [--elements 46000000] [--spared 4,2,1,0]

Rates in GB/s: 26 bytes per element of the split master, 24 of the read-modify-write of three fp32 arrays ("sweep").
One thread per CPU; as many of the first CPUs as `--spared` says are left alone.  Names: ahead0, without prefetches;
ahead512, so many elements ahead, as the loop is; 512w, prefetched to be written; 512/8k, in chunks of 8,192 elements.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import torch
from _results import save

from graphopt.codegen import adamw_cpp
from graphopt.codegen.adamw import Hyper, Piece
from graphopt.streaming import memory, numa

HYPER = Hyper(1e-4, 0.9, 0.999, 1e-8, 0.01, 3)
VARIANTS = ("ahead0", "ahead512", "ahead256", "ahead1024", "ahead512w")
ROUNDS = 7  # the first is left out


def source(name: str) -> str:
    """The loop's code, changed."""
    text = adamw_cpp.source()
    if name == "ahead0":
        for x in "wrgmve":
            text = text.replace(f"fetch({x}, j);", "")
    elif name.endswith("w"):
        text = text.replace("(x + i + AHEAD + k)", "(x + i + AHEAD + k, 1)")
    else:
        text = text.replace("AHEAD = 512", f"AHEAD = {name.removeprefix('ahead')}")
    return text


def build(name: str, folder: Path) -> ctypes.CDLL:
    file, made = folder / f"{name}.cpp", folder / f"{name}.so"
    file.write_text(source(name))
    flags = [*adamw_cpp.FLAGS, *adamw_cpp.ISAS[adamw_cpp.instruction_set()][1], *(["-mprfchw"] * name.endswith("w"))]
    subprocess.run([os.environ.get("CXX", "g++"), *flags, str(file), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


class Work:
    """Two layers' state, so that no cache holds it."""

    def __init__(self, n: int, libraries: dict[str, ctypes.CDLL]) -> None:
        self.n, self.libraries, self.pieces, self.sweeps = n, libraries, [], []
        arena = memory.Arena(torch.cuda.is_available())
        new = lambda dtype: arena.allocate(n * dtype.itemsize, pin=False).view(dtype)
        bf16, f32 = torch.bfloat16, torch.float32
        for _ in range(2):
            w, r, g, m, v, x = (new(d) for d in (bf16, torch.int16, bf16, f32, f32, f32))
            w.uniform_(-0.02, 0.02), g.uniform_(-1e-3, 1e-3)
            for t in (r, m, v, x):
                t.zero_()
            self.pieces.append(Piece(w, r, g, m, v, HYPER))
            self.sweeps.append((m, v, x))

    def run(self, name: str, threads: int, chunk: int) -> float:
        """GB/s of one pass over both layers."""
        start = time.perf_counter()
        for p in self.pieces:
            self.libraries[name].adamw(
                (adamw_cpp._Piece * 1)(adamw_cpp._piece(p, 0)), (adamw_cpp._Hyper * 1)(adamw_cpp._numbers(HYPER)),
                ctypes.c_int64(1), (ctypes.c_int64 * 1)(0), ctypes.c_int64(-(-self.n // chunk)),
                ctypes.c_int64(chunk), ctypes.c_int(threads))
        return 2 * 26 * self.n / (time.perf_counter() - start) / 1e9

    def sweep(self, threads: int) -> float:
        """GB/s of a read-modify-write."""
        start = time.perf_counter()
        for arrays in self.sweeps:
            self.libraries["ahead0"].sweep(*(ctypes.c_void_p(x.data_ptr()) for x in arrays), ctypes.c_int64(self.n),
                                           ctypes.c_int64(adamw_cpp.CHUNK), ctypes.c_int(threads))
        return 2 * 24 * self.n / (time.perf_counter() - start) / 1e9


def measure(work: Work, cpus: list[int], rows: list[dict]) -> None:
    """All cases in turn; in a thread of its own, whose team has these CPUs."""
    numa.bind(cpus)
    threads, size = len(cpus), adamw_cpp.CHUNK
    cases = {**{k: (lambda k=k: work.run(k, threads, size)) for k in VARIANTS}, "sweep": lambda: work.sweep(threads),
             "ahead512/8k": lambda: work.run("ahead512", threads, 8192),
             "ahead512/128k": lambda: work.run("ahead512", threads, 131072)}
    found: dict[str, list[float]] = {k: [] for k in cases}
    for _ in range(ROUNDS):
        for k, case in cases.items():
            found[k].append(case())
    gb = {k: statistics.median(v[1:]) for k, v in found.items()}
    rows.append(dict(isa=adamw_cpp.instruction_set(), threads=threads, elements=work.n, gb_per_s=gb,
                     least={k: min(v[1:]) for k, v in found.items()}, most={k: max(v[1:]) for k, v in found.items()}))
    print(threads, "threads", {k: f"{v:.1f}" for k, v in gb.items()}, flush=True)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--elements", type=int, default=46_000_000)
    p.add_argument("--spared", default="4,2,1,0")
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    cpus, rows = sorted(os.sched_getaffinity(0)), []
    with tempfile.TemporaryDirectory() as folder:
        work = Work(a.elements, {name: build(name, Path(folder)) for name in VARIANTS})
        for spared in map(int, a.spared.split(",")):
            if spared < len(cpus):
                t = threading.Thread(target=measure, args=(work, cpus[spared:], rows))
                t.start()
                t.join()
    save("stream_adamw_ahead", rows, ("threads", "elements"), {}, a.out)


if __name__ == "__main__":
    main()
