from __future__ import annotations

import json

import pytest
import torch
import typer.testing

from graphopt import _compat, _contracts, cli, doctor


@pytest.fixture(scope="module")
def found():
    return doctor.examine()


def test_every_section_is_there(found) -> None:
    assert list(dict.fromkeys(f.section for f in found))[:6] == [
        "versions", "devices", "torch's interfaces", "kernels", "caches", "memory"]
    by_name = {f.name: f for f in found}
    assert by_name["torch"].value.startswith(torch.__version__)
    assert "pinned memory" in by_name
    assert "mix-order reduction" in by_name
    assert all(f.value for f in found)


def test_this_machine_has_no_problem(found) -> None:
    assert [f for f in found if f.problem and f.section != "settings"] == []
    assert "no problem found" in doctor.text([f for f in found if not f.problem])


@pytest.mark.parametrize("name", sorted(_contracts.CONTRACTS))
def test_contracts_hold(name: str) -> None:
    _contracts.CONTRACTS[name]()


def test_a_broken_contract_is_named_and_the_exit_code_says_so(monkeypatch) -> None:
    monkeypatch.setattr(_compat, "inductor_mode_names", list)
    monkeypatch.setattr(doctor, "_kernels", lambda: iter(()))
    done = typer.testing.CliRunner().invoke(cli.app, ["doctor"])
    assert done.exit_code == 1
    assert "!! Inductor takes a graph with options: broken" in done.stdout
    assert "1 problem: Inductor takes a graph with options" in done.stdout


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("GRAPHOPT_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: not str(path).startswith(str(tmp_path)))
    (kernels, *_) = doctor._caches()
    assert "GRAPHOPT_CACHE_DIR" in kernels.problem


def test_a_wrong_setting_is_a_problem(monkeypatch) -> None:
    monkeypatch.setenv("GRAPHOPT_STRICT", "yes")
    last = list(doctor._settings())[-1]
    assert "GRAPHOPT_STRICT" in last.problem
    monkeypatch.setenv("GRAPHOPT_STRICT", "1")
    assert "on_error='raise'" in list(doctor._settings())[-1].value


def test_json(found) -> None:
    data = json.loads(doctor.to_json(found))
    assert data["version"] == 1
    assert {"section", "name", "value", "problem"} == set(data["findings"][0])
