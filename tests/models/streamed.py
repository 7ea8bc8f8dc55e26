"""A small model trained streamed, and its twin trained resident: what tests of streaming compare."""

from __future__ import annotations

import copy

import pytest
import torch
from resident import OPTIONS, checkpointed, layers, train
from tiny_dit import TinyDiT, inputs

import graphopt
from graphopt.streaming.link import LateLink

ADAM = dict(lr=1e-2, weight_decay=0.1)


def nightly(*values):
    """Parameters that are left to the nightly run: tracing a model takes seconds."""
    return [pytest.param(v, marks=pytest.mark.nightly) for v in values]


def both(**changes):
    """Two equal small models, and inputs."""
    model = TinyDiT(**changes).train()
    return model, copy.deepcopy(model), inputs()


def reference(model, inputs, steps=5, clip=None, checkpoint=True, random=False, groups=None, **kwargs):
    if checkpoint:
        for layer in layers(model):
            checkpointed(layer, random)
    opt = torch.optim.AdamW(groups(model) if groups else model.parameters(), **ADAM)
    losses = train(model, opt, inputs, steps, clip,
                   clip_with=lambda c: torch.nn.utils.clip_grad_norm_(model.parameters(), c), **kwargs)
    return losses, opt


def streamed(model, inputs, steps=5, clip=None, slots=2, update="deferred", late=None, resident=(), options=OPTIONS, accumulate=1, groups=None, ema=None, **kwargs):
    graphopt.stream(model, "cpu", slots=slots, resident=list(resident), link=None if late is None else LateLink(late))
    opt = graphopt.HostAdamW(groups(model) if groups else model.parameters(), **ADAM, update=update, kernel="torch",
                             accumulate=accumulate, ema=ema)
    step = torch.compile(model, backend="graphopt", options=options)
    losses = train(step, opt, inputs, steps, clip, clip_with=opt.clip_grad_norm_, **kwargs)
    return losses, opt
