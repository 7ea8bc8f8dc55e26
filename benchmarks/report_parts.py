"""What sections of the benchmark page are made of: result files, a section, a table, a number."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

Row = dict


@dataclass
class Section:
    """One heading of the page.

    Attributes:
        title: the heading.
        files: result files it was made of, relative to benchmarks/results.
        text: Markdown.
        figure: name of its plot and the function that draws it, if there is one.
    """

    title: str
    files: list[str]
    text: str
    figure: tuple[str, Callable[[Path], None]] | None = None
    rivals: list[str] = field(default_factory=list)


class Results:
    """Result files by machine and name."""

    def __init__(self, folder: Path) -> None:
        self.files = {str(f.relative_to(folder)): json.loads(f.read_text()) for f in sorted(folder.rglob("*.json"))}

    def rows(self, name: str, **where: object) -> Iterator[tuple[str, Row]]:
        """Rows of <machine>/<name>.json with these values, and their file."""
        for file, found in self.files.items():
            if Path(file).stem == name:
                for row in found["rows"]:
                    if all(row.get(k) == v for k, v in where.items()):
                        yield file, row


def source(results: Results, file: str) -> str:
    """One line: where a section's figures come from."""
    found = results.files[file]
    if "command" not in found:  # raw runs of a sweep: their own program keeps them
        key = found["key"]
        return (f"`benchmarks/results/{file}`: `python benchmarks/schedule_shape.py --systems {key['system']}`, "
                f"{key['device']}, torch {key['torch']}")
    commits = sorted({r.get("commit", found["commit"]) for r in found["rows"]})
    line = found["command"]
    line = line if len(line) <= 240 else line[:200].rsplit(" ", 1)[0] + " .."  # the file has it whole
    return (f"`benchmarks/results/{file}`: last command `{line}`, {found['machine']}, "
            f"torch {found['torch']}, triton {found['triton']}, {found['date']}, commits "
            + ", ".join(c[:7] for c in commits))


def table(head: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *lines])


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits; a dash for None."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if abs(value) >= 10 ** (digits - 1) else text


def both(pair: dict[str, Row], value: Callable[[Row], str],
         directions: tuple[str, ...] = ("forward", "backward")) -> str:
    """A cell of several directions, `1.2 / 3.4`; one dash if there is none of them."""
    cells = [value(pair[d]) if d in pair else "-" for d in directions]
    return "-" if set(cells) == {"-"} else " / ".join(cells)


def stream_rivals(rows: list[dict]) -> list[str]:
    """Streamed steps of others that take less time or memory than graphopt's best of any order, per size and length."""
    found = []
    for size, tokens in sorted({(r["params_b"], r["tokens"]) for r in rows}):
        same = [r for r in rows if (r["params_b"], r["tokens"]) == (size, tokens)]
        ours = [r for r in same if r["system"] == "graphopt"]
        for r in same:
            if r["system"] in ("graphopt", "serial") or not ours:
                continue
            for key, what, unit in (("step_ms", "step", "ms"), ("peak_gib", "peak", "GiB")):
                best = min(o[key] for o in ours)
                if r[key] < best:
                    found.append(f"{number(size)} B, {tokens:,} tokens: {r['system']}'s {what} is {number(r[key])} "
                                 f"{unit}, graphopt's {number(best)}")
    return found
