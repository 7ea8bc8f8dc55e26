"""A training step of a Wan-shaped model: how far every gradient is from fp32 eager, and what lives at the peak.

    python benchmarks/peak.py [--layers 4] [--grid 1x21x30x52] [--systems ...] [--seeds 3] [--warm] [--out FOLDER]

Rows of peak.json, one per system: peak_gib of a step; `mean` and `worst`, the contract of a whole model
(tests/models/contract.py): our error to fp32 eager in units of bf16 eager's, geometric mean over tensors and the
largest; `repeatable`: two steps give the same bits (`eager_repeatable`: eager's do); `alive`, the tensors at the peak
by what wrote them: [MiB, how many, shape and dtype, kernel].  The history of the allocator is replayed to find them;
what was allocated before the step is `before_mib`.

Systems: eager, inductor (mix-order reduction off, where it is wrong), graphopt, graphopt_all (select="all"); to
compare, graphopt_own (results in memory of their own, not over dying gradients) and graphopt_half (half the programs),
each in a process of its own, because torch would run what it compiled for graphopt.
`--warm` only compiles, for the caches: one such process for each system, side by side, saves most of the time.
"""

from __future__ import annotations

import argparse
import copy
import gc
import linecache
import re
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from _results import save
from step_models import CONFIGS, Size, build, inputs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "models"))
import contract

MODEL = "wan-1.3b"
SYSTEMS = ("inductor", "graphopt", "graphopt_all", "eager")


def change(system: str) -> None:
    """Switch off what a variant of graphopt does without."""
    from graphopt import backend
    from graphopt.codegen import kernels

    if system == "graphopt_own":
        backend.reuse_gradients.reuse = lambda graph: 0
        backend.version = lambda module: f"own {module.__name__}"  # Inductor's cache must know
    if system == "graphopt_half":
        kernels.multiprocessors = lambda device: 66


def compiled(model: torch.nn.Module, system: str) -> Any:
    change(system)
    if system == "eager":
        return model
    if system == "inductor":
        return torch.compile(model, options={"triton.mix_order_reduction": False})
    options = {"graphopt.on_error": "raise"} | ({"graphopt.select": "all"} if system == "graphopt_all" else {})
    return torch.compile(model, backend="graphopt", options=options)


def step(f: Any, kw: dict) -> None:
    """Forward and backward of a mean square."""
    f(**kw)[0].float().square().mean().backward()


def gradients(f: Any, model: torch.nn.Module, kw: dict, cotangent: torch.Tensor) -> contract.Result:
    """Output and every gradient of one step."""
    model.zero_grad(set_to_none=True)
    out = f(**kw)[0]
    out.backward(cotangent.to(out.dtype))
    found = {"output": out.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def equal(one: contract.Result, two: contract.Result) -> bool:
    """The same bits."""
    return all(torch.equal(one[n], two[n]) for n in one)


def label(frames: list[dict[str, Any]]) -> tuple[str, str]:
    """(shape and dtype, what writes it) of an allocation, read from the wrapper that Inductor wrote."""
    for frame in frames:
        line = linecache.getline(frame["filename"], frame["line"])
        found = re.search(r"(\w+) = (?:empty_strided\w*|torch\.empty\w*)\((\([\d, ]*\)).*?(torch\.\w+)", line)
        if found:
            name, shape, dtype = found.groups()
            for ahead in range(1, 60):
                text = linecache.getline(frame["filename"], frame["line"] + ahead).strip()
                if re.search(rf"\b{name}\b", text) and "assert" not in text and not text.startswith(("#", "del ")):
                    text = text.split(" = ", 1)[-1] if "(" not in text.split("=")[0] else text
                    return f"{shape} {dtype.removeprefix('torch.')}", text.split("(")[0].removesuffix(".run")[:90]
            return f"{shape} {dtype.removeprefix('torch.')}", "?"
    inner = [f for f in frames if "/torch/" not in f["filename"]]
    where = (inner or frames or [{"name": "?", "filename": "", "line": 0}])[0]
    text = linecache.getline(where["filename"], where["line"]).strip()
    return "", f"{where['name']}: {text.split('(')[0][:90]}"


def peak_of(f: Any, model: torch.nn.Module, kw: dict) -> tuple[float, float]:
    """(peak GiB of a step, MiB allocated before it)."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(f, kw)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30, before / 2**20


def alive_at_peak(f: Any, model: torch.nn.Module, kw: dict) -> list[list[Any]]:
    """Groups of tensors alive at the peak of a step."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    step(f, kw)
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    live: dict[int, dict[str, Any]] = {}
    now, top, best = before, 0, {}
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            now += event["size"]
            if now > top:
                top, best = now, dict(live)
        elif event["action"] == "free_completed" and (gone := live.pop(event["addr"], None)):
            now -= gone["size"]
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for event in best.values():
        groups[label(event["frames"])].append(event["size"])
    table = [[round(sum(s) / 2**20, 2), len(s), *k] for k, s in groups.items()]
    return sorted(table, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--grid", default="1x21x30x52")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="compile and stop")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    wanted = args.systems.split(",")
    if len(wanted) > 1 and {"graphopt_own", "graphopt_half"} & set(wanted):
        parser.error("graphopt_own and graphopt_half need a process of their own: name no other system")
    start = time.perf_counter()
    say = lambda *words: print(f"[{time.perf_counter() - start:.0f} s]", *words, flush=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    CONFIGS[MODEL]["num_layers"] = args.layers
    model = build(MODEL)
    size = Size(*map(int, args.grid.split("x")), text=512)
    key = ("model", "grid", "layers", "system")
    systems, rows = {}, {}
    for system in wanted:  # the peaks first: nothing else lives on the GPU
        row = dict(model=MODEL, grid=args.grid, layers=args.layers, system=system)
        try:
            f = compiled(model, system)
            step(f, inputs(MODEL, size))  # compiles
            torch.cuda.synchronize()
            say(system, "compiled")
            if args.warm:
                continue
            systems[system] = f
            peak, before = peak_of(f, model, inputs(MODEL, size))
            row |= dict(peak_gib=round(peak, 4), before_mib=round(before, 1))
            if system.startswith("graphopt"):
                import graphopt

                report = graphopt.report(f)
                row |= {f"{k}_{w}": report.count(k, w) for k in ("modulate", "gate") for w in ("matched", "rewritten")}
        except Exception as error:
            row |= dict(error=f"{type(error).__name__}: {str(error)[:500]}")
            traceback.print_exc()
        rows[system] = row
        say(row)
        save("peak", [row], key, {}, args.out)
        model.zero_grad(set_to_none=True)
    if not systems:
        return
    wide = copy.deepcopy(model).float()
    verdicts = {system: contract.Verdict() for system in systems}
    for seed in range(args.seeds):
        kw = inputs(MODEL, size)
        torch.manual_seed(100 + seed)
        kw["hidden_states"] = torch.randn_like(kw["hidden_states"])
        cotangent = torch.randn_like(kw["hidden_states"])
        high = {k: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in kw.items()}
        true = gradients(wide, wide, high, cotangent)
        plain = gradients(model, model, kw, cotangent)
        eager, same = contract.errors(plain, true), equal(plain, gradients(model, model, kw, cotangent))
        del plain
        for system, f in systems.items():
            first = gradients(f, model, kw, cotangent)
            for name, twice in (("repeatable", equal(first, gradients(f, model, kw, cotangent))),
                                ("eager_repeatable", same)):
                rows[system][name] = rows[system].get(name, True) and twice
            verdict = verdicts[system]
            verdict.add(contract.errors(first, true), eager)
            rows[system] |= dict(tensors=len(verdict.ratios), batches=verdict.batches, mean=round(verdict.mean, 4),
                                 worst=round(verdict.worst[1], 4), worst_tensor=verdict.worst[0], holds=verdict.holds)
            say(seed, system, verdict, rows[system]["repeatable"])
            save("peak", [rows[system]], key, {}, args.out)
    del wide
    for system, f in systems.items():
        rows[system]["alive"] = alive_at_peak(f, model, inputs(MODEL, size))[:60]
        say(system, "alive at the peak:")
        for line in rows[system]["alive"][:12]:
            print("   ", *line, flush=True)
        save("peak", [rows[system]], key, {}, args.out)


if __name__ == "__main__":
    main()
