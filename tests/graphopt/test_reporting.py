from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt.errors import ConfigError, GraphoptError, RewriteError, unwrap
from graphopt.passes.record import Prediction

ALL = {"graphopt.select": "all", "graphopt.compiler": "aot_eager"}


class Modulated(nn.Module):
    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.linear, self.broken = nn.Linear(8, 8), broken

    def forward(self, x, s, b):
        y = F.layer_norm(x, (8,)) * (1 + s) + b
        if self.broken:
            torch._dynamo.graph_break()
        return F.layer_norm(self.linear(y), (8,)) * (1 + s) + b


def operands():
    return torch.randn(2, 5, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)


def compiled(f, **options):
    return torch.compile(f, backend="graphopt", options=ALL | options)


def test_all_graphs_of_one_callable() -> None:
    f, other = compiled(Modulated(broken=True)), compiled(Modulated(), **{"graphopt.rules": ["norm_modulate"]})
    f(*operands())
    other(*operands())
    f(*operands())
    report = graphopt.report(f)
    assert len(report.graphs) == 2
    assert [g.compile_id for g in report.graphs] == ["0/0", "1/0"]
    assert report.count("modulate") == 2
    assert report.count("modulate", "rewritten", executed=True) == 4
    assert len(graphopt.report(other).graphs) == 1
    assert graphopt.last_report() is graphopt.report(other)


@pytest.mark.parametrize("how", ["module", "in place", "function", "method"])
def test_found_from_whatever_was_compiled(how: str) -> None:
    m = Modulated()
    if how == "in place":
        m.compile(backend="graphopt", options=ALL)
        f = m
    else:
        f = compiled({"module": m, "function": lambda *a: m(*a), "method": m.forward}[how])
    f(*operands())
    assert graphopt.report(f).count("modulate") == 2


def test_json_is_complete_and_stable() -> None:
    f = compiled(Modulated())
    f(*operands())
    report = graphopt.report(f)
    data = json.loads(report.to_json())
    assert data["version"] == 1
    (site, _) = data["graphs"][0]["passes"][-1]["sites"]
    assert site["kind"] == "modulate"
    assert site["where"].endswith("test_reporting.py:25")
    assert site["shape"] == [2, 5, 8]
    assert report.to_json() == report.to_json()
    assert "2 modulate sites (2 rewritten)" in str(report)


def test_fqn_and_source_line() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Modulated(), Modulated()])

        def forward(self, x, s, b):
            for block in self.blocks:
                x = block(x, s, b)
            return x

    f = compiled(Outer())
    f(*operands())
    assert [s.fqn for s in graphopt.report(f).sites] == ["blocks.0", "blocks.0", "blocks.1", "blocks.1"]


def test_a_model_without_a_site() -> None:
    f = torch.compile(nn.Linear(4, 4), backend="graphopt")
    x = torch.randn(2, 4)
    f(x)
    report = graphopt.check(f)
    assert report.count("modulate") == report.count("gate") == 0
    assert "no site: the graph goes through the compiler as it is" in str(report)


def test_check_names_what_is_missing() -> None:
    m = Modulated()

    def escaping(x, s, b):
        product = F.layer_norm(x, (8,)) * (1 + s)
        return product + b, product.sum()

    f = compiled(escaping)
    f(*operands())
    with pytest.raises(graphopt.CheckFailed, match=r"0 modulate sites matched, 1 required") as caught:
        graphopt.check(f, {"modulate": 1})
    assert "is also read by" in str(caught.value)
    g = compiled(m)
    g(*operands())
    assert graphopt.check(g, {"modulate": 2}).count("modulate") == 2
    with pytest.raises(ConfigError, match="modulates"):
        graphopt.check(g, {"modulates": 2})
    with pytest.raises(graphopt.CheckFailed, match="no other norm or gate"):
        graphopt.check(g, {"modulate": 3})
    for wrong in (2, {"modulate": "2"}):
        with pytest.raises(ConfigError, match="give the least number of each kind"):
            graphopt.check(g, wrong)


def test_check_when_torch_never_called_the_backend() -> None:
    f = compiled(Modulated())
    with pytest.raises(graphopt.CheckFailed, match=r"never called the backend for Modulated \(.*test_reporting\.py"):
        graphopt.check(f)
    with pytest.raises(GraphoptError, match="not made by torch"):
        graphopt.check(Modulated())


def test_disabled_by_environment(monkeypatch) -> None:
    monkeypatch.setenv("GRAPHOPT_DISABLE", "norm_modulate")
    f = compiled(Modulated())
    f(*operands())
    assert graphopt.report(f).count("modulate") == 0


def test_a_failing_pass_falls_back_or_raises(monkeypatch, caplog) -> None:
    from graphopt.passes import adaln

    def broken(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr(adaln.rewrite, "apply", broken)
    m = Modulated()
    f = compiled(m)
    x = operands()
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        torch.testing.assert_close(f(*x), m(*x))
    assert "planted" in caplog.text
    assert "planted" in graphopt.report(f).graphs[0].notes[0]
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(m, **{"graphopt.on_error": "raise"})(*x)
    assert isinstance(unwrap(caught.value), RewriteError)


def test_logging(caplog) -> None:
    with caplog.at_level(logging.INFO, logger="graphopt"):
        compiled(Modulated())(*operands())
    lines = [r for r in caplog.records if r.name.startswith("graphopt")]
    assert len(lines) == 1
    assert "2 modulate sites (2 rewritten)" in lines[0].getMessage()


def test_predicted_times_are_those_of_their_own_shape() -> None:
    f = compiled(lambda x, c, s, b: [F.layer_norm(v, (8,)) * (1 + s) + b for v in (x, c)])
    x, s, b = operands()
    f(x, x[:, :2].clone(), s, b)
    report = graphopt.report(f)
    for record in report.graphs[0].passes:
        record.sites = [replace(s, predicted=Prediction(10.0 * s.shape[1], 100.0)) for s in record.sites]
    lines = str(report).splitlines()
    for rows in (2, 5):
        at = next(i for i, line in enumerate(lines) if f"[2,{rows},8]" in line)
        assert f"predicted {10 * rows} us a step, Inductor 100 us" in lines[at + 1]
