"""Predicted time of one AdaLN site, by graphopt and by Inductor, from measurements of both on an H200.

    time_us = (launch_us + ramp_us * sqrt(bytes) + bytes * waste / (terabytes_per_s * 1e6)) * correction

Launch, ramp and bandwidth are fitted per fusion and direction: the ramp is what a kernel of middle size loses while the
GPU fills and drains, and a launch differs where rows are reduced another way (EDGE).  `waste` is what Inductor's
reductions lose to padding: they take a row in blocks of the next power of two, 2,048 at most, and their lanes limit
them (1,152 channels take as long as 2,048; ours are cut to the width).  The correction is what measurements of about
the same size lie above or below that line: a measured shape gets its measured time, others the line's, because how far
a small site is off says little about one of twice its size.
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
# what has no norm is no reduction: Inductor's elementwise kernels pad nothing
UNNORMED = ("gate_residual",)
DIRECTIONS = ("forward", "backward")
# how far a measurement reaches, in e-folds of bytes (widths count half), and the weight of the line itself
REACH, PRIOR = 0.15, 0.05
BLOCK = 2048  # channels that a reduction of Inductor's takes at a time, at most (its heuristics' MAX_R0_BLOCK)
# channels up to which a row is reduced in one go: by one warp without a block barrier (ours), in one block (Inductor)
EDGE = {"graphopt": 1600, "inductor": BLOCK}


def waste(D: int) -> float:
    """Lanes of Inductor's blocks over channels of a row."""
    block = min(1 << (int(D) - 1).bit_length(), BLOCK)
    return -(-int(D) // block) * block / D


@dataclass(frozen=True)
class Line:
    """launch_us and tb_per_s of one system, fusion and direction; points are (bytes, D, microseconds) measured.

    padded: rows are reduced in blocks of a power of two, and the padding counts like bytes.  ramp_us: per root of a
    byte.  wide_us: the launch of more than `edge` channels, where it differs.
    """

    launch_us: float
    tb_per_s: float
    points: tuple[tuple[float, int, float], ...] = field(default=())
    padded: bool = False
    ramp_us: float = 0.0
    wide_us: float | None = None
    edge: int = 0

    def plain_us(self, nbytes: float, D: int) -> float:
        """The line alone."""
        launch = self.launch_us if self.wide_us is None or self.edge >= D else self.wide_us
        moved = nbytes * (waste(D) if self.padded else 1.0) / (self.tb_per_s * 1e6)
        return launch + self.ramp_us * math.sqrt(nbytes) + moved

    def time_us(self, nbytes: float, D: int) -> float:
        """The line, corrected by the measurements nearby."""
        total = weights = 0.0
        for at_bytes, at_d, us in self.points:
            distance = math.log(max(nbytes, 1.0) / at_bytes) ** 2 + (0.5 * math.log(D / at_d)) ** 2
            weight = math.exp(-0.5 * distance / REACH**2) / (1e-3 + distance)
            total += weight * math.log(us / self.plain_us(at_bytes, at_d))
            weights += weight
        return self.plain_us(nbytes, D) * math.exp(total / (weights + PRIOR))


Model = dict[str, dict[str, Line]]  # system -> "fusion/direction" -> line


@cache
def model() -> Model:
    """What was measured."""
    return parsed(json.loads((files("graphopt.schedule") / "data" / "site_cost.json").read_text()))


def parsed(data: Mapping[str, Any]) -> Model:
    """The model in a file's content."""
    return {
        system: {
            k: Line(c["launch_us"], c["tb_per_s"], tuple(map(tuple, c.get("points", ()))), c.get("padded", False),
                    c.get("ramp_us", 0.0), c.get("wide_us"), EDGE[system])
            for k, c in of.items()
        }
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
