"""KernelSpec: everything that decides the source of one kernel, and the closed-form choice of its configuration.

The configuration rules come from measurements on an H200 (docs/kernels.md): sub-blocks instead of padding to a power
of two, the fewest warps that do not spill, and in the backward an asynchronous ring of rows whose bytes per
multiprocessor decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

MAX_D = 16384
Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: a direction of one chain for one width and one set of dtypes.

    `dtypes` holds (tensor name, dtype) for every tensor the kernel reads or writes; a part of the chain is present
    exactly when its tensors are.
    """

    name: str
    direction: Direction
    norm: str
    offset: float
    eps: float
    D: int
    dtypes: tuple[tuple[str, torch.dtype], ...]

    def __post_init__(self) -> None:
        if not 1 <= self.D <= MAX_D:
            raise ValueError(f"no kernel for D = {self.D}: supported are 1 to {MAX_D}")

    def has(self, tensor: str) -> bool:
        """Does the kernel read or write this tensor?"""
        return any(n == tensor for n, _ in self.dtypes)

    def dtype(self, tensor: str) -> torch.dtype:
        """The dtype of one of its tensors."""
        return dict(self.dtypes)[tensor]

    @property
    def rows_in(self) -> tuple[str, ...]:
        """The [rows, D] tensors it streams in."""
        names = ("x", "branch") if self.direction == "forward" else ("dy", "dh", "h", "branch")
        return tuple(n for n in names if self.has(n))

    @property
    def sums(self) -> tuple[str, ...]:
        """The factors whose gradients it sums over rows, in the order of the partial buffer."""
        if self.direction == "forward":
            return ()
        norm_part = tuple(n for n in ("scale", "shift", "weight", "bias") if self.has(n) and self.has("dy"))
        return norm_part + (("gate",) if self.has("gate") else ())


@dataclass(frozen=True)
class Configuration:
    """How one kernel is launched: sub-block widths, warps, ring depth, programs per multiprocessor."""

    blocks: tuple[int, ...]
    warps: int
    stages: int
    programs_per_sm: int


def configure(spec: KernelSpec) -> Configuration:
    """The configuration of a kernel, in closed form (no search at run time)."""
    D = spec.D
    if spec.direction == "forward":
        warps = 1 if D <= 256 else 2 if D <= 512 else 4 if D <= 8192 else 8
        return Configuration(cut(D, warps * 256), warps, 0, 0)
    # registers: one fp32 per element a thread owns for each accumulator, factor and streamed row
    live = len(spec.sums) + len(spec.rows_in) + 1
    warps = 1
    while warps < 16 and D * live > 200 * 32 * warps:
        warps *= 2
    warps = max(warps, 4 if D >= 1400 else 2 if D >= 512 else 1)
    if D <= 1400:
        per_sm = 2 if spec.has("gate") else 4
    else:
        per_sm = 1 if D >= 2560 else 2 if spec.has("gate") else 3
    row_bytes = sum(spec.dtype(n).itemsize for n in spec.rows_in) * D * per_sm
    ring_bytes = (76 if spec.has("gate") and spec.has("dy") else 60) * 1024
    stages = 1 + min(5, max(2, round(ring_bytes / row_bytes)))
    return Configuration(cut(D, warps * 256), warps, stages, per_sm)


def cut(D: int, cap: int) -> tuple[int, ...]:
    """Widths of the sub-blocks of one row: powers of two up to `cap` whose sum covers D; only the last may overhang.

    5120 with cap 1024 is 1024 x 5, 2240 is 1024, 1024, 256: a power of two would waste 37 % of the lanes.
    """
    blocks: list[int] = []
    left = D
    while left >= cap:
        blocks.append(cap)
        left -= cap
    width = cap // 2
    while left > 0:
        up = 1 << (left - 1).bit_length()  # next power of two
        if up - left <= D // 8 or up <= 32 or len(blocks) >= 6:
            blocks.append(up)
            break
        while width > left:
            width //= 2
        blocks.append(width)
        left -= width
    return tuple(blocks)
