"""The mark a converted attention leaves in a traced graph, for the pass that lowers it.

    x = graphopt::video_attention_input(x, offsets, T, H, W, ...)      q, k, v = linear(x)      attention(q, k, v)

`owner` is the class of the module, for messages: its name in the model would give each of equal blocks another graph.

The attention whose queries are made from the marked tensor becomes sliding attention with these offsets.  The mark sits
in the data flow, so that no compiler can lose it, and running it is an error: a graph in which the attention was not
replaced must not compute dense attention silently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphopt.errors import ConfigError


@torch.library.custom_op("graphopt::video_attention_input", mutates_args=())
def _mark(x: Tensor, offsets: Tensor | None, T: int, H: int, W: int, window: list[int], text: str,
          boundary: str, owner: str) -> Tensor:
    raise ConfigError(
        "a model converted by graphopt.dsa was compiled without the pass that lowers its attention",
        where=f"{owner}, grid ({T}, {H}, {W}), window {tuple(window)}",
        remedy="compile it with backend='graphopt' (graphopt.compiler may be 'inductor', 'aot_eager' or 'eager'), with "
        "the whole attention module in one graph; or run it eagerly",
    )


@_mark.register_fake
def _(x: Tensor, offsets: Tensor | None, T: int, H: int, W: int, window: list[int], text: str, boundary: str,
      owner: str) -> Tensor:
    return torch.empty_like(x)


def _formula(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
    return (dx,) + (None,) * 8


_mark.register_autograd(_formula, setup_context=lambda ctx, inputs, output: None)
MARK = torch.ops.graphopt.video_attention_input.default
