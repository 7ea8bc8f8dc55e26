"""Weights after training streamed, against the resident model under torch.optim.AdamW: equal bit by bit."""

from __future__ import annotations

import copy

import pytest
import torch
from resident import OPTIONS, checkpointed, differing, layers, loss_of, train
from torch import nn
from zoo import ZOO, liven

import graphopt
from graphopt.errors import StreamError
from graphopt.streaming import attach
from graphopt.streaming.link import LateLink

ADAM = dict(lr=1e-2, weight_decay=0.1)


def both(name="wan", **changes):
    """Two equal models of the zoo in training mode, and inputs; changes: attributes of the configuration."""
    model, inputs = ZOO[name].build()
    if changes:
        torch.manual_seed(0)
        model = type(model)(**{**{k: v for k, v in model.config.items() if not k.startswith("_")}, **changes})
        liven(model)
    model.train()
    return model, copy.deepcopy(model), inputs


def reference(model, inputs, steps=5, clip=None, checkpoint=True, **kwargs):
    if checkpoint:
        for layer in layers(model):
            checkpointed(layer)
    opt = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = train(model, opt, inputs, steps, clip, clip_with=lambda c: torch.nn.utils.clip_grad_norm_(model.parameters(), c), **kwargs)
    return losses, opt


def streamed(model, inputs, steps=5, clip=None, slots=2, update="deferred", late=None, resident=(), options=OPTIONS, accumulate=1, **kwargs):
    graphopt.stream(model, "cpu", slots=slots, resident=list(resident), link=None if late is None else LateLink(late))
    opt = graphopt.HostAdamW(model.parameters(), **ADAM, update=update, kernel="torch", accumulate=accumulate)
    step = torch.compile(model, backend="graphopt", options=options)
    losses = train(step, opt, inputs, steps, clip, clip_with=opt.clip_grad_norm_, **kwargs)
    return losses, opt


@pytest.mark.parametrize("name", ["wan", "hunyuan_video", "flux", "ltx", "cogvideox"])
def test_zoo_trains_as_resident(name: str) -> None:
    a, b, inputs = both(name)
    want, _ = reference(a, inputs)
    got, opt = streamed(b, inputs, late=7)
    assert got == want
    assert differing(b.state_dict(), a.state_dict()) == {}
    ring = attach.engine_of(b).ring
    n = len(attach.engine_of(b).store.layers)
    assert ring.misses == 0
    assert ring.uploads == 5 * (2 * n - min(2, n)) + min(2, n), "forward and backward, less what stays at the turn"


@pytest.mark.parametrize("update", ["deferred", "priority", "in_backward"])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_orders_and_slots(update: str, slots: int) -> None:
    a, b, inputs = both("wan", num_layers=4)
    want, _ = reference(a, inputs)
    got, _ = streamed(b, inputs, slots=slots, update=update, late=slots)
    assert got == want
    assert differing(b.state_dict(), a.state_dict()) == {}
    assert attach.engine_of(b).ring.misses == 0


def test_clipped_by_the_global_norm() -> None:
    a, b, inputs = both()
    want, _ = reference(a, inputs, clip=0.05)
    got, _ = streamed(b, inputs, clip=0.05, late=1)
    assert got == want
    assert differing(b.state_dict(), a.state_dict()) == {}


@pytest.mark.parametrize("update", ["deferred", "priority", "in_backward"])
def test_accumulated(update: str) -> None:
    a, b, inputs = both()
    want, _ = reference(a, inputs, micro=3, clip=0.05 if update == "deferred" else None)
    got, _ = streamed(b, inputs, micro=3, clip=0.05 if update == "deferred" else None, update=update, accumulate=3, late=2)
    assert got == want
    assert differing(b.state_dict(), a.state_dict()) == {}
