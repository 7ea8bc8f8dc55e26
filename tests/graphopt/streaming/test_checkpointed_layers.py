"""Layers that a model checkpoints by their own call, as diffusers does: Dynamo leaves the layer out of module stacks."""

from __future__ import annotations

import copy

import pytest
import torch
import zoo

import graphopt


@pytest.fixture
def wan() -> tuple[torch.nn.Module, dict]:
    """Wan with weights of a block's own (scale_shift_table), checkpointing off."""
    model, inputs = zoo.ZOO["wan"].build()
    return model.train(), inputs


def test_diffusers_checkpointing_streams(wan) -> None:
    resident, inputs = wan
    model = copy.deepcopy(resident)
    model.enable_gradient_checkpointing()
    graphopt.stream(model, "cpu")
    ours = graphopt.HostAdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    theirs = torch.optim.AdamW(resident.parameters(), lr=1e-3, weight_decay=0.01)
    model.compile(backend="graphopt", options={"graphopt.compiler": "eager"})
    for _ in range(2):
        got, want = model(**inputs)[0], resident(**inputs)[0]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for y, optimizer in ((got, ours), (want, theirs)):
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_inspect_finds_its_layers(wan) -> None:
    model, inputs = wan
    model.enable_gradient_checkpointing()
    seen = graphopt.inspect(model, **inputs, options={"graphopt.rules": []}, stream=dict(slots=2, resident=[]))
    assert seen.schedule.calls == tuple(f"blocks.{i}" for i in range(len(model.blocks)))
