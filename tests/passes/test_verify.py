from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt.errors import ConfigError, VerifyError, unwrap
from graphopt.passes import adaln, catalogue, norm_modulate, verify

VERIFY = {"graphopt.verify": True, "graphopt.select": "all", "graphopt.compiler": "aot_eager"}


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, s, b, g):
        y = F.layer_norm(x, (x.shape[-1],)) * (1 + s) + b
        return x + g * self.linear(y)


def operands(dtype=torch.float32, width: int = 16):
    return [torch.randn(*shape, dtype=dtype, requires_grad=True)
            for shape in ((2, 24, width), (2, 1, width), (2, 1, width), (2, 1, width))]


def compiled(f, **options):
    return torch.compile(f, backend="graphopt", options=VERIFY | {f"graphopt.{k}": v for k, v in options.items()})


def checked(step):
    return [c for g in graphopt.report(step).graphs for p in g.passes for c in p.verified]


def swapped(match):
    """The planted fault: scale and shift change places."""
    made = norm_modulate.replace(match)
    made.inputs = dict(made.inputs)
    for a, b in (("scale", "shift"), ("scale.0", "shift.0")):
        if a in made.inputs and b in made.inputs:
            made.inputs[a], made.inputs[b] = made.inputs[b], made.inputs[a]
            made.views = {b: match.views("scale"), a: match.views("shift")}
    return made


@pytest.fixture
def wrong_rule(monkeypatch):
    rules = tuple(dataclasses.replace(r, replace=swapped) if r is norm_modulate.RULE else r for r in catalogue.RULES)
    monkeypatch.setattr(catalogue, "RULES", rules)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_sites_pass_and_the_report_says_how_close(dtype) -> None:
    model = Block().to(dtype)
    step = compiled(model)
    step(*operands(dtype)).sum().backward()
    assert graphopt.report(step).count("modulate", "rewritten") == 1
    found = checked(step)
    assert len(found) == 2
    assert "verified 2 operators; closest to its limit" in str(graphopt.report(step))
    for c in found:
        assert c.ok
        assert 0 < c.error <= c.limit
        assert c.tensor


# wan in fp32: a value and a cast of it are one result; wan_ti2v: operators that add a table to a factor
CHEAP = [("wan", torch.float32), ("wan_ti2v", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), CHEAP + [
    pytest.param(n, d, marks=pytest.mark.nightly) for n in zoo.ZOO for d in (torch.float32, torch.bfloat16)
    if (n, d) not in CHEAP and zoo.ZOO[n].expected.modulate + zoo.ZOO[n].expected.gate])
def test_models_pass(name: str, dtype: torch.dtype) -> None:
    model, inputs = zoo.ZOO[name].build(dtype)
    step = compiled(model.train())
    step(**inputs)
    report = graphopt.report(step)
    forward = [k for k in report.kernels if k.direction == "forward"]
    assert len(checked(step)) == len(forward) > 0
    assert report.count("modulate", "rewritten") == report.count("modulate") > 0
    assert not [n for g in report.graphs for n in g.notes]


def test_a_wrong_rule_is_named_and_dropped(wrong_rule, caplog) -> None:
    model, args = Block(), operands()
    step = compiled(model)
    out = step(*args)
    report = graphopt.report(step)
    assert report.count("modulate", "rewritten") == 0
    assert report.count("gate", "rewritten") == 1, "the right site stays"
    (site,) = report.declined
    assert "failed verification" in site.reason
    assert "limit" in site.reason
    (note,) = report.graphs[0].notes
    assert "norm_modulate" in note
    assert "test_verify.py" in note
    assert note in caplog.text
    torch.testing.assert_close(out, model(*args))


def test_a_wrong_rule_raises_where_asked_to(wrong_rule) -> None:
    with pytest.raises(Exception, match="failed verification") as caught:
        compiled(Block(), on_error="raise")(*operands())
    error = unwrap(caught.value)
    assert isinstance(error, VerifyError)
    assert "test_verify.py" in error.where
    assert "norm_modulate" in error.what


def test_a_wrong_gradient_is_found(monkeypatch) -> None:
    """The forward is right, the gradient of one operand is half of what it should be."""
    original = adaln.operator_for

    def halved(match, context):
        operator = original(match, context)
        if match.rule.name != "gate_residual":
            return operator

        def wrong(*args, **kwargs):
            gate = kwargs["gate"]
            return operator(*args, **{**kwargs, "gate": gate.detach() * 0.5 + gate * 0.5})

        wrong.__name__ = "graphopt_wrong"
        torch._dynamo.allow_in_graph(wrong)
        return wrong

    monkeypatch.setattr(adaln, "operator_for", halved)
    step = compiled(Block())
    step(*operands())
    report = graphopt.report(step)
    (site,) = report.declined
    assert site.kind == "gate"
    assert "gradient of " in site.reason
    assert report.count("modulate", "rewritten") == 1


def test_a_registered_rule_that_is_wrong_is_dropped() -> None:
    """The plug-in a user writes: right in shape and dtype, wrong by a factor."""
    from graphopt.passes.pattern import Op, Var

    def doubled(x):
        return F.silu(x) * 2

    def f(x, s, b, g):
        return F.relu(F.silu(x)) + b

    graphopt.register_rule(graphopt.Rule("their_silu", Op(F.silu, Var("x")), function=doubled))
    try:
        step = compiled(f)
        args = operands()
        torch.testing.assert_close(step(*args), f(*args))
        (site,) = graphopt.report(step).sites
        assert site.status == "declined"
        assert "failed verification" in site.reason
    finally:
        graphopt.unregister_rule("their_silu")


def test_an_operator_that_raises_is_dropped(monkeypatch) -> None:
    def broken(match, context):
        def fails(*args, **kwargs):
            raise ValueError("not today")

        return fails

    monkeypatch.setattr(adaln, "operator_for", broken)
    model, args = Block(), operands()
    step = compiled(model)
    torch.testing.assert_close(step(*args), model(*args))
    assert all("ValueError: not today" in s.reason for s in graphopt.report(step).declined)
    assert len(graphopt.report(step).declined) == 2


def test_checkpointed_blocks_are_verified_inside() -> None:
    block = Block()
    step = compiled(lambda *args: checkpoint(block, *args, use_reentrant=False))
    step(*operands()).sum().backward()
    assert len(checked(step)) == 2


def test_inputs_and_random_state_stay_as_they_were() -> None:
    def f(x, s, b, buffer):
        buffer.mul_(3)
        x = F.dropout(x, 0.5)
        return F.layer_norm(x, (16,)) * (1 + s) + b + buffer

    x, s, b, _ = operands()
    results = []
    for options in (VERIFY, {**VERIFY, "graphopt.verify": False}):
        torch._dynamo.reset()
        torch.manual_seed(3)
        buffer = torch.ones(16)
        step = torch.compile(f, backend="graphopt", options=options)
        results.append((step(x, s, b, buffer), buffer.clone(), torch.rand(3)))
    for one, other in zip(*results):
        assert torch.equal(one, other)
    assert results[0][1].eq(3).all()


def test_values_are_freed_on_the_way(monkeypatch) -> None:
    """Never more alive at once than a few activations: a long chain of blocks does not pile up."""
    alive: list[int] = []
    compare = verify._compare

    def spy(p, env, stands_for):
        alive.append(sum(isinstance(v, torch.Tensor) and v.dim() == 3 and v.shape[1] == 24 for v in env.values()))
        return compare(p, env, stands_for)

    monkeypatch.setattr(verify, "_compare", spy)
    blocks = nn.ModuleList(Block() for _ in range(6))

    def run(x, s, b, g):
        for block in blocks:
            x = block(x, s, b, g)
        return x

    compiled(run)(*operands())
    assert len(alive) >= 7
    assert max(alive) <= 8


def test_dynamic_sizes() -> None:
    step = torch.compile(Block(), backend="graphopt", dynamic=True, options=VERIFY)
    step(*operands())
    assert all(c.ok for c in checked(step))
    assert len(checked(step)) == 2


def test_the_option_is_checked() -> None:
    with pytest.raises(Exception, match="True or False") as caught:
        torch.compile(Block(), backend="graphopt", options={"graphopt.verify": "yes"})(*operands())
    assert isinstance(unwrap(caught.value), ConfigError)
    with pytest.raises(ConfigError, match="cannot verify"):
        graphopt.inspect(Block(), *operands(), options={"graphopt.verify": True})
