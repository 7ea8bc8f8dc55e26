"""Every kernel against fp64 eager over the whole matrix: fusions, widths, batches, lengths, dtypes, means of 1e3.

    python benchmarks/kernel_matrix.py [--workers 8] [--seconds 600] [--state FILE] [--out FOLDER]
    TRITON_INTERPRET=1 python benchmarks/kernel_matrix.py --workers 1
    python benchmarks/kernel_matrix.py --check --state benchmarks/results/h200/kernel_matrix_cells.jsonl    (no GPU)

A GPU runs the full cross with five seeds, every case twice (the second must give the same bits).  The interpreter
takes 5 to 130 ms for a row, so it runs a covering design with one seed (more where D is small): every pair out of
fusion, width and dtypes meets in one cell at least; every cell has every batch size with 0 and 1 rows, one batch size
with 77 rows and one sign of the mean; every fusion, every width and every pair of dtypes meets every batch size with 77
rows, and each of them, and every batch size, meets 4,095 rows at least once.

A row: fusion, dtypes; cells and the widths missing, runs (compared cases), those measured again, failed, and the
tensor that came nearest to its limit: `worst` is its error divided by the limit (1 is the limit), `worst_at` says
where.

A cell of the state file counts as long as today's code would hand the same to the GPU: `launches` is a digest of every
kernel source, grid, argument, memory layout and tensor op of its cases (_launches.py), made without a GPU. A cell whose
digest changed, or that failed, is run again. `--check` runs nothing and lists such cells. Exit code 1 if a case failed
or a cell is missing.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import queue
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "codegen"), str(ROOT / "tests"), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for a GPU must not start CUDA before workers fork

import _launches  # noqa: E402
import accuracy  # noqa: E402
import conftest  # noqa: E402, F401  (mends the interpreter's rounding)
import torch  # noqa: E402
from _results import commit, save, triton_version  # noqa: E402
from accuracy import DTYPES, poisoned  # noqa: E402
from operator_forms import attributes, operands, plain, sized  # noqa: E402

from graphopt.codegen.form import FUSIONS  # noqa: E402

WIDTHS = (1, 3, 17, 64, 1152, 1536, 2240, 3072, 4096, 5120, 20000)
BATCHES, LENGTHS, MEANS = (1, 2, 3), (0, 1, 77, 4095), (1e3, -1e3)
MEAN_SHAPE = (2, 9)
# what was imported, whatever is checked out later
MADE = dict(commit=commit(), torch=torch.__version__, triton=triton_version())
# a relative error over fewer elements than this scatters (a row of 3 with a small variance outweighs all others): where
# it is outside, it is measured again with more seeds, and judged by them one by one (accuracy.py, `apart`)
FEW, MANY_SEEDS = 2000, 128
# GPU memory of one case in bytes per element of x: eager and ours; of one sample, fp64 eager with its autograd
BYTES, BYTES_FP64 = 130, 130
Cell = tuple[str, int, str, bool]  # fusion, width, dtypes; True: the 4,095 rows of the covering design, apart
Case = tuple[int, int, float]


def cells(full: bool) -> list[Cell]:
    """Fusion, width, dtypes, the longest first; with `full` False a pairwise covering of them, 4,095 rows last."""
    every: list[Cell] = [(f, D, d, False) for D in reversed(WIDTHS) for f in reversed(FUSIONS) for d in DTYPES]
    if full:
        return every
    pairs = [c for c in every if place(c)[2] == (2 * place(c)[0] + place(c)[1]) % len(DTYPES)]
    return pairs + [(*c[:3], True) for c in pairs if place(c)[1] == len(WIDTHS) - 1 - place(c)[0]]


def place(cell: Cell) -> tuple[int, int, int]:
    """The positions of a cell's fusion, width and dtypes."""
    return list(FUSIONS).index(cell[0]), WIDTHS.index(cell[1]), list(DTYPES).index(cell[2])


def cases(cell: Cell, full: bool) -> list[Case]:
    """(B, S, mean of x) to run for a cell; with `full` False the covering design of the module's text."""
    if full:
        return [(B, S, 0.0) for B in BATCHES for S in LENGTHS] + [(*MEAN_SHAPE, mean) for mean in MEANS]
    i, j, k = place(cell)
    if cell[3]:  # one per fusion and per width
        return [(BATCHES[i % 3], 4095, 0.0)]
    turn = i + j + k
    few = [(B, S, 0.0) for B in BATCHES for S in (0, 1)]
    return [*few, (BATCHES[turn % 3], 77, 0.0), (*MEAN_SHAPE, MEANS[turn % 2])]


class Memory:
    """GPU memory shared by the workers: a case waits until what it needs is free."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = multiprocessing.Value("q", total, lock=False)
        self.changed = multiprocessing.Condition()

    def take(self, size: int) -> int:
        """Wait for `size` bytes (or all there are); what was taken."""
        size = min(size, self.total)
        with self.changed:
            self.changed.wait_for(lambda: self.free.value >= size)
            self.free.value -= size
        return size

    def give(self, size: int) -> None:
        """Give bytes back."""
        with self.changed:
            self.free.value += size
            self.changed.notify_all()


def errors(cell: Cell, case: Case, device: str, seeds: int) -> list[accuracy.Measured]:
    """Every output and gradient of one case, over at least so many seeds."""
    fusion, D, dtypes, _ = cell
    form, trials = accuracy.trials_of(plain(fusion), *case[:2], D, dtypes, device, case[2], seeds)
    apart = seeds == MANY_SEEDS  # the same bits twice is known by then
    return accuracy.measure(form, trials, DTYPES[dtypes][0], device == "cuda" and not apart, apart)


def launched(cell: Cell, full: bool) -> str:
    """Digest of everything the cases of a cell hand to the device."""
    fusion, D, dtypes, _ = cell
    place = _launches.INTERPRETER
    if full:
        place = _launches.this_gpu() if torch.cuda.is_available() else _launches.H200
    digest = hashlib.sha256()
    for B, S, mean in cases(cell, full):
        dtype, factors = DTYPES[dtypes]
        form = sized(plain(fusion), (B, S, D))
        t = accuracy.moved(operands(form, dtype, factors, (B, S, D), "meta"), "meta", mean)
        lines = _launches.launches(fusion, t, attributes(form, dtype), place)
        digest.update("\n".join([f"{B} {S} {mean}", *lines, ""]).encode())
    return digest.hexdigest()[:16]


def run_cell(cell: Cell, device: str, memory: Memory) -> dict[str, Any]:
    """One cell: how many cases ran, which failed, and the tensor nearest to its limit."""
    fusion, D, dtypes, long = cell
    gpu = device == "cuda"
    start = time.perf_counter()
    row: dict[str, Any] = dict(fusion=fusion, D=D, dtypes=dtypes, long=long, runs=0, failed=[], worst=0.0, worst_at="")
    for B, S, mean in cases(cell, full=gpu):
        large = gpu and B * S * D > accuracy.LARGE
        taken = memory.take(S * D * (B * BYTES + BYTES_FP64)) if large else 0
        where = f"D={D} B={B} S={S}" + (f" mean={mean:g}" if mean else "")
        try:
            with poisoned():
                found = errors(cell, (B, S, mean), device, 5 if gpu else 0)
                if B * S * D < FEW and any(m.ratio > 1 for m in found):
                    found = errors(cell, (B, S, mean), device, MANY_SEEDS)
                    row["again"] = row.get("again", 0) + 1
                for m in found:
                    if m.ratio > row["worst"]:
                        row |= dict(worst=round(m.ratio, 4), worst_at=f"{where} {m}")
                    if not m.ratio <= 1:
                        row["failed"].append(f"{where} {m}")
        except Exception as error:  # a case that cannot run is a failed case, the others go on
            row["failed"].append(f"{where} {type(error).__name__}: {str(error)[:300]}")
            if "CUDA error" in str(error):
                row["broken"] = True
                break
        finally:
            if large:
                gc.collect()
                torch.cuda.empty_cache()
                memory.give(taken)
        row["runs"] += 1
    return row | dict(seconds=round(time.perf_counter() - start, 2), **MADE)


def work(device: str, wanted: list[Cell], known: dict[Cell, dict[str, Any]], place: Any, end: float, memory: Memory,
         results: Any) -> None:
    """A worker: takes the next cell until none is left; runs it if it is not known as it is today and there is time."""
    torch.set_num_threads(1)
    if device == "cpu":  # torch 2.11 wraps no interpreted kernel; outside a graph there is nothing to wrap
        torch.library.wrap_triton = lambda kernel: kernel
    while True:
        with place.get_lock():
            i, place.value = place.value, place.value + 1
        if i >= len(wanted):
            break
        cell = wanted[i]
        digest, row = launched(cell, device == "cuda"), known.get(cell)
        if row is not None and row.get("launches") == digest and not row["failed"]:
            results.put(row)
            continue
        if time.time() >= end:
            continue
        row = run_cell(cell, device, memory) | {"launches": digest}
        results.put(row)
        if row.pop("broken", False):  # this process's CUDA context is lost
            break
    results.put(None)


def collect(results: Any, workers: list[Any], new: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """Rows as they come; a worker that lost its GPU is replaced, one that died is not waited for."""
    running = len(workers)
    while running:
        try:
            row = results.get(timeout=5)
        except queue.Empty:
            dead = [w for w in workers if not w.is_alive() and w.exitcode]
            for w in dead:
                print(f"a worker died with exit code {w.exitcode}: its cell is missing", flush=True)
                workers.remove(w)
            running -= len(dead)
            continue
        if row is None:
            running -= 1
            continue
        if row.pop("broken", False):
            workers.append(new())
            workers[-1].start()
            running += 1
        yield row


def key(row: dict[str, Any]) -> Cell:
    """The cell of a row of the state."""
    return row["fusion"], row["D"], row["dtypes"], row.get("long", False)


def summary(rows: list[dict[str, Any]], full: bool) -> list[dict[str, Any]]:
    """The state's cells as rows of the result file: one per fusion and pair of dtypes."""
    out = []
    for fusion in FUSIONS:
        for dtypes in DTYPES:
            mine = [r for r in rows if (r["fusion"], r["dtypes"]) == (fusion, dtypes)]
            known = {key(r) for r in mine}
            worst = max(mine, key=lambda r: r["worst"], default={"worst": 0.0, "worst_at": ""})
            out.append(dict(
                fusion=fusion, code=FUSIONS[fusion].code, dtypes=dtypes, design="full" if full else "covering",
                cells=len(mine), runs=sum(r["runs"] for r in mine),
                missing=[f"{c[1]} x 4095 rows" if c[3] else c[1] for c in cells(full)
                         if (c[0], c[2]) == (fusion, dtypes) and c not in known],
                again=sum(r.get("again", 0) for r in mine), failed=[f for r in mine for f in r["failed"]],
                worst=worst["worst"], worst_at=worst["worst_at"],
                made={k: sorted({r[k] for r in mine if r.get(k)}) for k in MADE},
                launches=hashlib.sha256(" ".join(sorted(r["launches"] for r in mine)).encode()).hexdigest()[:16],
                seconds=round(sum(r["seconds"] for r in mine), 1),
            ))
    return out


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a state file; a last line cut short by a kill is passed over."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{path}: half a line is passed over: {line[:80]}", flush=True)
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """One row per cell, in the order of the matrix."""
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(r) + "\n" for r in sorted(rows, key=lambda r: (*place(key(r)), key(r)[3]))))
    os.replace(part, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no cell after this long")
    parser.add_argument("--only", default="", help="cells whose `fusion D dtypes` contains this")
    parser.add_argument("--widths", default="", help="run these widths first, in turns: 20000,64,...")
    parser.add_argument("--narrow-first", action="store_true", help="the shortest cells first")
    parser.add_argument("--check", action="store_true", help="run nothing: which cells are missing or of older kernels")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "kernel_matrix.jsonl")
    parser.add_argument("--memory", type=float, default=60.0, help="GiB of GPU memory for all workers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    full = device == "cuda"
    known = {key(row): row for row in read(args.state)}
    wanted = [c for c in cells(full) if args.only in " ".join(map(str, c))]
    if args.narrow_first:
        wanted = sorted(reversed(wanted), key=lambda c: c[3])
    if args.widths:
        order: dict[Cell, tuple[bool, int]] = {}
        first, turn = list(map(int, args.widths.split(","))), Counter[int]()
        for c in wanted:
            turn[c[1]] += 1
            order[c] = (c[1] not in first, turn[c[1]])
        wanted.sort(key=order.__getitem__)
    print(f"{len(wanted)} cells, {sum(c in known for c in wanted)} of them known, on {device}", flush=True)
    end = 0.0 if args.check else time.time() + args.seconds
    memory = Memory(int(args.memory * 2**30))
    start = multiprocessing.get_context("fork")  # CUDA is not touched before: workers need not import again
    place, results = start.Value("i", 0), start.Queue()
    new = lambda: start.Process(target=work, args=(device, wanted, known, place, end, memory, results), daemon=True)
    workers = [new() for _ in range(min(args.workers, len(wanted)))]
    for w in workers:
        w.start()
    since, current = time.time(), {}
    args.state.parent.mkdir(parents=True, exist_ok=True)
    with args.state.open("a") as state:
        for row in collect(results, workers, new):
            current[key(row)] = row
            if row != known.get(key(row)):
                state.write(json.dumps(row) + "\n")
                state.flush()
            if row["failed"]:
                print("FAILED", row["fusion"], row["D"], row["dtypes"], row["failed"][:3], flush=True)
            if len(current) % 20 == 0:
                print(f"{len(current)} cells, {time.time() - since:.0f} s", flush=True)
    left = [c for c in wanted if c not in current]
    if args.check:
        for c in left:
            print("of older kernels:" if c in known else "missing:", *c[:3], *["4,095 rows"] * c[3])
        print(f"{len(current)} cells are of the current kernels, {len(left)} are not")
        sys.exit(bool(left))
    rest = [c for c in cells(full) if c not in wanted and c in known]  # of other widths: as they were
    write(args.state, [*current.values(), *(known[c] for c in [*left, *rest] if c in known)])
    if args.only:
        current |= {c: known[c] for c in rest if known[c].get("launches") == launched(c, full)}
    table = summary(list(current.values()), full)
    name = "kernel_matrix" if device == "cuda" else "kernel_matrix_interpreter"
    save(name, table, ("fusion", "dtypes"), {}, args.out)
    failed = sum(len(r["failed"]) for r in table)
    missing = sum(len(r["missing"]) for r in table)
    print(f"{sum(r['runs'] for r in table)} runs, {failed} failed, {missing} cells missing, worst "
          f"{max(r['worst'] for r in table)} of the limit", flush=True)
    sys.exit(bool(failed or missing))


if __name__ == "__main__":
    main()
