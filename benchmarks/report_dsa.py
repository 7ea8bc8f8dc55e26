"""Sections of the benchmark page about sliding attention."""

from __future__ import annotations

import report_plots as plots
from report_parts import Results, Row, Section, both, number, table


def dsa(results: Results) -> Section | None:
    """Deformable sliding attention over the number of tokens."""
    found = [(f, r) for f, r in results.rows("dsa", what="attention")]
    if not found:
        return None
    systems = [s for s in ("graphopt", "cudnn", "flex", "reference") if any(s in r["ms"] for _, r in found)]
    groups: dict[tuple, dict[str, Row]] = {}
    rivals = []
    other = lambda r: (r["head_dim"], r["dtype"]) != (128, "bfloat16")
    order = lambda r: (r["window"], r["tokens"], other(r), r["dtype"], r["head_dim"], r["offsets"])
    for _, r in sorted(found, key=lambda fr: order(fr[1])):
        ms = r["ms"]
        heads = f"{r['heads']} x {r['head_dim']}" + ("" if r["dtype"] == "bfloat16" else f", {r['dtype']}")
        key = (" x ".join(map(str, r["window"])), f"{r['tokens']:,}", heads, r["offsets"])
        groups.setdefault(key, {})[r["direction"]] = r
        best = min((ms[s] for s in systems[1:] if s in ms), default=None)
        if best is not None and "graphopt" in ms and best <= ms["graphopt"]:
            rivals.append(f"{r['tokens']:,} tokens, {r['direction']} ({number(best)} against "
                          f"{number(ms['graphopt'])} ms)")
    three = ("forward", "backward", "both")
    lines = [[*key, *(both(group, lambda r, s=s: number(r["ms"].get(s)), three) for s in systems),
              number(max((r.get("error") or {}).get("y", 0) for r in group.values()) or None, 2)]
             for key, group in groups.items()]
    text = ("Milliseconds, through autograd: forward / backward with the offsets' gradient / both; bf16 where nothing "
            "else stands. cuDNN is dense attention and FlexAttention a fixed window: neither computes what a learned "
            "window does. The error is the output's, against fp64. Offsets: `none` is the fixed window, `zero` are all "
            "0, `smooth` noise of (1, 2, 2) tokens at points every 5 x 10 x 13 tokens, `rough` every 2.5 x 4 x 4.6, "
            "`noise` at every token, `wild` at every token and up to a quarter of the grid.\n\n"
            + table(["window", "tokens", "heads", "offsets", *systems, "error"], lines))
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
