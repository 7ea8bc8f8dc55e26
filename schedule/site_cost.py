"""Predicted time of one AdaLN site, by graphopt and by Inductor, from measurements of both on an H200.

    time_us = (launch_us + bytes / (terabytes_per_s * 1e6)) * correction

Launch and bandwidth are fitted per fusion and direction; the correction is what nearby measurements (in bytes and
width) lie above or below that line: a measured shape gets its measured time, one far from all of them the line's.
`data/site_cost.json` holds lines and measurements; `benchmarks/adaln.py --fit` writes it.  On another GPU both systems'
times are off alike, and what is compared is their ratio.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

# tensors of [rows, D] that must cross HBM at least once: (forward, backward)
UNITS = {
    "norm_modulate": (2, 3), "norm_modulates": (3, 4),
    "residual_norm_modulate": (4, 4), "residual_norm_modulates": (5, 5),
    "gate_norm_modulate": (4, 6), "gate_norm_modulates": (5, 7), "gate_norm": (4, 6), "gate_residual": (3, 3),
    "branch_norm_gate": (3, 3), "branch_norm_gate_norm": (4, 6), "branch_norm_gate_norm_modulate": (4, 6),
}
# whose measurements a fusion takes that has none of its own: the one it shares its parts with
LIKE = {
    "norm_modulates": "norm_modulate", "residual_norm_modulate": "gate_norm_modulate",
    "residual_norm_modulates": "gate_norm_modulate", "gate_norm_modulates": "gate_norm_modulate",
    "branch_norm_gate": "gate_residual", "branch_norm_gate_norm": "gate_norm",
    "branch_norm_gate_norm_modulate": "gate_norm_modulate",
}
DIRECTIONS = ("forward", "backward")
# how far a measurement reaches, in e-folds of bytes (widths count half), and the weight of the line itself
REACH, PRIOR = 0.6, 0.05


@dataclass(frozen=True)
class Line:
    """launch_us and tb_per_s of one system, fusion and direction; points are (bytes, D, microseconds) measured."""

    launch_us: float
    tb_per_s: float
    points: tuple[tuple[float, float, float], ...] = field(default=())

    def plain_us(self, nbytes: float) -> float:
        """The line alone."""
        return self.launch_us + nbytes / (self.tb_per_s * 1e6)

    def time_us(self, nbytes: float, D: int) -> float:
        """The line, corrected by the measurements nearby."""
        total = weights = 0.0
        for at_bytes, at_d, us in self.points:
            distance = math.log(max(nbytes, 1.0) / at_bytes) ** 2 + (0.5 * math.log(D / at_d)) ** 2
            weight = math.exp(-0.5 * distance / REACH**2) / (1e-3 + distance)
            total += weight * math.log(us / self.plain_us(at_bytes))
            weights += weight
        return self.plain_us(nbytes) * math.exp(total / (weights + PRIOR))


Model = dict[str, dict[str, Line]]  # system -> "fusion/direction" -> line


@cache
def model() -> Model:
    """What was measured."""
    return parsed(json.loads((files("graphopt.schedule") / "data" / "site_cost.json").read_text()))


def parsed(data: Mapping[str, Any]) -> Model:
    """The model in a file's content."""
    return {
        system: {k: Line(c["launch_us"], c["tb_per_s"], tuple(map(tuple, c.get("points", ())))) for k, c in of.items()}
        for system, of in data["coefficients"].items()
    }


def bytes_of(fusion: str, rows: int, D: int, itemsize: int) -> dict[str, int]:
    """Bytes that must move, by direction, where all factors are the same for many rows."""
    return {d: u * rows * D * itemsize for d, u in zip(DIRECTIONS, UNITS[fusion])}


def time_us(system: str, fusion: str, direction: str, nbytes: float, D: int, using: Model | None = None) -> float:
    """Predicted microseconds of one direction of one site that must move `nbytes`."""
    known = (using or model())[system]
    own = f"{fusion}/{direction}"
    return known[own if own in known else f"{LIKE[fusion]}/{direction}"].time_us(nbytes, D)


def predict(
    fusion: str, nbytes: Mapping[str, float], D: int, training: bool, using: Model | None = None
) -> tuple[float, float]:
    """(graphopt, Inductor) microseconds of one site in one step; forward alone where nothing is differentiated."""
    directions = DIRECTIONS if training else ("forward",)
    ours, theirs = (
        sum(time_us(system, fusion, d, nbytes[d], D, using) for d in directions) for system in ("graphopt", "inductor")
    )
    return ours, theirs
