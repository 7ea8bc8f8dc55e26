"""`graphopt kernels`: sources and resources without a GPU, and what it says to bad input."""

from __future__ import annotations

import ast
import json

import pytest
from typer.testing import CliRunner

from graphopt.cli import app

runner = CliRunner()


def invoke(*args: str):
    return runner.invoke(app, ["kernels", *args])


@pytest.mark.parametrize(("name", "functions"), [
    ("gate_norm_modulate", ["gate_norm_modulate_forward", "gate_norm_modulate_backward", "gate_norm_modulate_sums"]),
    ("norm_modulate_backward", ["norm_modulate_backward"]),
    ("gate_residual_forward", ["gate_forward"]),
])
def test_show(name: str, functions: list[str]) -> None:
    done = invoke("show", name, "--width", "1152", "--factors", "bf16", "--layout", "vector")
    assert done.exit_code == 0, done.output
    assert [f.name for f in ast.parse(done.stdout).body if isinstance(f, ast.FunctionDef)] == functions


@pytest.mark.parametrize(("args", "message"), [
    (("show", "nothing"), "known are norm_modulate,"),
    (("show", "norm_modulate_sideways"), "known are norm_modulate_forward"),
    (("show", "norm_modulate", "--width", "65537"), "supported are 1 to 65536"),
    (("show", "norm_modulate", "--dtype", "fp8"), "known are bf16, fp16, fp32"),
    (("show", "norm_modulate", "--layout", "diagonal"), "known are group, vector, token"),
    (("show", "norm_modulate", "--norm", "batch_norm"), "known are layer_norm, rms_norm"),
    (("show", "norm_modulate", "--outputs", "scale shfit"), "known are plain, scale, scale_table, shift, shift_table"),
    (("show", "norm_modulate", "--rounding", "product"), "known are bfloat16, float16, float32"),
    (("show", "norm_modulate", "--rounding", "all=bfloat16"), "known are branch_norm, activated,"),
    (("show", "norm_modulate", "--target", "h200"), "use sm80, sm90, sm100 or gfx942"),
    (("compile", "--target", "sm90,tpu"), "use sm80, sm90, sm100 or gfx942"),
    (("compile", "--widths", "64,wide"), "give numbers: --widths 1152,5120"),
])
def test_bad_input(args: tuple[str, ...], message: str) -> None:
    done = invoke(*args)
    assert done.exit_code == 2
    assert message in done.stderr


def test_compile(tmp_path) -> None:
    table = tmp_path / "table.json"
    done = invoke("compile", "--target", "sm80,sm100", "--widths", "64", "--fusions", "norm_modulate", "--json", str(table))
    assert done.exit_code == 0, done.output
    assert "6 kernels, 0 failed, 0 spill" in done.stdout
    rows = json.loads(table.read_text())
    assert [r["target"] for r in rows] == ["sm80"] * 3 + ["sm100"] * 3
    assert all(r["registers"] > 0 and r["spills"] == 0 for r in rows)
