"""The pass that puts an RMS norm and its rotary embedding into one operator: what it finds, leaves, and computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import graphopt

OPTIONS = {"graphopt.select": "all", "graphopt.compiler": "aot_eager"}


def rotate(hidden, cos_table, sin_table):
    """As Wan's attention writes it."""
    even, odd = hidden.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_table[..., 0::2], sin_table[..., 1::2]
    out = torch.empty_like(hidden)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out.type_as(hidden)


class Queries(torch.nn.Module):
    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.linear, self.change = torch.nn.Linear(32, 32), change
        self.weight = torch.nn.Parameter(1 + 0.1 * torch.randn(32))

    def forward(self, x, cos, sin):
        n = F.rms_norm(self.linear(x), (32,), self.weight, 1e-6)
        q = n.unflatten(2, (4, -1))
        if self.change == "heads":
            q = F.rms_norm(self.linear(x).unflatten(2, (4, -1)), (8,), None, 1e-6)
        y = rotate(q, cos, sin)
        if self.change == "other reader":
            y = y + n.unflatten(2, (4, -1))
        if self.change == "swapped":
            even, odd = q.unflatten(-1, (-1, 2)).unbind(-1)
            y = torch.empty_like(q)
            y[..., 0::2] = even * cos[..., 0::2] - odd * sin[..., 1::2]
            y[..., 1::2] = even * cos[..., 0::2] + odd * sin[..., 1::2]
            y = y.type_as(q)
        if self.change == "same columns":
            even, odd = q.unflatten(-1, (-1, 2)).unbind(-1)
            y = torch.empty_like(q)
            y[..., 0::2] = even * cos[..., 0::2] - odd * sin[..., 0::2]
            y[..., 1::2] = even * sin[..., 0::2] + odd * cos[..., 0::2]
            y = y.type_as(q)
        return y.flatten(2)


def operands(B: int = 2, N: int = 6):
    x = torch.randn(B, N, 32, requires_grad=True)
    angle = torch.randn(1, N, 1, 4)
    return x, angle.cos().repeat_interleave(2, -1), angle.sin().repeat_interleave(2, -1)


def compiled(model, **options):
    return torch.compile(model, backend="graphopt", options={**OPTIONS, **options})


def test_values_and_gradients() -> None:
    model, args = Queries(), operands()
    f = compiled(model)
    y = f(*args)
    assert graphopt.report(f).count("rotary", what="rewritten") == 1
    cotangent = torch.randn_like(y)
    leaves = [args[0], *model.parameters()]
    got = torch.autograd.grad(y, leaves, cotangent)
    want_y = model(*args)
    want = torch.autograd.grad(want_y, leaves, cotangent)
    torch.testing.assert_close(y, want_y, rtol=1e-5, atol=1e-5)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_two_shapes(dynamic: bool) -> None:
    model = Queries()
    f = torch.compile(model, backend="graphopt", dynamic=dynamic, options=OPTIONS)
    for B, N in ((2, 6), (3, 9)):
        args = operands(B, N)
        torch.testing.assert_close(f(*args), model(*args), rtol=1e-5, atol=1e-5)
    # with dynamic=True the tables' width is a symbol too, and half of it alone is known: 7 and 8 have four even columns
    assert (graphopt.report(f).count("rotary", what="rewritten") >= 1) == (not dynamic)


@pytest.mark.parametrize("change", ["other reader", "swapped", "same columns", "heads"])
def test_near_misses_stay(change: str) -> None:
    model, args = Queries(change), operands()
    f = compiled(model)
    torch.testing.assert_close(f(*args), model(*args), rtol=1e-5, atol=1e-5)
    assert graphopt.report(f).count("rotary") == 0


def test_a_table_that_learns_stays() -> None:
    model, (x, cos, sin) = Queries(), operands()
    f = compiled(model)
    cos = cos.requires_grad_()
    y = f(x, cos, sin)
    assert graphopt.report(f).count("rotary") == 0
    assert torch.autograd.grad(y.sum(), cos)[0].abs().sum() > 0


def test_it_can_be_switched_off(monkeypatch) -> None:
    args = operands()
    f = compiled(Queries(), **{"graphopt.numerics": "eager"})
    f(*args)
    assert graphopt.report(f).count("rotary") == 0
    torch._dynamo.reset()
    monkeypatch.setenv("GRAPHOPT_DISABLE", "norm_rotate")
    f = compiled(Queries())
    f(*args)
    assert graphopt.report(f).count("rotary") == 0


def test_it_runs_only_when_asked_for() -> None:
    f = compiled(Queries(), **{"graphopt.disable": ["norm_rotate"]})
    f(*operands())
    assert graphopt.report(f).count("rotary") == 0


def test_without_a_gpu_it_is_left_to_the_compiler() -> None:
    f = compiled(Queries(), **{"graphopt.select": "profitable"})
    f(*operands())
    assert graphopt.report(f).count("rotary") == 0


def test_wan() -> None:
    """Two per self-attention, none per cross-attention, and the gradients stay."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=8, freq_dim=16, ffn_dim=32,
        num_layers=2, rope_max_seq_len=32)
    kw = dict(hidden_states=torch.randn(1, 4, 2, 4, 4), timestep=torch.tensor([3]),
              encoder_hidden_states=torch.randn(1, 5, 8), return_dict=False)
    graphs: list[fx.GraphModule] = []
    f = torch.compile(model, backend="graphopt", options=OPTIONS)
    out = f(**kw)[0]
    assert graphopt.report(f).count("rotary", what="rewritten") == 4, graphs
    out.square().mean().backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model(**kw)[0].square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=2e-3, atol=1e-6, msg=name)
