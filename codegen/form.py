"""What distinguishes one AdaLN operator call from another, apart from its tensors.

All fusions are pieces of one chain (adaptive layer norm with a gated residual in front):

    h    = residual + gate * branch                      gate part    (F2, F2a, F3)
    xhat = (h - mean) * rstd            or h * rstd      norm part    (F1, F2, F2a; layer norm, RMS norm)
    n    = xhat * weight + bias                          affine part  (F2a)
    y    = n * (offset + scale) + shift                  modulate part (F1, F2)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NORMS = ("none", "layer_norm", "rms_norm")


@dataclass(frozen=True)
class Fusion:
    """One fusion: which parts of the chain it has, and what it is called in reports."""

    name: str
    code: str
    gate: bool
    norm: bool
    affine: bool
    modulate: bool


FUSIONS = {
    f.name: f
    for f in (
        Fusion("norm_modulate", "F1", gate=False, norm=True, affine=False, modulate=True),
        Fusion("gate_norm_modulate", "F2", gate=True, norm=True, affine=False, modulate=True),
        Fusion("gate_norm", "F2a", gate=True, norm=True, affine=True, modulate=False),
        Fusion("gate_residual", "F3", gate=True, norm=False, affine=False, modulate=False),
    )
}

# Where numerics="eager" rounds: after each op of the source, in this order.
ROUNDING_POINTS = ("gated", "residual", "norm", "gain", "product")


def encode_rounding(points: dict[str, torch.dtype]) -> str:
    """Rounding points as the text an operator carries: `norm=bfloat16 product=bfloat16`; "" rounds once at the end."""
    unknown = set(points) - set(ROUNDING_POINTS)
    if unknown:
        raise ValueError(f"unknown rounding points {sorted(unknown)}")
    return " ".join(f"{p}={str(points[p]).removeprefix('torch.')}" for p in ROUNDING_POINTS if p in points)


def decode_rounding(text: str) -> dict[str, torch.dtype]:
    """The inverse of `encode_rounding`."""
    return {p: getattr(torch, d) for p, d in (item.split("=") for item in text.split())}
