"""The fused AdaLN operators against Inductor (mix-order off), Liger and eager, as whole compiled functions.

    python benchmarks/adaln.py [--shapes 1x32760x1536,...] [--functions F1,F2,F1r,...] [--workers 6] [--out FOLDER]
                 [--systems graphopt,graphopt_two_pass,inductor,inductor_max_autotune,inductor_mix_order,liger,eager]
    python benchmarks/adaln.py --rows 1x4096x3072:F1:graphopt+inductor,...    these rows alone, in this order
    python benchmarks/adaln.py --warm ...                                compile only, so that caches are filled
    python benchmarks/adaln.py --tune [--cases ...] [--seconds 200]      (adaln_tune.py: a table for this GPU)
    python benchmarks/adaln.py --fit | --judge                           (on results that are there: adaln_results.py)

Times are CUDA-graph replays, medians in microseconds.  `roofline` is the floor (bytes that must move over the measured
copy bandwidth) over graphopt's time.  Functions are those of adaln_functions.py.  `inductor_max_autotune` adds
coordinate descent; `inductor_mix_order` is torch's default, whose gradients are wrong (pytorch#193061): it may raise.
Without `--functions` and `--systems` it is the whole table (`in_table`): graphopt and Inductor everywhere, further
rivals and forms where a figure is held against them.  Worker processes compile beside one another; then the GPU is
left to one of them at a time.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from _processes import Child
from _results import copy_tb_per_s, kept_times, save
from _timing import replayed
from adaln_functions import FUNCTIONS, floor_bytes, liger, operands

SHAPES = ("1x75600x5120,1x64000x3072,2x16384x3072,1x32760x1536,8x4096x1152,1x4096x3072,4x4096x2432,4x4096x1536,"
          "2x1024x3072,2x512x3072,1x512x3072,4x333x2432,1x512x1536,1x256x3072,4x256x1152,2x77x3072,1x77x2432,1x64x1152")
SMALL = 300e6  # bytes of one tensor: eager is timed below this only
LARGE = 350e6  # from here on every form is held to its share of the copy
MAIN = 5  # of SHAPES: those of the kernels' table
FUSED = ("F1", "F2", "F2a", "F3", "F4", "F5")  # what the cost model decides on
TWO_PASS = ("1x75600x5120", "1x32760x1536")  # Wan 14B and 1.3B; its compilation is not cached
HELD = 5e9  # bytes of x of all functions that workers hold at once, as a rule
KEYS = ("kernel", "direction", "shape", "dtype", "form")
Item = tuple[str, str, str]


def compiled(code: str, system: str, f):
    """The function as a system runs it; None where it has none."""
    f = fresh(f)
    if system.startswith("graphopt"):
        return torch.compile(f, backend="graphopt", dynamic=False, options={"graphopt.select": "all"})
    if system == "inductor":
        return torch.compile(f, dynamic=False, options={"triton.mix_order_reduction": False})
    if system == "inductor_max_autotune":
        return torch.compile(f, dynamic=False, options={
            "triton.mix_order_reduction": False, "max_autotune": True, "coordinate_descent_tuning": True})
    if system == "inductor_mix_order":
        return torch.compile(f, dynamic=False)
    return liger(code) if system == "liger" else f


def fresh(f):
    """The same function with code of its own: torch.compile counts the graphs of a code object."""
    if isinstance(f, torch.nn.Module):
        module = f
        f = lambda *args: module(*args)
    return FunctionType(f.__code__.replace(), f.__globals__, f.__name__, f.__defaults__, f.__closure__)


class Worker:
    """A process: functions compiled here, by their keys, until they are dropped."""

    def __init__(self) -> None:
        torch._functorch.config.donated_buffer = False
        self.held: dict[Item, Any] = {}

    def prepare(self, items: list[Item]) -> dict[Item, str]:
        """Compile and run each once, forward and backward; what failed, and why."""
        failed = {}
        for item in items:
            try:
                self.held[item] = prepared(*item)
            except Exception as error:
                failed[item] = f"{type(error).__name__}: {str(error)[:300]}"
        return failed

    def time(self, item: Item) -> tuple[float, float, tuple[int, int]] | None:
        """(forward, backward) microseconds and bytes that must move; None where the system has no such function."""
        found = self.held[item]
        if found is None:
            return None
        forward, backward, stream, floor = found
        return replayed(forward, stream, warmup=10, rep=60), replayed(backward, stream, warmup=10, rep=60), floor

    def drop(self) -> None:
        """Forget them all."""
        self.held.clear()
        torch.cuda.empty_cache()


def prepared(text: str, code: str, system: str) -> Any:
    """Forward and backward as calls, the stream they were recorded on, and the bytes that must move; compiled."""
    B, N, D = map(int, text.split("x"))
    torch.manual_seed(0)
    args = operands(code, B, N, D, torch.bfloat16)
    made = FUNCTIONS[code].made(D)
    leaves = [*args, *(made.parameters() if isinstance(made, torch.nn.Module) else ())]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with strategy(system):
        f = compiled(code, system, made)
        if f is None:
            return None
        with torch.cuda.stream(stream):
            out = f(*args)
        if system.startswith("graphopt"):
            check(code, f)
        cotangents = [torch.randn_like(o) for o in flat(out)]

        def backward() -> Any:
            return torch.autograd.grad(flat(out), leaves, cotangents, retain_graph=True)

        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            backward()
        torch.cuda.synchronize()
    return lambda: f(*args), backward, stream, floor_bytes(code, args, len(flat(out)))


@contextmanager
def strategy(system: str):
    """graphopt_two_pass: a separate pass over tiles of columns sums the gradients of factors, as in the paper.

    The switch is read while a graph is traced and is no part of any cache's key.
    """
    if system != "graphopt_two_pass":
        yield
        return
    os.environ["GRAPHOPT_REDUCTION"] = "two_pass"
    try:
        with torch._inductor.config.patch(force_disable_caches=True):
            yield
    finally:
        del os.environ["GRAPHOPT_REDUCTION"]


def check(code: str, f) -> None:
    """Was the function rewritten into the operator that the row is named after?"""
    import graphopt

    wanted = FUNCTIONS[code]
    graphopt.check(f, wanted.sites, what="rewritten")
    found = {k.operator for k in graphopt.report(f).kernels}
    if found != {wanted.operator}:
        raise RuntimeError(f"{code} became {found}, not {wanted.operator}")


def flat(out):
    return list(out) if isinstance(out, tuple) else [out]


def rows_of(text: str, code: str, found: dict[str, Any], bandwidth: float) -> list[dict]:
    """The result rows of one function and shape, forward and backward."""
    f = FUNCTIONS[code]
    rows = []
    for i, direction in enumerate(("forward", "backward")):
        row: dict[str, Any] = dict(kernel=f.kernel, direction=direction, shape=[int(n) for n in text.split("x")],
                                   dtype="bfloat16", form=f.form, us={s: t[i] for s, t in found.items()})
        if "graphopt" in found:
            row["roofline"] = found["graphopt"][2][i] / bandwidth / 1e6 / found["graphopt"][i]
        rows.append(row)
        times = "  ".join(f"{s} {t[i]:.1f}" for s, t in found.items())
        print(f"{code:3s} {direction:8s} {text:14s} {row.get('roofline', 0):.3f}  us: {times}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--functions", help="default: those of the table")
    parser.add_argument("--systems", help="default: those of the table")
    parser.add_argument("--rows", help="SHAPE:FUNCTION:SYSTEM+SYSTEM,... instead of the three above")
    parser.add_argument("--workers", type=int, default=6, help="processes that compile beside one another")
    parser.add_argument("--warm", action="store_true", help="compile only: fills the compilers' caches")
    parser.add_argument("--tune", action="store_true", help="search this GPU's configurations (adaln_tune.py)")
    parser.add_argument("--fit", action="store_true", help="write the cost model's data from the results")
    parser.add_argument("--judge", action="store_true", help="how often the cost model decides right on the results")
    parser.add_argument("--out", type=Path, help="folder of the results")
    args, rest = parser.parse_known_args()
    if args.tune:
        import adaln_tune

        adaln_tune.main(["--write", *rest, *(["--out", str(args.out)] if args.out else [])])
        return
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    if args.fit or args.judge:
        import adaln_results

        adaln_results.main(args)
        return
    measure_all(args)


def measure_all(args: argparse.Namespace) -> None:
    """Measure every shape, function and system asked for; rows are saved as they come."""
    workers = [Child(Worker) for _ in range(args.workers)]
    bandwidth = 0.0 if args.warm else copy_tb_per_s()
    for items in portions(args):
        shares = {w: items[i::len(workers)] for i, w in enumerate(workers)}
        for w, mine in shares.items():
            w.ask("prepare", mine)
        for w, mine in shares.items():
            for item, why in w.answer().items():
                print(f"{' '.join(item)}: {why}" if isinstance(item, tuple) else f"{mine}: {why}", flush=True)
                items = [i for i in items if i != item and (isinstance(item, tuple) or i not in mine)]
        for text, code in {} if args.warm else dict.fromkeys(i[:2] for i in items):
            found = {}
            for item in [i for i in items if i[:2] == (text, code)]:
                answer = next(w for w, mine in shares.items() if item in mine).call("time", item)
                if isinstance(answer, tuple):
                    found[item[2]] = answer
                elif answer is not None:
                    print(f"{' '.join(item)}: {answer}", flush=True)
            if found:
                rows = kept_times("adaln", rows_of(text, code, found, bandwidth), KEYS, args.out)
                save("adaln", rows, KEYS, {"copy_tb_per_s": bandwidth}, args.out)
        for w in workers:
            w.call("drop")
    for w in workers:
        w.end()


RIVALS = ("inductor_max_autotune", "graphopt_two_pass", "liger", "eager")


def in_table(text: str, code: str, system: str) -> bool:
    """Is a function on a shape by a system part of the whole table?"""
    B, N, D = map(int, text.split("x"))
    main = text in SHAPES.split(",")[:MAIN]
    if code not in FUSED and 2 * B * N * D < LARGE:
        return False
    if system == "liger":
        return code == "F1r"
    if system == "graphopt_two_pass":
        return code in ("F1", "F2") and text in TWO_PASS
    if system == "eager":
        return main and code in FUSED[:4]
    return system in ("graphopt", "inductor") or (main and code in ("F1", "F2"))


def wanted(args: argparse.Namespace) -> Iterator[tuple[str, str, list[str]]]:
    """(shape, function, its systems): what the command line asks for."""
    if args.rows:
        for row in args.rows.split(","):
            text, code, systems = row.split(":")
            yield text, code, systems.split("+")
        return
    functions = args.functions.split(",") if args.functions else list(FUNCTIONS)
    systems = args.systems.split(",") if args.systems else ["graphopt", "inductor", *RIVALS]
    whole = not (args.functions and args.systems)
    for text in args.shapes.split(","):
        B, N, D = map(int, text.split("x"))
        for code in functions:
            yield text, code, [s for s in systems if (s != "eager" or 2 * B * N * D < SMALL)
                               and not (whole and not in_table(text, code, s))]


def portions(args: argparse.Namespace) -> Iterator[list[Item]]:
    """(shape, function, system): what is compiled and held at once, one function after the other."""
    now: list[Item] = []
    held = 0.0
    for text, code, systems in wanted(args):
        B, N, D = map(int, text.split("x"))
        x = 2 * B * N * D * len(systems)
        if now and held + x > HELD:
            yield now
            now, held = [], 0.0
        now += [(text, code, s) for s in systems]
        held += x
    if now:
        yield now


if __name__ == "__main__":
    main()
