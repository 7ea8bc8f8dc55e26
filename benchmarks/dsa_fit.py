"""The constants of graphopt/dsa/costs.py from the rows of dsa.json: the smallest largest relative error.

    python benchmarks/dsa_fit.py                     prints them beside those in the file
    python benchmarks/dsa_fit.py --rows some.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy.optimize import linprog

from graphopt.dsa import costs

ROWS = Path(__file__).parent / "results" / "h200" / "dsa.json"
DIRECTIONS = ("forward", "backward")
OFFSETS = {True: "smooth", False: "none"}
LAUNCHES = {True: 6_000, False: 15_000}  # tokens below which launches from Python are most of the time
LARGEST = 500_000
Row = dict[str, Any]


def smallest_largest_error(terms: Sequence[Sequence[float]]) -> tuple[list[float], float]:
    """Factors >= 0 of each column that bring every row's sum nearest to 1, and the largest distance."""
    n = len(terms[0])
    upper = [[*row, -1.0] for row in terms] + [[-a for a in row] + [-1.0] for row in terms]
    # columns of one size, for the solver's tolerance
    size = [max(row[i] for row in terms) for i in range(n)] + [1.0]
    found = linprog([0.0] * n + [1.0], A_ub=[[a / s for a, s in zip(row, size)] for row in upper],
                    b_ub=[1.0] * len(terms) + [-1.0] * len(terms))
    return [x / s for x, s in zip(found.x[:n], size)], found.x[n]


def sliding_rows(rows: list[Row], learned: bool, direction: str) -> list[Row]:
    """What `parts` is fitted to: bf16 heads of 128, tokens for which launches do not count."""
    return [r for r in rows if r["what"] == "attention" and r["direction"] == direction and r["head_dim"] == 128
            and r["dtype"] == "bfloat16" and r["offsets"] == OFFSETS[learned] and "graphopt" in r["ms"]
            and LAUNCHES[learned] < r["tokens"] < LARGEST]


def terms(row: Row, learned: bool) -> list[float]:
    """Steps, taps and tokens of a row in units that make ns of each the share of its milliseconds."""
    grid, window = tuple(row["grid"]), tuple(row["window"])
    video = math.prod(grid)
    parts = (costs.steps(window, grid, costs.SPREAD if learned else (0.0, 0.0, 0.0)), video * math.prod(window), video)
    return [part * row["heads"] * 1e-6 / row["ms"]["graphopt"] for part in parts]


def parts(rows: list[Row], learned: bool, direction: str) -> tuple[list[float], float]:
    """A triple of PARTS_NS and its largest relative error."""
    return smallest_largest_error([terms(r, learned) for r in sliding_rows(rows, learned, direction)])


def largest_error(rows: list[Row], learned: bool, direction: str, ns: Sequence[float]) -> float:
    """Of given constants."""
    return max(abs(sum(a * b for a, b in zip(terms(r, learned), ns)) - 1)
               for r in sliding_rows(rows, learned, direction))


def dense_flops(rows: list[Row], direction: str) -> float:
    """Operations a second of cuDNN's attention."""
    products = {"forward": 4e3, "backward": 10e3}[direction]
    flops = [products * r["heads"] * r["tokens"] ** 2 * r["head_dim"] / r["ms"]["cudnn"] for r in rows
             if (r["what"], r["direction"]) == ("attention", direction) and "cudnn" in r["ms"]
             and LAUNCHES[True] < r["tokens"]]
    return (max(flops) + min(flops)) / 2


def head_ns(rows: list[Row], direction: str) -> float:
    """Of the offset head, per token and channel: device time, as layers before and after it hide the launches."""
    [row] = [r for r in rows if r["what"] == "offset_head" and r["direction"] == direction]
    return row.get("device_ms", row["ms"])["graphopt"] * 1e6 / row["tokens"] / row["head_dim"]


def main() -> None:
    """Print every constant, new and as it stands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS)
    rows = json.loads(parser.parse_args().rows.read_text())["rows"]
    for learned in (True, False):
        for k, direction in enumerate(DIRECTIONS):
            ns, error = parts(rows, learned, direction)
            now = costs.PARTS_NS[learned][k]
            print(f"PARTS_NS[{learned}] {direction}: {', '.join(f'{x:.4g}' for x in ns)} ({error:.3f}); "
                  f"now {now} ({largest_error(rows, learned, direction, now):.3f})")
    print("DENSE_FLOPS:", *(f"{dense_flops(rows, d):.4g}" for d in DIRECTIONS), "now", costs.DENSE_FLOPS)
    print("HEAD_NS:", *(f"{head_ns(rows, d):.4g}" for d in DIRECTIONS), "now", costs.HEAD_NS)


if __name__ == "__main__":
    main()
