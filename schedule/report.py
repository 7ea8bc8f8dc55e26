"""A plan, and a comparison of simulated policies, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphopt.errors import ConfigError
from graphopt.schedule.plan import Plan
from graphopt.schedule.simulate import SimResult


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
            f"symbolic cost of {model['key'].get('model', 'the model')} and a description of "
            f"{model['key'].get('gpu', 'the GPU')}; "
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
            f"{predicted['step_s_mean']:.2f} s, CV {predicted['step_cv']:.2%}; "
            f"epoch {predicted['epoch_s'] / 3600:.2f} h",
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
            f"{r['name']:>20} {r['tokens']:>9,} {r['samples']:>10,} {r['microbatches']:>9,} {b:>9} "
            f"{r['token_share']:>9.1%} "
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
                    f"  rank {mb.rank:>4}  {mb.k + 1}/{mb.microbatches}  {plan.shapes.name(mb.shape):>16}"
                    f" x {len(mb.samples):<4}"
                    f" {mb.tokens:>8,} tokens {mb.cost_s:>8.2f} s  {mb.flag}"
                )
    return "\n".join(lines)


def comparison(results: Sequence[tuple[str, SimResult]]) -> str:
    """Simulated designs as a table."""
    lines = [
        f"{'design':28} {'ranks':>5} {'steps':>7} {'tokens/s':>12} {'of limit':>9} {'bubble':>7} "
        f"{'load CV':>8} {'step CV':>8} {'token CV':>9} "
        f"{'padding':>8}"
    ]
    for name, r in results:
        lines.append(
            f"{name:28} {r.ranks:>5} {r.steps:>7,} {r.tokens_per_s:>12,.0f} {r.limit_fraction:>9.1%} "
            f"{r.bubble:>7.1%} {r.load_cv:>8.1%} "
            f"{r.step_cv:>8.1%} {r.token_cv:>9.2%} {r.padding:>8.1%}"
        )
    return "\n".join(lines)
