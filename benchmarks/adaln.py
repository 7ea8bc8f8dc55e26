"""The fused AdaLN operators against Inductor (mix-order off) and eager, as whole compiled functions.

    python benchmarks/adaln.py [--shapes 1x32760x1536,...] [--fusions F1,F2,F2a,F3] [--systems graphopt,inductor,eager]
                               [--fit] [--out FOLDER]
    python benchmarks/adaln.py --tune [--cases ...] [--seconds 200]      (adaln_tune.py: a table for this GPU)

Times are CUDA-graph replays, medians in microseconds.  `roofline` is the floor (bytes that must move over the measured
copy bandwidth) over graphopt's time.  `--fit --out results/h200/adaln.json` turns such a file into the
coefficients of the cost model that decides which sites are left to Inductor (schedule/data/site_cost.json).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch._functorch.config
import torch.nn.functional as F
from _results import copy_tb_per_s, save

from graphopt.codegen.form import FUSIONS
from graphopt.schedule.site_cost import UNITS

SHAPES = ("1x32760x1536,1x75600x5120,2x16384x3072,8x4096x1152,1x4096x3072,2x1024x3072,2x512x3072,2x77x3072,"
          "4x256x1152,1x512x1536")
SMALL = 300e6  # bytes of one tensor: eager is timed below this only


def f1(x, scale, shift):
    return (F.layer_norm(x.float(), (x.shape[-1],), None, None, 1e-6) * (1 + scale) + shift).type_as(x)


def f2(x, branch, gate, scale, shift):
    h = (x.float() + branch * gate).type_as(x)
    return h, (F.layer_norm(h.float(), (h.shape[-1],), None, None, 1e-6) * (1 + scale) + shift).type_as(x)


def f2a(x, branch, gate, weight, bias):
    h = (x.float() + branch * gate).type_as(x)
    return h, F.layer_norm(h.float(), (h.shape[-1],), weight, bias, 1e-6).type_as(x)


def f3(x, branch, gate):
    return (x.float() + branch * gate).type_as(x)


FUNCTIONS = {"F1": f1, "F2": f2, "F2a": f2a, "F3": f3}
NAMES = {f.code: f.name for f in FUSIONS.values() if f.code in FUNCTIONS}


def operands(code: str, B: int, N: int, D: int, dtype: torch.dtype) -> list[torch.Tensor]:
    new = lambda *shape: torch.randn(*shape, device="cuda")
    x, branch = (new(B, N, D).to(dtype) for _ in range(2))
    g, s, t = (0.3 * new(B, 3, D)).chunk(3, 1)
    w, b = 1 + 0.1 * new(D), 0.1 * new(D)
    by = {"F1": [x, s, t], "F2": [x, branch, g, s, t], "F2a": [x, branch, g, w, b], "F3": [x, branch, g]}
    return [v.detach().requires_grad_() for v in by[code]]


def replayed(f, stream: torch.cuda.Stream) -> float:
    """Median microseconds of one call, replayed from a CUDA graph.

    A backward runs on the stream of its forward, so both are captured on the same one.
    """
    with torch.cuda.stream(stream):
        f()
        f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        keep = f()
    from triton.testing import do_bench

    us = 1e3 * do_bench(graph.replay, warmup=10, rep=60, return_mode="median")
    del keep
    return us


def timed(code: str, system: str, args: list[torch.Tensor]) -> tuple[float, float]:
    """(forward, backward) microseconds."""
    torch._dynamo.reset()
    f = FUNCTIONS[code]
    if system == "graphopt":
        f = torch.compile(f, backend="graphopt", dynamic=False, options={"graphopt.select": "all"})
    elif system == "inductor":
        f = torch.compile(f, dynamic=False, options={"triton.mix_order_reduction": False})
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = f(*args)
    if system == "graphopt":
        import graphopt

        found = graphopt.report(f)
        wanted = {"F1": ("modulate",), "F2": ("modulate", "gate"), "F2a": ("gate",), "F3": ("gate",)}[code]
        graphopt.check(f, {k: 1 for k in wanted}, what="rewritten")
        if {k.operator for k in found.kernels} != {NAMES[code]}:
            raise RuntimeError(f"another fusion than {code}: {found}")
    cotangents = [torch.randn_like(o) for o in _flat(out)]

    def backward():
        return torch.autograd.grad(_flat(out), args, cotangents, retain_graph=True)

    torch.cuda.synchronize()
    forward_us = replayed(lambda: f(*args), stream)
    return forward_us, replayed(backward, stream)


def _flat(out):
    return list(out) if isinstance(out, tuple) else [out]


def fit(rows: list[dict]) -> dict:
    """launch_us and tb_per_s per system, fusion and direction: non-negative least squares on relative errors."""
    import numpy as np
    from scipy.optimize import nnls

    result: dict = {}
    for system in ("graphopt", "inductor"):
        result[system] = {}
        for code, name in NAMES.items():
            for direction in ("forward", "backward"):
                wanted = [r for r in rows if r["kernel"] == code and r["direction"] == direction]
                picked = [r for r in wanted if r["us"].get(system)]
                if len(picked) < 3:
                    continue
                units = UNITS[name][0 if direction == "forward" else 1]
                size = np.array([units * np.prod(r["shape"]) * 2 / 1e6 for r in picked])  # MB
                us = np.array([r["us"][system] for r in picked])
                (launch, per_mb), _ = nnls(np.stack([1 / us, size / us], 1), np.ones(len(us)))
                result[system][f"{name}/{direction}"] = {"launch_us": launch, "tb_per_s": 1 / per_mb}
    return result


def write_fit(results: Path) -> None:
    """Fit the rows of results (a JSON file this script wrote) and write schedule/data/site_cost.json."""
    data = json.loads(results.read_text())
    found = {"machine": data["machine"], "source": "benchmarks/adaln.py --fit", "coefficients": fit(data["rows"])}
    path = Path(__file__).resolve().parent.parent / "schedule" / "data" / "site_cost.json"
    path.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--fusions", default="F1,F2,F2a,F3")
    parser.add_argument("--systems", default="graphopt,inductor,eager")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--tune", action="store_true", help="search this GPU's configurations (adaln_tune.py)")
    parser.add_argument("--out", type=Path)
    args, rest = parser.parse_known_args()
    if args.tune:
        import adaln_tune

        adaln_tune.main(["--write", *rest, *(["--out", str(args.out)] if args.out else [])])
        return
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    if args.fit:
        write_fit(args.out)
        return
    torch._functorch.config.donated_buffer = False
    bandwidth = copy_tb_per_s()
    rows = []
    for shape in args.shapes.split(","):
        B, N, D = map(int, shape.split("x"))
        for code in args.fusions.split(","):
            torch.manual_seed(0)
            tensors = operands(code, B, N, D, torch.bfloat16)
            systems = [s for s in args.systems.split(",") if s != "eager" or tensors[0].nbytes < SMALL]
            us = {}
            for system in systems:
                try:
                    us[system] = timed(code, system, tensors)
                except Exception as error:
                    print(f"{shape} {code} {system}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            for i, direction in enumerate(("forward", "backward")):
                floor = UNITS[NAMES[code]][i] * tensors[0].nbytes / bandwidth / 1e6
                row = dict(kernel=code, direction=direction, shape=[B, N, D], dtype="bfloat16", form="wan",
                           us={s: t[i] for s, t in us.items()})
                if "graphopt" in us:
                    row["roofline"] = floor / us["graphopt"][i]
                rows.append(row)
                times = "  ".join(f"{s} {t[i]:8.1f}" for s, t in us.items())
                print(f"{code:3s} {direction:8s} {shape:14s} {row.get('roofline', 0):.3f}  us: {times}", flush=True)
            keys = ("kernel", "direction", "shape", "dtype", "form")
            save("adaln", rows, keys, {"copy_tb_per_s": bandwidth}, args.out)
            del tensors
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
