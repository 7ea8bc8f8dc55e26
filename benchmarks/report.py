"""Pages from the result files alone: docs/benchmarks.md with plots, docs/papers.md, README's tables, one HTML page.

    python benchmarks/report.py [--html build/benchmarks.html]

No figure is typed in here.  Each section names the files it was made of, their commands, machines and versions; where a
rival is as good or better, the section says so from the same rows.
"""

from __future__ import annotations

import argparse
import base64
from pathlib import Path

import report_plots as plots
from _results import ROOT
from report_dsa import dsa, dsa_step
from report_papers import papers
from report_parts import Results, Section, both, number, source, stream_rivals, table
from report_plans import in_turn, several
from report_readme import put

DOCS = ROOT.parent / "docs"
Row = dict


def adaln(results: Results) -> Section | None:
    """Fused operators: microseconds of each system, and graphopt's share of the copy bandwidth."""
    found = list(results.rows("adaln"))
    if not found:
        return None
    own = ("graphopt", "graphopt_two_pass")
    systems = [s for s in (*own, "inductor", "inductor_max_autotune", "inductor_mix_order", "liger", "eager")
               if any(s in r["us"] for _, r in found)]
    size = lambda r: r["shape"][0] * r["shape"][1] * r["shape"][2]
    pairs: dict[tuple, dict[str, Row]] = {}
    rivals = []
    for _, r in sorted(found, key=lambda fr: (fr[1]["kernel"], fr[1]["direction"] != "forward", -size(fr[1]))):
        us, shape = r["us"], " x ".join(map(str, r["shape"]))
        form = "" if r.get("form") in (None, "wan") else f" ({r['form']})"
        pairs.setdefault((r["kernel"] + form, -size(r), shape), {})[r["direction"]] = r
        best = min((us[s] for s in systems if s in us and s not in own), default=None)
        if best is not None and "graphopt" in us and best <= 1.01 * us["graphopt"]:
            rivals.append(f"{r['kernel']} {r['direction']} {shape} ({number(best)} against "
                          f"{number(us['graphopt'])} us)")
    cell = lambda r, s: number(r["us"].get(s)) + ("\\*" if s in r.get("us_commit", {}) else "")
    lines = [[kernel, shape, *(both(pair, lambda r, s=s: cell(r, s)) for s in systems),
              both(pair, lambda r: number(r.get("roofline"), 2))] for (kernel, _, shape), pair in sorted(pairs.items())]
    text = ("Forward / backward: whole compiled functions, second stage of the backward included; CUDA-graph replays, "
            "medians in microseconds. The last column is the floor (bytes that must move, over the copy bandwidth "
            "measured in that run) over graphopt's time. `inductor`: mix-order reduction off, because with it "
            "gradients are wrong. `graphopt_two_pass`: a separate pass over tiles of columns sums the factors' "
            "gradients. \\*: of an earlier run than graphopt's.\n\n"
            + table(["kernel", "B x N x D", *systems, "of copy"], lines))
    return Section("Fused norms and gates", sorted({f for f, _ in found}), text,
                   ("adaln", lambda p: plots.adaln([r for _, r in found], p)), rivals)


def bias_gradient(results: Results) -> Section | None:
    """Gradients of biases, with and without the elementwise op that makes their matrix."""
    found = list(results.rows("bias_gradient"))
    if not found:
        return None
    systems = ("graphopt", "inductor", "eager")
    lines = [[r["what"], " x ".join(map(str, r["shape"])), *(number(r["us"].get(s)) for s in systems),
              number(r["roofline"], 2)] for _, r in sorted(found, key=lambda fr: (fr[1]["what"], fr[1]["shape"]))]
    text = ("`gelu`: GELU's backward and the sum of its result over rows. `sum`: the sum alone, of a matrix in memory. "
            "Microseconds, and the share of the copy bandwidth (pass `column_sums`).\n\n"
            + table(["", "rows x columns", *systems, "of copy"], lines))
    return Section("Gradients of biases", sorted({f for f, _ in found}), text)


def joint_launch(results: Results) -> Section | None:
    """Two streams of a joint block in one launch or two."""
    found = list(results.rows("joint_launch"))
    if not found:
        return None
    systems = ("joint", "graphopt", "inductor")
    lines = [[r["what"], r["size"], r["direction"], *(number(r["us"].get(s)) for s in systems)] for _, r in found]
    text = ("`first`: norm and modulate of image and text; `second`: gate, residual, norm and modulate of both. "
            "`joint`: the pass `joint_launch` on. B x image + text x D, microseconds.\n\n"
            + table(["", "size", "direction", *systems], lines))
    return Section("Two streams in one launch", sorted({f for f, _ in found}), text)


def step(results: Results) -> Section | None:
    """A training step of whole models."""
    found = [(f, r) for f, r in results.rows("step") if r.get("step_ms")]
    if not found:
        return None
    key = lambda r: (r["model"], str(r["grid"]), r["batch"], str(r["layers"]))
    lines, rivals, order = [], [], ["eager", "inductor", "inductor_no_mix_order", "graphopt"]
    for k in sorted({key(r) for _, r in found}):
        same = {r["system"]: r for _, r in found if key(r) == k}
        for s in [s for s in order if s in same] + sorted(set(same) - set(order)):
            r = same[s]
            lines.append([k[0], k[1], str(k[2]), k[3], s, number(r.get("forward_ms"), 4), number(r["step_ms"], 4),
                          number(r["peak_gib"], 4), number(r.get("grad_norm"), 5), r.get("commit", "-")[:7]])
        if {"graphopt", "inductor_no_mix_order"} <= set(same):
            ours, theirs = same["graphopt"], same["inductor_no_mix_order"]
            if theirs["step_ms"] <= 1.005 * ours["step_ms"]:
                rivals.append(f"{k[0]} {k[1]}, batch {k[2]}: Inductor's step takes {number(theirs['step_ms'], 4)} ms, "
                              f"graphopt's {number(ours['step_ms'], 4)}")
            if theirs["peak_gib"] < ours["peak_gib"]:
                rivals.append(f"{k[0]} {k[1]}, batch {k[2]}: Inductor's peak is {number(theirs['peak_gib'], 4)} GiB, "
                              f"graphopt's {number(ours['peak_gib'], 4)}")
    text = ("Forward and backward, no optimizer. A gradient norm that is not eager's is a wrong result, not a fast "
            "one. Rows of several commits are of several runs.\n\n"
            + table(["model", "grid", "batch", "layers", "system", "forward, ms", "step, ms", "peak, GiB",
                     "gradient norm", "commit"], lines))
    return Section("A training step", sorted({f for f, _ in found}), text,
                   ("step", lambda p: plots.step([r for _, r in found], p)), rivals)


def peak(results: Results) -> Section | None:
    """What a step holds at its peak, where it was taken apart."""
    found = list(results.rows("peak"))
    if not found:
        return None
    lines = [[r["model"], r["grid"], str(r["layers"]), r["system"], number(r.get("peak_gib"), 4),
              *(number(r.get(k), 3) for k in ("tensors", "mean", "worst")),
              {True: "bit-equal", False: "differ", None: "-"}[r.get("repeatable")]]
             for _, r in sorted(found, key=lambda fr: (fr[1]["model"], fr[1]["layers"], fr[1]["system"]))]
    text = ("GiB at the peak of a training step; the file lists what lives there, by the kernel that wrote it. Then "
            "the output and every gradient against fp32 eager, in units of bf16 eager's error: geometric mean over "
            "tensors (contract: at most 1.05) and the largest (2). Rows may be newer than those above.\n\n"
            + table(["model", "grid", "layers", "system", "peak, GiB", "tensors", "mean", "worst", "two runs"], lines))
    return Section("Memory at the peak", sorted({f for f, _ in found}), text)


def stream(results: Results) -> Section | None:
    """Streamed steps against the machine's bound."""
    found = [(f, r) for f, r in results.rows("stream") if r.get("step_ms")]
    if not found:
        return None
    order = lambda r: str(r.get("update") or "-") + (", graphs" if r.get("graphs") else "")
    lines = [[number(r.get("params_b")), f"{r['tokens']:,}", r["system"], order(r),
              *(str(r.get(k) or "-") for k in ("cores", "threads", "slots")), str(r.get("resident", "-")),
              *(number(r.get(k), 4) for k in ("step_ms", "bound_ms", "resident_ms", "plan_ms")),
              number(r.get("rho"), 2), *(number(r.get(k), 3) for k in ("peak_gib", "plan_peak_gib", "host_gib"))]
             for _, r in sorted(found, key=lambda fr: (fr[1].get("params_b") or 0, fr[1]["tokens"], fr[1]["step_ms"]))]
    text = ("Weights, gradients and AdamW in host memory. The bound follows from rates measured alone in the same run "
            "(docs/streaming.md); resident is the same compiled layers kept on the GPU, without an optimizer; "
            "planned is what `graphopt.stream_plan` said from those rates before, as it was at the commit of the row. "
            "Rows of machines with different numbers of cores are of different runs.\n\n"
            + table(["billions", "tokens", "system", "update", "cores", "threads", "slots", "layers kept", "step, ms",
                     "bound, ms", "resident, ms", "planned, ms", "bound / step", "GPU peak, GiB", "planned",
                     "host, GiB"], lines))
    return Section("Layer streaming", sorted({f for f, _ in found}), text,
                   ("stream", lambda p: plots.stream([r for _, r in found], p)), stream_rivals([r for _, r in found]))


def schedule(results: Results) -> Section | None:
    """Batch plans, simulated and measured."""
    found = [(f, r) for f, r in results.rows("schedule") if r.get("limit_fraction") is not None]
    if not found:
        return None
    kind = lambda r: "simulated" if r.get("simulated") else "measured"
    key = lambda r: (kind(r), str(r["data"]), r["ranks"], r["limit_fraction"])
    per_cent = lambda value, digits: "-" if value is None else number(100 * value, digits)
    lines = [[kind(r), str(r["data"]), str(r["ranks"]), r["policy"], "-" if r.get("tau") is None else str(r["tau"]),
              str(r.get("mode") or "-"), per_cent(r["limit_fraction"], 3), per_cent(r.get("step_cv"), 2),
              number(r.get("tokens_per_s"), 4), per_cent(r.get("mape"), 2)]
             for r in sorted((r for _, r in found), key=key)]
    text = ("Simulated: per cent of a plan without any waiting. Measured: mean busy time of the ranks over the wall "
            "time of the slowest. Data A: 150 shapes of images and video, 256 to 97,200 tokens; C: capped at 32,760 "
            "([planning](planning.md)). `simulated with the fit` takes the cost fitted on this GPU, the other "
            "simulations that of Wan 14B: compare tokens/s within one kind only.\n\n"
            + table(["", "data", "ranks", "policy", "tau", "mode", "%", "CV of steps, %", "tokens/s",
                     "error of prediction, %"], lines))
    return Section("Batch plans", sorted({f for f, _ in found}), text,
                   ("schedule", lambda p: plots.schedule([r for _, r in found], p)))


def kernels(results: Results) -> Section | None:
    """Every kernel against fp64, by machine and width of the cross, and what compute-sanitizer found."""
    lines, files = [], set()
    for name, where in (("kernel_matrix", "GPU, five seeds"), ("kernel_matrix_interpreter", "Triton's interpreter")):
        machines: dict[str, list[Row]] = {}
        for file, row in results.rows(name):
            machines.setdefault(file, []).append(row)
        for file, rows in machines.items():
            files.add(file)
            worst = max(rows, key=lambda r: r["worst"])
            place = worst["worst_at"].split(" gradient")[0].split(" output")[0]
            lines.append([where, rows[0]["design"], f"{sum(r['cells'] for r in rows):,}",
                          str(sum(len(r["missing"]) for r in rows)), f"{sum(r['runs'] for r in rows):,}",
                          str(sum(len(r["failed"]) for r in rows)), f"{worst['worst']:.2f}",
                          f"{worst['fusion']} {worst['dtypes']} {place}"])
    if not lines:
        return None
    text = ("Eleven fusions, eleven widths from 1 to 20,000, five pairs of dtypes (a cell), each with batches 1 to 3 "
            "of 0 to 4,095 rows and means of 1e3 (a case): every output and gradient against fp64 eager. `worst` is "
            "the largest error in units of its limit, 1.25 x eager's error or 1e-5 in fp32.\n\n"
            + table(["where", "design", "cells", "missing", "cases", "failed", "worst", "at"], lines))
    checks = list(results.rows("sanitize"))
    if checks:
        files |= {f for f, _ in checks}
        text += "\n\n" + table(["compute-sanitizer", "calls", "kernels", "errors"], [
            [r["tool"], str(r["calls"]), str(r["kernels"]), "-" if r["errors"] is None else str(r["errors"])]
            for _, r in checks])
    return Section("Kernels against fp64", sorted(files), text)


def zoo(results: Results) -> Section | None:
    """What is matched in real models, and how exact the rewritten training is."""
    counted, matrix = list(results.rows("zoo_count")), list(results.rows("zoo_matrix"))
    if not counted:
        return None
    sites, matched = (sum(r[k] for _, r in counted) for k in ("sites", "matched"))
    models = len({r["model"] for _, r in counted})
    lines = [["sites matched", f"{matched:,} of {sites:,} ({len(counted)} variants of {models} models)"]]
    if matrix:
        means = [r["mean"] for _, r in matrix if r.get("mean") is not None and not r.get("torch_is_wrong")]
        holds = sum(bool(r.get("holds")) for _, r in matrix)
        lines += [["training within the contract", f"{holds} of {len(matrix)} variants"],
                  ["error against fp64, in eager's (means)", f"{min(means):.3f} to {max(means):.3f}"]]
        wrong = sorted({f"{r['model']} {r['variant']}" for _, r in matrix if not r.get("holds")})
        if wrong:
            lines.append(["not within", ", ".join(wrong)])
    return Section("Thirty-one real models", sorted({f for f, _ in counted + matrix}), table(["", ""], lines))


SECTIONS = (adaln, bias_gradient, joint_launch, step, peak, dsa, dsa_step, stream, schedule, in_turn, several, kernels,
            zoo)


def markdown(results: Results, pictures: Path) -> str:
    """The page; plots are drawn into `pictures`."""
    pictures.mkdir(parents=True, exist_ok=True)
    parts = ["# Benchmarks", "Made by `python benchmarks/report.py` from the files named below; run any of them "
             "yourself with `graphopt bench`. A dash: not measured. Rows of one file may be of several commits."]
    for make in SECTIONS:
        section = make(results)
        if section is None:
            continue
        parts.append(f"## {section.title}")
        if section.figure:
            name, draw = section.figure
            draw(pictures / f"{name}.svg")
            parts.append(f"![{section.title}]({pictures.name}/{name}.svg)")
        parts.append(section.text)
        if section.rivals:
            parts.append("**As good or better elsewhere:** " + "; ".join(section.rivals) + ".")
        parts.append("\n".join(f"- {source(results, f)}" for f in section.files))
    return "\n\n".join(parts) + "\n"


def page(text: str, pictures: Path) -> str:
    """The Markdown as one HTML file with its pictures inside."""
    import markdown as converter

    body = converter.markdown(text, extensions=["tables"])
    for picture in pictures.glob("*.svg"):
        data = base64.b64encode(picture.read_bytes()).decode()
        body = body.replace(f'src="{pictures.name}/{picture.name}"', f'src="data:image/svg+xml;base64,{data}"')
    style = ("body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#222}"
             "table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}"
             "td,th{padding:.2rem .6rem;border-bottom:1px solid #ddd;text-align:right}"
             "td:first-child,th:first-child{text-align:left}"
             "img{max-width:100%}code{background:#f3f3f3;padding:0 .2em}")
    return ('<!doctype html><html lang="en"><head><meta charset="utf-8"><title>graphopt: benchmarks</title>'
            f"<style>{style}</style></head><body>{body}</body></html>\n")


def main() -> None:
    """Write the page and its plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--html", type=Path)
    args = parser.parse_args()
    pictures = args.docs / "img"
    results = Results(args.results)
    text = markdown(results, pictures)
    (args.docs / "benchmarks.md").write_text(text)
    (args.docs / "papers.md").write_text(papers(results))
    readme = args.docs.parent / "README.md"
    if readme.exists():
        readme.write_text(put(readme.read_text(), results))
    if args.html:
        args.html.parent.mkdir(parents=True, exist_ok=True)
        args.html.write_text(page(text, pictures))
    print("wrote", args.docs / "benchmarks.md", args.html or "")


if __name__ == "__main__":
    main()
