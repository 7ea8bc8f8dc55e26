"""Fits recover what made the data; bad ones are refused."""

import json

import numpy as np
import pytest
import sympy

from graphopt.errors import ConfigError, GraphoptError
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.fitting import fit_cost, fit_memory
from graphopt.schedule.shapes import ShapeTable
from graphopt.schedule.symbolic import SymbolicCost, symbol

TOKENS = np.array([1000, 2000, 4000, 8000, 16000, 32000, 64000, 97200])


def runs(f, noise=0.0, seed=0, memory=False):
    rng = np.random.default_rng(seed)
    rows = [
        {"B": b, "T": 1, "H": 1, "W": int(s), "L": 512, "seconds": float(f(b, s) * rng.lognormal(0, noise))}
        for s in TOKENS
        for b in (1, 2)
    ]
    for r in rows:
        r["bytes"] = int(20e9 + r["B"] * (1.5e6 * r["W"] + 4e5 * r["L"])) if memory else None
    return rows


def truth(b, s):
    return 0.5 + b * (2.43e-4 * s + 9.2e-9 * s * s)


def test_two_term_recovers_its_coefficients():
    fit = fit_cost(runs(truth))
    assert np.allclose([fit.coefficients[k] for k in "abc"], [0.5, 2.43e-4, 9.2e-9], rtol=1e-6)
    assert fit.r2 > 1 - 1e-9
    assert fit.max_error < 1e-6


def test_two_term_under_noise_fits_to_the_noise_and_its_intervals_hold_the_truth():
    inside = 0
    for seed in range(40):
        fit = fit_cost(runs(truth, noise=0.03, seed=seed))
        assert fit.mape < 0.04
        inside += all(low <= t <= high for (low, high), t in zip(fit.intervals.values(), (0.5, 2.43e-4, 9.2e-9)))
    assert inside >= 30  # three 95 % intervals at once


def test_power_law_recovers_p_and_m_comp():
    fit = fit_cost(runs(lambda b, s: 0.2 + 3e-7 * b * s**1.4), form="power_law")
    assert np.isclose(fit.p, 1.4, atol=1e-4)
    assert np.isclose(fit.coefficients["b"], 3e-7, rtol=1e-2)
    assert np.isclose(fit.m_comp, 2 * 97200**fit.p)


def test_power_law_misses_two_term_times():
    """p is not a constant of the model: it depends on the range of the sweep."""
    whole = fit_cost(runs(truth), form="power_law", refuse=False)
    upper = fit_cost([r for r in runs(truth) if r["W"] >= 16000], form="power_law", refuse=False)
    assert upper.p > whole.p + 0.1
    assert whole.max_error > 3 * fit_cost(runs(truth, noise=0.01)).max_error


def test_symbolic_form_takes_its_terms_from_the_cost():
    B, T, H, W = (symbol(x) for x in "BTHW")
    S = T * H * W
    cost = SymbolicCost(
        tuple("BTHWL"),
        flops_forward=3e9 * B * S + 1e5 * B * S**2,
        flops_backward=6e9 * B * S + 2e5 * B * S**2,
        attention_flops=3e5 * B * S**2,
        saved_bytes=B * S,
        traffic=1e6 * B * S + 1e8,
        parameter_bytes=sympy.Integer(5),
    )
    made = runs(lambda b, s: 0.1 + b * (9e9 * s / 3e14 + 3e5 * s * s / 4e14) + (1e6 * b * s + 1e8) / 4e12)
    fit = fit_cost(made, form="symbolic", cost=cost)
    assert fit.max_error < 1e-6
    table = ShapeTable.of_tokens(TOKENS, 512)
    predicted = fit.seconds(table, np.arange(8), np.full(8, 2))
    assert np.allclose(predicted, [r["seconds"] for r in made if r["B"] == 2], rtol=1e-5)
    with pytest.raises(ConfigError, match="needs cost="):
        fit_cost(made, form="symbolic")


def test_bad_fits_are_refused_with_the_worst_shape():
    rng = np.random.default_rng(0)
    rows = runs(lambda b, s: rng.uniform(1, 3))
    with pytest.raises(GraphoptError, match=r"misses the measured times by \d+"):
        fit_cost(rows)
    assert fit_cost(rows, refuse=False).mape > 0.1
    with pytest.raises(GraphoptError, match="2 measured shapes cannot"):
        fit_cost(runs(truth)[:2])
    with pytest.raises(GraphoptError, match="no measured runs"):
        fit_cost([{"B": 1, "S": 5, "seconds": None}])
    with pytest.raises(ConfigError, match="no positive time"):
        fit_cost([{"B": 1, "S": 5, "seconds": -1.0}])
    for bad, match in ((dict(seconds=float("inf")), "no positive time"), (dict(seconds="1"), "no positive time"),
                       (dict(S=-5), "sizes"), (dict(bytes=float("nan")), "bytes"), (dict(bytes=-1), "bytes")):  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            fit_cost([{"B": 1, "S": s, "seconds": 1.0, **bad} for s in (1000, 2000, 4000, 8000)])
    same = fit_cost([{"B": 1, "S": s, "seconds": 1.0} for s in (1000, 2000, 4000, 8000)], refuse=False)
    assert same.r2 == 0.0, "times that do not depend on the size"
    with pytest.raises(ConfigError, match="unknown cost form"):
        fit_cost(runs(truth), form="cubic")


def test_memory_fit():
    rows = runs(truth, memory=True)
    for r, caption in zip(rows, [0, 512, 1024] * 8):  # L must vary to be told from m0
        r["L"] = caption
        r["bytes"] = int(20e9 + r["B"] * (1.5e6 * r["W"] + 4e5 * caption))
    m = fit_memory(rows)
    assert np.allclose([m.m0, m.m1, m.m2], [20e9, 1.5e6, 4e5], rtol=1e-3)
    assert fit_cost(rows).memory == m
    table = ShapeTable.of_tokens([10000], 512)
    assert m.cap(table, 20e9 + 3 * (1.5e10 + 4e5 * 512) + 1e9).tolist() == [3]
    assert m.cap(table, 10e9).tolist() == [0]


def test_floor_is_found_where_launching_binds_and_only_there():
    def launched(b, s):
        return max(1.9, truth(b, s))

    fit = fit_cost(runs(launched, noise=0.01))
    assert np.isclose(fit.floor_s, 1.9, rtol=0.02)
    assert np.allclose([fit.coefficients[k] for k in "bc"], [2.43e-4, 9.2e-9], rtol=0.1)
    assert fit.max_error < 0.05
    assert "floor" in fit.describe()
    assert fit_cost(runs(launched, noise=0.01), form="power_law", refuse=False).floor_s == 0
    for seed in range(20):
        assert fit_cost(runs(truth, noise=0.03, seed=seed)).floor_s == 0
    table = ShapeTable.of_tokens([100, 97200], 512)
    assert np.allclose(fit.seconds(table, np.array([0, 1]), np.array([1, 1])), [fit.floor_s, truth(1, 97200)], rtol=0.02)


def waves(b, s):
    """A cost whose matrix products run in waves of 40 tiles of 256 rows."""
    return 4e-3 + b * 1.5e-10 * s * s + 2.8e-6 * 256 * 40 * np.ceil(b * s / 256 / 40)


def test_anchors_take_measured_sizes_as_they_are_and_the_form_between():
    measured = [{"B": b, "T": 1, "H": 1, "W": s, "L": 512, "seconds": float(waves(b, s))}
                for s in (256, 1000, 4096, 14_400, 20_280, 23_400, 26_520, 30_400, 32_760) for b in (1, 2, 4) if b * s <= 32_760]  # fmt: skip
    plain, anchored = fit_cost(measured, refuse=False), fit_cost(measured, anchored=True, refuse=False)
    assert anchored.coefficients == plain.coefficients
    assert (anchored.mape, anchored.r2) == (plain.mape, plain.r2)  # the quality stated is the form's
    assert [a[0] for a in anchored.anchors] == sorted({r["W"] for r in measured if r["seconds"] > anchored.floor_s * 1.05})
    table = ShapeTable.of([[1, 1, r["W"], 512] for r in measured])
    batch, seconds = np.array([r["B"] for r in measured]), np.array([r["seconds"] for r in measured])
    error = lambda fit: np.abs(fit.seconds(table, np.arange(len(batch)), batch) / seconds - 1)
    alone = np.array([sum(q["W"] == r["W"] for q in measured) == 1 for r in measured])
    assert error(anchored)[alone].max() < 1e-9
    assert error(anchored).mean() < 0.75 * error(plain).mean()  # several B of one S are affine, waves are not
    # halfway between two sizes: the form's value times the mean of their ratios
    s = round((14_400 * 20_280) ** 0.5)
    between = ShapeTable.of([[1, 1, s, 512]])
    at = {a[0]: a[2] for a in anchored.anchors}
    ratio = anchored.affine(between)[1] / plain.affine(between)[1]
    assert np.isclose(ratio, (at[14_400] + at[20_280]) / 2, rtol=1e-4)
    outside = ShapeTable.of([[1, 1, 65_000, 512]])
    assert np.isclose(anchored.affine(outside)[1] / plain.affine(outside)[1], at[32_760])
    again = CostFit.of(json.loads(json.dumps(anchored.to_json())))
    np.testing.assert_array_equal(again.affine(table), anchored.affine(table))
    assert "anchored at" in again.describe()


def test_anchors_of_a_noisy_sweep_stay_near_the_form():
    fit = fit_cost(runs(truth, noise=0.02), anchored=True)
    assert [a[0] for a in fit.anchors] == TOKENS.tolist()
    ratios = np.array(fit.anchors)[:, 1:]
    assert ratios.min() > 0.2
    long = np.array(fit.anchors)[-4:, 2]
    assert np.abs(long - 1).max() < 0.08
