"""The kernels of a norm per head with a rotary embedding, compiled for GPUs that need not be here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphopt.codegen import compiler
from graphopt.codegen.head_rotary import HeadRotary, emit, unit

BF16 = torch.bfloat16


def spec(direction: str, target: str, streams: int = 2, heads: int = 24, d: int = 128) -> HeadRotary:
    return HeadRotary(direction, heads, d, streams, 1e-6, True, BF16, BF16, target)


@pytest.mark.parametrize("target,registers", [("sm80", 168), ("sm90", 168), ("sm100", 168), ("gfx942", 256)])
def test_no_spills(target: str, registers: int) -> None:
    """HunyuanVideo's and FLUX's heads, two tensors (the larger kernel); two programs a multiprocessor fit."""
    for direction in ("forward", "backward"):
        kernel = spec(direction, target)
        found = compiler.compiled(unit(kernel, torch.float32, (BF16, BF16)), target)
        assert found.spills == 0, (direction, found)
        assert found.registers <= registers


def test_a_ring_where_one_is_chosen_and_a_target_forms_one() -> None:
    for target, rings in (("sm90", True), ("gfx942", False)):
        kernel = replace(spec("backward", target), chosen=(4, 2, 3))
        assert ("num_stages" in emit(kernel)) == rings
        if rings:
            found = compiler.compiled(unit(kernel, torch.float32, (BF16, BF16)), target)
            assert found.shared >= 2 * 24 * 128 * 4, "no ring was formed"
    assert "num_stages" not in emit(spec("backward", "sm90"))


@pytest.mark.parametrize("heads,d", [(1, 4), (3, 16), (24, 128), (16, 512), (38, 64), (128, 64)])
def test_tiles_cover_the_row(heads: int, d: int) -> None:
    """Blocks of whole heads, the last may overhang; a head lies in one warp."""
    for direction in ("forward", "backward"):
        blocks = spec(direction, "sm90", heads=heads, d=d).blocks
        assert heads <= sum(blocks) < heads + blocks[-1]
        assert all(b & (b - 1) == 0 for b in blocks)
