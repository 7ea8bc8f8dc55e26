"""A graph cut by layer: each segment gets what it needs, sizes included."""

from __future__ import annotations

import torch
from torch import nn

from graphopt.passes import partition
from graphopt.passes.partition import example


class Video(nn.Module):
    """Patches of a video, then layers: the number of tokens is a product of three sizes of the input."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.patch = nn.Conv3d(2, 6, (1, 2, 2), (1, 2, 2))
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        x = self.patch(latent).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return x


def captured(model: nn.Module, *args: torch.Tensor) -> torch.fx.GraphModule:
    found = []
    torch.compile(model, backend=lambda gm, _: found.append(gm) or gm.forward, dynamic=True)(*args)
    return found[0]


def test_segments_get_the_symbols_their_sizes_are_made_of() -> None:
    """Inductor refuses a graph of x [B, T * (H // 2) * (W // 2), D] that gets none of T, H and W."""
    gm = captured(Video(), torch.randn(3, 2, 5, 8, 12))
    parts = partition.partition(gm, ["blocks.0", "blocks.1"])
    composite = 0
    for part in parts:
        used, given = set(), set()
        for value in map(example, part.inputs):
            sizes = value.shape if isinstance(value, torch.Tensor) else [value]
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    used |= size.node.expr.free_symbols
                    composite += part.layer is not None and not size.node.expr.is_Symbol
                    given |= {size.node.expr} if size.node.expr.is_Symbol else set()
        assert used <= given, part
    assert composite >= 2, "the sizes of this model were to be products"


def test_segments_of_plain_sizes_get_nothing_more() -> None:
    gm = captured(nn.Sequential(*Video(3).blocks), torch.randn(4, 7, 6))
    parts = partition.partition(gm, ["0", "1", "2"])
    layers = [p for p in parts if p.layer is not None]
    assert len(layers) == 3
    assert all(isinstance(example(n), torch.Tensor) for p in layers[1:] for n in p.inputs)
