"""The figures graphopt holds itself to, against what adaln.json, adaln_errors.json, adaln_tune.json and step.json say.

    python benchmarks/adaln_bars.py [--results FOLDER]

Prints each bar with the figure measured; exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _results import ROOT
from adaln_results import TOLD, TOLERANCE, judge

# shape -> share of the copy: F1 forward, F2 forward, F1 backward, F2 backward
SHARES = {
    "1x75600x5120": (0.95, 0.97, 0.96, 0.97), "1x64000x3072": (0.95, 0.97, 0.96, 0.97),
    "2x16384x3072": (0.90, 0.95, 0.93, 0.95), "1x32760x1536": (0.86, 0.92, 0.85, 0.92),
    "8x4096x1152": (0.82, 0.88, 0.82, 0.90),
}
COLUMNS = (("F1", "forward"), ("F2", "forward"), ("F1", "backward"), ("F2", "backward"))
# times as fast as a rival, by column
RIVALS = {"inductor": (1.8, 1.4, 2.4, 2.3), "inductor_max_autotune": (1.4, 1.4, 2.0, 2.1)}
FORMS, FLUX, SMALL_BYTES, SMALL_US, FACTORS, STAGE_US, RIGHT = 0.92, 1.2, 1e6, 5.0, 1e-6, 5.0, 0.95
STEPS = {("wan-1.3b", 1): 1.01, ("wan-1.3b", 2): 1.04, ("wan-14b", 1): 1.01, ("flux-dev", 1): 1.0,
         ("sd3.5-large", 4): 1.0, ("hunyuan-video", 1): 1.01}

Bar = tuple[str, float | None, float, bool]  # what, measured (None: not), bar, met


def kernels(rows: list[dict[str, Any]]) -> Iterator[Bar]:
    """Shares of the copy, and times beside Inductor's."""
    of = {(r["kernel"], r["form"], r["direction"], "x".join(map(str, r["shape"]))): r for r in rows}
    for shape, bars in SHARES.items():
        for i, (kernel, direction) in enumerate(COLUMNS):
            r = of.get((kernel, "wan", direction, shape), {})
            name, share = f"{kernel} {direction} {shape}", r.get("roofline")
            yield f"{name}: share of the copy", share, bars[i], share is not None and round(share, 3) >= bars[i]
            for rival, factors in RIVALS.items():
                x = ratio(r, rival)
                yield f"{name}: times as fast as {rival}", x, factors[i], x is not None and round(x, 2) >= factors[i]
    for (kernel, form, direction, shape), r in of.items():
        x = r["shape"][0] * r["shape"][1] * r["shape"][2] * 2
        name, times = f"{kernel} ({form}) {direction} {shape}", ratio(r, "inductor")
        if x >= 350e6 and "roofline" in r and (kernel, form) not in (("F1", "wan"), ("F2", "wan")):
            yield f"{name}: share of the copy", r["roofline"], FORMS, round(r["roofline"], 3) >= FORMS
        if shape == "1x4096x3072" and kernel in ("F1", "F2") and form == "wan":
            yield f"{name}: times as fast as inductor", times, FLUX, times is not None and times >= FLUX
        if x < SMALL_BYTES and times is not None:
            slower = r["us"]["graphopt"] - r["us"]["inductor"]
            yield f"{name}: us slower than inductor", slower, SMALL_US, slower <= SMALL_US


def ratio(row: dict[str, Any], rival: str) -> float | None:
    """A rival's time over graphopt's."""
    us = row.get("us", {})
    return us[rival] / us["graphopt"] if us.get(rival) and us.get("graphopt") else None


def errors(rows: list[dict[str, Any]]) -> Iterator[Bar]:
    """Gradients of factors against fp64, repeatable."""
    for r in rows:
        if r["system"] != "graphopt":
            continue
        name = f"{r['kernel']} {'x'.join(map(str, r['shape']))}"
        worst = max(v for k, v in r["errors"].items() if k in ("dscale", "dshift", "dgate", "dweight", "dbias"))
        yield f"{name}: error of the factors' gradients", worst, FACTORS, worst <= FACTORS
        yield f"{name}: gradients repeat", float(r["repeatable"]), 1.0, r["repeatable"]


def steps(rows: list[dict[str, Any]]) -> Iterator[Bar]:
    """Whole steps beside Inductor with mix-order off: time and peak memory."""
    of = {(r["model"], r["batch"], r["system"]): r for r in rows if "step_ms" in r}
    for (model, batch), bar in STEPS.items():
        ours, theirs = (of.get((model, batch, s)) for s in ("graphopt", "inductor_no_mix_order"))
        known = ours is not None and theirs is not None
        x = theirs["step_ms"] / ours["step_ms"] if known else None  # type: ignore[index]
        yield f"{model} B = {batch}: times as fast", x, bar, x is not None and round(x, 3) >= bar
        peak = ours["peak_gib"] / theirs["peak_gib"] if known else None  # type: ignore[index]
        yield f"{model} B = {batch}: share of the peak", peak, 1.0, peak is not None and round(peak, 3) <= 1.0


def stages(rows: list[dict[str, Any]]) -> Iterator[Bar]:
    """The second stage of a backward, as it is launched."""
    for r in rows:
        if r["closed_form"] and r["case"].split(":")[0].endswith("s"):
            yield f"{r['case']}: us of the second stage", r["us"], STAGE_US, r["us"] <= STAGE_US


def decisions(rows: list[dict[str, Any]]) -> Iterator[Bar]:
    """Sites left to Inductor or not, by the cost model that knows a row and by those that do not."""
    for leave_out, told in TOLD.items():
        found = judge(rows, leave_out)
        name = told if leave_out else "as shipped"
        share = sum(r["loss"] <= TOLERANCE for r in found) / max(1, len(found))
        yield f"right decisions, {name}", share, RIGHT, share >= RIGHT
        if not leave_out:
            worst = max((r["loss"] for r in found), default=None)
            yield "the side chosen over the better one", worst, TOLERANCE, worst is not None and worst <= TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "h200")
    args = parser.parse_args()
    missed = 0
    checks = (("adaln", kernels), ("adaln", decisions), ("adaln_errors", errors), ("adaln_tune", stages),
              ("step", steps))
    for name, check in checks:
        path = args.results / f"{name}.json"
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        for what, measured, bar, met in check(rows):
            missed += not met
            shown = "not measured" if measured is None else f"{measured:.3g}"
            print(f"{'  ' if met else '! '}{what}: {shown} (bar {bar:g})")
    print(f"{missed} missed or not measured")
    raise SystemExit(missed > 0)


if __name__ == "__main__":
    main()
