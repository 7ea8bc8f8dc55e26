"""`graphopt.dsa.plan`: every attention of a model, what it is, and what sliding attention would change."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from graphopt import _compat
from graphopt import config as settings
from graphopt.codegen.dsa.reference import effective_window
from graphopt.dsa import costs
from graphopt.dsa.converting import context_parallel, head_count, input_layer
from graphopt.dsa.options import DSAConfig
from graphopt.errors import ConfigError
from graphopt.inspecting.capture import Captured, capture
from graphopt.passes import match_global_attention
from graphopt.passes.match_global_attention import GLOBAL, Site


@dataclass(frozen=True)
class Row:
    """One attention.

    owner: the module.  kind: see passes/match_global_attention.py; "no graph" where no graph holds it.  tokens: of the
    queries, `text` of them text; None where unknown.  grid: (T, H, W).  dense_ms, sliding_ms: predicted forward and
    backward on an H200 (None without a prediction).  reason: why it would be left alone; None if it can slide.
    """

    owner: str
    kind: str
    tokens: int | None = None
    keys: int | None = None
    heads: int | None = None
    head_dim: int | None = None
    grid: tuple[int, int, int] | None = None
    text: int | None = None
    text_first: bool = False
    dense_ms: float | None = None
    sliding_ms: float | None = None
    reason: str | None = None
    where: str | None = None


class Plan:
    """What `plan` found.  `rows`: one per attention, in graph order; `print(plan)` shows a table."""

    def __init__(self, rows: list[Row], config: DSAConfig, title: str, breaks: list[tuple[str, str | None]]) -> None:
        self.rows, self.config, self.title, self.breaks = rows, config, title, breaks

    def __getitem__(self, owner: str) -> Row:
        found = next((r for r in self.rows if r.owner == owner), None)
        if found is None:
            some = ", ".join(dict.fromkeys(r.owner for r in self.rows[:4]))
            raise ConfigError(f"no attention belongs to {owner!r}", where=self.title, remedy=f"owners here: {some}, ..")
        return found

    @property
    def convertible(self) -> list[str]:
        """The modules `convert` can be given."""
        return list(dict.fromkeys(r.owner for r in self.rows if r.reason is None))

    def to_json(self, indent: int | None = 1) -> str:
        """The rows as JSON."""
        return json.dumps({"title": self.title, "config": self.config.to_dict(),
                           "rows": [asdict(r) for r in self.rows]}, indent=indent)

    def __str__(self) -> str:
        lines = [f"{self.title}: {len(self.rows)} attentions, {len(self.convertible)} can slide, "
                 f"window {self.config.window}", _line(HEADER)]
        alike: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for row in self.rows:
            cells = _cells(row)
            alike.setdefault((_family(row.owner), *cells[1:]), []).append(cells)
        for cells, *more in alike.values():
            lines.append(_line(cells) + (f"  [{len(more)} more alike]" if more else ""))
        return "\n".join(lines)


HEADER = ("owner", "kind", "tokens", "heads", "grid", "text", "dense ms", "sliding ms", "left alone because")


def _cells(row: Row) -> tuple[str, ...]:
    def number(x: Any, form: str = "{}") -> str:
        return "-" if x is None else form.format(x)
    grid = "-" if row.grid is None else "x".join(map(str, row.grid))
    text = "-" if not row.text else f"{row.text} {'first' if row.text_first else 'last'}"
    heads = "-" if row.heads is None else f"{row.heads} x {row.head_dim}"
    return (row.owner, row.kind, number(row.tokens), heads, grid, text, number(row.dense_ms, "{:.2f}"),
            number(row.sliding_ms, "{:.2f}"), row.reason or "")


def _line(cells: tuple[str, ...]) -> str:
    widths = (44, 9, 8, 10, 10, 10, 9, 11, 0)
    return " ".join(c.ljust(w) for c, w in zip(cells, widths)).rstrip()


def _family(owner: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in owner.split("."))


def plan(model: nn.Module, *args: Any, config: DSAConfig | None = None, target: str = "sm90", device: str = "meta",
         force: bool = False, **kwargs: Any) -> Plan:
    """List every attention of a model; nothing is changed and nothing is computed.

    model: on any device, also on meta.  args, kwargs: inputs of one forward; of tensors only shape and dtype matter.
    config: the window asked about (default DSAConfig()).  target: predictions exist for "sm90" (H200), bf16 and fp16.
    device: where it is traced: "meta", or "cpu" where the model does not allow that.  force: do not leave alone what is
    predicted to be slower.

    Returns a Plan.  Raises CaptureError for a model torch cannot capture, ConfigError for another device or config.
    """
    config = config or DSAConfig()
    if not isinstance(config, DSAConfig):
        raise ConfigError(f"config is {config!r}", where="graphopt.dsa.plan", remedy="give a graphopt.dsa.DSAConfig")
    if device not in ("meta", "cpu"):
        raise ConfigError(f"device is {device!r}", where="graphopt.dsa.plan", remedy="use 'meta' or 'cpu'")
    parsed, _ = settings.parse(None, None)
    found = capture(model, args, kwargs, device, parsed, target)
    rows = [_row(site, config, target, force) for g in found.graphs for site in match_global_attention.find(g.before)]
    names = [n for n, _ in model.named_modules()] if isinstance(model, nn.Module) else []
    rows = [replace(r, owner=_full(r.owner, names)) for r in rows]
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    rows = [replace(r, reason="context parallelism splits the sequence over ranks")
            if r.reason is None and r.owner in modules and context_parallel(modules[r.owner]) else r for r in rows]
    rows += _missing(model, found, {r.owner for r in rows})
    return Plan(rows, config, type(model).__name__, found.breaks)


def _full(owner: str, names: list[str]) -> str:
    """A frame that Dynamo started inside a model names modules from there: the whole name, if only one fits."""
    ends = [n for n in names if n.endswith("." + owner)]
    return ends[0] if owner not in names and len(ends) == 1 else owner


def _number(size: Any) -> int:
    return size if isinstance(size, int) else _compat.size_hint(size)


def _row(site: Site, config: DSAConfig, target: str, force: bool) -> Row:
    tokens, heads, dim = _number(site.tokens), _number(site.heads), _number(site.head_dim)
    row = Row(site.fqn, site.kind, tokens, _number(site.keys), heads, dim,
              None if site.grid is None else tuple(map(_number, site.grid)),  # type: ignore[arg-type]
              None if site.text is None else _number(site.text), site.text_first, reason=site.reason, where=site.where)
    batch = _number(site.batch)
    measured = costs.known(site.dtype, dim, target)
    if site.kind in GLOBAL and measured:
        row = replace(row, dense_ms=costs.dense(batch, heads, tokens, dim).step)
    if row.grid is None or site.kind not in GLOBAL or row.reason is not None:
        return row
    if effective_window(config.window, row.grid) == row.grid:
        return replace(row, reason=f"the window {config.window} covers the grid: it is dense attention")
    if not measured or math.prod(row.grid) == 0:
        return row
    ms = costs.sliding(batch, heads, row.grid, dim, config.window, row.text or 0, heads * dim,
                       config.offsets != "zero").step
    row = replace(row, sliding_ms=ms)
    if config.offsets == "tap" or config.boundary != "inside":
        return replace(row, sliding_ms=None)
    if row.dense_ms is not None and ms >= row.dense_ms and not force:
        why = f"dense is predicted faster ({row.dense_ms:.2f} against {ms:.2f} ms)"
        return replace(row, reason=f"too few tokens: {why}")
    return row


def _missing(model: nn.Module, found: Captured, seen: set[str]) -> list[Row]:
    """Attention modules of which no graph holds the attention."""
    if not isinstance(model, nn.Module):
        return []
    rows = []
    for name, module in model.named_modules():
        layer, heads = input_layer(module), None
        if layer is not None:
            heads = head_count(module)
        if layer is None or heads is None or any(o == name or o.startswith(name + ".") for o in seen):
            continue
        near = next((b for b in found.breaks if "attention" in f"{b[0]} {b[1]}".lower()), None)
        why = near or next(iter(found.breaks), None)
        reason = (f"a graph break keeps it out of every graph: {why[0].splitlines()[0]} ({why[1]})" if why
                  else "it did not run, or does not call attention torch can see")
        rows.append(Row(name, "no graph", heads=heads, head_dim=_head_dim(layer, heads), reason=reason,
                        where=why[1] if why else None))
    return rows


def _head_dim(layer: nn.Module, heads: int) -> int | None:
    out = getattr(layer, "out_features", None)
    return out // heads if isinstance(out, int) else None



