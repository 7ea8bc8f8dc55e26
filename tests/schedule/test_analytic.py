"""Costs from a model and a hardware description alone."""


import numpy as np
import pytest
import sympy

from graphopt.errors import ConfigError
from graphopt.schedule.hardware import analytic_fit, hardware
from graphopt.schedule.models import model_cost
from graphopt.schedule.shapes import ShapeTable
from graphopt.schedule.symbolic import symbol


def test_builtin_model_against_its_dimensions():
    """Wan 2.1 14B: 40 layers of width 5120, feed-forward 13,824; 2 operations per weight and token, forward."""
    cost = model_cost("wan-14b").total
    weights = 40 * (
        4 * 5120**2 + 2 * 5120**2 + 2 * 5120 * 13824
    )  # self-attention, q and out of cross-attention, feed-forward
    b, t, h, w, caption = (symbol(x) for x in "BTHWL")
    forward = sympy.Poly(cost.flops_forward, b, t, h, w, caption)
    assert abs(int(forward.coeff_monomial(b * t * h * w)) / (2 * weights) - 1) < 0.001
    attention = sympy.Poly(cost.attention_flops, b, t, h, w, caption)
    assert attention.coeff_monomial(b * t**2 * h**2 * w**2) == 40 * 14 * 5120
    assert 14.2e9 < int(cost.parameter_bytes) / 2 < 14.4e9
    with pytest.raises(ConfigError, match="no built-in model 'wan-15b'"):
        model_cost("wan-15b")


def test_analytic_fit_predicts_the_measured_step_it_was_calibrated_beside():
    """Compiled Wan-1.3B-shaped model, 4 layers, 32,760 tokens, no recomputation: 251 ms measured on an H200."""
    whole = model_cost("wan-1.3b")
    four = type(whole)("four layers", whole.rest, whole.layer, 4, whole.width)
    fit = analytic_fit(four, hardware("h200"), remat="none")
    table = ShapeTable.of([[21, 30, 52, 512]])
    assert abs(fit.seconds(table, np.array([0]), np.array([1]))[0] / 0.251 - 1) < 0.05
    full = analytic_fit(four, hardware("h200"), remat="full")
    ratio = full.seconds(table, np.array([0]), np.array([1]))[0] / fit.seconds(table, np.array([0]), np.array([1]))[0]
    assert 1.2 < ratio < 1.4  # one more forward of three
    assert full.memory.m1 < fit.memory.m1
    assert fit.source == "symbolic"
    with pytest.raises(ConfigError, match="no description of GPU 'b300'"):
        hardware("b300")
    with pytest.raises(ConfigError, match="unknown remat"):
        analytic_fit(four, hardware("h200"), remat="some")


def test_eager_launches_every_op_and_moves_every_byte():
    """Two layers on an H200: 12.7 ms at 1,024 tokens, where launching binds, and 136 ms at 32,760 (shape benchmark)."""
    whole = model_cost("wan-1.3b")
    two = type(whole)("two layers", whole.rest, whole.layer, 2, whole.width)
    assert int(whole.layer.launches) == 277
    eager, compiled = (analytic_fit(two, hardware("h200"), remat="none", compiled=c) for c in (False, True))
    table = ShapeTable.of([[1, 32, 32, 512], [21, 30, 52, 512]])
    short, long = eager.seconds(table, np.array([0, 1]), np.array([1, 1]))
    assert short == eager.floor_s
    assert abs(short / 12.7e-3 - 1) < 0.1
    assert abs(long / 0.136 - 1) < 0.08
    assert compiled.seconds(table, np.array([1]), np.array([1]))[0] < 0.95 * long
    again = analytic_fit(two, hardware("h200"), remat="full", compiled=False)
    assert eager.floor_s < again.floor_s < 1.4 * eager.floor_s


def test_sharded_parameters_leave_room():
    model, gpu = model_cost("wan-14b"), hardware("h200")
    kept, sharded = (analytic_fit(model, gpu, data_parallel=8, sharded=s).memory for s in (False, True))
    n = int(model.total.parameter_bytes) / 2
    assert kept.m0 == n * (4 + 12 / 8)
    assert n * 2 < sharded.m0 < n * 2.3
    assert kept.m1 == sharded.m1
