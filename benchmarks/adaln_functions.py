"""The functions of benchmarks/adaln.py: each fusion as a model writes it, with its operands, and who else has it.

A code is a kernel (docs/kernels.md) and a letter where its form differs: r RMS norm, h factors in bf16 and every op
rounded, t a factor row per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

EPS = 1e-6


def layer_norm(x, weight=None, bias=None):
    return F.layer_norm(x.float(), (x.shape[-1],), weight, bias, EPS)


def rms_norm(x, weight=None):
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return normed.type_as(x) if weight is None else (normed * weight).type_as(x)


def f1(x, scale, shift):
    return (layer_norm(x) * (1 + scale) + shift).type_as(x)


def f1h(x, scale, shift):
    return F.layer_norm(x, (x.shape[-1],), None, None, EPS) * (1 + scale) + shift


def f1r(x, scale, shift):
    return (rms_norm(x) * (1 + scale) + shift).type_as(x)


def f2(x, branch, gate, scale, shift):
    h = (x.float() + branch * gate).type_as(x)
    return h, (layer_norm(h) * (1 + scale) + shift).type_as(x)


def f2h(x, branch, gate, scale, shift):
    h = x + gate * branch
    return h, F.layer_norm(h, (x.shape[-1],), None, None, EPS) * (1 + scale) + shift


def f2a(x, branch, gate, weight, bias):
    h = (x.float() + branch * gate).type_as(x)
    return h, layer_norm(h, weight, bias).type_as(x)


def f3(x, branch, gate):
    return (x.float() + branch * gate).type_as(x)


def f4(x, scale, shift, scale2, shift2):
    n = layer_norm(x)
    return (n * (1 + scale) + shift).type_as(x), (n * (1 + scale2) + shift2).type_as(x)


def f1t(x, tokens):
    return f1(x, *tokens.unbind(2))


class F5(torch.nn.Module):
    """The weight of the branch's norm is a parameter, as graphopt asks."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(1 + 0.1 * torch.randn(D))

    def forward(self, x, branch, gate, scale):
        h = x + gate.tanh() * rms_norm(branch, self.weight)
        return h, rms_norm(h) * (1 + scale)


@dataclass(frozen=True)
class Function:
    """kernel and form as results name them; operator and sites as graphopt's report does; operands by their kinds."""

    kernel: str
    form: str
    run: Callable[..., Any]
    operator: str
    sites: dict[str, int]
    operands: tuple[str, ...]

    def made(self, D: int) -> Callable[..., Any]:
        """What is called: the function, or the module that holds its weight."""
        return self.run(D).to("cuda", torch.bfloat16) if isinstance(self.run, type) else self.run


PAIR = ("factor", "factor")
FUNCTIONS = {
    "F1": Function("F1", "wan", f1, "norm_modulate", {"modulate": 1}, ("x", *PAIR)),
    "F2": Function("F2", "wan", f2, "gate_norm_modulate", {"modulate": 1, "gate": 1}, ("x", "x", "factor", *PAIR)),
    "F2a": Function("F2a", "wan", f2a, "gate_norm", {"gate": 1}, ("x", "x", "factor", "weight", "bias")),
    "F3": Function("F3", "wan", f3, "gate_residual", {"gate": 1}, ("x", "x", "factor")),
    "F4": Function("F4", "wan", f4, "norm_modulates", {"modulate": 2}, ("x", *PAIR, *PAIR)),
    "F5": Function("F5", "rms", F5, "branch_norm_gate_norm_modulate", {"modulate": 1, "gate": 1},
                   ("x", "x", "half", "half")),
    "F1r": Function("F1", "rms", f1r, "norm_modulate", {"modulate": 1}, ("x", *PAIR)),
    "F1h": Function("F1", "plain", f1h, "norm_modulate", {"modulate": 1}, ("x", "half", "half")),
    "F2h": Function("F2", "plain", f2h, "gate_norm_modulate", {"modulate": 1, "gate": 1},
                    ("x", "x", "half", "half", "half")),
    "F1t": Function("F1t", "wan", f1t, "norm_modulate", {"modulate": 1}, ("x", "2 tokens")),
}


def operands(code: str, B: int, N: int, D: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Leaves: activations, factors (chunks of one buffer in fp32 or bf16, or fp32 rows per token), weight and bias."""
    kinds = FUNCTIONS[code].operands
    new = lambda *shape: torch.randn(*shape, device="cuda")
    count = sum(k in ("factor", "half") for k in kinds)
    wide = torch.bfloat16 if "half" in kinds else torch.float32
    chunks = iter((0.3 * new(B, 1, max(count, 1), D)).to(wide).unbind(2))
    make = {"x": lambda: new(B, N, D).to(dtype), "weight": lambda: 1 + 0.1 * new(D), "bias": lambda: 0.1 * new(D),
            "2 tokens": lambda: 0.3 * new(B, N, 2, D)}
    return [make.get(k, lambda: next(chunks))().detach().requires_grad_() for k in kinds]


def floor_bytes(code: str, args: list[torch.Tensor], outs: int) -> tuple[int, int]:
    """Bytes that must cross HBM: (forward, backward).

    Forward: operands and results.  Backward: gradients that arrive, what the formula needs, gradients that leave;
    shifts are not needed, a residual's gradient is h's, and what has a row per sample is too small to count.
    """
    f = FUNCTIONS[code]
    x = args[0].numel() * args[0].element_size()
    token = 4 * args[0].numel()  # one fp32 factor per token
    tokens = next((int(k[0]) for k in f.operands if k.endswith("tokens")), 0)
    branch, normed = f.operands[1] == "x", f.operator != "gate_residual"
    forward = x * (1 + branch + outs) + token * tokens
    read = x * (outs + branch + normed) + token * max(tokens - 1, 0)
    return forward, read + x * (branch + normed) + token * tokens


def liger(code: str) -> Callable[..., Any] | None:
    """Liger's operator for a function, where it has one and is installed."""
    if code != "F1r":
        return None
    try:
        from liger_kernel.ops import LigerModulatedRMSNormFunction as Op
    except ImportError:
        return None
    return lambda x, s, t: Op.apply(x, None, s.flatten(0, 1), t.flatten(0, 1), EPS, 0.0, "llama", False)
