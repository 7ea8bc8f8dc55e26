"""Reports of a plan, and the command line."""

import json
import re

import pyarrow.parquet as pq
import pytest
import typer
from clips import rows
from typer.testing import CliRunner

from graphopt._plan_cli import mount
from graphopt.errors import ConfigError
from graphopt.schedule import page as pages
from graphopt.schedule import plots, report
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.dataset import read_samples
from graphopt.schedule.plan import Plan
from graphopt.schedule.planner import plan_batches
from graphopt.schedule.simulate import simulate

FIT = CostFit.two_term(0.5, 2.43e-4, 9.2e-9, step_overhead_s=1.0)

@pytest.fixture
def plan():
    return plan_batches(read_samples(rows()), FIT, ranks=4, m_mem=33000, tail="drop")


def test_text_report(plan):
    text = report.text(plan, step=0)
    assert "every sample exactly once" in text
    assert re.search(r"21x30x52\s+32,760", text)
    assert f"rank    3  1/{len(plan.steps(3)[0])}" in text
    with pytest.raises(ConfigError, match="no step 999"):
        report.text(plan, step=999)
    total = sum(r["samples"] for r in report.buckets(plan))
    assert total == 300


def test_html_is_one_file_with_the_plan_in_it(plan, tmp_path):
    pytest.importorskip("matplotlib")
    page = pages.to_html(plan, tmp_path / "plan.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert not re.search(r"(src|href)=\"https?:", page)
    assert page.count("<tr>") > min(1000, plan.manifest["totals"]["microbatches"])
    assert "21x30x52" in page
    assert len(page) < 3e6
    assert [p.name for p in tmp_path.iterdir()] == ["plan.html"]


def test_html_escapes_and_slot_mode_and_one_step(tmp_path):
    pytest.importorskip("matplotlib")
    slots = plan_batches(read_samples(rows(9)), FIT, ranks=2, m_mem=33000, sync="microbatch", microbatches=2)
    slots.manifest["warnings"] = ["<script>x</script>"]
    page = pages.to_html(slots, tmp_path / "p.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_plots_are_written(plan, tmp_path):
    pytest.importorskip("matplotlib")
    results = [("step_balanced", simulate(plan, FIT))]
    plots.plot_comparison(results, tmp_path / "c.svg")
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")
    assert "step_balanced" in report.comparison(results)
    with pytest.raises(ConfigError, match="nothing to plot"):
        plots.plot_fit(FIT, tmp_path / "f.png")


@pytest.fixture
def cli(tmp_path, monkeypatch):
    app = typer.Typer()
    mount(app)
    monkeypatch.chdir(tmp_path)
    pq.write_table(rows(), tmp_path / "data.parquet")
    FIT.save(tmp_path / "fit.json")
    return lambda *args: CliRunner().invoke(app, list(args))


def test_cli_plan_show_table(cli, tmp_path):
    got = cli(
        "plan",
        "--manifest",
        "data.parquet",
        "--fit",
        "fit.json",
        "--ranks",
        "4",
        "--m-mem",
        "33000",
        "--out",
        "p",
        "--html",
        "p.html",
    )
    assert got.exit_code == 0, got.output
    assert "every sample exactly once" in got.output
    assert Plan.load("p").ranks == 4
    assert (tmp_path / "p.html").exists()
    assert "step 0" in cli("plan", "show", "p", "--step", "0").output
    assert "bucket_config" in cli("plan", "table", "p").output
    again = cli("plan", "--manifest", "data.parquet", "--fit", "fit.json", "--m-mem", "33000", "--out", "p")
    assert again.exit_code == 2
    assert "overwrite" in again.output


def test_cli_plan_from_a_model_alone(cli):
    got = cli("plan", "--model", "wan-14b", "--gpu", "h200", "--manifest", "data.parquet", "--ranks", "8")
    assert got.exit_code == 0, got.output
    assert "nothing was measured" in got.output
    assert "not saved" in got.output


def test_cli_next_epoch_takes_what_was_carried(cli):
    common = ("plan", "--manifest", "data.parquet", "--fit", "fit.json", "--m-mem", "33000", "--ranks", "7")
    assert cli(*common, "--policy", "equal_token", "--out", "a").exit_code == 0
    carried = Plan.load("a").carried
    assert carried
    assert cli(*common, "--policy", "equal_token", "--epoch", "1", "--carry-from", "a", "--out", "b").exit_code == 0
    assert Plan.load("b").manifest["carried_in"] == carried
    pq.write_table(rows(5), "other.parquet")
    other = cli("plan", "--manifest", "other.parquet", "--fit", "fit.json", "--m-mem", "33000", "--carry-from", "a")
    assert other.exit_code == 2
    assert "another data set" in other.output


def test_cli_takes_other_column_names(cli):
    table = rows(20)
    pq.write_table(table.rename_columns([{"frames": "nf", "height": "hh"}.get(n, n) for n in table.column_names]), "named.parquet")
    common = ("plan", "--manifest", "named.parquet", "--fit", "fit.json", "--m-mem", "33000")
    assert "--columns frames=nf" in cli(*common).output.replace("\n", " ")
    assert cli(*common, "--columns", "frames=nf, height=hh").exit_code == 0
    for bad, message in (("frames", "must be pairs"), ("frames=", "must be pairs"), ("frame=nf", "unknown column roles")):
        got = cli(*common, "--columns", bad)
        assert got.exit_code == 2
        assert message in got.output


def test_cli_limit_over_the_gpu_is_warned_about(cli):
    common = ("plan", "--model", "wan-14b", "--manifest", "data.parquet", "--ranks", "4", "--tail", "pad")
    over = cli(*common, "--m-mem", "200000")
    assert over.exit_code == 0, over.output
    assert re.search(r"predicted to need \d+ GiB, and the h200 has 131", over.output)
    assert "predicted to need" not in cli(*common, "--m-mem", "33000").output
    eager, compiled = (re.search(r"predicted step +([\d.]+) s", cli(*common, "--m-mem", "33000", *o).output)[1] for o in (["--eager"], []))
    assert float(eager) > float(compiled)


def test_cli_errors_have_exit_code_2(cli):
    for args, message in (
        (("plan", "--manifest", "no.parquet", "--fit", "fit.json", "--m-mem", "1"), "does not exist"),
        (("plan", "--manifest", "data.parquet"), "either --fit or --model"),
        (("plan", "--manifest", "data.parquet", "--fit", "fit.json"), "needs a memory limit"),
        (
            ("plan", "--manifest", "data.parquet", "--fit", "fit.json", "--m-mem", "9", "--vae", "4,8"),
            "--vae must be three",
        ),
        (("plan", "--manifest", "data.parquet", "--fit", "fit.json", "--m-mem", "900"), "do not fit in memory"),
        (("plan", "show", "nowhere"), "not a plan folder"),
        (("simulate",), "needs --manifest"),
        (("fit", "nothing"), "neither a file"),
        (("fit", "no_such_module:f"), "cannot be imported"),
        (("plan",), "Usage"),
    ):
        got = cli(*args)
        assert got.exit_code == 2, (args, got.output)
        assert message in got.output, (args, got.output)


def test_cli_fit_measures_and_simulate_compares(cli, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "mine_step.py").write_text(
        "import time\ndef make():\n    return lambda s: time.sleep(1e-3 + 2e-7 * s.B * s.S)\n"
    )
    got = cli(
        "fit",
        "mine_step:make",
        "--tokens",
        "20000,50000,100000,200000",
        "--out",
        "f.json",
        "--plot",
        "f.png",
        "--max-error",
        "0.5",
    )
    assert got.exit_code == 0, got.output
    assert CostFit.load("f.json").source == "measured"
    assert (tmp_path / "f.png").stat().st_size > 5000
    assert (tmp_path / "runs.json").exists()
    refused = cli("fit", "runs.json", "--max-error", "0.0000001", "--out", "g.json", "--plot", "g.png")
    assert refused.exit_code == 2
    assert (tmp_path / "g.png").exists()
    assert not (tmp_path / "g.json").exists()
    got = cli(
        "simulate",
        "--manifest",
        "data.parquet",
        "--fit",
        "fit.json",
        "--m-mem",
        "33000",
        "--m-comp",
        "1e9",
        "--ranks",
        "2,4",
        "--out",
        "s.json",
        "--plot",
        "s.png",
    )
    assert got.exit_code == 0, got.output
    assert len(json.loads((tmp_path / "s.json").read_text())) == 6
    assert (tmp_path / "s.png").stat().st_size > 5000
