"""results/<machine>/dsa.png: time over tokens from the saved rows, with the crossover against dense attention."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

NAMES = {"graphopt": "graphopt, smooth offsets", "window": "graphopt, fixed window", "cudnn": "cuDNN, dense",
         "flex": "FlexAttention, fixed window", "reference": "grid_sample"}


def series(rows: list[dict[str, Any]], direction: str, window: list[int]) -> dict[str, list[tuple[int, float]]]:
    """Name -> [(tokens, ms)], sorted."""
    out: dict[str, dict[int, float]] = {}
    for r in rows:
        plain = r["what"] == "attention" and r["window"] == window and r["direction"] == direction
        if not plain or r["dtype"] != "bfloat16" or r["head_dim"] != 128 or r["offsets"] not in ("smooth", "none"):
            continue
        for name, ms in [*r["ms"].items(), *((f"{n} by its FLOPs", t) for n, t in r.get("estimated_ms", {}).items())]:
            name = "window" if name == "graphopt" and r["offsets"] == "none" else name
            out.setdefault(name, {})[r["tokens"]] = ms
    return {name: sorted(points.items()) for name, points in out.items()}


def crossover(ours: list[tuple[int, float]], dense: list[tuple[int, float]]) -> float | None:
    """Tokens from which ours is faster, linear between measured sizes on logarithmic axes; None if never or always."""
    other = dict(dense)
    both = [(n, math.log(t / other[n])) for n, t in ours if n in other]
    for (a, x), (b, y) in pairwise(both):
        if x > 0 >= y:
            return math.exp(math.log(a) + (math.log(b) - math.log(a)) * x / (x - y))
    return None


def plot(folder: Path) -> Path:
    """Forward and backward side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = json.loads((folder / "dsa.json").read_text())["rows"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, direction in zip(axes, ("forward", "backward")):
        lines = series(rows, direction, [3, 7, 7])
        for name, label in NAMES.items():
            if name in lines:
                line, = axis.loglog(*zip(*lines[name]), marker="o", markersize=3, label=label)
                guess = lines.get(f"{name} by its FLOPs")
                if guess:
                    axis.loglog(*zip(lines[name][-1], *guess), marker="o", markersize=3, linestyle="--",
                                color=line.get_color(), label=f"{label}, by its FLOPs")
        at = crossover(lines.get("graphopt", []), lines.get("cudnn", []))
        if at:
            axis.axvline(at, color="grey", linewidth=0.8, linestyle=":")
            axis.annotate(f"dense is slower from {at:,.0f} tokens", (at, axis.get_ylim()[1]), xytext=(4, -12),
                          textcoords="offset points", fontsize=8, color="grey")
        axis.set_xlabel("tokens")
        axis.set_title(f"{direction}, 12 heads x 128, window 3 x 7 x 7, bf16")
        axis.set_xticks([2000 * 4**i for i in range(5)], [f"{2 * 4**i}k" for i in range(5)])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("ms")
    path = folder / "dsa.png"
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return path
