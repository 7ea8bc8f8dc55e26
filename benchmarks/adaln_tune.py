"""Configurations of the AdaLN kernels, measured one by one: where the closed form of codegen/configure.py comes from.

    python benchmarks/adaln_tune.py [--cases F1f:1x32760x1536,F2b:2x16384x3072] [--seconds 200] [--out FOLDER]

A case is a fusion, a direction (f, b) and a shape.  The closed form is measured first, marked `*`, then its
neighbours.  Times are CUDA-graph replays of the kernel alone (the backward without its second stage), bf16 activations,
fp32 factors; `share` is the floor (bytes that must move over the measured copy bandwidth) over the time.  Prints one
line per configuration, best first, and writes results/<machine>/adaln_tune.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from _results import copy_tb_per_s, save

from graphopt.codegen import kernels, store
from graphopt.codegen.configure import Configuration, configure, cut
from graphopt.codegen.emit import emit
from graphopt.schedule.site_cost import UNITS

CASES = ("F1f:8x4096x1152,F1f:1x32760x1536,F1b:8x4096x1152,F1b:1x32760x1536,F2f:8x4096x1152,F2b:8x4096x1152,"
         "F1f:2x16384x3072,F1b:2x16384x3072,F2b:1x32760x1536,F2b:2x16384x3072,F2f:1x32760x1536,F1f:1x4096x3072,"
         "F1b:1x4096x3072,F2b:1x4096x3072,F1b:1x75600x5120,F2b:1x75600x5120")
NAMES = {"F1": "norm_modulate", "F2": "gate_norm_modulate", "F3": "gate_residual", "F2a": "gate_norm"}


def replayed(f) -> float:
    """Median microseconds of one call, replayed from a CUDA graph."""
    from triton.testing import do_bench

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        f()
    return 1e3 * do_bench(graph.replay, warmup=4, rep=25, return_mode="median")


def launcher(code: str, B: int, N: int, D: int):
    """(spec, function of a configuration that returns a launch)."""
    fusion, direction = code[:-1], code[-1]
    new = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    factor = lambda: 0.3 * torch.randn(B, 1, D, device="cuda")
    gated, normed, affine = fusion != "F1", fusion != "F3", fusion == "F2a"
    x, branch, gate = new(B, N, D), new(B, N, D) if gated else None, factor() if gated else None
    weight, bias = (torch.ones(D, device="cuda"), torch.zeros(D, device="cuda")) if affine else (None, None)
    modulation = [factor(), factor()] if normed and not affine else []
    outputs = "" if not normed else "plain" if affine else "scale+shift"
    norm = "layer_norm" if normed else "none"
    front = (gate, None, None, None, weight, bias, modulation, outputs, norm)
    bf = torch.bfloat16
    if direction == "f":
        prepared = kernels.prepare_forward(x, branch, *front, 1e-6, 1.0, "none", 0.0, "identity", bf, bf, "")
    else:
        h = kernels.forward(x, branch, *front, 1e-6, 1.0, "none", 0.0, "identity", bf, bf, "")
        saved = h[0] if gated else x
        prepared = kernels.prepare_backward(new(B, N, D) if gated else None, [new(B, N, D)] if normed else [], saved,
                                            branch, *front, 1.0, "none", "identity", bf)
    spec, plan, given = prepared
    empty = lambda *shape, dtype=torch.float32: torch.empty(*shape, device="cuda", dtype=dtype)
    outs = [empty(B, N, D, dtype=spec.dtype(t)) for t in spec.rows_out]
    statistics = [empty(B * N).fill_(1.0) for _ in spec.statistics]
    sms = torch.cuda.get_device_properties(0).multi_processor_count

    def launch(config: Configuration):
        kernel = getattr(store.load(spec.function, emit(spec, config)), spec.function)
        args = [given[t] for t in (*spec.rows_in, *spec.factors)] + outs + statistics
        if direction == "f":
            P = -(-N // config.rows)
            sizes, grid = ([N, P], B * P) if config.rows > 1 else ([N], B * N)
        else:
            P = max(1, min(sms * config.programs_per_sm // B, (N + 3) // 4))
            sizes, grid = [N, P], B * P
            args += [empty(B * P, len(spec.sums) * D)] if spec.sums else []
        strides = kernels._strides(spec, plan)
        return lambda: kernel[(grid,)](*args, *sizes, *strides, num_warps=config.warps)

    return spec, launch


def neighbours(code: str, D: int, base: Configuration, row_bytes: int) -> list[Configuration]:
    """Configurations near the closed form."""
    found: list[Configuration] = []
    base_per_sm = base.programs_per_sm
    if code[-1] == "f":
        for warps in (1, 2, 4):
            if D // warps <= 2048:
                found.append(Configuration(cut(D, 256 * warps), warps, 0, 0))
        for warps, width in ((1, 256), (1, 128), (2, 512), (4, 1024)):
            if D // warps > 1600:
                continue
            for rows, stages in ((2, 3), (4, 3), (4, 4), (4, 5), (8, 4), (8, 5), (16, 4)):
                found.append(Configuration(cut(D, width), warps, stages, 0, rows))
        return found
    for joint in (False, True):
        found.append(replace(base, joint=joint))
        for warps in sorted({max(1, base.warps // 2), base.warps, base.warps * 2}):
            for blocks in sorted({cut(D, 256 * warps), cut(D, 128 * warps)}):
                for per_sm in sorted({max(1, base_per_sm - 1), base_per_sm, base_per_sm + 1}):
                    for stages in range(base.stages - 1, base.stages + 3):
                        ring = (stages - 1) * per_sm * row_bytes
                        if stages >= 3 and 40e3 < ring < 130e3 and D / warps < 1700:
                            found.append(Configuration(blocks, warps, stages, per_sm, joint=joint))
    return found


def candidates(code: str, spec, D: int) -> list[Configuration]:
    """The closed form, then its neighbours, those that differ least first."""
    base = configure(spec)
    row_bytes = sum(spec.dtype(t).itemsize for t in spec.rows_in) * D
    own = asdict(base)
    differs = lambda c: sum(value != own[name] for name, value in asdict(c).items())
    near = sorted(neighbours(code, D, base, row_bytes), key=differs)
    return list(dict.fromkeys([base, *near]))


def warm(cases: list[str], i: int, n: int) -> None:
    """Compile every n-th configuration of every case, from the i-th, by running it once."""
    for case in cases:
        code, shape = case.split(":")
        B, N, D = map(int, shape.split("x"))
        spec, launch = launcher(code, B, N, D)
        for config in candidates(code, spec, D)[i::n]:
            try:
                launch(config)()
                torch.cuda.synchronize()
            except Exception as error:
                print(f"  {case} {config}: {type(error).__name__} {str(error)[:120]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--seconds", type=float, default=200.0, help="time for all cases together")
    parser.add_argument("--workers", type=int, default=12, help="processes that fill Triton's cache first")
    parser.add_argument("--warm", help="what a worker does: its share, as i/n")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.warm:
        warm(args.cases.split(","), *map(int, args.warm.split("/")))
        return
    if args.workers:
        start = time.time()
        command = [sys.executable, __file__, "--cases", args.cases, "--warm"]
        running = [subprocess.Popen([*command, f"{i}/{args.workers}"]) for i in range(args.workers)]
        for process in running:
            process.wait()
        print(f"compiled in {time.time() - start:.0f} s", flush=True)
    bandwidth = copy_tb_per_s()
    print(f"copy {bandwidth:.3f} TB/s", flush=True)
    cases = args.cases.split(",")
    end = time.time() + args.seconds
    for k, case in enumerate(cases):
        limit = time.time() + (end - time.time()) / (len(cases) - k)
        code, shape = case.split(":")
        B, N, D = map(int, shape.split("x"))
        spec, launch = launcher(code, B, N, D)
        floor = UNITS[NAMES[code[:-1]]][code[-1] == "b"] * B * N * D * 2 / bandwidth / 1e6
        base = configure(spec)
        rows = []
        for config in candidates(code, spec, D):
            if time.time() > limit:
                break
            try:
                us = replayed(launch(config))
            except Exception as error:
                print(f"  {config}: {type(error).__name__} {str(error)[:120]}", flush=True)
                continue
            rows.append((floor / us, us, config))
            if len(rows) > 1 and us > 2 * min(r[1] for r in rows):
                continue
        print(f"== {case}: floor {floor:.1f} us, {len(rows)} configurations", flush=True)
        for share, us, c in sorted(rows, key=lambda r: -r[0])[:7] + [r for r in rows if r[2] == base]:
            star = "*" if c == base else " "
            print(f" {star} {share:.3f} {us:8.1f} us  warps {c.warps} stages {c.stages} per_sm {c.programs_per_sm} "
                  f"rows {c.rows} joint {int(c.joint)} blocks {'+'.join(map(str, c.blocks))}", flush=True)
        done = [dict(case=case, us=us, share=share, closed_form=c == base, **asdict(c)) for share, us, c in rows]
        save("adaln_tune", done, ("case", "blocks", "warps", "stages", "programs_per_sm", "rows", "joint"),
             {"copy_tb_per_s": bandwidth}, args.out)
        del launch
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
