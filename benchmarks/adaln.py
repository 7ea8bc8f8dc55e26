"""The fused AdaLN operators against Inductor (mix-order off), Liger and eager, as whole compiled functions.

    python benchmarks/adaln.py [--shapes 1x32760x1536,...] [--functions F1,F2,F2a,F3] [--warm I/N] [--out FOLDER]
                 [--systems graphopt,graphopt_two_pass,inductor,inductor_max_autotune,inductor_mix_order,liger,eager]
    python benchmarks/adaln.py --tune [--cases ...] [--seconds 200]      (adaln_tune.py: a table for this GPU)
    python benchmarks/adaln.py --fit | --judge                           (on results that are there: adaln_results.py)

Times are CUDA-graph replays, medians in microseconds.  `roofline` is the floor (bytes that must move over the measured
copy bandwidth) over graphopt's time.  Functions are those of adaln_functions.py.  `inductor_max_autotune` adds
coordinate descent; `inductor_mix_order` is torch's default, whose gradients are wrong (pytorch#193061): it may raise.
"""

from __future__ import annotations

import argparse
import itertools
import os
from contextlib import contextmanager
from pathlib import Path

import torch
import torch._functorch.config
import torch._inductor.config
from _results import copy_tb_per_s, kept_times, save
from _timing import replayed
from adaln_functions import FUNCTIONS, floor_bytes, liger, operands

SHAPES = ("1x75600x5120,1x64000x3072,2x16384x3072,1x32760x1536,8x4096x1152,1x4096x3072,4x4096x2432,4x4096x1536,"
          "2x1024x3072,2x512x3072,1x512x3072,4x333x2432,1x512x1536,1x256x3072,4x256x1152,2x77x3072,1x77x2432,1x64x1152")
SMALL = 300e6  # bytes of one tensor: eager is timed below this only
KEYS = ("kernel", "direction", "shape", "dtype", "form")


def compiled(code: str, system: str, f):
    """The function as a system runs it; None where it has none."""
    torch._dynamo.reset()
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


def timed(code: str, system: str, args: list[torch.Tensor], measure: bool = True) -> tuple[float, float] | None:
    """(forward, backward) microseconds; None where a system has no such function."""
    made = FUNCTIONS[code].made(args[0].shape[-1])
    with strategy(system):
        f = compiled(code, system, made)
        return None if f is None else times(code, system, f, made, args, measure)


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


def times(code: str, system: str, f, made, args: list[torch.Tensor], measure: bool) -> tuple[float, float] | None:
    """The times of a callable; None where they are not wanted."""
    leaves = [*args, *(made.parameters() if isinstance(made, torch.nn.Module) else ())]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = f(*args)
    if system.startswith("graphopt"):
        check(code, f)
    cotangents = [torch.randn_like(o) for o in flat(out)]

    def backward():
        return torch.autograd.grad(flat(out), leaves, cotangents, retain_graph=True)

    torch.cuda.synchronize()
    if not measure:
        with torch.cuda.stream(stream):
            backward()
        torch.cuda.synchronize()
        return None
    forward_us = replayed(lambda: f(*args), stream, warmup=10, rep=60)
    return forward_us, replayed(backward, stream, warmup=10, rep=60)


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


def rows_of(code: str, shape: tuple[int, int, int], us: dict, args: list[torch.Tensor], bandwidth: float) -> list[dict]:
    """The result rows of one function and shape, forward and backward."""
    f = FUNCTIONS[code]
    outs = 1 if f.operator in ("norm_modulate", "gate_residual") else 2
    rows = []
    for i, direction in enumerate(("forward", "backward")):
        row = dict(kernel=f.kernel, direction=direction, shape=list(shape), dtype="bfloat16", form=f.form,
                   us={s: t[i] for s, t in us.items()})
        if "graphopt" in us:
            row["roofline"] = floor_bytes(code, args, outs)[i] / bandwidth / 1e6 / us["graphopt"][i]
        rows.append(row)
        times = "  ".join(f"{s} {t[i]:.1f}" for s, t in us.items())
        name = f"{code:3s} {direction:8s} {'x'.join(map(str, shape)):14s}"
        print(f"{name} {row.get('roofline', 0):.3f}  us: {times}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--functions", default="F1,F2,F2a,F3")
    parser.add_argument("--systems", default="graphopt,inductor,eager")
    parser.add_argument("--warm", help="compile only a share of the work, as i/n: other processes fill the same caches")
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
    torch._functorch.config.donated_buffer = False
    bandwidth = 0.0 if args.warm else copy_tb_per_s()
    share, of = map(int, (args.warm or "0/1").split("/"))
    number = itertools.count()
    for text in args.shapes.split(","):
        shape = B, N, D = tuple(map(int, text.split("x")))
        for code in args.functions.split(","):
            torch.manual_seed(0)
            tensors = operands(code, B, N, D, torch.bfloat16)
            us = {}
            for system in args.systems.split(","):
                if (system == "eager" and tensors[0].nbytes >= SMALL) or next(number) % of != share:
                    continue
                try:
                    found = timed(code, system, tensors, measure=not args.warm)
                except Exception as error:
                    print(f"{text} {code} {system}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                    continue
                if found is not None:
                    us[system] = found
            if us:
                rows = rows_of(code, shape, us, tensors, bandwidth)
                save("adaln", kept_times("adaln", rows, KEYS, args.out), KEYS, {"copy_tb_per_s": bandwidth}, args.out)
            del tensors
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
