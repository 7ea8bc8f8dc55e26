"""Rewritten graphs through Inductor on a GPU: contract, bitwise repeatability, gradients over dying gradients."""

from __future__ import annotations

import blocks
import contract
import pytest
import torch

import graphopt
from graphopt import backend

pytestmark = pytest.mark.gpu

OPTIONS = {"graphopt.select": "all", "graphopt.on_error": "raise"}
B, S, D = 2, 1500, 1152


def model() -> blocks.Stack:
    torch.manual_seed(0)
    return blocks.Stack(D, 3).to("cuda", torch.bfloat16)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return tuple(torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((B, S, D), (B, D)))


def gradients(f, m, x, t, dtype=torch.bfloat16) -> contract.Result:
    m.zero_grad()
    x, t = (v.detach().clone().to(dtype).requires_grad_() for v in (x, t))
    out = f(x, t)
    out.backward(torch.ones_like(out) * torch.arange(D, device="cuda").to(dtype) / D)
    found = {"output": out.detach(), "x": x.grad, "t": t.grad}
    return found | {n: p.grad.clone() for n, p in m.named_parameters()}


def compiled(m):
    torch._dynamo.reset()
    return torch.compile(m, backend="graphopt", options=OPTIONS, dynamic=False)


def test_contract_and_repeatable() -> None:
    """Five batches; two runs of each give the same bits in the output and every gradient."""
    m = model()
    wide = model().double()
    wide.load_state_dict(m.state_dict())
    f, verdict = compiled(m), contract.Verdict()
    for seed in range(5):
        x, t = batch(seed)
        got, again = gradients(f, m, x, t), gradients(f, m, x, t)
        assert all(torch.equal(got[n], again[n]) for n in got)
        true = gradients(wide, wide, x, t, torch.float64)
        verdict.add(contract.errors(got, true), contract.errors(gradients(m, m, x, t), true))
    assert verdict.holds, verdict
    assert (graphopt.report(f).count("modulate", "rewritten"), graphopt.report(f).count("gate", "rewritten")) == (6, 6)


def test_results_over_dying_gradients(monkeypatch) -> None:
    """Most backward kernels write into memory that arrives; bits are those without, and the peak is not higher."""
    m, (x, t) = model(), batch(0)
    real, counts, found = backend.reuse_gradients.reuse, [], {}
    for name, reuse in (("own", lambda graph: 0), ("reused", lambda graph: counts.append(real(graph)))):
        monkeypatch.setattr(backend.reuse_gradients, "reuse", reuse)
        monkeypatch.setattr(backend, "version", lambda module, name=name: f"{name} {module.__name__}")
        f = compiled(m)
        gradients(f, m, x, t)
        m.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        result = gradients(f, m, x, t)
        found[name] = (torch.cuda.max_memory_allocated() - before, result)
    assert sum(counts) >= 6
    assert all(torch.equal(found["own"][1][n], found["reused"][1][n]) for n in found["own"][1])
    assert found["reused"][0] <= found["own"][0]
