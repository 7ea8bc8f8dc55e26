"""A plan as one self-contained HTML page."""
# ruff: noqa: E501 - the template's lines are as long as their markup

from __future__ import annotations

from pathlib import Path

from graphopt.errors import ConfigError
from graphopt.schedule.costmodel import write_whole
from graphopt.schedule.plan import Plan
from graphopt.schedule.plots import plots
from graphopt.schedule.problem import FLAG_NAMES
from graphopt.schedule.report import buckets, summary

MOST_ROWS = 1000


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1"><title>Batch plan {{ hash }}</title>
<style>body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1a1a1a}h1{font-size:1.5rem}
h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse;font-variant-numeric:tabular-nums}th,td{padding:.15rem .7rem;text-align:right;
border-bottom:1px solid #e3e3e3}th{background:#f5f5f5;position:sticky;top:0}table.facts td,table.facts th{text-align:left;background:none}
.warn{color:#8a3a2b;background:#f8ebe7;border-radius:4px;padding:.4rem .8rem}.scroll{max-height:32rem;overflow:auto;border:1px solid #ddd;display:inline-block;max-width:100%}.help{color:#6b6b66;margin:.1rem 0 .6rem}img{max-width:100%}summary{cursor:pointer}</style>
<h1>Batch plan</h1>{% for k, v in summary if k == "warning" %}<p class="warn">{{ v }}</p>{% endfor %}
<table class="facts">{% for k, v in summary if k != "warning" %}<tr><th>{{ k }}</th><td>{{ v }}</td></tr>{% endfor %}</table>
<h2>Load per rank</h2><p class="help">Ranks wait for the slowest one of their step. Above: who waits; below: how long, over all ranks.</p><img alt="busy share of each rank and step" src="{{ plots.load }}"><img alt="bubble of each step" src="{{ plots.bubble }}">
<h2>What a step holds</h2><p class="help">Steps of a good plan have the same mix; within one, each rank gets microbatches of about the same total time.</p><img alt="token mix of each step" src="{{ plots.mix }}"><img alt="microbatches of one step" src="{{ plots.step }}">
<h2>Buckets</h2><p class="help">One line per token grid (frames x height x width after VAE and patches). B: samples in a microbatch, smallest to largest.</p><div class="scroll"><table><thead><tr><th>T x H x W</th><th>tokens</th><th>samples</th><th>microbatches</th><th>B</th><th>largest microbatch, tokens</th>
<th>share of tokens</th><th>share of cost</th><th>flagged</th></tr></thead>{% for r in buckets %}<tr><td>{{ r.name }}</td><td>{{ "{:,}".format(r.tokens) }}</td>
<td>{{ "{:,}".format(r.samples) }}</td><td>{{ "{:,}".format(r.microbatches) }}</td><td>{{ r.b_min }}{% if r.b_min != r.b_max %}&ndash;{{ r.b_max }}{% endif %}</td>
<td>{{ "{:,}".format(r.largest) }}</td><td>{{ "{:.1%}".format(r.token_share) }}</td><td>{{ "{:.1%}".format(r.cost_share) }}</td><td>{{ r.flagged or "" }}</td></tr>{% endfor %}</table></div>
{% for name, rows in left.items() if rows %}<details><summary>{{ rows|length }} rows {{ name }}</summary><p>{{ rows[:2000]|join(", ") }}{% if rows|length > 2000 %}, ...{% endif %}</p></details>{% endfor %}
<h2>Microbatches</h2><p class="help">The first {{ "{:,}".format(shown) }} of {{ "{:,}".format(count) }}, in the order they run.</p><div class="scroll"><table><thead><tr><th>step</th><th>rank</th><th>microbatch</th><th>of</th><th>T x H x W</th>
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
