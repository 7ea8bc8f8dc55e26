"""The adaptation example at its smallest size."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def example(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("adapt_dsa")


def test_the_adaptation_example_runs(tmp_path, example) -> None:
    example.main(["--smoke", "--seed", "0", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "seed0.json").read_text())
    assert set(result["arms"]) == set(example.ARMS)
    for arm in result["arms"].values():
        assert [p["step"] for p in arm["curve"]] == [0, 1, 2]
        assert all(0 < e < 10 for p in arm["curve"] for e in p["error"].values())
    start = {name: arm["curve"][0]["error"] for name, arm in result["arms"].items()}
    assert start["dsa"] == start["window"] != start["dense"], "offsets start at zero"
    assert start["tap"] == pytest.approx(start["window"], rel=1e-5)
    example.join(tmp_path, ["--smoke"])
    assert json.loads((tmp_path / "adapt_dsa.json").read_text())["rows"] == [result]
    example.plot(tmp_path)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "offsets.png").exists()
    assert "tap" in example.table(tmp_path)


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path, example, monkeypatch) -> None:
    """Ended after every evaluation in turn: the same errors and offsets as a run in one go."""
    arms = ["--smoke", "--seed", "0", "--arms", "dsa"]
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    example.main([*arms, "--out", str(whole)])
    keep = example.State.keep

    def keep_and_end(self, *args) -> None:
        keep(self, *args)
        raise KeyboardInterrupt

    ends = 0
    while ends < 12:
        with monkeypatch.context() as patch:
            patch.setattr(example.State, "keep", keep_and_end)
            try:
                example.main([*arms, "--out", str(pieces)])
                break
            except KeyboardInterrupt:
                ends += 1
    assert ends == 6, "two parts of three evaluations each"

    def result(folder: Path) -> dict:
        found = json.loads((folder / "seed0.json").read_text())
        for curve in (found["pretrain"], *(arm["curve"] for arm in found["arms"].values())):
            for point in curve:
                del point["seconds"]
        return found

    assert result(pieces) == result(whole)
    example.main(["--smoke", "--seed", "0", "--arms", "dsa,window", "--out", str(pieces)])
    assert list(result(pieces)["arms"]) == ["dsa", "window"], "one more arm from the same weights"
    with pytest.raises(SystemExit, match="other adapt: use another --out"):
        example.main([*arms, "--adapt", "3", "--out", str(pieces)])
