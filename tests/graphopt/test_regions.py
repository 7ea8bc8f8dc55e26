"""One of N equal layers compiled once: same numbers, same report, one class."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_dit import TinyDiT, inputs
from zoo import ZOO

import graphopt

OPTIONS = {"graphopt.compiler": "aot_eager", "graphopt.regions": "auto", "graphopt.select": "all"}


def step(f, *args, **kwargs):
    out = f(*args, **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    out.float().square().mean().backward()
    return out.detach()


def gaps(a, b):
    return [n for (n, p), q in zip(a.named_parameters(), b.named_parameters()) for q in (q[1],)
            if (p.grad is None) != (q.grad is None) or (p.grad is not None and not torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-6))]


# the last single-stream block of HunyuanVideo gives out one value where the others give two: a class of its own
@pytest.mark.parametrize(("name", "note"), [("wan", "2 layers in 1 classes"), ("hunyuan_video", "4 layers in 3 classes")])
def test_zoo(name: str, note: str) -> None:
    a, x = ZOO[name].build()
    b = copy.deepcopy(a)
    whole = torch.compile(a, backend="graphopt", options={**OPTIONS, "graphopt.regions": "off"})
    want = step(whole, **x, return_dict=False)
    expected = graphopt.report(whole)
    torch._dynamo.reset()
    parts = torch.compile(b, backend="graphopt", options=OPTIONS)
    torch.testing.assert_close(step(parts, **x, return_dict=False), want, rtol=1e-5, atol=1e-6)
    assert gaps(a, b) == []
    report = graphopt.report(parts)
    assert f"regions: {note}" in report.graphs[0].notes
    for kind in ("modulate", "gate"):
        assert report.count(kind) == expected.count(kind)
    assert sorted(s.fqn for s in report.sites) == sorted(s.fqn for s in expected.sites)


def test_each_class_is_compiled_once(monkeypatch) -> None:
    from graphopt import backend

    compiled = []
    hand_over = backend.hand_over
    monkeypatch.setattr(backend, "hand_over", lambda gm, *a: compiled.append(gm) or hand_over(gm, *a))
    model, twin = TinyDiT(layers=12), TinyDiT(layers=12)
    f = torch.compile(model, backend="graphopt", options=OPTIONS)
    x = inputs()
    torch.testing.assert_close(step(f, *x), step(twin, *x), rtol=1e-5, atol=1e-6)
    assert gaps(model, twin) == []
    assert len(compiled) == 3, "before, one of twelve, behind"
    for S in (9, 14, 1, 9):
        x = inputs(S=S)
        torch.testing.assert_close(step(f, *x), step(twin, *x), rtol=1e-5, atol=1e-6)
    assert len(graphopt.report(f).graphs) <= 3


def test_where_nothing_repeats_the_graph_is_one() -> None:
    f = torch.compile(torch.nn.Linear(2, 2), backend="graphopt", options=OPTIONS)
    f(torch.ones(1, 2)).sum().backward()
    assert any("no layers repeat" in n for n in graphopt.report(f).graphs[0].notes)


def test_layers_under_checkpoints_stay_in_them() -> None:
    from torch.utils.checkpoint import checkpoint

    class Saving(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model, x = Saving(), torch.randn(2, 8)
    f = torch.compile(model, backend="graphopt", options=OPTIONS)
    torch.testing.assert_close(step(f, x), step(model, x))
    assert any("inside activation checkpoints" in n for n in graphopt.report(f).graphs[0].notes)


def test_training_mode_draws_new_numbers_in_every_layer() -> None:
    model = TinyDiT(layers=3, dropout=0.5).train()
    f = torch.compile(model, backend="graphopt", options=OPTIONS)
    x = inputs()
    assert not torch.equal(f(*x), f(*x))
    model.eval()
    assert torch.equal(f(*x), f(*x))


class Numbered(torch.nn.Module):
    """Layers with a number of their own, which dynamic=True makes a symbol."""

    def __init__(self, *eps: float) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.LayerNorm(16, eps=e) for e in eps)

    def forward(self, x: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = e.chunk(3, -1)
        for block in self.blocks:
            x = x + gate * (block(x) * (1 + scale) + shift) * block.eps
        return x


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("eps", "classes"), [((0.5, 0.5, 0.5, 0.5), 2), ((0.5, 0.5, 0.5, 0.25), 3)])
def test_numbers_of_layers_under_dynamic_shapes(eps, classes, streamed) -> None:
    """A class never has the eps of another layer, and a changed eps is seen.  The first layer's x needs no gradient."""
    model = Numbered(*eps)
    twin = copy.deepcopy(model)
    if streamed:
        graphopt.stream(model, "cpu", resident=[])
    f = torch.compile(model, backend="graphopt", dynamic=True, options=OPTIONS)
    for S in (5, 9):
        x = torch.randn(2, S, 16), torch.randn(2, 1, 48)
        torch.testing.assert_close(step(f, *x), step(twin, *x), rtol=1e-5, atol=1e-6)
    notes = [n for g in graphopt.report(f).graphs for n in g.notes]
    assert any(f"in {classes} classes" in n for n in notes), notes
    # compiled again while gradients are there: torch 2.11 and 2.12 look at them
    model.blocks[1].eps = twin.blocks[1].eps = 0.125
    x = torch.randn(2, 7, 16), torch.randn(2, 1, 48)
    torch.testing.assert_close(step(f, *x), step(twin, *x), rtol=1e-5, atol=1e-6)
