"""Inspection of every zoo model, and of the built-in models at their real sizes: what was found, where, how long.

    python benchmarks/inspect_zoo.py [--names wan,flux] [--models wan-14b] [--out FOLDER]

Zoo models are tiny (tests/models/zoo.py).  `device` is where the model could be captured and `device_reason` why not on
meta; `sites` are compared with the counts read off the models' sources, and `asked` is how many norms and gated sums
`why` was asked about, `answered` for how many it had a reason.  A built-in model runs in a fresh process, so
`seconds` is a cold start: imports, capture, kernels compiled for sm90 (with an empty cache of Triton) and the page;
`cpu_seconds` and `load` (the machine's average at the end) tell how much of it was waiting for other work.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "models"))


def zoo_row(name: str) -> dict[str, Any]:
    import torch
    import zoo

    import graphopt
    from graphopt.passes import ops_view, pipeline, source

    torch._dynamo.reset()
    entry = zoo.ZOO[name]
    model, inputs = entry.build(torch.bfloat16)
    start = time.perf_counter()
    seen = graphopt.inspect(model.train(), **inputs, return_dict=False, options={"graphopt.select": "all"})
    seconds = time.perf_counter() - start
    report = seen.report
    owners = {source.fqn(n) for g in seen.graphs for sub in pipeline.nested(g.before) for n in sub.graph.nodes
              if ops_view.canonical(n) in ("layer_norm", "rms_norm")}
    owners |= {x.fqn for x in (*report.sites, *report.rejects, *report.near_misses)}
    answered = sum(fqn in (text := seen.why(fqn)) and "captured in it" not in text for fqn in owners)
    ran = {kind: report.count(kind, executed=True) for kind in ("modulate", "gate")}
    expected = {"modulate": entry.expected.modulate, "gate": entry.expected.gate}
    return dict(
        model=name, size="tiny", device=seen.captured.device, device_reason=seen.captured.device_reason,
        graphs=len(seen.graphs), breaks=len(seen.captured.breaks), **ran, expected=expected,
        as_expected=ran == expected,
        rewritten=sum(s.status == "rewritten" for s in report.sites), rejects=len(report.rejects),
        near_misses=len(report.near_misses), asked=len(owners), answered=answered, seconds=seconds,
    )


def model_row(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"TRITON_CACHE_DIR": f"{folder}/triton", "GRAPHOPT_CACHE_DIR": f"{folder}/graphopt"}
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-m", "graphopt", "inspect", name, "--json", f"{folder}/a.json",
                               "--html", f"{folder}/a.html"], env=env, capture_output=True, text=True)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if done.returncode:
            raise SystemExit(done.stderr)
        data = json.loads(Path(f"{folder}/a.json").read_text())
        size = Path(f"{folder}/a.html").stat().st_size
    sites = [s for g in data["graphs"] for p in g["passes"] for s in p["sites"]]
    kernels = [k for g in data["graphs"] for p in g["passes"] for k in p["kernels"]]
    calls = [k for k in kernels if k["direction"] == "forward"]
    return dict(
        model=name, size="real", device=data["device"], device_reason=data["device_reason"],
        graphs=len(data["graphs"]), breaks=len(data["breaks"]), modulate=sum(s["kind"] == "modulate" for s in sites),
        gate=sum(s["kind"] == "gate" for s in sites), rewritten=sum(s["status"] == "rewritten" for s in sites),
        kernels=len(calls), kernels_named=sum(bool(k["sources"]) for k in calls),
        saved_gib=sum(k["traffic"]["op_by_op"] - k["traffic"]["fused"] for k in kernels) / (1 << 30),
        seconds=seconds, cpu_seconds=cpu, load=os.getloadavg()[0], html_bytes=size,
    )


def main() -> None:
    from _results import save

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", help="zoo models; default: all, 'none' for none")
    parser.add_argument("--models", help="built-in models; default: all, 'none' for none")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import torch
    import zoo

    from graphopt.schedule.builtin import BUILTIN

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    pick = lambda chosen, known: [] if chosen == "none" else chosen.split(",") if chosen else list(known)
    rows = []
    for make, names in ((model_row, pick(args.models, BUILTIN)), (zoo_row, pick(args.names, zoo.ZOO))):
        for name in names:
            rows.append(make(name))
            print(rows[-1], flush=True)
            save("inspect", rows, ("model", "size"), {}, args.out)
    tiny = [r for r in rows if r["size"] == "tiny"]
    print(f"{sum(r['device'] == 'meta' for r in tiny)} of {len(tiny)} on meta, "
          f"{sum(r['as_expected'] for r in tiny)} as read off the source, "
          f"{sum(r['asked'] == r['answered'] for r in tiny)} with an answer for every place")


if __name__ == "__main__":
    main()
