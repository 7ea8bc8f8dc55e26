"""What `benchmarks/adaln.py` measures by default is what `benchmarks/adaln_bars.py` asks for."""

from __future__ import annotations

import argparse
import sys
from math import prod
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch):
    """The two scripts as modules."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    import adaln
    import adaln_bars

    yield adaln, adaln_bars
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__ or "").parent == BENCHMARKS:
            del sys.modules[name]


def asked(adaln, **given: str) -> dict[tuple[str, str], list[str]]:
    args = argparse.Namespace(**{"rows": None, "functions": None, "systems": None, "shapes": adaln.SHAPES, **given})
    return {(text, code): systems for text, code, systems in adaln.wanted(args)}


def test_the_whole_table_has_what_the_bars_need(scripts) -> None:
    adaln, bars = scripts
    table = asked(adaln)
    for shape in bars.SHARES:
        for kernel, _ in bars.COLUMNS:
            assert {"graphopt", "inductor", *bars.RIVALS} <= set(table[shape, kernel])
    for code in ("F2a", "F3", "F4", "F5", "F1r", "F1h", "F2h", "F1t"):
        assert {"graphopt", "inductor"} <= set(table["1x64000x3072", code])
    assert {"graphopt", "inductor"} <= set(table["1x4096x3072", "F1"])
    small = [s for s, code in table if code == "F1" and 2 * prod(map(int, s.split("x"))) < bars.SMALL_BYTES]
    assert small
    assert all({"graphopt", "inductor"} <= set(table[s, "F1"]) for s in small)


def test_rows_by_name_and_explicit_systems(scripts) -> None:
    adaln, _ = scripts
    named = asked(adaln, rows="2x8x64:F1:graphopt+inductor,1x8x64:F1t:graphopt")
    assert named == {("2x8x64", "F1"): ["graphopt", "inductor"], ("1x8x64", "F1t"): ["graphopt"]}
    assert asked(adaln, shapes="1x64000x3072", functions="F1h", systems="eager,liger") == {
        ("1x64000x3072", "F1h"): ["liger"]}  # eager is left out at this size
