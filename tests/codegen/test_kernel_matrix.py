"""The design of benchmarks/kernel_matrix.py covers what its text says, and one cell runs."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import accuracy
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import kernel_matrix as matrix

from graphopt.codegen.form import FUSIONS


def test_a_gpu_runs_the_full_cross() -> None:
    cells = matrix.cells()
    assert len(set(cells)) == len(cells) == 11 * 11 * 5
    for cell in cells:
        assert set(matrix.cases(cell, full=True)) == {
            *((B, S, 0.0) for B in (1, 2, 3) for S in (0, 1, 77, 4095)), (2, 9, 1e3), (2, 9, -1e3)}


def test_the_interpreter_covers_what_it_says() -> None:
    design = {cell: matrix.cases(cell, full=False) for cell in matrix.cells()}
    for found in design.values():
        assert {(B, S, 0.0) for B in (1, 2, 3) for S in (0, 1)} <= set(found)
        assert sum(abs(mean) == 1e3 for _, _, mean in found) == 1
    pairs = {frozenset(p): set() for p in itertools.combinations(range(3), 2)}
    for cell, found in design.items():
        for p, seen in pairs.items():
            seen |= {(*(cell[i] for i in sorted(p)), B) for B, S, _ in found if S == 77}
    assert len(pairs[frozenset((0, 2))]) == 11 * 5 * 3
    for p, (one, two) in {(0, 1): (11, 11), (1, 2): (11, 5)}.items():
        narrow = {c for c in pairs[frozenset(p)] if 20000 not in c}
        assert len(narrow) == (one - (p[0] == 1)) * (two - (p[1] == 1)) * 3
    long = [(cell, B) for cell, found in design.items() for B, S, _ in found if S == 4095]
    assert {c[0] for c, _ in long} == set(FUSIONS)
    assert {c[1] for c, _ in long} == set(matrix.WIDTHS)
    assert {c[2] for c, _ in long} == set(matrix.DTYPES)
    assert {B for _, B in long} == {1, 2, 3}
    widest = [(cell, B) for cell, found in design.items() for B, S, _ in found if S == 77 and cell[1] == 20000]
    assert {c[0] for c, _ in widest} == set(FUSIONS)
    assert {c[2] for c, _ in widest} == set(matrix.DTYPES)


@pytest.mark.kernel
def test_one_cell(device: str, monkeypatch) -> None:
    monkeypatch.setattr(matrix, "cases", lambda cell, full: [(1, 0, 0.0), (2, 3, 0.0), (2, 2, 1e3)])
    row = matrix.run_cell(("gate_norm_modulate", 17, "bf16-fp32"), device, matrix.Memory(2**30))
    assert (row["runs"], row["failed"]) == (3, [])
    assert 0 < row["worst"] <= 1


@pytest.mark.kernel
def test_a_wrong_kernel_is_seen(device: str, monkeypatch) -> None:
    """An error of a hundredth in one output of one case is a failed case with its place."""
    call = accuracy.call
    monkeypatch.setattr(matrix, "cases", lambda cell, full: [(1, 5, 0.0)])
    monkeypatch.setattr(accuracy, "call", lambda *a, **k: [1.01 * o for o in call(*a, **k)])
    row = matrix.run_cell(("norm_modulate", 17, "fp32"), device, matrix.Memory(2**30))
    assert row["failed"]
    assert "D=17 B=1 S=5 output 0" in row["failed"][0]
