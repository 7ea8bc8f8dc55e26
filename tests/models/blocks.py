"""A DiT block small enough for any test, and one training step of whatever computes it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALL = {"graphopt.select": "all", "graphopt.compiler": "aot_eager", "graphopt.on_error": "raise"}


def adaln(x: Tensor, s: Tensor, b: Tensor, eps: float = 1e-6) -> Tensor:
    """layer_norm(x) * (1 + s) + b."""
    return F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + s) + b


class Block(nn.Module):
    """Two modulates and two gates; the modulation is strided chunks of one Linear.

    `between` is called between the two halves: a graph break, a checkpoint, anything.
    """

    def __init__(self, D: int, between: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.ad, self.f1, self.f2 = nn.Linear(D, 6 * D), nn.Linear(D, D), nn.Linear(D, D)
        self.between = between

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """x [B, S, D], t [B, D]."""
        a, b, g, c, d, h = self.ad(F.silu(t))[:, None].chunk(6, -1)
        x = x + g * self.f1(adaln(x, b, a))
        if self.between is not None:
            self.between()
        return x + h * self.f2(adaln(x, d, c))


class Stack(nn.Module):
    """Blocks in a row, as diffusers names them; `call` runs one (a checkpoint, or nothing special)."""

    def __init__(self, D: int, blocks: int = 2, call: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(D) for _ in range(blocks))
        self.call = call

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """x [B, S, D], t [B, D]."""
        for block in self.blocks:
            x = block(x, t) if self.call is None else self.call(block, x, t)
        return x


def compiled(f: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """`f` compiled with every site rewritten, errors raised, and nothing left of earlier compiles."""
    torch._dynamo.reset()
    return torch.compile(f, backend="graphopt", options=ALL | (options or {}), **kwargs)


def gap(a: Iterable[Tensor], b: Iterable[Tensor]) -> float:
    """Largest absolute difference over tensors, in units of max(1, |b|)."""
    pairs = list(zip(a, b, strict=True))
    return max(((p.double() - q.double()).abs().max() / q.abs().max().clamp_min(1)).item() for p, q in pairs)


def step(f: Callable[..., Tensor], parameters: Iterable[nn.Parameter], *inputs: Tensor) -> list[Tensor]:
    """Output, gradients of the inputs, gradients of the parameters; loss = mean of squares."""
    parameters = list(parameters)
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    for p in parameters:
        p.grad = None
    out = f(*leaves)
    out.float().square().mean().backward()
    grads = [x.grad for x in (*leaves, *parameters)]
    missing = [i for i, g in enumerate(grads) if g is None]
    if missing:
        raise AssertionError(f"no gradient for leaves {missing}")
    return [out.detach(), *(g.clone() for g in grads if g is not None)]


def in_fp64(module: nn.Module, *inputs: Tensor, f: Callable[..., Any] | None = None) -> list[Tensor]:
    """`step` in fp64 eager, on the same parameters and inputs; `f(module, *inputs)` calls the module otherwise."""
    twin = copy.deepcopy(module).double()
    return step(twin if f is None else lambda *xs: f(twin, *xs), twin.parameters(), *(x.double() for x in inputs))


def assert_close_to_fp64(got: list[Tensor], eager: list[Tensor], truth: list[Tensor]) -> None:
    """Per tensor: relative error to fp64 at most 1.25x eager's (in fp32: or 1e-5), and eager's dtype, shape, strides."""
    for i, (g, e, t) in enumerate(zip(got, eager, truth, strict=True)):
        assert (g.dtype, g.shape, g.stride()) == (e.dtype, e.shape, e.stride()), i
        ours, theirs = (((x.double() - t).norm() / t.norm()).item() for x in (g, e))
        floor = 1e-5 if g.dtype in (torch.float32, torch.float64) else 0.0
        assert ours <= max(floor, 1.25 * theirs), (i, ours, theirs)
