"""benchmarks/kernel_matrix.py: its design covers what its text says, one cell runs, cells of older kernels run again."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import queue
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import accuracy
import pytest
import torch
from operator_forms import attributes, call, leaves, operands, plain, sized

from graphopt.codegen import kernels
from graphopt.codegen.form import FUSIONS

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import _launches
import kernel_matrix as matrix

CELL = ("gate_norm_modulate", 64, "bf16-fp32", False)


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
    monkeypatch.setattr(matrix, "MANY_SEEDS", 16)
    monkeypatch.setattr(accuracy, "call", lambda *a, **k: [1.01 * o for o in call(*a, **k)])
    row = matrix.run_cell(("norm_modulate", 17, "fp32", False), device, matrix.Memory(2**30))
    assert row["failed"]
    assert "D=17 B=1 S=5 output 0" in row["failed"][0]


def few(D: int, wrong: dict[int, float], monkeypatch) -> list[accuracy.Measured]:
    """32 trials of three rows of the reference, judged as small cases are, its last output scaled in some trials."""
    call, turn = accuracy.call, itertools.count()
    scaled = lambda outs: [*outs[:-1], outs[-1] * wrong.get(next(turn), 1.0)]
    monkeypatch.setattr(accuracy, "call", lambda *a, **k: scaled(call(*a, engine="reference")))
    form, trials = accuracy.trials_of(plain("norm_modulate"), 1, 3, D, "bf16", "cpu", seeds=32)
    return accuracy.measure(form, trials, torch.bfloat16, apart=True)


def test_a_small_case_that_is_right_is_within(monkeypatch) -> None:
    assert max(m.ratio for m in few(3, {}, monkeypatch)) <= 1


def test_a_wrong_trial_among_many_small_ones_is_seen(monkeypatch) -> None:
    """The typical trial is right, and the geometric mean alone would not tell."""
    output, *_ = few(3, {7: 1.25}, monkeypatch)
    assert output.ours <= output.limit
    assert output.ratio > 1


def test_small_errors_in_all_trials_are_seen(monkeypatch) -> None:
    output, *_ = few(3, dict.fromkeys(range(32), 1.01), monkeypatch)
    assert output.ours > output.limit
    assert output.ratio > 1


def test_ill_conditioned_trials_that_are_worse_than_eager_are_seen() -> None:
    """Three times eager's error in the eighth of trials that are farthest off; better than eager everywhere else."""
    eager = torch.logspace(-3, -1, 128, dtype=torch.float64)
    ours = eager * torch.where(torch.arange(128) >= 112, 3.0, 0.8)
    found = accuracy.apart_of("dx", torch.stack([ours**2, eager**2, torch.ones(128)], 1), torch.bfloat16)
    assert found.ours < found.eager
    assert found.single < accuracy.SINGLE
    assert found.ratio > 1


def test_where_the_truth_is_zero_the_error_itself_counts(monkeypatch) -> None:
    """The gradient of x behind a layer norm of one channel is 0: 1e-4 of it is an error without a size to compare with."""
    assert max(m.ratio for m in few(1, {}, monkeypatch)) <= 1
    gradients, turn = accuracy.gradients, itertools.count()

    def off(*args: Any) -> list[torch.Tensor]:
        """Of each trial's three calls (ours, fp64, eager) the first has an error."""
        dx, *others = gradients(*args)
        return [dx + 1e-4 if next(turn) % 3 == 0 else dx, *others]

    monkeypatch.setattr(accuracy, "gradients", off)
    assert few(1, {}, monkeypatch)[1].ratio > 1


@pytest.mark.kernel
@pytest.mark.parametrize("fusion", FUSIONS)
def test_what_is_recorded_is_what_is_launched(fusion: str, device: str, monkeypatch) -> None:
    """Sources, grids, layouts, arguments and warps, in order, of a forward and a backward that really run."""
    form, dtype = sized(plain(fusion), (2, 5, 130)), torch.bfloat16
    make = lambda device: accuracy.moved(operands(form, dtype, torch.float32, (2, 5, 130), device), device)
    place = _launches.this_gpu() if device == "cuda" else _launches.INTERPRETER
    recorded = _launches.launches(fusion, make("meta"), attributes(form, dtype), place)
    seen: list[str] = []
    wrap = torch.library.wrap_triton

    class Spied:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            source = Path(sys.modules[self.kernel.fn.__module__].__file__).read_bytes()

            def launch(*args: Any, **settings: Any) -> None:
                digest = hashlib.sha256(source).hexdigest()
                seen.append(f"{digest} {grid} {_launches._text(args)} {settings}")
                wrap(self.kernel)[grid](*args, **settings)

            return launch

    monkeypatch.setattr(torch.library, "wrap_triton", Spied)
    t = make(device)
    outs = call(form, t, *attributes(form, dtype), engine="triton")
    torch.autograd.grad(outs, leaves(t), [torch.ones_like(o) for o in outs])
    assert seen
    assert [line for line in recorded if not line.startswith("aten.")] == seen


def test_a_digest_follows_what_is_launched(monkeypatch) -> None:
    """The source, the configuration, the grid and the tensor ops around the kernels each change it; nothing else does."""
    before = matrix.launched(CELL, full=True)
    assert matrix.launched(CELL, full=True) == before != matrix.launched(CELL, full=False)
    emit, configuration, forward = _launches.emit, _launches.tuned.configuration, kernels.forward

    def warps(spec: Any) -> Any:
        config = configuration(spec)
        return replace(config, warps=2 * config.warps)

    changes = (
        (_launches, "emit", lambda spec, config: emit(spec, config) + "# another\n"),
        (_launches.tuned, "configuration", warps),
        (_launches, "H200", replace(_launches.H200, multiprocessors=66)),
        (kernels, "forward", lambda *args: [t.clone() for t in forward(*args)]),
    )
    found = {before}
    for owner, name, new in changes:
        with monkeypatch.context() as m:
            m.setattr(owner, name, new)
            found.add(matrix.launched(CELL, full=True))
    assert len(found) == 1 + len(changes)
    assert matrix.launched(CELL, full=True) == before


def test_only_cells_of_todays_kernels_count(monkeypatch) -> None:
    """An equal digest without failures is kept; another digest, a failure, none at all: run again, if there is time."""
    cells = [(*CELL[:2], dtypes, False) for dtypes in ("bf16", "bf16-fp32", "fp32", "fp32-bf16")]
    digests = {cell: matrix.launched(cell, full=True) for cell in cells}
    fresh = lambda cell, **more: dict(zip(("fusion", "D", "dtypes", "long"), cell)) | dict(failed=[], new=False) | more
    known = {
        cells[0]: fresh(cells[0], launches=digests[cells[0]]), cells[1]: fresh(cells[1], launches="older"),
        cells[2]: fresh(cells[2], launches=digests[cells[2]], failed=["D=64"]),
    }
    monkeypatch.setattr(matrix, "run_cell", lambda cell, device, memory: fresh(cell, new=True))
    for end, wanted in ((float("inf"), [False, True, True, True]), (0.0, [False])):
        results: queue.Queue[Any] = queue.Queue()
        matrix.work("cuda", cells, known, multiprocessing.Value("i", 0), end, matrix.Memory(1), results)
        rows = list(iter(results.get, None))
        assert [row["new"] for row in rows] == wanted
        assert all(row["launches"] == digests[matrix.key(row)] and not row["failed"] for row in rows)


def test_a_state_cut_short_is_read(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    rows = [dict(zip(("fusion", "D", "dtypes", "long"), (*CELL[:2], dtypes, False))) for dtypes in ("fp32", "bf16")]
    matrix.write(path, rows)
    assert matrix.read(path) == rows[::-1]  # in the order of the matrix
    path.write_text(path.read_text()[:-20])
    assert matrix.read(path) == [rows[1]]
