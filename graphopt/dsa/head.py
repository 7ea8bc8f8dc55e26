"""The module that learns offsets: depthwise 3x3x3 convolution, GELU, linear layer that starts at zero."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.codegen.dsa.head import offset_head
from graphopt.dsa.grid import Scope
from graphopt.dsa.options import DSAConfig

LINEAR_INPUTS = ("to_q", "to_qkv", "q_proj", "qkv", "query", "q", "wq")


class OffsetHead(nn.Module):
    """Offsets of the tokens of a video from the hidden states that queries, keys and values are made from.

    Parameters are fp32 whatever the model's dtype; the last layer is zero, so that a new head gives a fixed window.  At
    the first step only it has a gradient.  No parameters with `offsets="zero"`.

    channels: of the hidden states.  groups: offset vectors per token.
    """

    def __init__(self, config: DSAConfig, channels: int, groups: int, scope: Scope, name: str,
                 device: torch.device | None = None) -> None:
        super().__init__()
        self.config, self.channels, self.groups, self.scope, self.fqn = config, channels, groups, scope, name
        self.input_name = "hidden_states"
        self.mask_checked = False
        if config.offsets == "zero":
            return
        out = 3 * groups * (math.prod(config.window) if config.offsets == "tap" else 1)
        make: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.conv_weight = nn.Parameter(torch.empty(channels, 1, 3, 3, 3, **make))
        self.conv_bias = nn.Parameter(torch.empty(channels, **make))
        self.out_weight = nn.Parameter(torch.empty(out, channels, **make))
        self.out_bias = nn.Parameter(torch.empty(out, **make))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A random convolution (uniform, bound 27 ** -0.5) under a linear layer of zeros."""
        if self.config.offsets == "zero":
            return
        bound = 27**-0.5
        nn.init.uniform_(self.conv_weight, -bound, bound)
        for zero in (self.conv_bias, self.out_weight, self.out_bias):
            nn.init.zeros_(zero)

    def forward(self, x: Tensor, grid: tuple[int, int, int]) -> Tensor | None:
        """[B, groups, N, 3] in tokens, fp32 (per tap: [B, groups, N, taps, 3]); x is [B, N, channels]."""
        if self.config.offsets == "zero":
            return None
        weights = (self.conv_weight, self.conv_bias, self.out_weight, self.out_bias)
        if torch.compiler.is_dynamo_compiling():  # compiled code runs outside autocast
            raw = offset_head(x, *weights, grid)
        else:
            with torch.autocast(x.device.type, enabled=False):
                raw = offset_head(x, *weights, grid)
        B, N = x.shape[0], x.shape[1]
        if self.config.offsets == "tap":
            offsets = raw.view(B, N, self.groups, math.prod(self.config.window), 3).permute(0, 2, 1, 3, 4)
        else:
            offsets = raw.view(B, N, self.groups, 3).transpose(1, 2)
        bound = self.config.max_offset
        return offsets if bound is None else torch.tanh(offsets / bound) * bound

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"window={self.config.window}, offsets={self.config.offsets!r}, groups={self.groups}"
