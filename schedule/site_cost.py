"""Predicted time of one AdaLN site, by graphopt and by Inductor: launches plus bytes over an effective bandwidth.

The coefficients were fitted to measurements on an H200 (benchmarks/adaln.py writes them, `data/site_cost.json` holds
them): time_us = launch_us + bytes / (terabytes_per_s * 1e6).
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

# tensors of [rows, D] that must cross HBM at least once: (forward, backward)
UNITS = {
    "norm_modulate": (2, 3), "norm_modulates": (3, 4),
    "residual_norm_modulate": (4, 4), "residual_norm_modulates": (5, 5),
    "gate_norm_modulate": (4, 6), "gate_norm_modulates": (5, 7), "gate_norm": (4, 6), "gate_residual": (3, 3),
    "branch_norm_gate": (3, 3), "branch_norm_gate_norm": (4, 6), "branch_norm_gate_norm_modulate": (4, 6),
}
# whose coefficients a fusion takes that has none of its own: the measured one it shares its parts with
LIKE = {
    "norm_modulates": "norm_modulate", "residual_norm_modulate": "gate_norm_modulate",
    "residual_norm_modulates": "gate_norm_modulate", "gate_norm_modulates": "gate_norm_modulate",
    "branch_norm_gate": "gate_residual", "branch_norm_gate_norm": "gate_norm",
    "branch_norm_gate_norm_modulate": "gate_norm_modulate",
}


@cache
def coefficients() -> dict[str, dict[str, dict[str, float]]]:
    """system -> "fusion/direction" -> {"launch_us", "tb_per_s"}."""
    text = (files("graphopt.schedule") / "data" / "site_cost.json").read_text()
    return json.loads(text)["coefficients"]


def time_us(system: str, fusion: str, direction: str, rows: int, D: int, itemsize: int) -> float:
    """Predicted microseconds of one direction of one site.

    `itemsize` is the activation's bytes per element.  Modulation and statistics are too small to count.
    """
    known = coefficients()[system]
    own = f"{fusion}/{direction}"
    c = known[own if own in known else f"{LIKE[fusion]}/{direction}"]
    units = UNITS[fusion][0 if direction == "forward" else 1]
    return c["launch_us"] + units * rows * D * itemsize / (c["tb_per_s"] * 1e6)


def predict(fusion: str, rows: int, D: int, itemsize: int, training: bool) -> tuple[float, float]:
    """(graphopt, Inductor) microseconds of one site in one step; forward alone where nothing is differentiated."""
    directions = ("forward", "backward") if training else ("forward",)
    ours, theirs = (
        sum(time_us(system, fusion, d, rows, D, itemsize) for d in directions) for system in ("graphopt", "inductor")
    )
    return ours, theirs
