from __future__ import annotations

import pytest
import torch

from graphopt.passes import source


@pytest.mark.parametrize(("written", "tidy"), [
    ("L['self'].__dict__['_modules']['blocks'].0.norm1", "blocks.0.norm1"),
    ("L['self']._modules['blocks']._modules['0']._modules['norm1']", "blocks.0.norm1"),
    ("G['m'].blocks.0", "blocks.0"),
    ("L['self']", ""),
    ("L['m'].norm", "norm"),
])
def test_tidy(written: str, tidy: str) -> None:
    assert source.tidy(written) == tidy


def test_where_is_the_user_line_and_fqn_the_owner() -> None:
    nodes = []

    def backend(gm, inputs):
        nodes.extend(gm.graph.nodes)
        return gm.forward

    class Inner(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.gelu(x)

    torch.compile(torch.nn.Sequential(torch.nn.ReLU(), Inner()), backend=backend)(torch.randn(3))
    gelu = next(n for n in nodes if "gelu" in str(n.target))
    assert source.fqn(gelu) == "1"
    assert source.where(gelu).endswith("test_source.py:29")
    assert source.where(next(n for n in nodes if n.op == "placeholder")) is None
