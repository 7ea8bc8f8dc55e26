"""What the documentation names exists: attributes, commands and their options, result files, error texts, tests."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

import graphopt
from graphopt import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
SOURCES = [f for folder in ("graphopt", "passes", "codegen", "schedule") for f in (ROOT / folder).rglob("*.py")]
OPTIONS = {"rules", "experimental", "select", "numerics", "verify", "on_error", "regions", "compiler", "mode", "dsa"}


@cache
def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def resolve(name: str) -> object:
    """The object behind a dotted name that starts with graphopt."""
    from importlib import import_module

    parts = name.split(".")
    found: object = graphopt
    for i, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            found = import_module(".".join(parts[:i]))
    return found


def dotted(text: str) -> set[str]:
    """Names of the package in a page: not option keys, not files of caches."""
    names = {n.rstrip(".") for n in re.findall(r"(?<![\w./\"'-])graphopt(?:\.[A-Za-z_]\w*)+", text)}
    return {n for n in names if not n.endswith((".py", ".json", ".html")) and n.split(".")[1] not in OPTIONS - {"dsa", "verify"}}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_names_exist(page: Path) -> None:
    keys = set(re.findall(r"[\"'`]graphopt\.(\w+)[\"'`=]", page.read_text()))
    for name in dotted(page.read_text()):
        if name.split(".")[1] in keys and name.count(".") == 1 and name.split(".")[1] in OPTIONS:
            continue  # an option key in prose
        resolve(name)


def option_names(command: Any) -> set[str]:
    return {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    group = typer.main.get_command(cli.app)
    lines = [ln for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
             for ln in block.splitlines()] + re.findall(r"`(graphopt [^`]+)`", page.read_text())
    for line in lines:
        found = re.match(r"\$?\s*graphopt ([a-z][\w -]*.*)", line.split(" #")[0].strip())
        if not found or page.name == "cli.md":
            continue
        words = found[1].split()
        command: Any = group
        while hasattr(command, "commands") and words and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        assert command is not group or words[0] == "VERB", f"{page.name}: {line}"
        if command.allow_extra_args or command.context_settings.get("allow_extra_args"):  # a script takes them
            continue
        for word in words:
            if word.startswith("--"):
                assert word.split("=")[0] in option_names(command), f"{page.name}: {line}: {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_exist(page: Path) -> None:
    for name in re.findall(r"`((?:benchmarks|tests|docs|examples|passes|codegen|schedule)/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    for name in re.findall(r"python ((?:benchmarks|tests|examples)/[\w./-]+\.py)", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} runs {name}"


@cache
def files_of_tests() -> dict[str, str]:
    return {str(f.relative_to(ROOT / "tests")): f.read_text() for f in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tests_that_are_named_exist(page: Path) -> None:
    """`test_store.py`, `loading/test_resume.py::test_x`, and `::test_y` of the file named before it."""
    name = ""
    for file, test in re.findall(r"`(?:([\w./-]*test_\w+\.py))?(?:::(test_\w+))?`", page.read_text()):
        name = file.removeprefix("tests/") or name
        if file or test:
            found = [text for path, text in files_of_tests().items() if path == name or path.endswith("/" + name)]
            assert found, f"{page.name} names {name}"
            assert not test or any(f"def {test}(" in text for text in found), f"{page.name} names {name}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_are_python(page: Path) -> None:
    for block in code_blocks(page, "python"):
        ast.parse(re.sub(r"^>>> ?", "", block, flags=re.MULTILINE))


def test_every_example_is_named_in_a_page() -> None:
    text = "".join(p.read_text() for p in PAGES if p.name != "CHANGELOG.md")
    scripts = [p.name for p in (ROOT / "examples").glob("*.py") if not p.stem.startswith("adapt_dsa_")]  # parts of adapt_dsa.py
    assert len(scripts) >= 4
    assert not [s for s in scripts if f"examples/{s}" not in text]


def test_the_planning_example_runs(capsys) -> None:
    runpy.run_path(str(ROOT / "examples" / "plan_synthetic.py"))
    table = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("step_balanced", "equal_token"))]
    assert float(table[1][4].rstrip("%")) > float(table[0][4].rstrip("%"))


def test_result_files_are_whole() -> None:
    for file in (ROOT / "benchmarks" / "results").rglob("*.json"):
        found = json.loads(file.read_text())
        if "name" in found:
            assert {"machine", "commit", "torch", "command", "date", "rows"} <= set(found), file
            assert found["rows"], file


def texts() -> str:
    """Every string of the sources, f-strings with their fields left out, implicit joins joined."""
    parts = []
    for file in SOURCES:
        tree = ast.parse(file.read_text())
        docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts.append("".join(v.value if isinstance(v, ast.Constant) else " .. " for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(node.value)
    return "\n".join(parts)


def test_error_texts_are_those_of_the_code() -> None:
    """The first column of the tables of troubleshooting.md, and the reasons of reading_a_report.md."""
    sources, checked = texts(), 0
    for page, foreign in (("troubleshooting.md", ("Invalid backend", "DynamoBackend", "mode=", "options=", "ImportError")), ("reading_a_report.md", ())):
        text = (ROOT / "docs" / page).read_text()
        start = text.index("## Why not there?") if page == "reading_a_report.md" else 0
        end = text.index("## In a script") if page == "reading_a_report.md" else len(text)
        for line in text[start:end].splitlines():
            if not line.startswith("| `"):
                continue
            for quoted in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
                if any(f in quoted for f in foreign) or re.fullmatch(r"[A-Za-z_*]+|\d .*", quoted):
                    continue
                for piece in quoted.split(".."):
                    piece = piece.strip(" :()")
                    assert piece in sources, f"{page}: {quoted!r}: nobody says {piece!r}"
                    checked += 1
    assert checked > 30


def test_the_command_reference_is_current(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "typer", "graphopt.cli", "utils", "docs", "--name", "graphopt",
                           "--title", "Command line"], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.strip() == (ROOT / "docs" / "reference" / "cli.md").read_text().strip(), "run `make docs`"
