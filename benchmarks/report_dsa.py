"""Sections of the benchmark page about sliding attention."""

from __future__ import annotations

import report_plots as plots
from report_parts import Results, Section, number, table


def dsa(results: Results) -> Section | None:
    """Deformable sliding attention over the number of tokens."""
    found = [(f, r) for f, r in results.rows("dsa", what="attention")]
    if not found:
        return None
    systems = [s for s in ("graphopt", "cudnn", "flex", "reference") if any(s in r["ms"] for _, r in found)]
    lines, rivals = [], []
    for _, r in sorted(found, key=lambda fr: (fr[1]["window"], fr[1]["tokens"], fr[1]["direction"], fr[1]["offsets"])):
        ms = r["ms"]
        lines.append([" x ".join(map(str, r["window"])), f"{r['tokens']:,}", r["offsets"], r["direction"],
                      *(number(ms.get(s)) for s in systems), number((r.get("error") or {}).get("y"), 2)])
        best = min((ms[s] for s in systems[1:] if s in ms), default=None)
        if best is not None and "graphopt" in ms and best <= ms["graphopt"]:
            rivals.append(f"{r['tokens']:,} tokens, {r['direction']} ({number(best)} against "
                          f"{number(ms['graphopt'])} ms)")
    text = ("Milliseconds through autograd; backward with the offsets' gradient. cuDNN is dense attention and "
            "FlexAttention a fixed window: neither computes what a learned window does. The error is the output's, "
            "against fp64.\n\n"
            + table(["window", "tokens", "offsets", "direction", *systems, "error"], lines))
    return Section("3D deformable sliding attention", sorted({f for f, _ in found}), text,
                   ("dsa", lambda p: plots.dsa([r for _, r in found], p)), rivals)


def dsa_step(results: Results) -> Section | None:
    """A training step of a converted model."""
    found = [(f, r) for f, r in results.rows("dsa_step") if r.get("step_ms")]
    if not found:
        return None
    order = ["eager", "inductor", "graphopt", "graphopt_window", "graphopt_dsa"]
    lines, rivals = [], []
    key = lambda r: (r["tokens"], r["window"], r["layers"], order.index(r["system"]))
    for _, r in sorted(found, key=lambda fr: key(fr[1])):
        lines.append([r["grid"], f"{r['tokens']:,}", r["window"], str(r["layers"]), r["system"],
                      number(r["forward_ms"], 4), number(r["step_ms"], 4), number(r.get("ratio"), 3),
                      number(r["peak_gib"], 4)])
        if r["system"] in ("graphopt_dsa", "graphopt_window") and r.get("ratio", 0) >= 1:
            rivals.append(f"{r['tokens']:,} tokens: dense attention is as fast as {r['system']}")
    text = ("Wan 1.3B's width, forward and backward without optimizer. `graphopt_dsa`: every layer converted, learned "
            "offsets of about (1, 2, 2) tokens; `graphopt_window`: converted with zero offsets; the others are dense. "
            "The ratio is the step's time over that of `graphopt` dense in the same run. A converted model is another "
            "model: see the adaptation run in [dsa.md](dsa.md).\n\n"
            + table(["grid", "tokens", "window", "layers", "system", "forward, ms", "step, ms", "ratio", "peak, GiB"],
                    lines))
    return Section("A training step with sliding attention", sorted({f for f, _ in found}), text, None, rivals)
