"""benchmarks/report.py: every figure from a row, rivals named where they win, the same page for the same files."""

from __future__ import annotations

import json
import shutil
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


def test_streamed_steps_of_machines_stand_side_by_side(tmp_path: Path) -> None:
    row = {"params_b": 1.4, "tokens": 7800, "peak_gib": 3.0, "slots": 3, "overlap": True}
    rows = [{**row, "system": "graphopt", "update": "priority", "step_ms": ms, "cores": n, "threads": n - 4, "resident": k}
            for n, k, ms in ((32, 2, 270.0), (16, 4, 290.0))]
    rows += [{**row, "system": "fsdp2", "update": "host", "step_ms": 900.0, "peak_gib": 2.0, "cores": 16, "threads": 16}]
    text = page(tmp_path, {"stream": rows})
    assert "| 1.4 | 7,800 | graphopt | priority | 32 | 28 | 3 | 2 | 270 |" in text
    assert "| 1.4 | 7,800 | graphopt | priority | 16 | 12 | 3 | 4 | 290 |" in text
    assert "**As good or better elsewhere:** 1.4 B, 7,800 tokens: fsdp2's peak is 2 GiB, graphopt's 3." in text


def test_ranks_in_turn_stand_beside_what_was_predicted(tmp_path: Path) -> None:
    row = {"mode": "in turn", "data": "C", "checkpoint": False, "layers": 4, "ranks": 8, "tau": 1.3, "memory": 1.0, "m_mem": 32760,
           "system": "graphopt", "steps": 7, "tokens_per_s": 9e5, "tokens_per_step": 3e5, "limit_fraction": 0.95, "load_cv": 0.1,
           "step_cv": 0.2, "oom": 0, "graphs": 4, "peak_gib": 14.5, "starved": 3, "noise": 0.01, "microbatch_s": [[1, 1, 2, 3, 40, 0.1]]}
    told = {"predicted_limit_fraction_steps": 0.96, "mape": 0.021, "mape_ranks": 0.03, "gain_over_equal_token": 0.31,
            "gain_interval": [0.2, 0.4], "planned_gain_steps": 0.32, "zero_bubble_gain_steps": 0.33, "share_of_zero_bubble_gain": 0.94,
            "share_interval": [0.9, 0.97], "planned_gain": 0.21, "planned_gain_corrected": 0.205, "planned_gain_interval": [0.2, 0.21],
            "zero_bubble_gain": 0.22, "share_of_zero_bubble_gain_corrected": 0.93}
    base = {**told, "gain_over_equal_token": 0.0, "gain_interval": [0.0, 0.0]}
    rows = [{**row, **told, "policy": "step_balanced"}, {**row, **base, "policy": "equal_token"},
            {**row, **base, "policy": "adaptive_load", "same_plan_as": "equal_token"},
            {**row, "policy": "step_balanced", "system": "inductor", "gain_over_equal_token": 0.3, "time_over_graphopt": 1.08,
             "time_over_interval": [1.07, 1.09]},
            {**{k: row[k] for k in ("mode", "data", "layers", "ranks", "tau", "system")}, "policy": "equal_token", "oom": 1, "error": "no"},
            {"mode": "fit", "data": "C", "layers": 4, "shapes": 34, "mape": 0.02, "p": 1.3}]
    text = page(tmp_path, {"schedule_in_turn": rows})
    assert ("| C, 4 layers | 8 | 1.3 | 32,760 | step_balanced | 7 | 95 | 96 | 31 | 20 to 40 | 32 | 33 | 94 | 90 to 97 | 2.1 | 3 |") in text
    assert "| C, 4 layers | 8 | 1.3 | 32,760 | adaptive_load (the plan of equal_token) | 7 |" in text
    assert "| 21 | 20.5 | 20 to 21 | 22 | 93 | 1 | 0 | 4 | 14.5 | 3 of 40 |" in text
    assert "| inductor | 1.080 | 1.070 to 1.090 | 30 |" in text
    assert "34 shapes, mean error 2 %, p = 1.30" in text
    assert "Out of memory at the first step: C, 4 layers, 8 ranks, equal_token." in text
    papers = (tmp_path / "docs" / "papers.md").read_text()
    assert "+20.5 % (20.0 to 21.0) step_balanced tau 1.3, data C" in papers
    assert "10.0 % equal_token, data C; 10.0 % step_balanced, data C" in papers


def test_the_page_of_this_tree_is_current(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "README.md", tmp_path)
    subprocess.run([sys.executable, ROOT / "benchmarks" / "report.py", "--docs", tmp_path / "docs"], check=True, capture_output=True)
    for name in ("docs/benchmarks.md", "docs/papers.md", "README.md"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), "run `make docs`"
    assert "| graphopt | 0.85" in (tmp_path / "README.md").read_text()


def test_the_second_papers_system(tmp_path: Path) -> None:
    clip = {"figure": "clip", "layers": 3, "params_b": 4.6, "host_gib": 60.0}
    rows = [{**clip, "system": s, "frames": f, "tokens": f * 2040, "fits": fits, "step_s": sec, "peak_gib": g}
            for s, f, fits, sec, g in (("streamed", 9, True, 4.0, 30.0), ("streamed", 85, True, 60.0, 137.0), ("streamed", 89, False, 9.0, 139.0),
                                       ("streamed_dsa", 9, True, 2.0, 31.0), ("streamed_dsa", 81, True, 15.0, 130.0), ("resident", 9, True, None, 99.0))]
    rows += [{**clip, "system": "resident", "frames": 17, "tokens": 32640, "fits": False, "other": True, "step_s": 1.0, "peak_gib": 80.0}]
    rows += [{"figure": "mfu", "system": s, "direction": d, "tokens": 7800, "mfu": m, "layers": 6, "params_b": 2.3}
             for s, d, m in (("prefetch", "priority", 0.4), ("no prefetch", "deferred", 0.2))]
    rows += [{"figure": "forward", "system": s, "params_b": 14.3, "tokens": 7800, "forward_ms": ms} for s, ms in (("serial", 1100.0), ("asynchronous", 550.0))]
    page(tmp_path, {"papers": rows})
    text = (tmp_path / "docs" / "papers.md").read_text()
    assert "streamed dense: 85 frames (173,400 tokens, 60.0 s a step, 137 GiB, host 60 GiB; 89 out of memory)" in text
    assert "streamed + DSA: 81 frames" in text
    assert "its limit was not reached" in text
    assert "| 2.0x at 9 frames (4.0 to 2.0 s, 30 and 31 GiB; 3 layers of a 105 B model's width (4.6 B parameters), the whole GPU) |" in text
    assert "| streamed dense | 89 | 181,560 | out of memory | - | 139.0 | - | 60.0 |" in text
    assert "resident dense: 9 frames (18,360 tokens, 99 GiB, host 60 GiB; its limit was not reached)" in text
    assert "| resident dense | 17 | 32,640 | failed | - |" in text
    assert "- `benchmarks/results/h200/papers.json`: last command `python benchmarks/x.py`, h200, torch 2.11, triton 3.6" in text
    assert "7,800 tokens: 40 % prefetch, priority, 20 % no prefetch (2.3 B parameters, 6 layers of Wan 14B's width)" in text
    assert "2.00x at 14.3 B" in text


def test_flops_of_the_papers_page_are_those_torch_counts() -> None:
    import torch
    from diffusers import WanTransformer3DModel
    from torch.utils.flop_counter import FlopCounterMode

    sys.path.insert(0, str(ROOT / "benchmarks"))
    from report_papers import wan_flops

    def counted(layers: int) -> int:
        with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
            model = WanTransformer3DModel(num_attention_heads=12, ffn_dim=8960, num_layers=layers, in_channels=16)
            model(torch.empty(1, 16, 5, 60, 104), torch.empty(1), torch.empty(1, 512, 4096), return_dict=False)
        return counter.get_total_flops()

    assert counted(2) - counted(1) == wan_flops("1.3b", 1, 5 * 30 * 52)


def test_figures_that_no_named_file_has_are_listed() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from docs_figures import unfound

    files = {"h200/step.json": [242.4155, 0.0371, 12.6e9]}
    page = ("# A\n242.4 ms, 3.7 %, 11.7 GiB and 249.7 ms (`benchmarks/results/h200/step.json`)\n```\n9.9\n```\n"
            "## B\n1.030x of 242.4 ms\n## C\nnothing\n## D\n242 ms, 13 GB, 113 ms of 40 blocks (`h200/step.json`)\n")
    assert list(unfound(page, files)) == [("# A", ["h200/step.json"], ["249.7"]), ("## B", [], ["1.030", "242.4"]),
                                          ("## D", ["h200/step.json"], ["113"])]


def test_a_files_command_is_without_where_its_rows_went() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from _results import command

    assert command(["/tmp/x/step.py", "--models", "wan", "--state", "/tmp/z", "--out", "/tmp/y", "--rounds", "5"]) == (
        "python benchmarks/step.py --models wan --rounds 5")
