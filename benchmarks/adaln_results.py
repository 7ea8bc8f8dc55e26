"""What the results of benchmarks/adaln.py say: the cost model's data, and how well it decides.

    python benchmarks/adaln.py --fit                 writes schedule/data/site_cost.json
    python benchmarks/adaln.py --judge               share of right decisions; rows, shapes, widths left out in turn

`--out` names the folder of adaln.json (default: results/<machine>).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from _results import machine, results_folder
from adaln_functions import FUNCTIONS

from graphopt.schedule import site_cost

SYSTEMS = ("graphopt", "inductor")
# the cost model knows fusions, not forms: these functions stand for them
STANDS_FOR = {(f.kernel, f.form): f.operator for code, f in FUNCTIONS.items() if code in
              ("F1", "F2", "F2a", "F3", "F4", "F5")}
TOLERANCE = 1.03  # a decision is right if the chosen side is at most this much slower


def load(folder: Path | None) -> dict[str, Any]:
    """The results."""
    return json.loads(((folder or results_folder() / machine()) / "adaln.json").read_text())


def steps(rows: Iterable[dict], others: bool = False) -> dict[tuple, dict[str, dict[str, float]]]:
    """(operator, shape) -> system -> direction -> microseconds, where both systems have both directions.

    others: of the forms that the cost model has no measurements of; their keys end with the kernel and the form.
    """
    operators = {(f.kernel, f.form): f.operator for f in FUNCTIONS.values()}
    found: dict[tuple, dict[str, dict[str, float]]] = {}
    for r in rows:
        form = r["kernel"], r["form"]
        key = (operators.get(form), tuple(r["shape"]), *(form if others else ()))
        for s in SYSTEMS:
            if key[0] and (form in STANDS_FOR) != others and r["us"].get(s):
                found.setdefault(key, {}).setdefault(s, {})[r["direction"]] = r["us"][s]
    return {k: v for k, v in found.items() if set(v) == set(SYSTEMS) and all(len(t) == 2 for t in v.values())}


def nbytes(operator: str, shape: tuple[int, int, int]) -> dict[str, int]:
    """Bytes that must move."""
    B, N, D = shape
    return site_cost.bytes_of(operator, B * N, D, 2)


def fit(measured: dict[tuple, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """The content of site_cost.json: a line per system, fusion and direction (non-negative least squares on relative
    errors), and the measurements."""
    import numpy as np
    from scipy.optimize import nnls

    result: dict[str, dict[str, Any]] = {s: {} for s in SYSTEMS}
    for operator in dict.fromkeys(op for op, _ in measured):
        shapes = [shape for op, shape in measured if op == operator]
        if len(shapes) < 3:
            continue
        for s in SYSTEMS:
            for d in site_cost.DIRECTIONS:
                size = np.array([nbytes(operator, shape)[d] for shape in shapes], dtype=float)
                us = np.array([measured[operator, shape][s][d] for shape in shapes])
                normed = operator not in site_cost.UNNORMED
                padded = s == "inductor" and normed
                lanes = size * [site_cost.waste(shape[2]) if padded else 1.0 for shape in shapes]
                wide = np.array([normed and shape[2] > site_cost.EDGE[s] for shape in shapes])
                columns = [~wide, wide] if 0 < wide.sum() < len(wide) else [np.ones(len(us))]
                terms = np.stack([*columns, np.sqrt(size), lanes], 1) / us[:, None]
                (*launches, ramp, per_byte), _ = nnls(terms, np.ones(len(us)))
                points = sorted((int(b), shape[2], round(float(u), 2)) for b, shape, u in zip(size, shapes, us))
                result[s][f"{operator}/{d}"] = {
                    "launch_us": float(launches[0]), "tb_per_s": float(1 / max(per_byte, 1e-12) / 1e6),
                    "ramp_us": float(ramp), **({"wide_us": float(launches[1])} if len(launches) > 1 else {}),
                    **({"padded": True} if padded else {}), "points": points}
    return {"coefficients": result}


# what a row is predicted without: nothing, itself, all fusions of its shape, all of its width
LEFT_OUT: dict[str, Callable[[tuple], Any]] = {
    "": lambda key: None, "row": lambda key: key, "shape": lambda key: key[1], "width": lambda key: key[1][2],
}
TOLD = {"": "all rows in the fit", **{k: f"each {k} predicted without itself" for k in LEFT_OUT if k}}


def judge(rows: list[dict], leave_out: str = "") -> list[dict[str, Any]]:
    """Each measured site, in training and in inference (the forward alone): the decision, and what it costs against the
    better side; fitted without what `leave_out` (a key of LEFT_OUT) names."""
    measured, left = steps(rows), LEFT_OUT[leave_out]
    models: dict[Any, site_cost.Model] = {None: site_cost.parsed(fit(measured))}
    found = []
    for (operator, shape, *form), times in {**measured, **steps(rows, others=True)}.items():
        out = None if form else left((operator, shape))
        if out not in models:
            models[out] = site_cost.parsed(fit({k: v for k, v in measured.items() if left(k) != out}))
        model = models[out]
        for training in (True, False):
            ours, theirs = site_cost.predict(operator, nbytes(operator, shape), shape[2], training, model)
            truth = {s: sum(times[s].values()) if training else times[s]["forward"] for s in SYSTEMS}
            chosen = "graphopt" if ours <= theirs else "inductor"
            found.append({"operator": " ".join([operator, *form]), "shape": shape, "training": training,
                          "chosen": chosen, "predicted": (ours, theirs), "measured": truth,
                          "loss": truth[chosen] / min(truth.values())})
    return found


def report(data: list[dict]) -> None:
    """Print how often decisions are right."""
    for leave_out, how in TOLD.items():
        rows = judge(data, leave_out)
        wrong = [r for r in rows if r["loss"] > TOLERANCE]
        left = sum(r["chosen"] == "inductor" for r in rows)
        print(f"{how}: {len(rows) - len(wrong)} of {len(rows)} right, {left} left to Inductor")
        for r in wrong:
            what = "step" if r["training"] else "forward"
            print(f"  {r['operator']} {r['shape']} {what}: chose {r['chosen']}, {100 * r['loss'] - 100:.1f} % slower, "
                  f"predicted {r['predicted'][0]:.1f} / {r['predicted'][1]:.1f} us")


def write_fit(data: dict[str, Any]) -> None:
    """Write schedule/data/site_cost.json."""
    found = {"machine": data["machine"], "source": "benchmarks/adaln.py --fit", **fit(steps(data["rows"]))}
    path = Path(site_cost.__file__).parent / "data" / "site_cost.json"
    text = json.dumps(found, indent=1)
    path.write_text(compact(text) + "\n")


def compact(text: str) -> str:
    """Lists of numbers on one line."""
    import re

    return re.sub(r"\[\s+([-\d.e]+),\s+([-\d.e]+),\s+([-\d.e]+)\s+\]", r"[\1, \2, \3]", text)


def main(args: argparse.Namespace) -> None:
    """Do what the command line says with the results of a folder."""
    data = load(args.out)
    if args.fit:
        write_fit(data)
    if args.judge:
        report(data["rows"])
