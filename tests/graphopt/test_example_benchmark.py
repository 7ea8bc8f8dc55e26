"""benchmarks/example.py: runs that need another's result begin behind it, and every run of the list happens."""

from __future__ import annotations

import importlib.util
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "example.py"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(FILE.parent))
    spec = importlib.util.spec_from_file_location("example_benchmark", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("together", [1, 2, 4])
def test_partners_come_first(bench, monkeypatch, tmp_path, together: int) -> None:
    order: list[str] = []

    def carry_out(name, folder, gpus, end):
        order.append(f"{name} begins")
        time.sleep(0.02)
        order.append(f"{name} ends")
        return {"name": name}

    monkeypatch.setattr(bench, "carry_out", carry_out)
    names = bench.in_turn(["killed", "plain", "torchrun killed", "torchrun fp32", "fp32", "torchrun", "lora 1.3b"])
    assert len(names) == 7
    with ThreadPoolExecutor(together) as pool:
        waiting = {}
        for n in names:
            waiting[n] = pool.submit(bench.behind, waiting.get(bench.RUNS[n].partner), n, tmp_path, "0", 0.0)
        assert [w.result()["name"] for w in waiting.values()] == names
    for n in names:
        partner = bench.RUNS[n].partner
        assert not partner or order.index(f"{partner} ends") < order.index(f"{n} begins")
