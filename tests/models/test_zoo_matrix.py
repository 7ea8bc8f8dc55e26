"""A third of the zoo, rewritten, against fp64: another third each day; benchmarks/zoo_matrix.py does all of it nightly.

GRAPHOPT_THIRD=0, 1 or 2 picks one.  A model that cannot be built fails its test.
"""

from __future__ import annotations

import datetime
import os

import contract
import pytest
import torch
import zoo
from blocks import ALL

import graphopt

THIRD = int(os.environ.get("GRAPHOPT_THIRD", datetime.date.today().toordinal() % 3))


@pytest.mark.parametrize("name", list(zoo.ZOO)[THIRD::3])
def test_rewritten_training_is_within_the_contract(name: str) -> None:
    """fp32, static: output and every gradient, and something was rewritten where there are sites."""
    entry = zoo.ZOO[name]
    model = entry.build()[0].train()
    step = torch.compile(model, backend="graphopt", options=ALL)
    verdict = contract.measure(step, model, contract.fresh_inputs(entry))
    assert verdict.holds, verdict
    report = graphopt.report(step)
    found = [report.count(kind, "rewritten") > 0 for kind in ("modulate", "gate")]
    assert found == [entry.expected.modulate > 0, entry.expected.gate > 0]


@pytest.mark.parametrize("name", ["wan", "cosmos", "flux", "omnigen"])
def test_the_reference_rounds_nowhere(name: str) -> None:
    """Parameters moved by 1e-10 move the output by about as much: a single fp32 rounding would show as 1e-8."""
    model, inputs = zoo.ZOO[name].build(torch.bfloat16)
    twin = contract.wide_twin(model)
    outputs = []
    for _ in range(2):
        with contract.Wide(), torch.no_grad():
            outputs.append(twin(**inputs, return_dict=False)[0])
        for p in twin.parameters():
            p.data *= 1 + 1e-10 * torch.randn_like(p)
    assert outputs[0].dtype == torch.float64
    moved = ((outputs[1] - outputs[0]).norm() / outputs[0].norm()).item()
    assert 1e-11 < moved < 1e-9


def test_the_contract_can_fail() -> None:
    """An error of 5 % in one gradient, or a factor of 1.1 in every error, is outside."""
    entry = zoo.ZOO["sd3"]
    model = entry.build()[0].train()

    def worse(**inputs):
        out = model(**inputs)[0]
        return (out + 1e-3 * out.detach().abs().mean() * torch.randn_like(out),)

    assert not contract.measure(worse, model, contract.fresh_inputs(entry), most=2).holds
    verdict = contract.Verdict()
    verdict.add({"a": 1.1e-7, "b": 1.1e-7}, {"a": 1e-7, "b": 1e-7})
    assert not verdict.holds
    verdict = contract.Verdict()
    verdict.add({"a": 0.5e-7, "b": 2.1e-7}, {"a": 1e-7, "b": 1e-7})
    assert not verdict.holds
