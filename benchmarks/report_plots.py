"""Plots of the benchmark page, one function per section; each takes the rows and writes one SVG file."""

from __future__ import annotations

from pathlib import Path

import dsa_plot
import matplotlib
import numpy as np

matplotlib.use("svg")
from matplotlib import pyplot as plt

# the same picture for the same rows: no date, fixed ids
matplotlib.rcParams["svg.hashsalt"] = "graphopt"
matplotlib.rcParams["svg.fonttype"] = "none"
COLOURS = {"graphopt": "#1b6ca8", "inductor_no_mix_order": "#d1803c", "eager": "#999999", "cudnn": "#5a9e6f",
           "flex": "#b05a7a", "reference": "#bbbbbb"}


def _save(figure: plt.Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _tidy(axis: plt.Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e5e5e5", linewidth=0.7)
    axis.set_axisbelow(True)


def adaln(rows: list[dict], path: Path) -> None:
    """Share of the copy bandwidth over the size of one tensor, per kernel and direction."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for axis, direction in zip(axes, ("forward", "backward")):
        for kernel in sorted({r["kernel"] for r in rows}):
            points: dict[float, float] = {}
            for r in rows:
                if r["kernel"] == kernel and r["direction"] == direction and r.get("roofline"):
                    mb = r["shape"][0] * r["shape"][1] * r["shape"][2] * 2 / 1e6
                    points[mb] = max(points.get(mb, 0.0), r["roofline"])
            if points:
                sizes = sorted(points)
                axis.plot(sizes, [points[s] for s in sizes], marker="o", markersize=3, linewidth=1.2, label=kernel)
        axis.set_xscale("log")
        axis.set_xlabel("MB of one bf16 activation")
        axis.set_title(direction, fontsize=10)
        axis.set_ylim(0, 1.05)
        _tidy(axis)
    axes[0].set_ylabel("share of the copy bandwidth")
    axes[1].legend(fontsize=8, frameon=False, ncols=2)
    _save(figure, path)


def step(rows: list[dict], path: Path) -> None:
    """Step time and peak memory relative to Inductor without mix-order reduction."""
    key = lambda r: (r["model"], str(r["grid"]), r["batch"], str(r["layers"]))
    base = {key(r): r for r in rows if r["system"] == "inductor_no_mix_order"}
    names = [k for k in sorted({key(r) for r in rows}) if k in base]
    systems = [s for s in ("eager", "inductor_no_mix_order", "graphopt") if any(r["system"] == s for r in rows)]
    figure, axes = plt.subplots(1, 2, figsize=(10, 1.2 + 0.55 * max(len(names), 2)), sharey=True)
    for axis, what, title in zip(axes, ("step_ms", "peak_gib"), ("step time", "peak memory")):
        for i, system in enumerate(systems):
            by = {key(r): r for r in rows if r["system"] == system}
            values = [by[n][what] / base[n][what] if n in by else np.nan for n in names]
            places = np.arange(len(names)) + 0.26 * (i - 1)
            axis.barh(places, values, height=0.24, color=COLOURS[system], label=system)
            for place, value in zip(places, values):
                if not np.isnan(value):
                    axis.text(value + 0.01, place, f"{value:.3f}", va="center", fontsize=7)
        axis.set_title(f"{title}, Inductor (mix-order off) = 1", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(np.arange(len(names)), [f"{m} {g}, B={b}, {n} layers" for m, g, b, n in names], fontsize=8)
    axes[1].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.1, 1))
    _save(figure, path)


def dsa(rows: list[dict], path: Path) -> None:
    """Milliseconds over tokens, forward and backward, with the crossover."""
    _save(dsa_plot.draw(rows), path)


def stream(rows: list[dict], path: Path) -> None:
    """Step time beside its bound, per model size, tokens and order of the update."""
    rows = sorted(rows, key=lambda r: (r.get("params_b") or 0, r["tokens"], r["step_ms"]))
    figure, axis = plt.subplots(figsize=(10, 1.0 + 0.35 * len(rows)))
    places = np.arange(len(rows))
    axis.barh(places, [r["step_ms"] for r in rows], height=0.6, color="#c9d9e6", label="step")
    for what, colour in (("bound", "#1b6ca8"), ("resident", "#d1803c")):
        axis.scatter([r.get(f"{what}_ms") or np.nan for r in rows], places, marker="|", s=160, color=colour, label=what)
    names = [f"{r.get('params_b') or 0:.1f} B, {r['tokens']:,}: {r['system']} {r.get('update') or ''}"
             + (", graphs" if r.get("graphs") else "") + (f", {r['cores']} cores" if r.get("cores") else "")
             + (f", {r['threads']} threads, {r['resident']} kept" if "resident" in r else "")
             for r in rows]
    axis.set_yticks(places, names, fontsize=8)
    axis.set_xlabel("ms")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)
    _save(figure, path)


def _design(row: dict) -> str:
    tau = "" if row.get("tau") is None else f"tau {row['tau']}"
    return " ".join(str(v) for v in (row["policy"], tau, row.get("mode") or "") if v)


def schedule(rows: list[dict], path: Path) -> None:
    """Per cent of the zero-bubble limit over ranks, of the data set with most ranks; measured rows as stars."""
    simulated = [r for r in rows if r.get("simulated")]
    sets = {r["data"] for r in simulated or rows}
    data = max(sorted(sets), key=lambda d: len({r["ranks"] for r in simulated if r["data"] == d}))
    chosen = [r for r in simulated if r["data"] == data]
    figure, axis = plt.subplots(figsize=(10, 3.6))
    alike: dict[tuple, list[str]] = {}  # designs with the same points are one line
    for line in sorted({_design(r) for r in chosen}):
        points = {r["ranks"]: 100 * r["limit_fraction"] for r in chosen if _design(r) == line}
        alike.setdefault(tuple(sorted(points.items())), []).append(line)
    for points, names in alike.items():
        axis.plot(*zip(*points), marker="o", markersize=3, linewidth=1.2, label="\nand ".join(names))
    measured = [r for r in rows if not r.get("simulated")]
    if measured:
        axis.scatter([r["ranks"] for r in measured], [100 * r["limit_fraction"] for r in measured], marker="*",
                     color="black", label="measured")
    for r in measured:
        axis.annotate(f"{r['policy']} tau {r['tau']}", (r["ranks"], 100 * r["limit_fraction"]), (5, 0), fontsize=7,
                      textcoords="offset points", va="center")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted({r["ranks"] for r in chosen + measured}), minor=False)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set_xlabel("ranks")
    axis.set_ylabel("% of no waiting")
    axis.set_title(f"data {data}, simulated", fontsize=10)
    axis.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    _tidy(axis)
    _save(figure, path)
