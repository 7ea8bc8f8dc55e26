"""The operators: fake, autograd, hash in the name, compile without graph breaks, checkpointing."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from graphopt.codegen.dsa import operators


def call(q, k, v, offsets, boundary="inside"):
    return operators.operator("reference")(q, k, v, offsets, 2, 3, 4, 2, 3, 3, 0.5, boundary)


def sample(dtype=torch.float32, transposed=False, grad=True):
    make = lambda: torch.randn(1, 24, 2, 4, dtype=dtype).transpose(1, 2) if transposed else torch.randn(1, 2, 24, 4, dtype=dtype)
    return [make().requires_grad_(grad) for _ in range(3)] + [torch.rand(1, 1, 24, 3).requires_grad_(grad)]


def test_opcheck() -> None:
    op = operators.operator("reference")
    rest = (2, 3, 4, 2, 3, 3, 0.5, "inside")
    for args in (sample(), sample(torch.bfloat16, transposed=True), [*sample()[:3], None]):
        torch.library.opcheck(op, (*args, *rest), test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    torch.library.opcheck(op, (*sample(), *rest))


def test_gradients_keep_layout_and_dtype() -> None:
    leaves = sample(torch.bfloat16, transposed=True)
    y, lse = call(*leaves)
    assert y.stride() == leaves[0].stride()
    assert lse.dtype == torch.float32
    for x, g in zip(leaves, torch.autograd.grad(y.float().sum() + lse.sum(), leaves)):
        assert (g.dtype, g.shape, g.stride()) == (x.dtype, x.shape, x.stride())


def test_no_gradient_is_made_for_offsets_that_need_none() -> None:
    q, k, v, offsets = sample()
    y, lse = call(q, k, v, offsets.detach())
    lse.sum().backward()  # the log-sum-exp alone is differentiable
    assert q.grad.abs().sum() > 0
    assert v.grad.abs().sum() == 0
    assert y.grad_fn is not None


def test_compiles_whole_and_dynamic() -> None:
    def f(x, offsets, T, H, W):
        q, k, v = x.chunk(3, -1)
        y, lse = operators.operator("reference")(q, k, v, offsets, T, H, W, 2, 3, 3, 0.5, "inside")
        return y.sum() + lse.sum()

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    for grid in ((2, 3, 4), (3, 3, 5), (2, 4, 6)):
        N = grid[0] * grid[1] * grid[2]
        a = torch.randn(1, 2, N, 12, requires_grad=True)
        b = a.detach().clone().requires_grad_()
        offsets = torch.rand(1, 1, N, 3)
        f(a, offsets, *grid).backward()
        compiled(b, offsets, *grid).backward()
        torch.testing.assert_close(a.grad, b.grad)


def test_activation_checkpointing() -> None:
    leaves = sample()
    plain = torch.autograd.grad(call(*leaves)[0].sin().sum(), leaves)
    again = torch.autograd.grad(checkpoint(lambda *x: call(*x)[0], *leaves, use_reentrant=False).sin().sum(), leaves)
    for a, b in zip(plain, again):
        assert torch.equal(a, b)


def test_the_name_follows_the_sources(monkeypatch, tmp_path) -> None:
    assert operators.operator_name("reference").endswith(operators.source_hash())
    for name in operators.SOURCES:
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(operators, "__file__", str(tmp_path / "operators.py"))
    before = operators.source_hash.__wrapped__()
    (tmp_path / "reference.py").write_text("x = 2\n")
    assert operators.source_hash.__wrapped__() != before
