"""AdamW of what stays on the device: the same kernel, with the state beside the parameter."""

from __future__ import annotations

from typing import Any

import torch

from graphopt.codegen.adamw import Hyper, split, update_
from graphopt.errors import StreamError


class ResidentState:
    """State of the resident parameters: fp32 moments, an int16 residual for bf16 ones, on their device."""

    def __init__(self, ema: float | None) -> None:
        self.ema = ema
        self.of: dict[torch.nn.Parameter, dict[str, Any]] = {}

    def steps(self, p: torch.nn.Parameter) -> int:
        """Updates done so far."""
        return int(self.of[p]["step"]) if p in self.of else 0

    def get(self, p: torch.nn.Parameter) -> dict[str, Any]:
        """The state of a parameter, made on first use."""
        if p not in self.of:
            if p.dtype not in (torch.float32, torch.bfloat16):
                raise StreamError(f"HostAdamW trains fp32 and bf16 parameters, not {p.dtype}",
                                  remedy="cast the model to bfloat16 first")
            value = p.detach()
            state: dict[str, Any] = {
                "step": 0,
                "exp_avg": torch.zeros_like(value, dtype=torch.float32),
                "exp_avg_sq": torch.zeros_like(value, dtype=torch.float32),
            }
            if p.dtype == torch.bfloat16:
                state["residual"] = torch.zeros_like(value, dtype=torch.int16)
            if self.ema is not None:
                state["ema"] = value.float().clone()
            self.of[p] = state
        return self.of[p]

    def update(self, p: torch.nn.Parameter, hyper: Hyper) -> None:
        """One update from `p.grad`."""
        state = self.get(p)
        assert p.grad is not None
        grad = p.grad
        if grad.stride() != p.stride():
            grad = torch.empty_like(p, dtype=grad.dtype).copy_(grad)
        flat = [None if t is None else _flat(t) for t in (
            p.detach(), state.get("residual"), grad, state["exp_avg"], state["exp_avg_sq"], state.get("ema"))]
        update_(flat[0], flat[1], flat[2], flat[3], flat[4], hyper, flat[5])  # type: ignore[arg-type]
        state["step"] = hyper.step

    def load_master(self, p: torch.nn.Parameter, master: torch.Tensor) -> None:
        """Set a bf16 parameter and its residual from an fp32 value."""
        high, rest = split(master.to(p.device))
        with torch.no_grad():
            p.copy_(high)
        self.get(p)["residual"].copy_(rest)


def _flat(t: torch.Tensor) -> torch.Tensor:
    """All elements in memory order, without a copy; parameters are dense."""
    return t.as_strided((t.numel(),), (1,))
