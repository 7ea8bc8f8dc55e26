"""The generated kernels under NVIDIA's compute-sanitizer: memcheck, racecheck, initcheck and synccheck.

    python benchmarks/sanitize.py [--workers 8] [--tools memcheck,racecheck] [--out FOLDER]

Every form of tests/codegen/operator_forms.py, and every fusion at odd widths and at those of each configuration (one
warp, several, sub-blocks, ring, chunks), forward, backward and second stage, with one pass and with two,
numerics="eager" once. Each tensor has an allocation of its own (no caching allocator), so memcheck sees an access
past its end.
A row: tool, calls (operators run forward and backward), kernels (different sources), errors, seconds.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "codegen")]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer")
# (width, rows): one warp, several with a ring, sub-blocks that overhang, chunks
WIDTHS = ((1, 5), (3, 7), (17, 5), (333, 9), (1152, 9), (2240, 9), (3072, 5), (5120, 5), (20000, 3))


def calls() -> list:
    """(form, shape, dtype of the activations, of the factors, rounding, reduction)."""
    import torch
    from operator_forms import FORMS, plain

    from graphopt.codegen.form import FUSIONS

    bf16, fp32 = torch.bfloat16, torch.float32
    out = [(form, (2, 6, 72), bf16, fp32, "", "") for form in FORMS]
    out += [(plain(f), (2, S, D), bf16, fp32, "", "") for D, S in WIDTHS for f in FUSIONS]
    out += [(plain(f), (3, 7, 130), fp32, bf16, "", "two_pass") for f in FUSIONS]
    eager = "gated=bfloat16 residual=bfloat16 norm=bfloat16 gain=bfloat16 product=bfloat16"
    return out + [(plain(f), (2, 5, 330), bf16, bf16, eager, "") for f in ("norm_modulate", "gate_norm_modulate")]


def run(first: int, step: int) -> None:
    """Every step-th call."""
    import torch
    from operator_forms import attributes, call, leaves, operands, sized, with_leaves

    from graphopt.codegen import store

    names: set[str] = set()
    load = store.load
    store.load = lambda name, source: (names.add(store.write(name, source).stem), load(name, source))[1]
    torch.manual_seed(0)
    count = 0
    for form, shape, dtype, factors, rounding, reduction in calls()[first::step]:
        os.environ["GRAPHOPT_REDUCTION"] = reduction
        form = sized(form, shape)
        t = operands(form, dtype, factors, shape)
        t = with_leaves(t, [v.detach().cuda().requires_grad_() for v in leaves(t)])
        outs = call(form, t, *attributes(form, dtype, rounding), engine="triton")
        torch.autograd.grad(outs, leaves(t), [torch.ones_like(o) for o in outs])
        torch.cuda.synchronize()
        count += 1
    print(f"ran {count} calls", *sorted(names), flush=True)


def find() -> str:
    """The tool, or an exit that says it is missing."""
    found = shutil.which("compute-sanitizer") or next((p for p in PLACES if os.path.exists(p)), None)
    if found is None:
        sys.exit("compute-sanitizer is not here: it comes with the CUDA toolkit")
    return found


def errors_in(text: str) -> int | None:
    """What the tool counted; None when it printed no summary."""
    found = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", text)
    return int(found[1] or found[2]) if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--slice", default="", help="i/n: run every n-th call here, as the tool starts it")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.slice:
        return run(*map(int, args.slice.split("/")))
    from _results import save

    tool, n = find(), args.workers
    script = [sys.executable, __file__]
    env = dict(os.environ, OMP_NUM_THREADS="1")

    def slices(prefix: list[str], **more: str) -> list[subprocess.CompletedProcess]:
        one = lambda i: subprocess.run([*prefix, *script, "--slice", f"{i}/{n}"], capture_output=True, text=True,
                                       env=env | more)
        with ThreadPoolExecutor(n) as pool:
            return list(pool.map(one, range(n)))

    start = time.perf_counter()
    plain = slices([])  # compiles; under the tool nothing compiles
    bad = [p.stderr[-2000:] for p in plain if p.returncode]
    print(f"compiled in {time.perf_counter() - start:.0f} s", *bad, flush=True)
    failed = bool(bad)
    for name in args.tools.split(","):
        start = time.perf_counter()
        done = slices([tool, "--tool", name, "--error-exitcode", "9"], PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        counts = [errors_in(p.stdout + p.stderr) for p in done]
        ran = [re.search(r"ran (\d+) calls(.*)", p.stdout) for p in done]
        row = dict(tool=name, calls=sum(int(r[1]) for r in ran if r), wanted=len(calls()),
                   kernels=len({k for r in ran if r for k in r[2].split()}),
                   errors=sum(c or 0 for c in counts) if None not in counts else None,
                   seconds=round(time.perf_counter() - start, 1))
        print(row, flush=True)
        clean = row["errors"] == 0 and row["calls"] == row["wanted"]
        if not clean:
            failed = True
            for p in done:
                if p.returncode:
                    print((p.stdout + p.stderr)[:6000], flush=True)
        save("sanitize", [row], ("tool",), {}, args.out)
    sys.exit(failed)


if __name__ == "__main__":
    main()
