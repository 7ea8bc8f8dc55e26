"""Measured configurations: which kernel they are for, whose table wins, and what a broken one does."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch

from graphopt.codegen import tuned
from graphopt.codegen.configure import Configuration, closed_form
from graphopt.codegen.examples import example
from graphopt.codegen.spec import addend

GPU = "Some GPU"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GRAPHOPT_CACHE_DIR", str(tmp_path))
    tuned.tables.cache_clear()
    yield
    tuned.tables.cache_clear()


def test_the_shipped_table_can_be_read() -> None:
    assert "NVIDIA H200" in tuned.tables()
    forward = {tuned.key(s): s for name in ("norm_modulate", "gate_norm_modulate") for s in example(name, 3072)}
    assert len(forward) == 4
    for entries in tuned.tables().values():
        for k, c in entries.items():
            assert " D=" in k
            assert sum(c.blocks) >= int(k.split(" D=")[1].split()[0]), k


def test_a_measured_configuration_is_for_one_gpu_and_one_width() -> None:
    spec = replace(example("norm_modulate", 3072)[1], gpu=GPU)
    mine = Configuration((512,) * 6, 2, 5, 2)
    assert tuned.configuration(spec) == closed_form(spec)
    path = tuned.write(GPU, {tuned.key(spec): mine})
    assert path == tuned.user_file()
    assert tuned.configuration(spec) == mine
    assert tuned.configuration(replace(spec, gpu="Another")) == closed_form(spec)
    assert tuned.configuration(replace(spec, gpu="")) == closed_form(spec)
    other = replace(example("norm_modulate", 1536)[1], gpu=GPU)
    assert tuned.configuration(other) == closed_form(other)
    # the grid of a kernel whose gradient arrives in parts stays that of the whole
    parts = replace(spec, dtypes=(*spec.dtypes, (addend("dy", 1), torch.bfloat16)))
    assert tuned.configuration(parts).programs_per_sm == 2
    assert "1 measured" in tuned.about(GPU)
    assert "closed form" in tuned.about("Another")


def test_write_keeps_what_it_does_not_replace() -> None:
    a, b = Configuration((64,), 1, 3, 1), Configuration((32, 32), 2, 0, 4)
    tuned.write(GPU, {"one": a, "two": a})
    tuned.write("Another", {"one": b})
    tuned.write(GPU, {"two": b})
    assert tuned.tables()[GPU] == {"one": a, "two": b}
    assert tuned.tables()["Another"] == {"one": b}


@pytest.mark.parametrize("text", ["{", "[1]", '{"G": {"k": {"width": 3}}}', '{"G": {"k": {"blocks": [64]}}}'])
def test_a_broken_table_is_passed_over(text: str, caplog) -> None:
    tuned.user_file().parent.mkdir(parents=True, exist_ok=True)
    tuned.user_file().write_text(text)
    spec = replace(example("norm_modulate", 64)[0], gpu="NVIDIA H200")
    with caplog.at_level(logging.WARNING, "graphopt"):
        tuned.configuration(spec)
    assert "bench adaln --tune" in caplog.text
    assert caplog.text.count("passed over") == 1
    tuned.user_file().unlink()
    tuned.write(GPU, {"one": Configuration((64,), 1, 3, 1)})
    assert json.loads(tuned.user_file().read_text())[GPU]["one"]["blocks"] == [64]
