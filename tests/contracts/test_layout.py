"""How the source tree is laid out: packages, direction of dependencies, where private APIs may be used."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"graphopt": "graphopt", "graphopt.passes": "passes", "graphopt.codegen": "codegen", "graphopt.schedule": "schedule"}
# modules of graphopt/ that stand below all four: they import nothing of ours
COMPAT = ("_compat", "_compat_capture", "_compat_tensors", "_compat_triton")
LEAVES = {"graphopt.errors", *(f"graphopt.{name}" for name in COMPAT)}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
    return found


def test_packages_match_the_tree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    # the benchmark scripts travel with the package for `graphopt bench`, and are no part of it
    assert project["package-dir"] == FOLDERS | {"graphopt.benchmarks": "benchmarks"}
    listed = set(project["packages"])
    for package, folder in FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            inner = ".".join((package, *file.parent.relative_to(ROOT / folder).parts))
            assert inner in listed, f"{file} would be missing from the wheel"


def test_dependencies_point_one_way() -> None:
    forbidden = {"codegen": ("graphopt.passes", "graphopt.schedule"), "schedule": ("graphopt.passes", "graphopt.codegen"),
                 "passes": ()}
    for folder, never in forbidden.items():
        for file in (ROOT / folder).rglob("*.py"):
            for name in imports(file):
                assert not name.startswith(never or ("\0",)), f"{file.name} imports {name}"
                if name.startswith("graphopt.") and not name.startswith(("graphopt.passes", "graphopt.codegen", "graphopt.schedule")):
                    assert any(name == leaf or name.startswith(leaf + ".") for leaf in LEAVES), f"{file.name} imports {name}"


def test_leaves_import_nothing_of_ours() -> None:
    for name in ("errors", *COMPAT):
        assert not any(i.startswith("graphopt") and not i.startswith("graphopt._compat") for i in imports(ROOT / "graphopt" / f"{name}.py"))


def test_private_torch_apis_live_in_compat() -> None:
    for folder in FOLDERS.values():
        for file in (ROOT / folder).rglob("*.py"):
            private = {i for i in imports(file) if i.startswith("torch.") and any(p.startswith("_") for p in i.split("."))}
            private |= {
                f"torch.{n.attr}" for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Attribute)
                and isinstance(n.value, ast.Name) and n.value.id == "torch" and n.attr.startswith("_")
                and not n.attr.endswith("__")
            }
            private -= {"torch._dynamo"}  # reset() and list_backends() are documented
            assert file.stem in COMPAT or not private, f"{file}: {private}"


def test_no_bare_modules_and_a_quick_import() -> None:
    code = ("import sys, graphopt; import graphopt.backend; "
            "assert not {'passes', 'codegen', 'schedule'} & set(sys.modules); "
            "heavy = {'diffusers', 'scipy', 'matplotlib', 'pyarrow'} & set(sys.modules); "
            "assert not heavy, heavy; print('fine')")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine", done.stderr[-800:]


def test_files_have_one_job() -> None:
    for folder in FOLDERS.values():
        for file in (ROOT / folder).rglob("*.py"):
            lines = file.read_text().count("\n")
            assert lines <= 400, f"{file} has {lines} lines: split it"


def test_public_names() -> None:
    import graphopt

    for name in graphopt.__all__:
        assert getattr(graphopt, name).__doc__, name
    assert set(graphopt.__all__) == set(graphopt._HOME)
