"""How many graphs the shapes of a mixed plan compile to: at most four of a block, whatever the number of shapes."""

import sys
from pathlib import Path

import pytest
import torch
import torch.fx.experimental._config as shape_config

from graphopt.schedule.bench import Shape

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
pytest.importorskip("diffusers")
import schedule_shape

SHAPES = [(b, t, h, w) for b in (1, 2, 3) for t, h, w in ((1, 4, 4), (1, 6, 4), (2, 4, 4), (3, 4, 6), (5, 2, 8), (8, 2, 4))]


@pytest.mark.nightly
def test_four_graphs_for_every_shape():
    graphs = []

    def count(gm, inputs):
        graphs.append(gm)
        return gm.forward

    with shape_config.patch(use_duck_shape=False):  # restores what build sets
        model = schedule_shape.build(2, 128, torch.device("cpu"), "eager", False)
        for block in model.blocks:
            block.compile(backend=count, dynamic=True)
        step = schedule_shape.make_step(model, torch.device("cpu"))
        for s in SHAPES:
            step(Shape(*s, 7))
    assert 2 <= len(graphs) <= 4  # B and T of 1 are compiled apart
