"""Time of the backend after Dynamo, cold, for a Wan-shaped model: Inductor alone, the whole graph, regions, streamed.

    python benchmarks/stream_compile.py --system inductor|whole|regions|stream [--layers 30] [--grid 1x30x52]

One system a process, with an empty cache folder.  backend_s: the backend's call, and what the first backward takes
longer than the second (torch lowers some backwards late).  total_s: the first step.  backend_cpu_s: the same in seconds
of CPU time, compilers included (with TORCHINDUCTOR_COMPILE_THREADS=1), for a machine that does other things, too.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import torch
from _results import save
from stream_step import GPU, WIDTHS, build, inputs
from torch._inductor.compile_fx import compile_fx

import graphopt
from graphopt.backend import graphopt as backend


def cpu_seconds() -> float:
    """CPU time of this process and of compilers it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--system", choices=("inductor", "whole", "regions", "stream"), required=True)
    p.add_argument("--layers", type=int, default=30)
    p.add_argument("--width", default="1.3b")
    p.add_argument("--grid", default="1x30x52")
    p.add_argument("--compiler", default="inductor")
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    model = build(a.width, a.layers)
    if a.system == "stream":
        graphopt.stream(model, "cuda" if GPU else "cpu", resident=[])
    spent, begun = [0.0, 0.0], time.perf_counter()

    def timed(gm, example_inputs, **kwargs):
        start, cpu = time.perf_counter(), cpu_seconds()
        print(f"{a.system}: Dynamo gave {len(gm.graph.nodes)} nodes after {start - begun:.1f} s", flush=True)
        if a.system == "inductor":
            made = compile_fx(gm, example_inputs, config_patches={"triton.mix_order_reduction": False})
        else:
            made = backend(gm, example_inputs, **kwargs)
        spent[0] += time.perf_counter() - start
        spent[1] += cpu_seconds() - cpu
        print(f"{a.system}: the backend took {spent[0]:.1f} s", flush=True)
        return made

    own = {"graphopt.compiler": a.compiler, "graphopt.regions": "auto" if a.system == "regions" else "off"}
    step = torch.compile(model, backend=timed, options=None if a.system == "inductor" else own)
    kw = inputs(tuple(int(x) for x in a.grid.split("x")), WIDTHS[a.width]["text_dim"])

    def once() -> tuple[float, float, float]:
        start = time.perf_counter()
        loss = step(**kw)[0].float().square().mean()
        middle, cpu = time.perf_counter(), cpu_seconds()
        loss.backward()
        if GPU:
            torch.cuda.synchronize()
        return middle - start, time.perf_counter() - middle, cpu_seconds() - cpu

    first, second = once(), once()
    row = dict(system=a.system, layers=a.layers, width=a.width, compiler=a.compiler,
               backend_s=spent[0] + first[1] - second[1], total_s=sum(first[:2]) - sum(second[:2]),
               backend_cpu_s=spent[1] + first[2] - second[2])
    print(row, graphopt.last_report().graphs[-1].notes if a.system != "inductor" else "", flush=True)
    save("stream_compile", [row], ("system", "layers", "width", "compiler"), {}, a.out)


if __name__ == "__main__":
    main()
