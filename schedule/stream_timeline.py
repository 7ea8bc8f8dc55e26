"""Spans of work on tracks of time, simulated or measured, and their pictures: SVG, an HTML page, a Chrome trace.

A track is what works on one thing at a time: the compute, upload and download streams, the CPU pool, the thread that
launches.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphopt.schedule.stream_sim import Timeline

TRACKS = ("compute", "upload", "download", "cpu", "launch", "fetch")
COLOURS = {"forward": "#4878a8", "backward": "#b0563b", "upload": "#5a9c6e", "download": "#a8863f",
           "optimizer": "#7a5c99", "launch": "#9aa2ab", "wait": "#d8c7c0", "glue": "#6d8f8f", "update": "#96789e"}
WIDTH, ROW, LEFT = 1180, 30, 84


@dataclass(frozen=True)
class Span:
    """One piece of work: its track, what it works on, its kind (a key of COLOURS, or any word), seconds."""

    track: str
    name: str
    kind: str
    start: float
    end: float


def of_simulation(line: Timeline, keep_empty: bool = False) -> list[Span]:
    """The spans of a simulated schedule, in its order; tasks that take no time are left out unless asked for."""
    spans = []
    for t in line.tasks:
        if keep_empty or line.end[t.name] > line.start[t.name]:
            spans.append(Span(t.stream, t.label or t.name, t.kind or t.stream, line.start[t.name], line.end[t.name]))
    return spans


def busy(spans: Sequence[Span], track: str, kind: str | None = None) -> float:
    """Seconds in which a track works (spans that overlap count once)."""
    chosen = sorted((s.start, s.end) for s in spans if s.track == track and kind in (None, s.kind))
    total, reached = 0.0, float("-inf")
    for a, b in chosen:
        total += max(0.0, b - max(a, reached))
        reached = max(reached, b)
    return total


def summary(spans: Sequence[Span]) -> list[tuple[str, str, int, float]]:
    """(track, kind, spans, busy seconds), in the order of the tracks."""
    kinds = dict.fromkeys((s.track, s.kind) for s in spans)
    order = sorted(kinds, key=lambda k: (TRACKS.index(k[0]) if k[0] in TRACKS else len(TRACKS), k[1]))
    return [(t, k, sum(s.track == t and s.kind == k for s in spans), busy(spans, t, k)) for t, k in order]


def to_svg(spans: Sequence[Span], width: int = WIDTH) -> str:
    """A picture: one row per track, time to the right; every span has a tooltip."""
    if not spans:
        return '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"></svg>'
    zero, last = min(s.start for s in spans), max(s.end for s in spans)
    scale = (width - LEFT - 8) / max(last - zero, 1e-12)
    tracks = [t for t in TRACKS if any(s.track == t for s in spans)]
    tracks += sorted({s.track for s in spans} - set(tracks))
    height = ROW * len(tracks) + 26
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
           'font-family="sans-serif" font-size="11">']
    for i, track in enumerate(tracks):
        y = i * ROW + 4
        out.append(f'<text x="2" y="{y + 15}">{html.escape(track)}</text>'
                   f'<rect x="{LEFT}" y="{y}" width="{width - LEFT - 8}" height="{ROW - 8}" fill="#f3f3f1"/>')
        for s in spans:
            if s.track != track:
                continue
            x, w = LEFT + (s.start - zero) * scale, max((s.end - s.start) * scale, 0.3)
            tip = html.escape(f"{s.kind} {s.name}: {1e3 * (s.start - zero):.2f} to {1e3 * (s.end - zero):.2f} ms "
                              f"({1e3 * (s.end - s.start):.2f})")
            out.append(f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{ROW - 8}" stroke="#fff" stroke-width="0.3" '
                       f'fill="{COLOURS.get(s.kind, "#777")}"><title>{tip}</title></rect>')
    bottom, whole = height - 8, 1e3 * (last - zero)
    form = ".1f" if whole >= 10 else ".2g"  # a tiny model's step lasts microseconds
    for i in range(11):
        x, anchor = LEFT + i * (width - LEFT - 8) / 10, "middle" if i < 10 else "end"
        out.append(f'<text x="{x:.0f}" y="{bottom}" text-anchor="{anchor}" fill="#666">'
                   f"{whole * i / 10:{form}}{' ms' if i == 10 else ''}</text>")
    return "\n".join([*out, "</svg>"])


def to_html(spans: Sequence[Span], title: str, lines: Sequence[str] = ()) -> str:
    """A page of its own: the picture, its colours, and what each track did."""
    total = max((s.end for s in spans), default=0.0) - min((s.start for s in spans), default=0.0)
    colours = "".join(f'<span style="background:{c};color:#fff;padding:1px 6px;margin-right:6px">{k}</span>'
                      for k, c in COLOURS.items() if any(s.kind == k for s in spans))
    rows = "".join(f"<tr><td>{html.escape(t)}</td><td>{html.escape(k)}</td><td>{n}</td><td>{1e3 * b:.2f}</td>"
                   f"<td>{100 * b / total if total else 0:.0f} %</td></tr>" for t, k, n, b in summary(spans))
    notes = "".join(f"<p>{html.escape(x)}</p>" for x in lines)
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>'
            "body{font:13px sans-serif;margin:16px}td,th{padding:2px 10px;text-align:right}"
            "td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}.wide{overflow-x:auto}</style></head><body>"
            f"<h1>{html.escape(title)}</h1>{notes}<p>{colours}</p>"
            f'<div class="wide">{to_svg(spans, max(WIDTH, min(6000, 4 * len(spans))))}</div>'
            "<table><tr><th>track</th><th>kind</th><th>spans</th><th>busy, ms</th><th>of the time</th></tr>"
            f"{rows}</table></body></html>\n")


def to_chrome(spans: Sequence[Span]) -> dict[str, object]:
    """The Trace Event format, which chrome://tracing and Perfetto read."""
    tracks = list(dict.fromkeys(s.track for s in spans))
    zero = min((s.start for s in spans), default=0.0)
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": t}} for i, t in enumerate(tracks)]
    events += [{"ph": "X", "name": f"{s.kind} {s.name}", "cat": s.kind, "pid": 0, "tid": tracks.index(s.track),
                "ts": 1e6 * (s.start - zero), "dur": 1e6 * (s.end - s.start)} for s in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write(spans: Sequence[Span], path: str | os.PathLike, title: str, lines: Sequence[str] = ()) -> Path:
    """Write a page (.html) or a Chrome trace (.json), whole or not at all."""
    target = Path(path)
    text = json.dumps(to_chrome(spans)) if target.suffix == ".json" else to_html(spans, title, lines)
    part = target.with_name(target.name + ".part")
    part.write_text(text)
    os.replace(part, target)
    return target
