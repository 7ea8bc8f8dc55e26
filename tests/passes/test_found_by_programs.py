"""Found by random programs: gradients stopped in front of an input, sums cast between dtypes of equal width."""

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


def test_a_sum_cast_between_dtypes_of_equal_width() -> None:
    """fp16 + fp16, cast to bf16, normed: h is the bf16 value, for every reader."""

    def f(x, branch, g, s, b):
        h = (x + g * branch).to(torch.bfloat16)
        return h, F.layer_norm(h, (8,)) * (1 + s) + b

    inputs = [torch.randn(*shape).half() for shape in ((2, 5, 8), (2, 5, 8), (2, 1, 8), (2, 1, 8), (2, 1, 8))]
    inputs[1] = inputs[0].sin()
    compiled = torch.compile(lambda x, *rest: f(x, x.sin(), *rest), backend="graphopt", options=ALL)
    got, want = compiled(inputs[0], *inputs[2:]), f(*inputs)
    assert [t.dtype for t in got] == [t.dtype for t in want]
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert {k.operator for k in graphopt.report(compiled).kernels} == {"gate_norm_modulate"}


def test_a_result_that_only_a_later_site_reads() -> None:
    """Two names of h (a no-op cast), one of them read by nothing but the operator of another site."""

    def f(x, s, b, w):
        h = x + s * x.sin()
        same = h.float()
        n = F.layer_norm(same, (8,), eps=1e-6)
        halves = [n[:, i : i + 3] * (1 + s) + b for i in (0, 3)]
        return torch.cat(halves, 1), F.layer_norm(same, (8,), w, w)

    inputs = torch.randn(2, 6, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8), torch.randn(8)
    compiled = torch.compile(f, backend="graphopt", options=ALL)
    torch.testing.assert_close(compiled(*inputs), f(*inputs), rtol=1e-5, atol=1e-5)
    report = graphopt.report(compiled)
    assert sorted(k.operator for k in report.kernels) == ["gate_norm", "norm_modulate", "norm_modulate"]


@pytest.mark.parametrize("what", ["scale", "shift", "h"])
def test_a_value_written_after_the_site(what: str) -> None:
    """Eager saves `1 + scale`, a widened h, and no shift; the operator would save what is written to."""

    def f(x, s, b, g):
        s, b = s * 1, b * 1
        h = (x + g * x.sin()).bfloat16()
        y = F.layer_norm(h.float(), (8,)) * (1 + s) + b
        {"scale": s, "shift": b, "h": h}[what][..., :2] = 0.5
        return y + h + s + b

    inputs = torch.randn(2, 5, 8), *(torch.randn(2, 1, 8) for _ in range(3))
    compiled = torch.compile(f, backend="graphopt", options=ALL | {"graphopt.compiler": "aot_eager"})
    grads = []
    for g in (f, compiled):
        leaves = [v.clone().requires_grad_() for v in inputs]
        g(*leaves).float().square().sum().backward()
        grads.append([v.grad for v in leaves])
    torch.testing.assert_close(grads[1], grads[0], rtol=3e-2, atol=3e-2)
    report = graphopt.report(compiled)
    if what == "scale":  # `1 + scale` is taken as it is instead
        assert report.count("modulate", "rewritten") == 1
    else:
        assert any("writes in place into a value" in r.reason for r in report.rejects)


def compared(f, *inputs):
    """(report, [(gradient of the compiled, of eager), ..]); outputs are asserted equal."""
    compiled = torch.compile(f, backend="graphopt", options=ALL | {"graphopt.compiler": "aot_eager"})
    results = []
    for g in (compiled, f):
        leaves = [v.clone().requires_grad_() for v in inputs]
        out = g(*leaves)
        sum(o.square().sum() for o in (out if isinstance(out, tuple) else (out,))).backward()
        results.append((out, [v.grad for v in leaves]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    return graphopt.report(compiled), list(zip(*(grads for _, grads in results)))


def assert_same(pairs) -> None:
    for got, want in pairs:
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


OPERANDS = torch.randn(2, 5, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)


def test_first_operands_by_keyword() -> None:
    def f(x, s, b):
        n = F.layer_norm(input=x, normalized_shape=(8,))
        y = torch.add(input=torch.mul(input=n, other=1 + torch.unsqueeze(input=s, dim=0).squeeze(0)), other=b)
        h = x + torch.tanh(input=s) * y
        return F.layer_norm(input=h, normalized_shape=(8,)) * (1 + s) + b

    report, grads = compared(f, *OPERANDS)
    assert_same(grads)
    assert (report.count("modulate", "rewritten"), report.count("gate", "rewritten")) == (2, 1)


def unread_behind_a_gate(x, s, b, w):
    h = x + s * x.sin()
    F.layer_norm(h, (8,), w) * (1 + s) + b
    return h


def unread_weight(x, s, b, w):
    h = x + s * x.sin()
    F.layer_norm(h, (8,), w, b[0, 0])
    return h


def unread_of_two(x, s, b, w):
    n = F.layer_norm(x, (8,))
    n * (1 + w) + b
    return n * (1 + s) + s


def detached_weight(x, s, b, w):
    h = x + s * x.sin()
    return h + F.layer_norm(h, (8,), w).detach()


def detached_of_two(x, s, b, w):
    n = F.layer_norm(x, (8,))
    y = n * (1 + w) + b
    return n * (1 + s) + s, y.detach().exp()


@pytest.mark.parametrize("f", [unread_behind_a_gate, unread_weight, unread_of_two, detached_weight, detached_of_two])
def test_what_gets_no_gradient_in_eager_gets_none(f) -> None:
    """An operator with a live and a dead result would give zeros, which an optimizer steps on."""
    report, grads = compared(f, *OPERANDS, torch.randn(8))
    assert grads[-1][1] is None
    assert_same(grads)
    assert {s.status for s in report.sites} == {"rewritten"}


@pytest.mark.skipif(not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this torch does not trace it")
@pytest.mark.parametrize("of", ["gain", "norm", "scale"])
def test_a_gradient_taken_inside_the_graph(of: str) -> None:
    def f(x, s, b):
        values = {"norm": F.layer_norm(x, (8,)), "scale": s, "gain": 1 + s}
        y = values["norm"] * values["gain"] + b
        (d,) = torch.autograd.grad(y.square().sum(), values[of])
        return d.sum((0, 1)) * b

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(f, backend="graphopt", options=ALL, fullgraph=True)
        leaves = [v.clone().requires_grad_() for v in OPERANDS]
        torch.testing.assert_close(compiled(*leaves), f(*leaves), rtol=1e-4, atol=1e-4)
    reasons = [r.reason for r in graphopt.report(compiled).rejects]
    assert any("torch.autograd.grad differentiates" in r for r in reasons) == (of == "norm")
