"""Bucket tables of other trainers, WebDataset indexes, hardware descriptions, reports and the command line."""

import io
import json
import re
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sympy
import typer
from typer.testing import CliRunner

from graphopt._plan_cli import mount
from graphopt.errors import ConfigError, PlanInfeasible
from graphopt.schedule import page as pages
from graphopt.schedule import plots, report
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.dataset import read_samples
from graphopt.schedule.hardware import analytic_fit, hardware
from graphopt.schedule.models import model_cost
from graphopt.schedule.plan import Plan
from graphopt.schedule.planner import plan_batches
from graphopt.schedule.shapes import LatentLayout, ShapeTable
from graphopt.schedule.simulate import simulate
from graphopt.schedule.symbolic import symbol
from graphopt.schedule.tables import nemo, open_sora, read_table, write_table
from graphopt.schedule.webdataset import index_webdataset

FIT = CostFit.two_term(0.5, 2.43e-4, 9.2e-9, step_overhead_s=1.0)
LAYOUT = LatentLayout()


def rows(n=300, seed=0):
    rng = np.random.default_rng(seed)
    video = rng.random(n) < 0.5
    return pa.table(
        {
            "id": [f"clip{i}" for i in range(n)],
            "frames": np.where(video, rng.choice([17, 49, 81], n), 1),
            "height": np.where(video, 480, 512),
            "width": np.where(video, 832, 512),
        }
    )


OPEN_SORA = """# comment
bucket_config = {
    "512": {1: (1.0, 50)},
    "480p": {1: (0.5, 20), 51: (1.0, 8), 102: ((1.0, 0.33), 4), 204: (1.0, None)},
}
"""


def test_open_sora_in(tmp_path):
    (tmp_path / "config.py").write_text(OPEN_SORA)
    table = read_table(tmp_path / "config.py")
    assert [(b.frames, b.batch, b.probability) for b in table.buckets] == [
        (1, 50, 1.0),
        (1, 20, 0.5),
        (51, 8, 1.0),
        (102, 4, 0.33),
    ]
    samples = read_samples(rows())
    limits = table.limits(samples.shapes, LAYOUT)
    assert {samples.shapes.name(i): int(b) for i, b in enumerate(limits)} == {
        "1x32x32": 50,
        "5x30x52": 8,
        "13x30x52": 8,
        "21x30x52": 4,
    }
    plan = plan_batches(samples, FIT, ranks=2, limits=limits, policy="equal_token")
    largest = {plan.shapes.name(mb.shape): 0 for mb in plan.microbatches()}
    for mb in plan.microbatches():
        largest[plan.shapes.name(mb.shape)] = max(largest[plan.shapes.name(mb.shape)], len(mb.samples))
    assert largest == {"1x32x32": 50, "5x30x52": 8, "13x30x52": 8, "21x30x52": 4}
    with pytest.raises(ConfigError, match=r"no bucket .* holds shape 99x30x52"):
        table.limits(ShapeTable.of([[99, 30, 52, 0]]), LAYOUT)
    with pytest.raises(ConfigError, match="unknown Open-Sora resolution '9p'"):
        open_sora({"9p": {1: (1.0, 1)}})
    with pytest.raises(ConfigError, match="must be positive"):
        open_sora({"480p": {1: (1.0, 0)}})


def test_tables_out_and_in_again(tmp_path):
    shapes = ShapeTable.of([[1, 32, 32, 0], [5, 30, 52, 0], [13, 30, 52, 0]])
    batch = np.array([30, 6, 2])
    for kind in ("open-sora", "nemo"):
        (tmp_path / kind).write_text(write_table(kind, shapes, batch, LAYOUT))
        assert read_table(tmp_path / kind).limits(shapes, LAYOUT).tolist() == [30, 6, 2]
    text = write_table("finetrainers", shapes, batch, LAYOUT)
    assert text == "--video_resolution_buckets 1x512x512 17x480x832 49x480x832\n"
    (tmp_path / "f").write_text(text)
    table = read_table(tmp_path / "f")
    assert [(b.frames, b.height, b.width) for b in table.buckets] == [(1, 512, 512), (17, 480, 832), (49, 480, 832)]
    with pytest.raises(ConfigError, match="no batch sizes"):
        table.limits(shapes, LAYOUT)
    with pytest.raises(ConfigError, match="unknown table format"):
        write_table("excel", shapes, batch, LAYOUT)


def test_a_shared_bucket_gets_the_batch_that_is_safe_for_all():
    shapes = ShapeTable.of([[5, 30, 52, 0], [5, 36, 44, 0]])
    assert "17: (1.0, 3)" in write_table("open-sora", shapes, np.array([7, 3]), LAYOUT)
    assert "bucket_batch_size: [3]" in write_table("nemo", shapes, np.array([7, 3]), LAYOUT)


def test_nemo_and_bad_tables(tmp_path):
    (tmp_path / "n.yaml").write_text("bucket_duration_bins: [1.1, 4.0]\nbucket_batch_size: [8, 2]\n")
    assert read_table(tmp_path / "n.yaml").limits(
        ShapeTable.of([[5, 30, 52, 0], [13, 30, 52, 0]]), LAYOUT
    ).tolist() == [8, 2]
    with pytest.raises(ConfigError, match="2 bucket_duration_bins but 1"):
        nemo([1, 2], [3])
    (tmp_path / "bad").write_text("bucket_config = {'480p': {51: (1.0,")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_table(tmp_path / "bad")
    with pytest.raises(ConfigError, match="does not exist"):
        read_table(tmp_path / "none")


def shard(path, samples):
    with tarfile.open(path, "w") as tar:
        for key, meta in samples.items():
            for suffix, data in (
                ("mp4", b"x" * 700),
                ("json", json.dumps(meta).encode() if meta is not None else None),
            ):
                if data is not None:
                    info = tarfile.TarInfo(f"{key}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def test_webdataset_index(tmp_path):
    shard(
        tmp_path / "a.tar",
        {
            "000": {"num_frames": 17, "height": 480, "width": 832, "caption": "a cat on a mat"},
            "001": {"num_frames": 1, "height": 512, "width": 512, "caption": "b"},
        },
    )
    shard(tmp_path / "b.tar", {"000": {"num_frames": 81, "height": 480, "width": 832, "caption": "c"}})
    assert index_webdataset([tmp_path / "a.tar", tmp_path / "b.tar"], tmp_path / "i.parquet") == 3
    s = read_samples(tmp_path / "i.parquet")
    assert s.shapes.tokens[s.shape_id].tolist() == [7800, 1024, 32760]
    table = pq.read_table(tmp_path / "i.parquet").to_pydict()
    assert table["id"] == ["a.tar/000", "a.tar/001", "b.tar/000"]
    assert table["caption_length"] == [6, 1, 1]
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert tar.getmembers()[2].offset == table["offset"][1]
    shard(tmp_path / "c.tar", {"7": None})
    with pytest.raises(PlanInfeasible, match=r"sample 7 has no .json(.|\n)*c.tar"):
        index_webdataset([tmp_path / "c.tar"], tmp_path / "j.parquet")
    shard(tmp_path / "d.tar", {"7": {"height": 5}})
    with pytest.raises(PlanInfeasible, match="sample 7 has no frames, width"):
        index_webdataset([tmp_path / "d.tar"], tmp_path / "j.parquet")
    (tmp_path / "e.tar").write_bytes(b"zzz" * 1000)
    with pytest.raises(ConfigError, match="shard cannot be read"):
        index_webdataset([tmp_path / "e.tar"], tmp_path / "j.parquet")
    assert not (tmp_path / "j.parquet").exists()


def test_builtin_model_against_its_dimensions():
    """Wan 2.1 14B: 40 layers of width 5120, feed-forward 13,824; 2 operations per weight and token, forward."""
    cost = model_cost("wan-14b").total
    weights = 40 * (
        4 * 5120**2 + 2 * 5120**2 + 2 * 5120 * 13824
    )  # self-attention, q and out of cross-attention, feed-forward
    b, t, h, w, caption = (symbol(x) for x in "BTHWL")
    forward = sympy.Poly(cost.flops_forward, b, t, h, w, caption)
    assert abs(int(forward.coeff_monomial(b * t * h * w)) / (2 * weights) - 1) < 0.001
    attention = sympy.Poly(cost.attention_flops, b, t, h, w, caption)
    assert attention.coeff_monomial(b * t**2 * h**2 * w**2) == 40 * 14 * 5120
    assert 14.2e9 < int(cost.parameter_bytes) / 2 < 14.4e9
    with pytest.raises(ConfigError, match="no built-in model 'wan-15b'"):
        model_cost("wan-15b")


def test_analytic_fit_predicts_the_measured_step_it_was_calibrated_beside():
    """Compiled Wan-1.3B-shaped model, 4 layers, 32,760 tokens, no recomputation: 251 ms measured on an H200."""
    whole = model_cost("wan-1.3b")
    four = type(whole)("four layers", whole.rest, whole.layer, 4, whole.width)
    fit = analytic_fit(four, hardware("h200"), remat="none")
    table = ShapeTable.of([[21, 30, 52, 512]])
    assert abs(fit.seconds(table, np.array([0]), np.array([1]))[0] / 0.251 - 1) < 0.05
    full = analytic_fit(four, hardware("h200"), remat="full")
    ratio = full.seconds(table, np.array([0]), np.array([1]))[0] / fit.seconds(table, np.array([0]), np.array([1]))[0]
    assert 1.2 < ratio < 1.4  # one more forward of three
    assert full.memory.m1 < fit.memory.m1
    assert fit.source == "symbolic"
    with pytest.raises(ConfigError, match="no description of GPU 'b300'"):
        hardware("b300")
    with pytest.raises(ConfigError, match="unknown remat"):
        analytic_fit(four, hardware("h200"), remat="some")


def test_eager_launches_every_op_and_moves_every_byte():
    """Two layers on an H200: 12.7 ms at 1,024 tokens, where launching binds, and 136 ms at 32,760 (shape benchmark)."""
    whole = model_cost("wan-1.3b")
    two = type(whole)("two layers", whole.rest, whole.layer, 2, whole.width)
    assert int(whole.layer.launches) == 277
    eager, compiled = (analytic_fit(two, hardware("h200"), remat="none", compiled=c) for c in (False, True))
    table = ShapeTable.of([[1, 32, 32, 512], [21, 30, 52, 512]])
    short, long = eager.seconds(table, np.array([0, 1]), np.array([1, 1]))
    assert short == eager.floor_s
    assert abs(short / 12.7e-3 - 1) < 0.1
    assert abs(long / 0.136 - 1) < 0.08
    assert compiled.seconds(table, np.array([1]), np.array([1]))[0] < 0.95 * long
    again = analytic_fit(two, hardware("h200"), remat="full", compiled=False)
    assert eager.floor_s < again.floor_s < 1.4 * eager.floor_s


def test_sharded_parameters_leave_room():
    model, gpu = model_cost("wan-14b"), hardware("h200")
    kept, sharded = (analytic_fit(model, gpu, data_parallel=8, sharded=s).memory for s in (False, True))
    n = int(model.total.parameter_bytes) / 2
    assert kept.m0 == n * (4 + 12 / 8)
    assert n * 2 < sharded.m0 < n * 2.3
    assert kept.m1 == sharded.m1


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
