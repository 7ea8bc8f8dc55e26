"""What stands in front of an input and stops gradients is not looked through."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import graphopt

ALL = {"graphopt.select": "all", "graphopt.compiler": "eager", "graphopt.on_error": "raise"}


def gain(x, s, b):
    with torch.no_grad():
        gain = 1 + s
    return F.layer_norm(x, (8,)) * gain + b


def cast(x, s, b):
    with torch.no_grad():
        wide = x.float()
    return F.layer_norm(wide, (8,)) * (1 + s) + b


def view(x, s, b):
    with torch.no_grad():
        gain = (1 + s[:, 0]).unsqueeze(1)
    return F.layer_norm(x, (8,)) * gain + b


@pytest.mark.parametrize("f", [gain, cast, view])
def test_no_gradient_is_invented(f) -> None:
    inputs = (torch.randn(2, 5, 8).bfloat16() if f is cast else torch.randn(2, 5, 8)), torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    compiled = torch.compile(f, backend="graphopt", options=ALL)
    grads = []
    for g in (f, compiled):
        leaves = [v.clone().requires_grad_() for v in inputs]
        g(*leaves).square().sum().backward()
        grads.append([v.grad for v in leaves])
    assert [v is None for v in grads[0]] == [f is cast, f is not cast, False]
    for got, want in zip(grads[1], grads[0], strict=True):
        if want is None:
            assert got is None
        else:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert graphopt.report(compiled).count("modulate", "rewritten") == 1
