"""Bucket tables of other trainers, and WebDataset indexes."""

import io
import json
import tarfile

import numpy as np
import pyarrow.parquet as pq
import pytest
from clips import rows

from graphopt.errors import ConfigError, PlanInfeasible
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.dataset import read_samples
from graphopt.schedule.planner import plan_batches
from graphopt.schedule.shapes import LatentLayout, ShapeTable
from graphopt.schedule.tables import nemo, open_sora, read_table, write_table
from graphopt.schedule.webdataset import index_webdataset

FIT = CostFit.two_term(0.5, 2.43e-4, 9.2e-9, step_overhead_s=1.0)
LAYOUT = LatentLayout()

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
