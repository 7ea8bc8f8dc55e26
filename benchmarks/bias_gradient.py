"""The gradient of a bias: summed where its matrix is made (passes/column_sums.py) against Inductor and eager.

    python benchmarks/bias_gradient.py [--shapes 32760x8960,...] [--sweep] [--out FOLDER]

`gelu`: g = gelu'(pre) * dy and g.sum(0).  `sum`: g.sum(0) of a matrix in memory.  Microseconds, medians of CUDA-graph
replays; `roofline` is the floor (3 or 1 matrices over the measured copy bandwidth) over graphopt's time.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
import torch._inductor.config
from _results import copy_tb_per_s, save
from _timing import replayed
from torch.fx.experimental.proxy_tensor import make_fx

from graphopt.codegen import column_sums as generated
from graphopt.codegen import kernels
from graphopt.codegen.emit_sums import tile
from graphopt.passes import column_sums

aten = torch.ops.aten
SHAPES = "32760x8960,28080x8960,32760x13824,32760x1536,32760x5120,4608x12288"


def gelu(dy, pre):
    g = aten.gelu_backward.default(dy, pre, approximate="tanh")
    return g, g.sum(0)


def summed(g):
    return (g.sum(0),)


FUNCTIONS = {"gelu": (gelu, 2, 3), "sum": (summed, 1, 1)}  # function, inputs, matrices moved


def specs(M: int, N: int, what: str) -> generated.ColumnSums:
    """The kernel that the pass puts in for these sizes."""
    from torch._inductor.decomposition import select_decomp_table

    def backward(dy, pre, x):
        g = gelu(dy, pre)[0] if what == "gelu" else dy
        return aten.mm.default(g.t(), x), aten.sum.dim_IntList(g, [0], True)

    shapes = ((M, N), (M, N), (M, 8))
    args = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes]
    graph = make_fx(backward, select_decomp_table())(*args).graph
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = args.pop(0)
    total = next(n for n in graph.nodes if n.target is aten.sum.dim_IntList)
    found = column_sums.plan(total, 0)
    if found is None:
        raise RuntimeError(f"{M}x{N} {what}: the pass leaves this sum alone")
    return found[1]


def ours(spec: generated.ColumnSums, M: int, tensors: list[torch.Tensor]):
    """Both launches."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    P, N = spec.parts(M, sms), spec.N
    out = [torch.empty(M, N, device="cuda", dtype=spec.dtype)] if spec.makes else []
    partial, total = torch.empty(P, N, device="cuda"), torch.empty(N, device="cuda", dtype=spec.dtype)
    kernel, shape = generated.kernel_of(spec), tile(N, P)
    second = kernels.sum_kernel("column_sums_sums", N, N, (("dbias", 0, spec.dtype),), shape)

    def run():
        kernel[(spec.tiles * P,)](*tensors[:len(spec.inputs)], *out, partial, M, P, num_warps=generated.WARPS)
        second[(-(-N // shape.columns),)](partial, total, P, num_warps=shape.warps)
        return (*out, total)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--sweep", action="store_true", help="other tiles and numbers of programs, too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bandwidth = copy_tb_per_s()
    for text, what in itertools.product(args.shapes.split(","), FUNCTIONS):
        M, N = map(int, text.split("x"))
        row, floor = measure(M, N, what, bandwidth)
        print(f"{what:5s} {text:12s} {row['roofline']:.3f} error {row['error']:.1e}  "
              + "  ".join(f"{s} {t:.1f}" for s, t in row["us"].items()), flush=True)
        save("bias_gradient", [row], ("what", "shape"), {"copy_tb_per_s": bandwidth}, args.out)
        if args.sweep:
            sweep(M, N, what, floor)
        torch.cuda.empty_cache()


def measure(M: int, N: int, what: str, bandwidth: float) -> tuple[dict, float]:
    """The row of one case, and its floor in microseconds."""
    function, count, moved = FUNCTIONS[what]
    inputs = [torch.randn(M, N, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    floor = moved * inputs[0].nbytes / bandwidth / 1e6
    run = ours(specs(M, N, what), M, inputs)
    got, want = run()[-1].double(), function(*(t.float() for t in inputs))[-1].double()
    torch._dynamo.reset()
    compiled = torch.compile(function, dynamic=False, options={"triton.mix_order_reduction": False})
    us = {"graphopt": replayed(run), "inductor": replayed(lambda: compiled(*inputs)),
          "eager": replayed(lambda: function(*inputs))}
    row = dict(what=what, shape=[M, N], us=us, error=((got - want).norm() / want.norm()).item(),
               roofline=floor / us["graphopt"])
    return row, floor


def sweep(M: int, N: int, what: str, floor: float) -> None:
    """Other tiles, warps and programs than the closed form's."""
    spec = specs(M, N, what)
    tensors = [torch.randn(M, N, device="cuda", dtype=torch.bfloat16) for _ in spec.inputs]
    kept = generated.TILE, generated.WARPS, generated.PROGRAMS_PER_SM
    found = []
    for size, warps, programs in ((2048, 4, 3), (2048, 4, 6), (2048, 4, 8), (4096, 4, 4), (4096, 8, 4), (4096, 8, 2),
                                  (1024, 4, 8), (1024, 2, 8), (2048, 8, 4), (8192, 8, 2)):
        generated.TILE, generated.WARPS, generated.PROGRAMS_PER_SM = size, warps, programs
        generated.kernel_of.cache_clear()
        found.append((floor / replayed(ours(spec, M, tensors)), size, warps, programs))
    generated.TILE, generated.WARPS, generated.PROGRAMS_PER_SM = kept
    generated.kernel_of.cache_clear()
    for share, size, warps, programs in sorted(found, reverse=True)[:5]:
        print(f"      {share:.3f}  tile {size} warps {warps} programs per SM {programs}", flush=True)


if __name__ == "__main__":
    main()
