"""Video attention's time over tokens from saved rows, with the crossover against dense attention."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

NAMES = {"graphopt": ("graphopt, smooth offsets", "#1b6ca8"), "window": ("graphopt, fixed window", "#6fb1de"),
         "cudnn": ("cuDNN, dense", "#5a9e6f"), "flex": ("FlexAttention, fixed window", "#b05a7a"),
         "reference": ("grid_sample, smooth offsets", "#999999")}
Line = list[tuple[int, float]]


def series(rows: list[dict[str, Any]], direction: str, window: list[int]) -> dict[str, Line]:
    """Name -> [(tokens, ms)], sorted; NAMES, and "<name> by its FLOPs" for what was not run."""
    out: dict[str, dict[int, float]] = {}
    for r in rows:
        if r["what"] != "attention" or r["window"] != window or r["direction"] != direction:
            continue
        if r["dtype"] != "bfloat16" or r["head_dim"] != 128 or r["offsets"] not in ("smooth", "none"):
            continue
        for name, ms in [*r["ms"].items(), *((f"{n} by its FLOPs", t) for n, t in r.get("estimated_ms", {}).items())]:
            name = "window" if name == "graphopt" and r["offsets"] == "none" else name
            out.setdefault(name, {})[r["tokens"]] = ms
    return {name: sorted(points.items()) for name, points in out.items()}


def crossover(ours: Line, dense: Line) -> float | None:
    """Tokens from which ours is faster, linear between measured sizes on logarithmic axes; None if never or always."""
    other = dict(dense)
    both = [(n, math.log(t / other[n])) for n, t in ours if n in other]
    for (a, x), (b, y) in pairwise(both):
        if x > 0 >= y:
            return math.exp(math.log(a) + (math.log(b) - math.log(a)) * x / (x - y))
    return None


def draw(rows: list[dict[str, Any]]) -> plt.Figure:
    """Forward and backward side by side."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6), sharey=True)
    for axis, direction in zip(axes, ("forward", "backward")):
        lines = series(rows, direction, [3, 7, 7])
        for name, (label, colour) in NAMES.items():
            if name not in lines:
                continue
            axis.loglog(*zip(*lines[name]), marker="o", markersize=3, label=label, color=colour)
            guess = lines.get(f"{name} by its FLOPs")
            if guess:
                axis.loglog(*zip(lines[name][-1], *guess), marker="o", markersize=3, linestyle="--", color=colour,
                            label=f"{label}, by its FLOPs")
        at = crossover(lines.get("graphopt", []), lines.get("cudnn", []))
        if at:
            axis.axvline(at, color="grey", linewidth=0.8, linestyle=":",
                         label=f"dense is slower from {round(at, -2):,.0f} tokens")
        axis.set_xticks([2000 * 4**i for i in range(5)], [f"{2 * 4**i}k" for i in range(5)])
        axis.minorticks_off()
        axis.set_xlabel("tokens")
        axis.set_title(f"{direction}, 12 heads x 128, window 3 x 7 x 7, bf16", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e5e5e5", linewidth=0.7)
        axis.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    axes[0].set_ylabel("ms")
    return figure


def plot(folder: Path) -> Path:
    """<folder>/dsa.png from <folder>/dsa.json."""
    figure = draw(json.loads((folder / "dsa.json").read_text())["rows"])
    figure.tight_layout()
    figure.savefig(folder / "dsa.png", dpi=110)
    return folder / "dsa.png"
