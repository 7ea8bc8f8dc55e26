"""The second paper's system whole, from the rows of papers_clips.py: the largest clip of each, and every one tried."""

from __future__ import annotations

from collections.abc import Iterator

from report_parts import table

Row = dict
SYSTEMS = {"resident": "resident dense", "resident_checkpointed": "resident dense, blocks recomputed",
           "streamed": "streamed dense", "streamed_dsa": "streamed + DSA"}
WIDTHS = {"105b": "a 105 B model's width", "14b": "Wan 14B's width", "1.3b": "Wan 1.3B's width"}


def model(row: Row) -> str:
    """Depth and width of a row's model."""
    if row.get("width") == "1.3b" and row["layers"] == 30:
        return f"Wan 1.3B whole ({row['params_b']:.1f} B parameters)"
    return f"{row['layers']} layers of {WIDTHS[row.get('width', '105b')]} ({row['params_b']:.1f} B parameters)"


def groups(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Rows of one model in one amount of memory, with what they are called; the whole GPU and wide models first."""
    key = lambda r: (-(r.get("cap_gib") or 1e9), -list(WIDTHS)[::-1].index(r.get("width", "105b")), r["layers"])
    for k in sorted({key(r) for r in rows}):
        same = [r for r in rows if key(r) == k]
        room = "the whole GPU" if k[0] == -1e9 else f"{-k[0]:.0f} GiB of the GPU"
        yield f"{model(same[0])}, {room}", same


def by_system(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """A system's name and its rows, short clips first."""
    for system, name in SYSTEMS.items():
        found = sorted((r for r in rows if r["system"] == system), key=lambda r: r["frames"])
        if found:
            yield name, found


def largest(rows: list[Row]) -> str | None:
    """One line: the largest clip of each system, per model; None without rows."""
    texts = []
    for name, same in groups(rows):
        parts = []
        for system, found in by_system(same):
            fitting = [r for r in found if r["fits"]]
            failed = [r for r in found if not r["fits"] and not r.get("other")]
            end = f"{failed[0]['frames']} out of memory" if failed else "its limit was not reached"
            if fitting:
                r = fitting[-1]
                alone = r.get("step_s") and not r.get("cap_gib")  # with a cap, others ran on the GPU beside it
                seconds = f"{r['step_s']:.1f} s a step, " if alone else ""
                parts.append(f"{system}: {r['frames']} frames ({r['tokens']:,} tokens, {seconds}"
                             f"{r['peak_gib']:.0f} GiB, host {r['host_gib']:.0f} GiB; {end})")
            else:
                parts.append(f"{system}: none ({end})")
        texts.append(f"{name}: " + "; ".join(parts))
    return ". ".join(texts) or None


def every(rows: list[Row]) -> str:
    """All clips that were tried, as tables; empty without rows."""
    parts = []
    for name, same in groups(rows):
        lines = []
        for system, found in by_system(same):
            for r in found:
                end = "fits" if r["fits"] else "failed" if r.get("other") else "out of memory"
                took = r.get("step_s") if r["fits"] else None
                lines.append([system, f"{r['frames']}", f"{r['tokens']:,}", end, "-" if took is None else f"{took:.1f}",
                              *(f"{r[k]:.1f}" if r.get(k) else "-" for k in ("peak_gib", "reserved_gib", "host_gib"))])
        parts.append(f"**{name}**\n\n" + table(["system", "frames", "tokens", "", "step, s", "allocated, GiB",
                                                "reserved, GiB", "host, GiB"], lines))
    return "\n\n".join(parts)


def dense_over_sliding(rows: list[Row]) -> str | None:
    """Seconds of a dense and of a sliding streamed step at the longest clip that both ran; None if there is none."""
    parts = []
    for name, same in groups([r for r in rows if r["fits"] and r.get("step_s") and not r.get("cap_gib")]):
        by = {s: {r["frames"]: r for r in same if r["system"] == s} for s in ("streamed", "streamed_dsa")}
        both = sorted(set(by["streamed"]) & set(by["streamed_dsa"]))
        if both:
            dense, sliding = by["streamed"][both[-1]], by["streamed_dsa"][both[-1]]
            parts.append(f"{dense['step_s'] / sliding['step_s']:.1f}x at {both[-1]} frames ({dense['step_s']:.1f} to "
                         f"{sliding['step_s']:.1f} s, {dense['peak_gib']:.0f} and {sliding['peak_gib']:.0f} GiB; "
                         f"{name})")
    return ", ".join(parts) or None
