"""Attention to text keys: the log-sum-exp and its gradient, plain and by kernels."""

from __future__ import annotations

import pytest
import torch

from graphopt.codegen.dsa import text


def naive(q, k, v, scale):
    kk, vv = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = q @ kk.transpose(-1, -2) * scale
    return logits.softmax(-1) @ vv, logits.logsumexp(-1)


def test_reference_with_gradients() -> None:
    q = torch.randn(2, 4, 11, 6, dtype=torch.float64).requires_grad_()
    k, v = (torch.randn(2, 2, 5, 6, dtype=torch.float64).requires_grad_() for _ in range(2))
    y, lse = text.attend(q, k, v, 0.4)
    Y, L = naive(q, k, v, 0.4)
    torch.testing.assert_close(y, Y)
    torch.testing.assert_close(lse, L)
    dy, dl = torch.randn_like(y), torch.randn_like(lse)
    got = torch.autograd.grad((y * dy).sum() + (lse * dl).sum(), (q, k, v))
    for a, b in zip(got, torch.autograd.grad((Y * dy).sum() + (L * dl).sum(), (q, k, v))):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    small = [torch.randn(1, 2, 3, 4).requires_grad_() for _ in range(3)]
    torch.library.opcheck(text.operator("reference"), (*small, 0.4))


@pytest.mark.kernel
@pytest.mark.parametrize(("N", "L", "kv", "D"), [(70, 9, 2, 16), (33, 66, 1, 12)])
def test_kernels(N, L, kv, D, device) -> None:
    on_gpu = device == "cuda"
    make = lambda h, n: torch.randn(1, h, n, 64 if on_gpu else D, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    q, k, v, dy = make(2, N), make(kv, L), make(kv, L), make(2, N)
    dlse = torch.randn(1, 2, N, device=device)
    y, lse = text.triton_forward(q, k, v, 0.3)
    wide = [t.double() for t in (q, k, v)]
    Y, LSE = text.reference_forward(*wide, 0.3)
    error = lambda a, b: ((a.double() - b).norm() / b.norm()).item()
    limit = 4e-3 if on_gpu else 1e-5
    assert error(y, Y) < limit
    torch.testing.assert_close(lse.double(), LSE, rtol=0, atol=1e-4)
    got, again = (text.triton_backward(dy, dlse, q, k, v, y, lse, 0.3) for _ in range(2))
    for a, b, c in zip(got, text.reference_backward(dy.double(), dlse.double(), *wide, Y, LSE, 0.3), again):
        assert error(a, b) < limit
        assert torch.equal(a, c)
