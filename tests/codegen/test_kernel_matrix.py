"""The design of benchmarks/kernel_matrix.py covers what its text says, and one cell runs."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import accuracy
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import kernel_matrix as matrix


def test_a_gpu_runs_the_full_cross() -> None:
    cells = matrix.cells(full=True)
    assert len(set(cells)) == len(cells) == 11 * 11 * 5
    for cell in cells:
        assert set(matrix.cases(cell, full=True)) == {
            *((B, S, 0.0) for B in (1, 2, 3) for S in (0, 1, 77, 4095)), (2, 9, 1e3), (2, 9, -1e3)}


def test_the_interpreter_covers_what_it_says() -> None:
    design = {cell: matrix.cases(cell, full=False) for cell in matrix.cells(full=False)}
    sizes = (11, 11, 5)
    for one, two in itertools.combinations(range(3), 2):
        assert len({(cell[one], cell[two]) for cell in design}) == sizes[one] * sizes[two]
    for found in (found for cell, found in design.items() if not cell[3]):
        assert {(B, S, 0.0) for B in (1, 2, 3) for S in (0, 1)} <= set(found)
        assert sum(abs(mean) == 1e3 for _, _, mean in found) == 1
        assert sum(S == 77 for _, S, _ in found) == 1
    assert {mean for found in design.values() for *_, mean in found} == {0.0, 1e3, -1e3}
    for i, size in enumerate(sizes):
        assert len({(cell[i], B) for cell, found in design.items() for B, S, _ in found if S == 77}) == 3 * size
    long = [(cell, B) for cell, found in design.items() for B, S, _ in found if S == 4095]
    assert [len({cell[i] for cell, _ in long}) for i in range(3)] == list(sizes)
    assert {B for _, B in long} == {1, 2, 3}


@pytest.mark.kernel
def test_one_cell(device: str, monkeypatch) -> None:
    monkeypatch.setattr(matrix, "cases", lambda cell, full: [(1, 0, 0.0), (2, 3, 0.0), (2, 2, 1e3)])
    row = matrix.run_cell(("gate_norm_modulate", 17, "bf16-fp32", False), device, matrix.Memory(2**30))
    assert (row["runs"], row["failed"]) == (3, [])
    assert 0 < row["worst"] <= 1


@pytest.mark.kernel
def test_a_wrong_kernel_is_seen(device: str, monkeypatch) -> None:
    """An error of a hundredth in one output of one case is a failed case with its place."""
    call = accuracy.call
    monkeypatch.setattr(matrix, "cases", lambda cell, full: [(1, 5, 0.0)])
    monkeypatch.setattr(accuracy, "call", lambda *a, **k: [1.01 * o for o in call(*a, **k)])
    row = matrix.run_cell(("norm_modulate", 17, "fp32", False), device, matrix.Memory(2**30))
    assert row["failed"]
    assert "D=17 B=1 S=5 output 0" in row["failed"][0]
