"""Calls that are not one layer after the other: reused, skipped, cut in two, compiled one by one, of several lengths.

Right, and slower where the schedule cannot foresee them; see test_training.py for the usual order.
"""

from __future__ import annotations

import copy

import pytest
import torch
from resident import OPTIONS, checkpointed, differing, layers, train
from streamed import ADAM, both, nightly, reference, streamed
from tiny_dit import Block, TinyDiT, inputs

import graphopt
from graphopt.streaming.link import LateLink


@pytest.mark.parametrize("order", [[0, 1, 0, 1, 2], [3, 1, 2], *nightly([0, 1, 1, 2, 3], [3, 1, 2, 0], [0, 2, 3])])
def test_layers_reused_reordered_skipped(order) -> None:
    a, b, x = both(order=order)
    want, _ = reference(a, x, checkpoint=len(set(order)) == len(order))
    got, _ = streamed(b, x, late=3)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert max(differing(b.state_dict(), a.state_dict()).values(), default=0) <= 2e-6


class Breaking(Block):
    """A graph break inside the layer; one weight is read on both sides of it."""

    def forward(self, x, temb, rope=None):
        x = x + self.qkv(x)[..., :16]
        torch._dynamo.graph_break()
        return super().forward(x, temb, rope)


@pytest.mark.parametrize("update", ["deferred", *nightly("in_backward")])
def test_a_graph_break_inside_a_layer_is_slower_and_right(update) -> None:
    a, b, x = both()
    for m in (a, b):
        torch.manual_seed(7)
        m.blocks[1] = Breaking()
    want, _ = reference(a, x, checkpoint=False)
    got, _ = streamed(b, x, late=3, update=update)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert any("more than one graph" in n for g in graphopt.last_report().graphs for n in g.notes)


def test_layers_compiled_by_themselves() -> None:
    """As diffusers' compile_repeated_blocks does."""
    a, b, x = both()
    want, _ = reference(a, x)
    graphopt.stream(b, "cpu", resident=[], link=LateLink(3))
    opt = graphopt.HostAdamW(b.parameters(), **ADAM, kernel="torch")
    for block in b.blocks:
        block.compile(backend="graphopt", options=OPTIONS)
    assert train(b, opt, x) == want
    assert differing(b.state_dict(), a.state_dict()) == {}


def test_models_of_one_class_compile_it_once(monkeypatch) -> None:
    """Three models, one compile of their layers; each trains its own weights, with its own owner of kernels."""
    from graphopt import backend

    compiled = []
    hand_over = backend.hand_over
    monkeypatch.setattr(backend, "hand_over", lambda gm, *a: compiled.append(gm) or hand_over(gm, *a))
    options = {**OPTIONS, "graphopt.compiler": "aot_eager"}
    x, kept, counts = inputs(), [], []
    for seed, layers_, more in ((0, 4, {}), (1, 3, {}), (2, 4, {"graphopt.rules": ["gate_residual"]})):
        a = TinyDiT(layers=layers_, seed=seed).train()
        b = copy.deepcopy(a)
        want, _ = reference(a, x, steps=2)
        got, opt = streamed(b, x, steps=2, late=2, options={**options, **more})
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        kept.append((b, opt))
        counts.append(len(compiled))
    forward_and_train, around = 2, 2
    assert counts[0] == forward_and_train + around
    assert counts[1] - counts[0] == around, "the layers' class is there already"
    assert counts[2] - counts[1] == forward_and_train + around, "other rules: another class"


def test_two_forwards_before_one_backward() -> None:
    def loss(m, x):
        return m(*x).square().mean() + m(x[0] * 0.5, x[1]).square().mean()

    a, b, x = both()
    want, _ = reference(a, x, loss=loss)
    got, _ = streamed(b, x, loss=loss, late=1)
    assert got == want
    assert differing(b.state_dict(), a.state_dict()) == {}


def test_sequence_lengths() -> None:
    a, b, _ = both()
    graphopt.stream(b, "cpu", resident=[], link=LateLink(4))
    for layer in layers(a):
        checkpointed(layer)
    one, two = torch.optim.AdamW(a.parameters(), **ADAM), graphopt.HostAdamW(b.parameters(), **ADAM, kernel="torch")
    step = torch.compile(b, backend="graphopt", options=OPTIONS)
    for i, S in enumerate((60, 96, 140, 1, 60)):
        x = inputs(S=S)
        assert train(step, two, x, steps=1, start=i) == train(a, one, x, steps=1, start=i)
    assert differing(b.state_dict(), a.state_dict()) == {}
    assert len(graphopt.report(step).graphs) <= 3
