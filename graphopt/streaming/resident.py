"""AdamW of what stays on the device: the same kernel, with the state beside the parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from graphopt.codegen.adamw import Hyper, Piece, split, update_all
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

    def update(self, parameters: Sequence[tuple[torch.nn.Parameter, Hyper]]) -> None:
        """One update of each parameter from its `.grad`; on a GPU a few launches for all of them."""
        pieces: dict[torch.device, list[Piece]] = {}
        for p, hyper in parameters:
            state = self.get(p)
            assert p.grad is not None
            grad = p.grad
            if grad.stride() != p.stride():
                grad = torch.empty_like(p, dtype=grad.dtype).copy_(grad)
            residual, average = state.get("residual"), state.get("ema")
            pieces.setdefault(p.device, []).append(Piece(
                _flat(p.detach()), None if residual is None else _flat(residual), _flat(grad), _flat(state["exp_avg"]),
                _flat(state["exp_avg_sq"]), hyper, None if average is None else _flat(average)))
            state["step"] = hyper.step
        for device, found in pieces.items():
            kernel_of(device)(found)

    def load_master(self, p: torch.nn.Parameter, master: torch.Tensor) -> None:
        """Set a bf16 parameter and its residual from an fp32 value."""
        high, rest = split(master.to(p.device))
        with torch.no_grad():
            p.copy_(high)
        self.get(p)["residual"].copy_(rest)


def kernel_of(device: torch.device) -> Callable[[Sequence[Piece]], None]:
    """What updates parameters on a device: a Triton kernel on a GPU (if Triton is installed), else torch operators."""
    if device.type != "cuda" or find_spec("triton") is None:
        return update_all
    from graphopt.codegen import adamw_triton

    return adamw_triton.update_all


def _flat(t: torch.Tensor) -> torch.Tensor:
    """All elements in memory order, without a copy; parameters are dense."""
    return t.as_strided((t.numel(),), (1,))
