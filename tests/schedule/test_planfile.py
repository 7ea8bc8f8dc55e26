"""Plan folders: whole or not at all, bound to their data, corrupt parts named; readers of metadata files."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from graphopt.errors import ConfigError, PlanInfeasible
from graphopt.schedule.costmodel import CostFit, MemoryModel
from graphopt.schedule.dataset import Samples, read_samples
from graphopt.schedule.plan import Plan
from graphopt.schedule.planner import plan_batches
from graphopt.schedule.shapes import LatentLayout

FIT = CostFit.two_term(0.5, 2.43e-4, 9.2e-9, memory=MemoryModel(1e9, 1e5, 1e3))
COLUMNS = {
    "id": ["a", "b", "c", "d"],
    "frames": [1, 81, 17, 1],
    "height": [256, 480, 480, 256],
    "width": [256, 832, 832, 256],
    "caption_len": [3, 512, 513, 9],
}


@pytest.fixture
def samples():
    return Samples.of_tokens([256, 1024, 4096, 9000, 20000] * 40)


def test_save_and_load_keep_everything(tmp_path, samples):
    plan = plan_batches(samples, FIT, ranks=4, m_mem=40000)
    plan.save(tmp_path / "plan")
    again = Plan.load(tmp_path / "plan")
    assert again.table() == plan.table()
    assert again.step_table == plan.step_table
    assert again.hash == plan.hash
    assert [p.name for p in tmp_path.iterdir()] == ["plan"]
    again.check_dataset(samples)
    with pytest.raises(PlanInfeasible, match="made for another data set"):
        again.check_dataset(Samples.of_tokens([256] * 200))


def test_written_window_by_window_is_the_same(tmp_path, samples):
    one = plan_batches(samples, FIT, ranks=4, m_mem=40000, window_steps=3, uneven=False)
    two = plan_batches(samples, FIT, ranks=4, m_mem=40000, window_steps=3, uneven=False, out=tmp_path / "p")
    assert len(two.parts) == len(one.parts) > 1
    assert two.table() == one.table()
    assert two.hash == one.hash


def test_corrupt_missing_and_truncated_parts_are_named(tmp_path, samples):
    folder = plan_batches(samples, FIT, ranks=4, m_mem=40000).save(tmp_path / "plan")
    part = folder / "part-00000.parquet"
    good = part.read_bytes()
    part.write_bytes(good[:200] + bytes([good[200] ^ 1]) + good[201:])
    with pytest.raises(PlanInfeasible, match=r"corrupt(.|\n)*part-00000.parquet"):
        Plan.load(folder)
    part.unlink()
    with pytest.raises(PlanInfeasible, match=r"missing(.|\n)*part-00000.parquet"):
        Plan.load(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(PlanInfeasible, match="not valid JSON"):
        Plan.load(folder)
    (folder / "manifest.json").write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(ConfigError, match="schema version 99"):
        Plan.load(folder)
    with pytest.raises(ConfigError, match="not a plan folder"):
        Plan.load(tmp_path)


def test_nothing_half_written(tmp_path, samples):
    plan = plan_batches(samples, FIT, ranks=4, m_mem=40000)
    plan.parts.append(None)  # fails after the first part is on disk
    with pytest.raises(AttributeError):
        plan.save(tmp_path / "plan")
    assert list(tmp_path.iterdir()) == []

    def interrupt(done, steps):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan_batches(samples, FIT, ranks=4, m_mem=40000, out=tmp_path / "p", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept_unless_asked(tmp_path, samples):
    plan = plan_batches(samples, FIT, ranks=4, m_mem=40000)
    plan.save(tmp_path / "plan")
    with pytest.raises(ConfigError, match="exists"):
        plan.save(tmp_path / "plan")
    other = plan_batches(samples, FIT, ranks=2, m_mem=40000)
    other.save(tmp_path / "plan", overwrite=True)
    assert Plan.load(tmp_path / "plan").ranks == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="exists"):
        plan.save(tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.tex").exists()


@pytest.fixture(params=["parquet", "csv", "tsv", "jsonl", "table"])
def source(request, tmp_path):
    table = pa.table(COLUMNS)
    path = tmp_path / f"data.{request.param}"
    if request.param == "table":
        return table
    if request.param == "parquet":
        pq.write_table(table, path)
    elif request.param == "jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in table.to_pylist()))
    else:
        pa.csv.write_csv(table, path, pa.csv.WriteOptions(delimiter="\t" if request.param == "tsv" else ","))
    return path


def test_every_format_gives_the_same_shapes(source):
    s = read_samples(source)
    assert [s.shapes.name(i) for i in s.shape_id] == ["1x16x16+512", "21x30x52+512", "5x30x52+1024", "1x16x16+512"]
    assert s.shapes.tokens[s.shape_id].tolist() == [256, 32760, 7800, 256]
    assert s.fingerprint == read_samples(pa.table(COLUMNS)).fingerprint
    assert s.name(1) == "row 1 (id 'b')"


def test_layout_and_own_column_names():
    table = pa.table({"nf": [17], "hh": [480], "ww": [832], "caption": ["text"]})
    s = read_samples(
        table,
        layout=LatentLayout(vae=(8, 32, 32), patch=(1, 1, 1)),
        columns={"frames": "nf", "height": "hh", "width": "ww"},
    )
    assert s.shapes.name(0) == "3x15x26"
    counts = read_samples(pa.table({"tokens": [5, 7, 5]}))
    assert counts.shapes.tokens[counts.shape_id].tolist() == [5, 7, 5]
    with pytest.raises(ConfigError, match="vae must be three positive"):
        LatentLayout(vae=(4, 8))


def change(**columns):
    return pa.table({**COLUMNS, **columns})


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        (pa.table({"frames": [1], "height": [8]}), ConfigError, "missing column width"),
        (change(height=[256, 0, 480, 256]), PlanInfeasible, r"height = 0 is outside(.|\n)*row 1"),
        (change(width=[256, 1, -480, 256]), PlanInfeasible, r"width = -480 is outside(.|\n)*row 2"),
        (change(frames=[1, None, 1, 1]), PlanInfeasible, r"'frames' is empty(.|\n)*row 1"),
        (change(frames=[1, 2.5, 1, 1]), PlanInfeasible, "does not hold whole numbers"),
        (change(frames=[1, 9, 10**9, 1]), PlanInfeasible, r"frames = 1000000000 is outside(.|\n)*row 2"),
        (change(height=[256, 480, 480, 8]), PlanInfeasible, r"smaller than one patch(.|\n)*row 3"),
        (change(id=["a", "b", "c", "b"]), PlanInfeasible, r"first is 'b' \(2 times\)(.|\n)*row 1"),
        (pa.table({k: v[:0] for k, v in COLUMNS.items()}), PlanInfeasible, "no rows"),
    ],
)
def test_bad_metadata(table, error, message):
    with pytest.raises(error, match=message):
        read_samples(table)


def test_bad_files(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_samples(tmp_path / "no.parquet")
    (tmp_path / "empty.parquet").write_bytes(b"")
    with pytest.raises(PlanInfeasible, match="empty"):
        read_samples(tmp_path / "empty.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"not a parquet file")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_samples(tmp_path / "bad.parquet")
    (tmp_path / "data.xlsx").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"unknown metadata file type '.xlsx'"):
        read_samples(tmp_path / "data.xlsx")


def test_row_numbers_survive_batches(monkeypatch):
    monkeypatch.setattr("graphopt.schedule.dataset.BATCH_ROWS", 3)
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 50, 20)
    s = read_samples(pa.table({"tokens": tokens}))
    assert s.shapes.tokens[s.shape_id].tolist() == tokens.tolist()
    tokens[13] = 0
    with pytest.raises(PlanInfeasible, match="row 13"):
        read_samples(pa.table({"tokens": tokens}))


def test_fit_file(tmp_path):
    FIT.save(tmp_path / "fit.json")
    assert CostFit.load(tmp_path / "fit.json") == FIT
    (tmp_path / "fit.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a fit"):
        CostFit.load(tmp_path / "fit.json")
