"""The generated source of representative kernels, and what they take once compiled.

    GRAPHOPT_UPDATE_GOLDEN=1 python -m pytest tests/codegen/test_golden.py --nightly     writes both again

tests/golden/kernels/NAME.py holds the source, tests/golden/kernel_resources.json registers and spills per thread and
bytes of shared memory, for one version of Triton; other versions are not compared.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest

from graphopt._kernels_cli import compile_all
from graphopt.codegen.examples import example, units
from graphopt.codegen.form import FUSIONS

FOLDER = Path(__file__).resolve().parents[1] / "golden"
TABLE = FOLDER / "kernel_resources.json"
UPDATE = os.environ.get("GRAPHOPT_UPDATE_GOLDEN") == "1"

EAGER = "gated=bfloat16 residual=bfloat16 norm=bfloat16 gain=bfloat16 product=bfloat16"
PINNED = {
    "norm_modulate_1152": lambda: example("norm_modulate", 1152),
    "norm_modulate_rms_scale_2240": lambda: example("norm_modulate", 2240, norm="rms_norm", outputs="scale"),
    "norm_modulate_tables_per_token_3072": lambda: example("norm_modulate", 3072, layout="token", tables=True),
    "norm_modulates_1536": lambda: example("norm_modulates", 1536, outputs="scale+shift scale plain"),
    "gate_norm_modulate_5120": lambda: example("gate_norm_modulate", 5120),
    "gate_norm_modulate_eager_3072": lambda: example("gate_norm_modulate", 3072, factors="bf16", rounding=EAGER),
    "gate_norm_modulate_20000": lambda: example("gate_norm_modulate", 20000),
    "gate_norm_fp32_17": lambda: example("gate_norm", 17, dtype="fp32"),
    "gate_residual_64": lambda: example("gate_residual", 64),
    "gate_norm_modulate_gfx942_1536": lambda: example("gate_norm_modulate", 1536, target="gfx942"),
    "branch_norm_gate_norm_modulate_2304": lambda: example("branch_norm_gate_norm_modulate", 2304),
}


@pytest.mark.parametrize("name", PINNED)
def test_source(name: str) -> None:
    path = FOLDER / "kernels" / f"{name}.py"
    found = "\n\n".join(u.source for u in units(PINNED[name]())).replace("\n\n\nimport triton\nimport triton.language as tl", "")
    if UPDATE:
        path.write_text(found)
    assert found == path.read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {p.stem for p in (FOLDER / "kernels").glob("*.py")} == set(PINNED)


@pytest.mark.parametrize("name", PINNED)
def test_only_tl_and_literals(name: str) -> None:
    """Inductor copies a kernel's source into a module of its own, where no other global exists."""
    for unit in units(PINNED[name]()):
        function = ast.parse(unit.source).body[-1]
        stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        stored |= {a.arg for a in function.args.args}
        loaded = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        assert loaded - stored - set(dir(builtins)) <= {"tl", "triton"}


def resources(targets: list[str], widths: list[int], fusions: list[str], **kind) -> dict[str, list[int]]:
    """Key -> [registers, spills, shared memory].  The fusion is in the key: F1 and F2r have a backward of one name."""
    wanted = [(f, t, u) for t in targets for f in fusions for D in widths for u in units(example(f, D, target=t, **kind))]
    rows = compile_all([(t, u) for _, t, u in wanted], min(2, os.cpu_count() or 1))
    assert [r for r in rows if "error" in r] == []
    tag = "".join(f" {k}={v}" for k, v in kind.items())
    return {f"{r['target']} {FUSIONS[f].code} {r['kernel']} D={r['D']}{tag}": [r["registers"], r["spills"], r["shared"]]
            for r, (f, _, _) in zip(rows, wanted, strict=True)}


def check(found: dict[str, list[int]]) -> None:
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {"kernels": {}, "spills": {}}
    if UPDATE:
        table["triton"] = version("triton")
        table["kernels"] |= found
        lines = {part: ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(table[part].items()))
                 for part in ("spills", "kernels")}
        TABLE.write_text(f'{{\n"triton": "{table["triton"]}",\n"spills": {{\n{lines["spills"]}\n}},\n'
                         f'"kernels": {{\n{lines["kernels"]}\n}}\n}}\n')
    if table["triton"] != version("triton"):
        pytest.skip(f"the table is of triton {table['triton']}")
    for name, (registers, spills, shared) in found.items():
        # zero, or listed with the reason
        assert spills == 0 or any(part in name for part in table["spills"]), f"{name} spills {spills}"
        if name in table["kernels"]:  # the matrix of the nightly run is wider than the table
            golden = table["kernels"][name]
            assert registers <= golden[0] + 8, name
            assert shared == golden[2], name
            assert spills <= golden[1], name


def test_resources() -> None:
    found = resources(["sm90", "gfx942"], [1536, 3072, 5120], ["norm_modulate", "gate_norm_modulate"])
    check(found)
    assert set(found) <= set(json.loads(TABLE.read_text())["kernels"])


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
@pytest.mark.parametrize("kind", [{}, {"factors": "bf16"}, {"dtype": "fp32"}, {"layout": "token"}], ids=str)
def test_resources_of_the_whole_matrix(target: str, kind: dict) -> None:
    widths = [1, 3, 17, 64, 1152, 1536, 2240, 3072, 4096, 5120, 20000] if not kind else [1536, 5120]
    check(resources([target], widths, list(FUSIONS), **kind))
