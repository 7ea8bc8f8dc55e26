"""Predicted times against the measured ones they are fitted to, and what `plan` makes of them."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from graphopt.dsa import costs

ROWS = json.loads((Path(__file__).parents[3] / "benchmarks/results/h200/dsa.json").read_text())["rows"]
LAUNCHES = {"smooth": 6_000, "none": 15_000}  # tokens below which launches from Python are most of the time
MEASURED = [r for r in ROWS if r["what"] == "attention" and r["direction"] in ("forward", "backward")
            and LAUNCHES.get(r["offsets"], 0) < r["tokens"] < 500_000 and r["head_dim"] == 128 and r["offsets"] in ("smooth", "none")]


def test_predictions_are_the_measurements() -> None:
    assert len(MEASURED) >= 8
    for row in MEASURED:
        if "cudnn" in row["ms"]:
            ms = costs.dense(1, row["heads"], row["tokens"], 128)
            assert getattr(ms, row["direction"]) == pytest.approx(row["ms"]["cudnn"], rel=0.1), row
        if "graphopt" in row["ms"]:
            assert math.prod(row["grid"]) == row["tokens"]
            ms = costs.sliding(1, row["heads"], tuple(row["grid"]), 128, tuple(row["window"]),
                               learned=row["offsets"] == "smooth")
            assert getattr(ms, row["direction"]) == pytest.approx(row["ms"]["graphopt"], rel=0.1), row


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_constants_are_the_fit_of_the_rows(learned: bool, direction: str) -> None:
    """benchmarks/dsa_fit.py makes them again: no constants have a smaller largest error."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
    import dsa_fit

    ns, error = dsa_fit.parts(ROWS, learned, direction)
    k = dsa_fit.DIRECTIONS.index(direction)
    assert dsa_fit.largest_error(ROWS, learned, direction, ns) == pytest.approx(error, abs=1e-6)
    assert dsa_fit.largest_error(ROWS, learned, direction, costs.PARTS_NS[learned][k]) < error + 2e-3
    assert costs.DENSE_FLOPS[k] == pytest.approx(dsa_fit.dense_flops(ROWS, direction), rel=1e-3)
    assert costs.HEAD_NS[k] == pytest.approx(dsa_fit.head_ns(ROWS, direction), rel=1e-2)


def test_few_tokens_are_left_dense_where_dense_was_faster() -> None:
    rows = [r for r in ROWS if r["what"] == "attention" and r["direction"] == "both" and r["tokens"] < 20_000
            and r["offsets"] == "smooth" and "cudnn" in r["ms"]]
    assert len(rows) >= 5
    for r in rows:
        ms = costs.sliding(1, r["heads"], tuple(r["grid"]), 128, tuple(r["window"])).step
        assert (ms < costs.dense(1, r["heads"], r["tokens"], 128).step) == (r["ms"]["graphopt"] < r["ms"]["cudnn"]), r
    assert {r["ms"]["graphopt"] < r["ms"]["cudnn"] for r in rows} == {True, False}


def test_text_and_the_head_cost_something() -> None:
    grid = (21, 30, 52)
    base = costs.sliding(1, 12, grid, 128, (3, 7, 7))
    assert costs.sliding(1, 12, grid, 128, (3, 7, 7), text=256).step > base.step
    assert costs.sliding(1, 12, grid, 128, (3, 7, 7), channels=1536).step > base.step
    assert costs.sliding(2, 12, grid, 128, (3, 7, 7)).step == pytest.approx(2 * base.step)


@pytest.mark.parametrize(("dtype", "dim", "target", "known"), [
    (torch.bfloat16, 128, "sm90", True), (torch.float32, 128, "sm90", False), (torch.bfloat16, 80, "sm90", False),
    (torch.bfloat16, 128, "sm80", False)])
def test_no_prediction_without_a_measurement(dtype, dim, target, known) -> None:
    assert costs.known(dtype, dim, target) is known
