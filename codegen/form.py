"""What distinguishes one AdaLN operator call from another, apart from its tensors.

All fusions are pieces of one chain (adaptive layer norm with a gated residual in front):

    b    = norm(branch) * branch_weight + branch_bias    branch norm part (F5)
    g    = activation(gate + gate_table)                 activation: identity or tanh
    h    = x + g * b                  or x + b           gate part        (F2, F2a, F3, F5), residual part (F2r)
    xhat = (h - mean) * rstd          or h * rstd        norm part        (layer norm, RMS norm)
    n    = xhat * weight + bias                          affine part
    y_i  = n * (offset + scale_i + scale_table_i) + shift_i + shift_table_i      modulate part, once per output

A part is there exactly when its tensors (or its norm) are.  `outputs` has one word per y_i that names its tensors:
`scale+shift` is a modulate, `scale` one without a shift, `plain` is n itself, and F4 is several words.  The tensors of
all outputs travel in one list, in the order of the words.  (No list of optional tensors: torch's autograd for custom
operators takes a list with a None in it for a constant.)

A `_table` is a factor's second summand (`table + embedding`): it is added inside (docs/rules.md says when).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

NORMS = ("none", "layer_norm", "rms_norm")
ACTIVATIONS = ("identity", "tanh")
# the tensors of one output, in the order they travel in
OUTPUT_PARTS = ("scale", "scale_table", "shift", "shift_table")
# the single tensor operands, in the order of the operators' arguments; the list `modulation` follows them
OPERANDS = ("x", "branch", "gate", "gate_table", "branch_weight", "branch_bias", "weight", "bias")
# positions in the list an operator returns; y_i is at Y + i
H, MEAN, RSTD, BRANCH_MEAN, BRANCH_RSTD, Y = range(6)

T = TypeVar("T")


@dataclass(frozen=True)
class Fusion:
    """One fusion: what it is called in operators and reports, and which parts of the chain it has.

    front: "none", "residual", "gate" or "branch_norm_gate"; back: "none", "norm" (weight and bias alone), "modulate"
    (one output) or "modulates" (several).
    """

    name: str
    code: str
    front: str
    back: str

    @property
    def gate(self) -> bool:
        """Does it have a gate?"""
        return self.front in ("gate", "branch_norm_gate")

    @property
    def norm(self) -> bool:
        """Does a norm follow the residual?"""
        return self.back != "none"

    @property
    def affine(self) -> bool:
        """Is its norm's result used as it is?"""
        return self.back == "norm"

    @property
    def modulate(self) -> bool:
        """Does it modulate?"""
        return self.back in ("modulate", "modulates")


FUSIONS = {
    f.name: f
    for f in (
        Fusion("norm_modulate", "F1", "none", "modulate"),
        Fusion("norm_modulates", "F4", "none", "modulates"),
        Fusion("residual_norm_modulate", "F2r", "residual", "modulate"),
        Fusion("residual_norm_modulates", "F4r", "residual", "modulates"),
        Fusion("gate_norm_modulate", "F2", "gate", "modulate"),
        Fusion("gate_norm_modulates", "F4g", "gate", "modulates"),
        Fusion("gate_norm", "F2a", "gate", "norm"),
        Fusion("gate_residual", "F3", "gate", "none"),
        Fusion("branch_norm_gate", "F5", "branch_norm_gate", "none"),
        Fusion("branch_norm_gate_norm", "F5a", "branch_norm_gate", "norm"),
        Fusion("branch_norm_gate_norm_modulate", "F5m", "branch_norm_gate", "modulate"),
    )
}


def encode_outputs(outputs: Iterable[Sequence[str]]) -> str:
    """The parts of every output as the text an operator carries: [("scale", "shift"), ()] -> `scale+shift plain`."""
    words = []
    for parts in outputs:
        unknown = set(parts) - set(OUTPUT_PARTS)
        if unknown:
            raise ValueError(f"unknown parts of an output {sorted(unknown)}")
        words.append("+".join(p for p in OUTPUT_PARTS if p in parts) or "plain")
    return " ".join(words)


def decode_outputs(text: str) -> list[tuple[str, ...]]:
    """The inverse of `encode_outputs`."""
    return [() if word == "plain" else tuple(word.split("+")) for word in text.split()]


def split_outputs(tensors: Sequence[T], outputs: str) -> list[dict[str, T]]:
    """The list `modulation` as one dict per output.  ValueError when its length is not what `outputs` says."""
    words = decode_outputs(outputs)
    if sum(map(len, words)) != len(tensors):
        raise ValueError(f"{len(tensors)} modulation tensors for outputs {outputs!r}")
    each = iter(tensors)
    return [{part: next(each) for part in parts} for parts in words]


# Where numerics="eager" rounds: after each op of the source, in this order.
ROUNDING_POINTS = ("branch_norm", "activated", "gated", "residual", "norm", "gain", "product")


def encode_rounding(points: dict[str, torch.dtype]) -> str:
    """Rounding points as the text an operator carries: `norm=bfloat16 product=bfloat16`; "" rounds once at the end."""
    unknown = set(points) - set(ROUNDING_POINTS)
    if unknown:
        raise ValueError(f"unknown rounding points {sorted(unknown)}")
    return " ".join(f"{p}={str(points[p]).removeprefix('torch.')}" for p in ROUNDING_POINTS if p in points)


def decode_rounding(text: str) -> dict[str, torch.dtype]:
    """The inverse of `encode_rounding`."""
    return {p: getattr(torch, d) for p, d in (item.split("=") for item in text.split())}
