"""A plan as text and as one self-contained HTML page; a comparison of simulated policies as text and as a plot; a
fit's plot."""

from __future__ import annotations

import base64
import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphopt.errors import ConfigError

from .costmodel import CostFit
from .plan import Plan
from .simulate import SimResult, cv

MOST_RANKS, MOST_STEPS, MOST_ROWS = 64, 400, 1000


def buckets(plan: Plan) -> list[dict[str, Any]]:
    """One row per shape, costliest first: samples, microbatches, batch sizes, share of tokens and of cost."""
    shape, batch = plan.column("shape"), plan.column("batch")
    tokens, cost = plan.column("tokens"), plan.column("cost_s")
    rows = []
    for s in np.unique(shape):
        mine = shape == s
        rows.append(
            {
                "name": plan.shapes.name(int(s)),
                "tokens": int(plan.shapes.tokens[s]),
                "samples": int(batch[mine].sum()),
                "microbatches": int(mine.sum()),
                "b_min": int(batch[mine].min()),
                "b_max": int(batch[mine].max()),
                "token_share": float(tokens[mine].sum() / tokens.sum()),
                "cost_share": float(cost[mine].sum() / cost.sum()),
                "largest": int(tokens[mine].max()),
                "flagged": int((plan.column("flags")[mine] > 0).sum()),
            }
        )
    return sorted(rows, key=lambda r: -r["tokens"])


def origin(plan: Plan) -> str:
    """Where the plan's times come from, in words."""
    model = plan.manifest["cost_model"]
    if model["source"] == "symbolic":
        return (
            f"symbolic cost of {model['key'].get('model', 'the model')} and a description of {model['key'].get('gpu', 'the GPU')}; "
            "nothing was measured"
        )
    if model["r2"] is None:
        return f"given coefficients ({model['source']})"
    return (
        f"fit of measured runs: R2 {model['r2']:.4f}, mean error {model['mape']:.1%}, largest {model['max_error']:.1%}"
    )


def summary(plan: Plan) -> list[tuple[str, str]]:
    """Name and value of what a reader asks first."""
    m, total, predicted = plan.manifest, plan.manifest["totals"], plan.manifest["predicted"]
    left = (
        ", ".join(f"{len(m[k])} {k}" for k in ("dropped", "carried", "repeated") if m[k]) or "every sample exactly once"
    )
    memory = [f"{m['limits']['m_mem']:,.0f} tokens"] if m["limits"]["m_mem"] else []
    memory += [f"{m['limits']['memory_bytes'] / 2**30:.1f} GiB"] if m["limits"]["memory_bytes"] else []
    peak = plan.column("bytes") if all(p.column("bytes").null_count == 0 for p in plan.parts) else None
    largest = f"{int(plan.column('tokens').max()):,} tokens" + (
        f", {peak.max() / 2**30:.1f} GiB" if peak is not None else ""
    )
    sp = f", {m['layout']['sp']} per sequence-parallel group" if m["layout"]["sp"] > 1 else ""
    rows = [
        ("policy", f"{m['policy']}, ranks meet once a {m['layout']['sync']}, tau {m['limits']['tau']}"),
        ("ranks", f"{plan.ranks}{sp}"),
        ("steps", f"{len(plan):,}"),
        ("samples", f"{total['samples']:,} of {m['dataset']['rows']:,}: {left}"),
        (
            "microbatches",
            f"{total['microbatches']:,} ({total['microbatches'] / len(plan) / plan.groups:.2f} per rank and step), "
            f"{total['shape_batch_pairs']} different (shape, B)",
        ),
        ("tokens per step", f"{total['tokens'] / len(plan):,.0f}, CV {predicted['token_cv']:.2%}"),
        (
            "memory limit",
            f"{' and '.join(memory)}; largest microbatch {largest}"
            + (f"; {total['over_memory']} microbatches OVER it" if total["over_memory"] else ""),
        ),
        (
            "predicted step",
            f"{predicted['step_s_mean']:.2f} s, CV {predicted['step_cv']:.2%}; epoch {predicted['epoch_s'] / 3600:.2f} h",
        ),
        (
            "predicted imbalance",
            f"{predicted['imbalance_mean']:.2%} (worst step {predicted['imbalance_worst']:.2%}), bubble "
            f"{predicted['bubble']:.2%}",
        ),
        ("times from", origin(plan)),
        ("plan", plan.hash[:16]),
    ]
    return rows + [("warning", w) for w in plan.warnings]


def text(plan: Plan, *, step: int | None = None, most: int = 30) -> str:
    """The summary, the buckets, and on request one step's microbatches."""
    lines = [f"{k:20} {v}" for k, v in summary(plan)]
    lines += ["", f"{'bucket':>20} {'tokens':>9} {'samples':>10} {'batches':>9} {'B':>9} {'tokens %':>9} {'cost %':>7}"]
    rows = buckets(plan)
    for r in rows[:most]:
        b = str(r["b_min"]) if r["b_min"] == r["b_max"] else f"{r['b_min']}-{r['b_max']}"
        lines.append(
            f"{r['name']:>20} {r['tokens']:>9,} {r['samples']:>10,} {r['microbatches']:>9,} {b:>9} {r['token_share']:>9.1%} "
            f"{r['cost_share']:>7.1%}" + (f"  {r['flagged']} flagged" if r["flagged"] else "")
        )
    if len(rows) > most:
        lines.append(f"{'...':>20} {len(rows) - most} more buckets")
    for name in ("dropped", "carried", "repeated"):
        if plan.manifest[name]:
            shown = ", ".join(map(str, plan.manifest[name][:20]))
            lines += ["", f"{name}: rows {shown}{', ...' if len(plan.manifest[name]) > 20 else ''}"]
    if step is not None:
        if not 0 <= step < len(plan):
            raise ConfigError(f"there is no step {step}; the plan has {len(plan)}")
        lines += ["", f"step {step}"]
        for mb in plan.microbatches():
            if mb.step == step:
                lines.append(
                    f"  rank {mb.rank:>4}  {mb.k + 1}/{mb.microbatches}  {plan.shapes.name(mb.shape):>16} x {len(mb.samples):<4}"
                    f" {mb.tokens:>8,} tokens {mb.cost_s:>8.2f} s  {mb.flag}"
                )
    return "\n".join(lines)


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
        ax.stackplot(
            shown, 100 * share, colors=colours, labels=[f"{a + 1:,}-{b:,}" for a, b in zip(edges[:-1], edges[1:])]
        )
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


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Batch plan {{ hash }}</title>
<style>body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1a1a1a}h1{font-size:1.5rem}
h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse;font-variant-numeric:tabular-nums}th,td{padding:.15rem .7rem;text-align:right;
border-bottom:1px solid #e3e3e3}th{background:#f5f5f5;position:sticky;top:0}table.facts td,table.facts th{text-align:left;background:none}
.warn{color:#a33;font-weight:600}.scroll{max-height:32rem;overflow:auto;border:1px solid #ddd}img{max-width:100%}summary{cursor:pointer}</style>
<h1>Batch plan</h1><table class="facts">{% for k, v in summary %}<tr{% if k == "warning" %} class="warn"{% endif %}><th>{{ k }}</th><td>{{ v }}</td></tr>{% endfor %}</table>
<h2>Load per rank</h2><img alt="busy share of each rank and step" src="{{ plots.load }}"><img alt="bubble of each step" src="{{ plots.bubble }}">
<h2>What a step holds</h2><img alt="token mix of each step" src="{{ plots.mix }}"><img alt="microbatches of one step" src="{{ plots.step }}">
<h2>Buckets</h2><div class="scroll"><table><thead><tr><th>T x H x W</th><th>tokens</th><th>samples</th><th>microbatches</th><th>B</th><th>largest, tokens</th>
<th>tokens</th><th>cost</th><th>flagged</th></tr></thead>{% for r in buckets %}<tr><td>{{ r.name }}</td><td>{{ "{:,}".format(r.tokens) }}</td>
<td>{{ "{:,}".format(r.samples) }}</td><td>{{ "{:,}".format(r.microbatches) }}</td><td>{{ r.b_min }}{% if r.b_min != r.b_max %}&ndash;{{ r.b_max }}{% endif %}</td>
<td>{{ "{:,}".format(r.largest) }}</td><td>{{ "{:.1%}".format(r.token_share) }}</td><td>{{ "{:.1%}".format(r.cost_share) }}</td><td>{{ r.flagged or "" }}</td></tr>{% endfor %}</table></div>
{% for name, rows in left.items() if rows %}<details><summary>{{ rows|length }} rows {{ name }}</summary><p>{{ rows[:2000]|join(", ") }}{% if rows|length > 2000 %}, ...{% endif %}</p></details>{% endfor %}
<h2>Microbatches</h2><p>{{ shown }} of {{ "{:,}".format(count) }}</p><div class="scroll"><table><thead><tr><th>step</th><th>rank</th><th>k</th><th>of</th><th>T x H x W</th>
<th>B</th><th>tokens</th><th>seconds</th><th>flags</th></tr></thead>{% for m in microbatches %}<tr><td>{{ m.step }}</td><td>{{ m.rank }}</td><td>{{ m.k + 1 }}</td>
<td>{{ m.microbatches }}</td><td>{{ names[m.shape] }}</td><td>{{ m.batch }}</td><td>{{ "{:,}".format(m.tokens) }}</td><td>{{ "{:.2f}".format(m.cost_s) }}</td><td>{{ m.flag }}</td></tr>{% endfor %}</table></div></html>
"""


def to_html(plan: Plan, path: str | Path) -> Path:
    """One self-contained page: facts, load per rank, bubble, token mix, a step, buckets, the first thousand
    microbatches."""
    try:
        import jinja2
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise ConfigError(f"the HTML page needs {e.name}", remedy="pip install 'graphopt[plot]'") from e
    from .problem import FLAG_NAMES

    head = plan.table().slice(0, MOST_ROWS).drop_columns(["samples"]).to_pylist()
    for r in head:
        r["flag"] = ", ".join(n for bit, n in FLAG_NAMES.items() if r["flags"] & bit)
    page = (
        jinja2.Environment(autoescape=True)
        .from_string(PAGE)
        .render(
            summary=summary(plan),
            buckets=buckets(plan),
            plots=plots(plan),
            hash=plan.hash[:12],
            microbatches=head,
            shown=len(head),
            count=plan.manifest["totals"]["microbatches"],
            names=[plan.shapes.name(i) for i in range(len(plan.shapes))],
            left={k: plan.manifest[k] for k in ("dropped", "carried", "repeated")},
        )
    )
    write_whole(path, page.encode())
    return Path(path)


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file through a temporary one and a rename."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


COMPARISON = (
    "policy",
    "ranks",
    "steps",
    "tokens_per_s",
    "limit_fraction",
    "bubble",
    "load_cv",
    "step_cv",
    "token_cv",
    "padding",
)


def comparison(results: Sequence[tuple[str, SimResult]]) -> str:
    """Simulated designs as a table."""
    lines = [
        f"{'design':28} {'ranks':>5} {'steps':>7} {'tokens/s':>12} {'of limit':>9} {'bubble':>7} {'load CV':>8} {'step CV':>8} {'token CV':>9} "
        f"{'padding':>8}"
    ]
    for name, r in results:
        lines.append(
            f"{name:28} {r.ranks:>5} {r.steps:>7,} {r.tokens_per_s:>12,.0f} {r.limit_fraction:>9.1%} {r.bubble:>7.1%} {r.load_cv:>8.1%} "
            f"{r.step_cv:>8.1%} {r.token_cv:>9.2%} {r.padding:>8.1%}"
        )
    return "\n".join(lines)


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


__all__ = ["buckets", "comparison", "cv", "plot_comparison", "plot_fit", "summary", "text", "to_html"]
