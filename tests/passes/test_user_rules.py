"""`graphopt.register_rule`: the worked example of the docs, and every mistake a user can make."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import graphopt
from graphopt.errors import ConfigError, RewriteError, RuleError, unwrap
from graphopt.passes import user_rules
from graphopt.passes.pattern import Op, Var

DOCS = Path(__file__).resolve().parents[2] / "docs" / "rules.md"
OPTIONS = {"graphopt.compiler": "aot_eager"}


@pytest.fixture(autouse=True)
def _none_stays():
    yield
    for rule in user_rules.registered():
        graphopt.unregister_rule(rule.name)


def swiglu(gate, up):
    return F.silu(gate) * up + 0


def rule(function=swiglu, **more):
    return graphopt.Rule("swiglu", Op(F.silu, Var("gate")) * Var("up"), function=function, **more)


def model(gate, up):
    return (F.silu(gate) * up).relu() + (up * F.silu(gate + 1)).tanh()


def run(f=model, options=OPTIONS):
    """(the compiled callable, its result, eager's)."""
    x = [torch.randn(2, 5, 8, requires_grad=True) for _ in range(2)]
    step = torch.compile(f, backend="graphopt", options=options)
    return step, step(*x), f(*x)


def test_the_worked_example_of_the_docs(capsys: pytest.CaptureFixture) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code, str(DOCS), "exec"), names)
    assert "swiglu" in capsys.readouterr().out
    x = names["x"]
    got = x.grad.clone()
    x.grad = None
    names["model"](x).square().sum().backward()
    torch.testing.assert_close(got, x.grad)
    assert any(n.target is names["swiglu"] for n in _graph(names["model"], x).graph.nodes)


def _graph(f, *inputs):
    """The graph after the passes."""
    from graphopt import backend, config, reporting

    seen = []

    def capture(gm, example_inputs):
        seen.append(backend.rewrite(gm, config.parse(None, OPTIONS)[0], reporting.GraphRecord("0/0", [])))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(f, backend=capture)(*inputs)
    return seen[0]


def test_matches_both_orders_counts_and_is_switched_off() -> None:
    graphopt.register_rule(rule(families=frozenset({"mlp"})))
    step, got, want = run()
    torch.testing.assert_close(got, want)
    report = graphopt.check(step, {"swiglu": 2}, what="rewritten")
    assert [s.rule for s in report.sites] == ["swiglu"] * 2
    assert {k.operator for k in report.kernels} == {"swiglu"}
    for off in ({"graphopt.disable": ["swiglu"]}, {"graphopt.disable": ["mlp"]}, {"graphopt.rules": ["norm_modulate"]}):
        torch._dynamo.reset()
        step, _, _ = run(options=OPTIONS | off)
        assert graphopt.report(step).count("swiglu") == 0


def test_registering_checks_the_rule() -> None:
    graphopt.register_rule(rule())
    with pytest.raises(ConfigError, match="'swiglu' exists already"):
        graphopt.register_rule(rule())
    for taken in ("norm_modulate", "gate_residual", "gate_norm"):
        with pytest.raises(ConfigError, match="exists already"):
            graphopt.register_rule(graphopt.Rule(taken, Op(F.silu, Var("x")), function=F.silu))
    with pytest.raises(ConfigError, match="has no function"):
        graphopt.register_rule(graphopt.Rule("a", Op(F.silu, Var("x"))))
    with pytest.raises(ConfigError, match="fits every node"):
        graphopt.register_rule(graphopt.Rule("b", Var("x"), function=F.silu))
    with pytest.raises(ConfigError, match="is no rule"):
        graphopt.register_rule("swiglu")
    graphopt.unregister_rule("swiglu")
    with pytest.raises(ConfigError, match="no registered rule is named 'swiglu'"):
        graphopt.unregister_rule("swiglu")


def raising(*_args, **_kwargs):
    raise KeyError("oops")


@pytest.mark.parametrize("where", ["check", "candidate", "function"])
def test_a_rule_that_raises_leaves_its_sites_and_warns_once(where: str, caplog: pytest.LogCaptureFixture) -> None:
    graphopt.register_rule(rule(**{where: raising}))
    with caplog.at_level(logging.WARNING, "graphopt"):
        step, got, want = run()
    torch.testing.assert_close(got, want)
    warnings = [r.getMessage() for r in caplog.records if "swiglu" in r.getMessage()]
    assert len(warnings) == 1
    assert "KeyError" in warnings[0]
    assert "test_user_rules.py" in warnings[0]
    report = graphopt.report(step)
    assert report.count("swiglu") == 0
    assert len(report.rejects) == 2
    torch._dynamo.reset()
    with pytest.raises(Exception, match="swiglu") as caught:
        run(options=OPTIONS | {"graphopt.on_error": "raise"})
    assert isinstance(unwrap(caught.value), RewriteError)


@pytest.mark.parametrize(("function", "words"), [
    (lambda gate, up: (gate * up).sum(-1), r"\[2, 5, 8\] by torch.float32 \[2, 5\]"),
    (lambda gate, up: (gate * up).double(), "by torch.float64"),
    (lambda gate, up: (gate, up), "returns tuple"),
])
def test_another_shape_or_dtype_is_an_error_before_it_is_applied(function, words: str) -> None:
    graphopt.register_rule(rule(function))
    with pytest.raises(Exception, match=words) as caught:
        run()
    error = unwrap(caught.value)
    assert type(caught.value).__name__ == "BackendCompilerFailed"
    assert isinstance(error, RuleError)
    assert isinstance(error, RewriteError)
    assert "test_user_rules.py" in error.where


def test_other_strides_are_refused() -> None:
    graphopt.register_rule(rule(lambda gate, up: swiglu(gate, up).transpose(0, 1).contiguous().transpose(0, 1)))
    step, got, want = run()
    torch.testing.assert_close(got, want)
    (first, _) = graphopt.report(step).rejects
    assert "strides" in first.reason


def test_dynamic_shapes_and_a_custom_operator() -> None:
    @torch.library.custom_op("graphopt_tests::swiglu", mutates_args=())
    def custom(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    custom.register_fake(lambda gate, up: torch.empty_like(gate))
    graphopt.register_rule(rule(custom))
    step = torch.compile(model, backend="graphopt", dynamic=True, options=OPTIONS)
    for S in (5, 9):
        x = [torch.randn(2, S, 8) for _ in range(2)]
        torch.testing.assert_close(step(*x), model(*x))
    graphopt.check(step, {"swiglu": 2}, what="rewritten")
