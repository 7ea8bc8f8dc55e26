"""benchmarks/report.py: every figure from a row, rivals named where they win, the same page for the same files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAD = {"machine": "h200", "commit": "abc1234", "torch": "2.11", "triton": "3.6", "command": "python benchmarks/x.py", "date": "2026-11-30"}


def page(folder: Path, files: dict[str, list[dict]]) -> str:
    results, docs = folder / "results", folder / "docs"
    (results / "h200").mkdir(parents=True, exist_ok=True)
    docs.mkdir(exist_ok=True)
    for name, rows in files.items():
        (results / "h200" / f"{name}.json").write_text(json.dumps({"name": name, **HEAD, "ceilings": {}, "rows": rows}))
    subprocess.run([sys.executable, ROOT / "benchmarks" / "report.py", "--results", results, "--docs", docs,
                    "--html", folder / "page.html"], check=True, capture_output=True)
    return (docs / "benchmarks.md").read_text()


def test_rivals_are_named_where_they_win(tmp_path: Path) -> None:
    adaln = [{"kernel": "F1", "direction": "forward", "shape": [2, 8, 64], "form": "wan", "roofline": 0.5, "us": us}
             for us in ({"graphopt": 10.0, "inductor": 9.5},)]
    adaln += [{"kernel": "F2", "direction": "backward", "shape": [2, 8, 64], "form": "wan", "roofline": 0.5,
               "us": {"graphopt": 10.0, "inductor": 20.0}}]
    step = [{"model": "wan", "grid": "1x2x3", "batch": 1, "layers": 4, "system": s, "forward_ms": 1.0, "step_ms": ms, "peak_gib": g,
             "grad_norm": 0.5} for s, ms, g in (("eager", 30.0, 3.0), ("inductor_no_mix_order", 20.0, 2.0), ("graphopt", 19.0, 2.5))]
    text = page(tmp_path, {"adaln": adaln, "step": step})
    assert "F1 forward 2 x 8 x 64 (9.5 against 10 us)" in text
    assert "F2 backward 2 x 8 x 64 (" not in text
    assert "Inductor's peak is 2 GiB, graphopt's 2.5" in text
    assert "Inductor's step takes" not in text
    assert "`benchmarks/results/h200/adaln.json`: last command `python benchmarks/x.py`, h200, torch 2.11, triton 3.6" in text
    html = (tmp_path / "page.html").read_text()
    assert html.count("data:image/svg+xml") == 2
    assert "<table>" in html
    pictures = {f.name: f.read_bytes() for f in (tmp_path / "docs" / "img").iterdir()}
    assert page(tmp_path, {}) == text
    assert {f.name: f.read_bytes() for f in (tmp_path / "docs" / "img").iterdir()} == pictures


def test_a_step_with_sliding_attention_that_gains_nothing_is_named(tmp_path: Path) -> None:
    row = {"model": "wan-1.3b", "window": "3x7x7", "layers": 4, "forward_ms": 1.0, "peak_gib": 2.0}
    rows = [{**row, "grid": g, "tokens": n, "system": s, "step_ms": ms, "ratio": ms / 10} for g, n, s, ms in (
        ("2x4x4", 32, "graphopt", 10.0), ("2x4x4", 32, "graphopt_dsa", 12.0), ("4x8x8", 256, "graphopt_dsa", 4.0))]
    text = page(tmp_path, {"dsa_step": [*rows, {**row, "grid": "9x9x9", "tokens": 729, "system": "eager", "error": "memory"}]})
    assert "| 4x8x8 | 256 | 3x7x7 | 4 | graphopt_dsa | 1 | 4 | 0.4 | 2 |" in text
    assert "**As good or better elsewhere:** 32 tokens: dense attention is as fast as graphopt_dsa." in text
    assert "9x9x9" not in text


def test_the_page_of_this_tree_is_current(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "benchmarks" / "report.py", "--docs", tmp_path], check=True, capture_output=True)
    for name in ("benchmarks.md", "papers.md"):
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text(), "run `make docs`"
