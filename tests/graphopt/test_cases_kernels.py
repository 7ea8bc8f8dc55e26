"""Checks from public bug reports that need the generated kernels: C11 (past 2^31 elements) and C12 (repeatable gradients).

On a GPU only: the smaller shapes of other tests run under the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import graphopt

pytestmark = [pytest.mark.kernel, pytest.mark.gpu]

N, D = 700_001, 3072  # 2.15e9 elements: row 699,051 is the first that starts past 2^31
PLACES = ((0, 4), (699_049, 699_053), (N - 4, N))
ALL = {"graphopt.select": "all", "graphopt.on_error": "raise", "graphopt.compiler": "aot_eager"}


def adaln(x, s, b):
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + s) + b


def gated(x, branch, g, s, b):
    h = x + g * branch
    return h, F.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + s) + b


def rewritten(f, kinds: set[str]):
    """f compiled; `ran()` asserts after a call that every kind was rewritten to a generated kernel."""
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="graphopt", options=ALL, dynamic=False)

    def ran() -> None:
        report = graphopt.report(compiled)
        assert {k for k in ("modulate", "gate") if report.count(k, "rewritten") == 1} == kinds
        assert all(kernel.sources for kernel in report.kernels)  # generated, not the reference

    return compiled, ran


def big() -> Tensor:
    """[1, N, D] in bf16, filled in pieces."""
    out = torch.empty(1, N, D, device="cuda", dtype=torch.bfloat16)
    for piece in out.split(100_000, 1):
        piece.normal_()
    return out


@pytest.fixture
def room() -> Iterator[None]:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    yield
    torch.cuda.empty_cache()


def sum_over_rows(v: Tensor) -> Tensor:
    """The sum over rows in fp64, in pieces."""
    return sum(p.double().sum(1, keepdim=True) for p in v.split(20_000, 1))


@pytest.mark.parametrize("reduction", ["one_pass", "two_pass"])
def test_c11_norm_modulate_past_two_to_the_31(reduction: str, room: None, monkeypatch) -> None:
    """pytorch#181555, vllm#42862: rows on both sides of the border are bit-equal to small runs, gradients too."""
    monkeypatch.setenv("GRAPHOPT_REDUCTION", reduction)
    f, ran = rewritten(adaln, {"modulate"})
    x = big().requires_grad_()
    s, b = ((0.3 * torch.randn(1, 1, D, device="cuda")).to(torch.bfloat16).requires_grad_() for _ in range(2))
    y, dy = f(x, s, b), big()
    dx, ds, db = torch.autograd.grad(y, (x, s, b), dy)
    ran()
    for i, j in PLACES:
        xs = x[:, i:j].detach().clone().requires_grad_()
        ys = f(xs, s, b)
        assert torch.equal(ys, y[:, i:j])
        assert torch.equal(torch.autograd.grad(ys, xs, dy[:, i:j])[0], dx[:, i:j])
    assert ((db.double() - sum_over_rows(dy)).norm() / sum_over_rows(dy).norm()).item() < 4e-3  # one rounding to bf16
    want = torch.zeros(1, 1, D, device="cuda", dtype=torch.float64)
    for xp, dyp in zip(x.detach().split(20_000, 1), dy.split(20_000, 1), strict=True):
        want += (F.layer_norm(xp.double(), (D,), eps=1e-6) * dyp.double()).sum(1, keepdim=True)
    assert ((ds.double() - want).norm() / want.norm()).item() < 4e-3


def test_c11_gate_norm_modulate_past_two_to_the_31(room: None) -> None:
    f, ran = rewritten(gated, {"modulate", "gate"})
    x, branch = big().requires_grad_(), big().requires_grad_()
    g, s, b = (0.3 * torch.randn(1, 1, D, device="cuda") for _ in range(3))
    g, s, b = (v.to(torch.bfloat16).requires_grad_() for v in (g, s, b))
    h, y = f(x, branch, g, s, b)
    dh, dy = big(), big()
    dx, dbranch, dg = torch.autograd.grad((h, y), (x, branch, g), (dh, dy))
    ran()
    for i, j in PLACES:
        xs, bs = (v[:, i:j].detach().clone().requires_grad_() for v in (x, branch))
        hs, ys = f(xs, bs, g, s, b)
        assert torch.equal(hs, h[:, i:j])
        assert torch.equal(ys, y[:, i:j])
        small = torch.autograd.grad((hs, ys), (xs, bs), (dh[:, i:j], dy[:, i:j]))
        assert torch.equal(small[0], dx[:, i:j])
        assert torch.equal(small[1], dbranch[:, i:j])
    want = sum((p.double() * q.double()).sum(1, keepdim=True)
               for p, q in zip(dx.split(20_000, 1), branch.detach().split(20_000, 1), strict=True))
    assert ((dg.double() - want).norm() / want.norm()).item() < 4e-3


def test_partial_sums_past_two_to_the_31(room: None) -> None:
    """110,000 groups of two rows: the buffer of partial sums has 2.25e9 elements, and all of it ends in dshift."""
    G, width = 110_000, 10_240
    f, ran = rewritten(adaln, {"modulate"})
    x, dy = (torch.empty(G, 2, width, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(2))
    s, b = torch.zeros(G, 1, width, device="cuda", dtype=torch.bfloat16), torch.zeros(width, device="cuda", dtype=torch.bfloat16)
    b.requires_grad_()
    y = f(x, s.requires_grad_(), b)
    ds, db = torch.autograd.grad(y, (s, b), dy)
    ran()
    want = sum(p.double().sum((0, 1)) for p in dy.split(5000))
    assert ((db.double() - want).norm() / want.norm()).item() < 4e-3  # one rounding to bf16
    last = (F.layer_norm(x[-3:].double(), (width,), eps=1e-6) * dy[-3:].double()).sum(1, keepdim=True)
    assert ((ds[-3:].double() - last).norm() / last.norm()).item() < 4e-3


def test_a_strided_channel_past_two_to_the_31(room: None) -> None:
    """Channels outside: the last channel of a row starts past 2^31 elements."""
    f, ran = rewritten(adaln, {"modulate"})
    x = big().view(1, D, N).transpose(1, 2)
    s, b = (0.3 * torch.randn(1, 1, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    y = f(x, s, b)
    ran()
    for i, j in PLACES:
        assert torch.equal(f(x[:, i:j].contiguous(), s, b), y[:, i:j])


def test_c12_gradients_that_repeat() -> None:
    """Liger-Kernel#945, llm.c#445: bit-equal twice; rows in another order stay within eager's error to fp64."""
    f, ran = rewritten(adaln, {"modulate"})
    torch.manual_seed(0)
    x, dy = (torch.randn(4096, 1536, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    s, b = (0.3 * torch.randn(1, 1536, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    order = torch.randperm(4096, device="cuda")

    def step(f, x, dy, dtype=torch.bfloat16):
        leaves = [v.detach().to(dtype).requires_grad_() for v in (x, s, b)]
        y = f(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]

    torch.use_deterministic_algorithms(True)
    try:
        first, second, moved = step(f, x, dy), step(f, x, dy), step(f, x[order], dy[order])
        ran()
        eager = step(adaln, x, dy)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
    assert torch.equal(first[0][order], moved[0])
    assert torch.equal(first[1][order], moved[1])
    true = step(adaln, x, dy, torch.float64)
    true_moved = [v[order] if i < 2 else v for i, v in enumerate(true)]
    for got, want in ((first, true), (moved, true_moved)):
        for ours, theirs, truth, want_eager in zip(got, want, true, eager, strict=True):
            off = ((ours.double() - theirs).norm() / theirs.norm()).item()
            assert off <= 1.25 * ((want_eager.double() - truth).norm() / truth.norm()).item()
