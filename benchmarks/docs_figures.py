"""Figures of hand-written pages that none of the result files named in their section has, to be looked at.

    python benchmarks/docs_figures.py [PAGE ..]

A figure is a number with a decimal point or a unit, outside code blocks; it is found if a number of the files rounds to
it, as it is or in per cent, milli, mega, giga or GiB.  What is left are ratios, bounds, versions and sizes, or a figure
that a newer run has changed: docs/benchmarks.md and docs/papers.md are made from the files and need no look.
"""

from __future__ import annotations

import argparse
import bisect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _results import ROOT

MADE = ("benchmarks.md", "papers.md")
SCALES = (1, 100, 1e3, 1e-3, 1e6, 1e-6, 1e-9, 2.0**-30)
FIGURE = re.compile(r"(?<![\w.,])(\d[\d,]*\.\d+(?:e-?\d+)?(?![\w.]*\d)"
                    r"|\d[\d,]*(?= (?:ns|us|ms|MB|GB|MiB|GiB|TB/s|GB/s|%)(?!\w)))")


def numbers(value: Any) -> Iterator[float]:
    """Every number in a result file, without its sign."""
    if isinstance(value, dict | list):
        for v in value.values() if isinstance(value, dict) else value:
            yield from numbers(v)
    elif isinstance(value, int | float) and not isinstance(value, bool) and value == value:
        yield abs(float(value))


def has(values: list[float], figure: str) -> bool:
    """Whether a number of the sorted `values` rounds to the figure in some unit."""
    mantissa, _, exponent = figure.replace(",", "").partition("e")
    half = 0.5001 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    value = float(figure.replace(",", ""))
    for scale in SCALES:
        at = bisect.bisect_left(values, (value - half) / scale)
        if at < len(values) and values[at] <= (value + half) / scale:
            return True
    return False


def unfound(text: str, files: dict[str, list[float]]) -> Iterator[tuple[str, list[str], list[str]]]:
    """(heading, files named, figures not in them) of each section that has any."""
    for section in re.split(r"^(?=#+ )", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE):
        names = sorted(f for f in files if re.search(rf"(?<![\w])(?:results/)?{re.escape(f)}[`)]", section)
                       or f"`{f.split('/')[-1]}`" in section)
        values = sorted(v for f in names for v in files[f])
        missing = [m for m in FIGURE.findall(section) if not has(values, m)]
        if missing:
            yield section.splitlines()[0] if section.strip() else "", names, missing


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("pages", nargs="*", type=Path)
    a = p.parse_args()
    found = (ROOT / "results").rglob("*.json")
    files = {str(f.relative_to(ROOT / "results")): list(numbers(json.loads(f.read_text()))) for f in found}
    pages = a.pages or [ROOT.parent / "README.md", *sorted((ROOT.parent / "docs").glob("*.md"))]
    for page in pages:
        if page.name not in MADE:
            for heading, names, missing in unfound(page.read_text(), files):
                print(f"{page.name} | {heading} | {', '.join(names) or 'no file named'} | {' '.join(missing)}")


if __name__ == "__main__":
    main()
