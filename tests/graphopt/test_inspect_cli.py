from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import typer.testing

from graphopt import _inspect_cli, cli, reporting

MODULE = '''
import torch
from torch.nn import functional as F
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
    def forward(self, x, s, b):
        return self.linear(F.layer_norm(x, (8,)) * (1 + s) + b)
def make(rows=20):
    return Model(), (torch.ones(2, rows, 8), torch.ones(2, 1, 8), torch.ones(2, 1, 8))
class Refused(torch.nn.Module):
    @torch.compiler.disable
    def forward(self, x):
        return x * 2
def refused():
    return Refused(), torch.ones(2)
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "their_cli_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("their_cli_models", None)
    sys.path[:] = [p for p in sys.path if p != str(tmp_path)]


def run(*words: str):
    return typer.testing.CliRunner().invoke(cli.app, ["inspect", *words])


def test_text_and_files(here: Path) -> None:
    done = run("their_cli_models:make", "--shape", "rows=24", "--json", "a.json", "--dot", "a.dot", "--html", "a.html",
               "--option", "select=all")
    assert done.exit_code == 0, done.output
    assert "1 modulate sites, 1 rewritten" in done.stdout
    assert "float32[2, 24, 8]" in done.stdout
    data = json.loads((here / "a.json").read_text())
    assert data["version"] == 1
    assert data["graphs"][0]["nodes"]["before"]
    assert (here / "a.dot").read_text().startswith("digraph")
    assert (here / "a.html").read_text().startswith("<!doctype html>")
    assert sorted(p.name for p in here.iterdir() if not p.name.startswith("__")) == [
        "a.dot", "a.html", "a.json", "their_cli_models.py"]


def test_questions(here: Path) -> None:
    done = run("their_cli_models:make", "--why", "", "--diff", "norm_modulate", "--option", "select=all")
    assert done.exit_code == 0
    assert "modulate of float32[2, 20, 8] rewritten" in done.stdout
    assert "graphopt.norm_modulate(" in done.stdout


@pytest.mark.parametrize(("words", "code", "message"), [
    (["wan-14"], 2, "did you mean 'wan-14b'"),
    (["their_cli_models:mak"], 2, "did you mean 'make'"),
    ([":make"], 2, "For your own: package.module:factory"),
    (["their_cli_models:"], 2, "For your own: package.module:factory"),
    (["their_cli_models:make", "--why", "linea"], 2, "did you mean 'linear'"),
    (["their_cli_models:make", "--diff", "adalm"], 2, "did you mean 'adaln'"),
    (["their_cli_models:make", "--shape", "rows"], 2, "name=number"),
    (["their_cli_models:make", "--target", "h100"], 2, "unknown target"),
    (["their_cli_models:make", "--option", "selekt=all"], 2, "graphopt.select"),
    (["their_cli_models:make", "--json", "."], 2, "a folder is"),
    (["their_cli_models:refused"], 1, "disable"),
])
def test_bad_input(here: Path, words, code, message) -> None:
    done = run(*words)
    assert done.exit_code == code, done.output
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_an_unwritable_file_leaves_nothing_behind(here: Path, monkeypatch) -> None:
    def refuse(path, data):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(reporting, "write_whole", refuse)
    done = run("their_cli_models:make", "--json", "a.json")
    assert done.exit_code == 2
    assert "cannot be written: Permission denied" in done.stderr
    assert not list(here.glob("*.json*"))


def test_a_write_that_fails_half_way_keeps_the_old_file(here: Path, monkeypatch) -> None:
    (here / "a.json").write_text("old")
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(KeyboardInterrupt()))
    done = run("their_cli_models:make", "--json", "a.json")
    assert done.exit_code == 130
    assert (here / "a.json").read_text() == "old"
    assert sorted(p.name for p in here.iterdir() if p.suffix not in (".py", "")) == ["a.json"]


SWALLOWED = """
import sys, time
try:
    print("ready", flush=True)
    time.sleep(120)
except BaseException:
    print("swallowed", file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("where", ["in the factory", "in an import", "swallowed by an import", "swallowed by the factory"])
def test_ctrl_c_ends_it_and_leaves_no_file(here: Path, where: str) -> None:
    """Also where somebody else's code holds the exception back, as modules do that try to import another one."""
    body = SWALLOWED if where.startswith("swallowed") else "import time\nprint('ready', flush=True)\ntime.sleep(120)\n"
    if where.endswith("import"):
        (here / "their_cli_slow.py").write_text(body + "def make():\n    return 1\n")
    else:
        (here / "their_cli_slow.py").write_text("def make():\n" + textwrap.indent(body + "return 1\n", "    "))
    started = subprocess.Popen([sys.executable, "-m", "graphopt", "inspect", "their_cli_slow:make", "--json", "a.json"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "ready\n"
    started.send_signal(signal.SIGINT)
    _, rest = started.communicate(timeout=60)
    # interrupted inside exec() of a string, Python ends as if by the signal itself; a shell says 130 to both
    assert started.returncode in (130, -signal.SIGINT), rest
    assert rest.splitlines()[-1] == "interrupted; no file was left half-written"
    assert ("swallowed" in rest) == (where == "swallowed by the factory")  # an import is not even given the chance
    assert "Traceback" not in rest
    assert not (here / "a.json").exists()


def test_long_work_counts_the_seconds(capfd: pytest.CaptureFixture[str]) -> None:
    with _inspect_cli.progress("looking", after=0.05):
        time.sleep(0.5)
    with _inspect_cli.progress("hurrying", after=60):
        pass
    assert capfd.readouterr().err == "looking: 0 s\n"


def test_help_has_an_example() -> None:
    for command in ("inspect", "rules", "demo"):
        done = typer.testing.CliRunner().invoke(cli.app, [command, "--help"])
        assert done.exit_code == 0
        assert "Example: graphopt" in done.stdout


@pytest.mark.parametrize(("given", "means"), [
    ("verify=True", {"graphopt.verify": True}), ("verify=false", {"graphopt.verify": False}),
    ("select=all", {"graphopt.select": "all"}), ("graphopt.rules=gate_norm, gate_residual", {"graphopt.rules": ["gate_norm", "gate_residual"]}),
    ('rules=["gate_norm"]', {"graphopt.rules": ["gate_norm"]}), ("disable=gate_norm", {"graphopt.disable": ["gate_norm"]}),
    ("mode=None", {"graphopt.mode": None}), ("dsa={'window': (3, 7, 7)}", {"graphopt.dsa": {"window": (3, 7, 7)}}),
    ("triton.cudagraphs=1", {"triton.cudagraphs": 1}),
])
def test_values_of_options(given: str, means: dict) -> None:
    assert _inspect_cli._options([given]) == means


def test_list_names_the_built_in_models() -> None:
    done = run("list")
    assert "wan-14b" in done.stdout
    assert "40 layers" in done.stdout
