"""The measured part of README.md, from the result files: what stands between its two markers (written by report.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

Row = dict
BEGIN, END = "<!-- measured: python benchmarks/report.py -->", "<!-- end of measured -->"
SYSTEMS = {"eager": "eager", "inductor": "Inductor, stock",
           "inductor_no_mix_order": "Inductor, mix-order reduction off", "graphopt": "graphopt"}
KERNELS = {"F1": "norm + modulate", "F2": "gate + residual + norm + modulate", "F2a": "gate + residual + affine norm",
           "F3": "gate + residual"}
SHAPE = [2, 16384, 3072]


class Rows(Protocol):
    """What this needs of report.Results."""

    def rows(self, name: str, **where: object) -> Iterator[tuple[str, Row]]:
        """Rows of a benchmark, with their file."""


def table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *lines])


def step(results: Rows) -> str:
    """Wan 1.3B x 4, 32,760 tokens: the gradient first, then time and memory."""
    found = {r["system"]: r for f, r in results.rows("step", model="wan-1.3b", grid="21x30x52", batch=1, layers=4)
             if f.startswith("h200/") and r.get("step_ms")}
    right = found["eager"]["grad_norm"] if "eager" in found else None
    now = found.get("graphopt", {}).get("commit")
    lines, earlier = [], False
    for system, name in SYSTEMS.items():
        r = found.get(system)
        if r is None:
            continue
        norm = f"{r['grad_norm']:,.4f}" if r["grad_norm"] < 100 else f"{r['grad_norm']:,.0f}"
        wrong = right is not None and abs(r["grad_norm"] / right - 1) > 0.01
        if r.get("commit") != now:
            name, earlier = name + " \\*", True
        lines.append([name, f"**{norm}**" if wrong else norm, f"{r['step_ms']:.1f}", f"{r['forward_ms']:.1f}",
                      f"{r['peak_gib']:.1f}"])
    return ("A Wan-1.3B-shaped model of 4 layers, 32,760 tokens, bf16, one H200 "
            "([step.json](benchmarks/results/h200/step.json), `python benchmarks/step.py`):\n\n"
            + table(["system", "gradient norm", "step, ms", "forward, ms", "peak, GiB"], lines)
            + ("\n\n\\* of an earlier run than graphopt's row" if earlier else ""))


def kernels(results: Rows) -> str:
    """Fused operators at one shape."""
    lines, systems, earlier = [], ("graphopt", "inductor", "eager"), False
    for kernel, name in KERNELS.items():
        rows = {r["direction"]: r for _, r in results.rows("adaln", kernel=kernel, shape=SHAPE)
                if r.get("form") in (None, "wan")}
        if not {"forward", "backward"} <= set(rows):
            continue
        cells = []
        for s in systems:
            a, b = (rows[d]["us"].get(s) for d in ("forward", "backward"))
            old = any(s in rows[d].get("us_commit", {}) for d in rows)  # kept from a run before
            earlier |= old
            cells.append(f"{a:,.0f} / {b:,.0f}" + (" \\*" if old else "") if a and b else "-")
        lines.append([f"{name} ({kernel})", *cells])
    shape = ", ".join(f"{n:,}" for n in SHAPE)
    return (f"The fused operators alone, bf16, [{shape}], microseconds forward / backward "
            "([adaln.json](benchmarks/results/h200/adaln.json), `python benchmarks/adaln.py`):\n\n"
            + table(["", "graphopt", "Inductor", "eager"], lines)
            + ("\n\n\\* of an earlier run than graphopt's" if earlier else ""))


def put(text: str, results: Rows) -> str:
    """README with its measured part made anew; unchanged if it has no markers."""
    if BEGIN not in text or END not in text:
        return text
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{step(results)}\n\n{kernels(results)}\n{END}{after}"
