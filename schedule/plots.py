"""Pictures of plans, simulated policies and fits (matplotlib, without global state)."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from graphopt.errors import ConfigError
from graphopt.schedule.costmodel import CostFit, write_whole
from graphopt.schedule.plan import Plan
from graphopt.schedule.simulate import SimResult

MOST_RANKS, MOST_STEPS = 64, 400


def _figure(width: float, height: float) -> Any:
    """A matplotlib figure without any global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=110)


def _png(figure: Any) -> str:
    """A figure as a data URL."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _load(plan: Plan) -> np.ndarray:
    """Predicted busy seconds, [steps, groups]."""
    speed = np.asarray(plan.manifest["layout"]["speeds"] or np.ones(plan.groups))
    cell = plan.column("step").astype(np.int64) * plan.groups + plan.column("rank")
    return np.bincount(cell, plan.column("cost_s"), len(plan) * plan.groups).reshape(len(plan), plan.groups) / speed


def plots(plan: Plan) -> dict[str, str]:
    """Pictures as data URLs: load per rank and step, bubble per step, token mix per step, one step's microbatches."""
    load, steps = _load(plan), len(plan)
    shown = np.unique(np.linspace(0, steps - 1, min(steps, MOST_STEPS)).astype(int))
    table = plan.step_table
    mean, longest = table.column("mean_s").to_numpy(), table.column("max_s").to_numpy()
    out = {}
    f = _figure(10, 3.2)
    ax = f.subplots()
    relative = load / longest[:, None]
    image = ax.imshow(
        relative[shown].T,
        aspect="auto",
        cmap="viridis",
        vmin=min(0.8, float(relative.min())),
        vmax=1,
        interpolation="nearest",
        extent=(-0.5, steps - 0.5, plan.groups - 0.5, -0.5),
    )
    ax.set(xlabel="step", ylabel="data-parallel group", title="Busy share of each rank's step (1 = never waits)")
    f.colorbar(image, ax=ax)
    out["load"] = _png(f)
    f = _figure(10, 2.6)
    ax = f.subplots()
    ax.plot(shown, 100 * (1 - mean / longest)[shown], lw=0.8, color="#b2182b")
    ax.set(
        xlabel="step",
        ylabel="waiting, %",
        title="Bubble of each step (predicted, without noise)",
        ylim=(0, None),
        xlim=(0, max(1, steps - 1)),
    )
    ax.grid(alpha=0.3)
    out["bubble"] = _png(f)
    out["mix"] = _mix(plan, shown)
    out["step"] = _one_step(plan, steps // 2)
    return out


def _mix(plan: Plan, shown: np.ndarray) -> str:
    """Tokens per step by sequence length."""
    s = plan.shapes.tokens
    edges = np.unique(np.r_[0, np.geomspace(max(1, s.min()), s.max(), 7)[1:-1].astype(int), s.max()])
    group = np.searchsorted(edges, s[plan.column("shape")], side="left") - 1
    tokens = np.zeros((len(edges) - 1, len(plan)))
    np.add.at(tokens, (group, plan.column("step")), plan.column("tokens"))
    f = _figure(10, 3)
    ax = f.subplots()
    colours = ["#deebf7", "#c6dbef", "#9ecae1", "#6baed6", "#3182bd", "#08519c"][-len(tokens) :]
    share = tokens[:, shown] / tokens[:, shown].sum(0)
    if len(shown) > 1:
        ax.stackplot(shown, 100 * share, colors=colours, labels=[f"{a + 1:,}-{b:,}" for a, b in pairwise(edges)])
        ax.set_xlim(0, len(plan) - 1)
    else:
        bottom = 0.0
        for c, v, a, b in zip(colours, 100 * share[:, 0], edges[:-1], edges[1:]):
            ax.bar([0], [v], bottom=bottom, color=c, label=f"{a + 1:,}-{b:,}")
            bottom += v
    ax.set(xlabel="step", ylabel="tokens, %", ylim=(0, 100), title="Token mix of each step, by tokens per sample")
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, reverse=True)
    return _png(f)


def _one_step(plan: Plan, step: int) -> str:
    """Every microbatch of a step as a bar, rank by rank."""
    mine = plan.column("step") == step
    rank, cost, tokens, batch = (plan.column(n)[mine] for n in ("rank", "cost_s", "tokens", "batch"))
    ranks = np.unique(np.linspace(0, plan.groups - 1, min(plan.groups, MOST_RANKS)).astype(int))
    f = _figure(10, 1.2 + 0.17 * len(ranks))
    ax = f.subplots()
    import matplotlib as mpl

    colour = mpl.colormaps["viridis"]
    low, high = np.log(max(1, int(plan.shapes.tokens.min()))), np.log(max(2, int(plan.shapes.tokens.max())))
    slots = plan.manifest["layout"]["sync"] == "microbatch"
    k = plan.column("k")[mine]
    slot_end = np.cumsum([cost[k == i].max() for i in range(int(k.max()) + 1)]) if slots else None
    for place, r in enumerate(ranks):
        end = 0.0
        for i in np.flatnonzero(rank == r):
            if slot_end is not None:
                end = float(slot_end[k[i]] - cost[k == k[i]].max())
            ax.barh(
                place,
                cost[i],
                left=end,
                height=0.8,
                color=colour((np.log(tokens[i] / batch[i]) - low) / max(high - low, 1e-9)),
                edgecolor="white",
                lw=0.4,
            )
            end += cost[i]
    ax.set(
        xlabel="predicted seconds",
        ylabel="data-parallel group",
        ylim=(len(ranks) - 0.5, -0.5),
        title=f"Microbatches of step {step} (darker: shorter samples)"
        + (f", {len(ranks)} of {plan.groups} groups" if len(ranks) < plan.groups else ""),
    )
    every = max(1, len(ranks) // 16)
    ax.set_yticks(range(0, len(ranks), every), [str(r) for r in ranks[::every]])
    return _png(f)


def plot_comparison(results: Sequence[tuple[str, SimResult]], path: str | Path) -> None:
    """Bars of the fraction of the zero-bubble limit, one group per rank count (PNG or SVG by the path's suffix)."""
    names = list(dict.fromkeys(n for n, _ in results))
    ranks = sorted({r.ranks for _, r in results})
    f = _figure(1.8 + 2.6 * len(ranks), 4)
    ax = f.subplots()
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        value = [
            100 * next((r.limit_fraction for n, r in results if n == name and r.ranks == k), np.nan) for k in ranks
        ]
        bars = ax.bar(np.arange(len(ranks)) + (i - (len(names) - 1) / 2) * width, value, width * 0.95, label=name)
        ax.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
    ax.set_xticks(range(len(ranks)), [f"{k} ranks" for k in ranks])
    ax.set(ylabel="tokens/s, % of the zero-bubble limit", ylim=(0, 105))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, frameon=False)
    _save(f, path)


def plot_fit(fit: CostFit, path: str | Path) -> None:
    """Measured against predicted seconds, and the relative error over tokens (PNG or SVG by the path's suffix)."""
    if not fit.errors:
        raise ConfigError("this cost model was not fitted to measurements; there is nothing to plot")
    s = np.array([e["S"] * e["B"] for e in fit.errors], float)
    seconds, error = (np.array([e[k] for e in fit.errors], float) for k in ("seconds", "error"))
    f = _figure(9, 3.6)
    left, right = f.subplots(1, 2)
    left.loglog(s, seconds, "o", ms=4, label="measured")
    order = np.argsort(s)
    left.loglog(s[order], (seconds * (1 + error))[order], "x", ms=5, label=fit.form)
    left.set(xlabel="tokens of the microbatch (B x S)", ylabel="seconds", title=f"R2 {fit.r2:.4f}")
    left.legend(frameon=False)
    right.axhline(0, color="grey", lw=0.8)
    right.semilogx(s, 100 * error, "o", ms=4)
    right.set(
        xlabel="tokens of the microbatch (B x S)",
        ylabel="predicted over measured, %",
        title=f"mean error {fit.mape:.1%}, largest {fit.max_error:.1%}",
    )
    _save(f, path)


def _save(figure: Any, path: str | Path) -> None:
    """A figure to a file, whole or not at all."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=Path(path).suffix.lstrip(".") or "png")
    write_whole(path, buffer.getvalue())
