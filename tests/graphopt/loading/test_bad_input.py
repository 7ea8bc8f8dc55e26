"""Samples that cannot be read are replaced and recorded; ranks that differ are an error on all of them."""

import json
import multiprocessing
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from plan_data import FIT, ROWS, TOKENS, Data, make, read

import graphopt
from graphopt.errors import ConfigError, GraphoptError, PlanInfeasible
from graphopt.loading.microbatch import Replacement
from graphopt.schedule.planner import plan_batches


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_and_missing_samples_are_replaced_by_their_shape_and_recorded(folder, world, tmp_path, workers, caplog):
    bad, missing, short = 17, 101, 202
    found = []
    for rank in range(2):
        loader = graphopt.PlanLoader(
            Data(bad=[bad], missing=[missing], short=[short]), folder, rank=rank, num_workers=workers,
            shape_of=lambda x: x["tokens"], record=tmp_path / f"{rank}.jsonl",
        )  # fmt: skip
        for batch, mb in loader:
            assert set(batch["tokens"].tolist()) == {mb.shape.S}
            assert batch["row"].tolist() == list(mb.samples)
            assert len(mb.samples) == mb.shape.B
        found += loader.replaced
        record = tmp_path / f"{rank}.jsonl"
        lines = record.read_text().splitlines() if loader.replaced else []
        assert [json.loads(x)["row"] for x in lines] == [r.row for r in loader.replaced]
    by = {r.row: r for r in found}
    assert set(by) == {bad, missing, short}
    assert all(TOKENS[r.by] == TOKENS[r.row] for r in found)
    assert "truncated file 17" in by[bad].reason
    assert "None" in by[missing].reason
    assert f"{TOKENS[short]} were planned" in by[short].reason
    assert caplog.text.count("was replaced by") == 3


def read_both(data, folder, **kw):
    return [read(graphopt.PlanLoader(data, folder, rank=rank, **kw)) for rank in range(2)]


def test_the_reserve_list_is_used_and_its_end_is_an_error(folder, world):
    same = np.flatnonzero(TOKENS[17] == TOKENS)
    spare = int(same[same != 17][0])
    got = []
    for rank in range(2):
        loader = graphopt.PlanLoader(Data(bad=[17]), folder, rank=rank, reserve=[spare])
        read(loader)
        got += loader.replaced
    assert got == [Replacement(17, spare, "OSError: truncated file 17")]
    with pytest.raises(PlanInfeasible, match=r"sample 17 cannot be read .* no other of its shape is in the reserve"):
        read_both(Data(bad=[17]), folder, reserve=[])
    with pytest.raises(PlanInfeasible, match="neither can 8 others"):
        read_both(Data(bad=same), folder)
    with pytest.raises(ConfigError, match="reserve holds row 999"):
        graphopt.PlanLoader(Data(), folder, rank=0, reserve=[999])


def test_many_replacements_are_no_accident_and_a_bug_is_no_bad_data(folder, world):
    loader = graphopt.PlanLoader(Data(bad=range(0, ROWS, 3)), folder, rank=0)
    with pytest.raises(PlanInfeasible, match=r"11 of \d+ samples could not be read"):
        read(loader)

    class Buggy(Data):
        def __getitem__(self, row):
            return {"row": row}["nothing"] if row < 0 else row + "a"

    with pytest.raises(TypeError):
        read(graphopt.PlanLoader(Buggy(), folder, rank=0))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"plan": "/nowhere"}, ConfigError, "not a plan folder"),
        ({"rank": 5}, ConfigError, "rank 5 is not in a world of 2"),
        ({"dataset": Data(7)}, PlanInfeasible, "made for 300 samples, and this data set has 7"),
        ({"dataset": iter([])}, ConfigError, "needs random access"),
        ({"weight": "pixel"}, ConfigError, "unknown weight 'pixel'"),
        ({"reduce_size": 0}, ConfigError, "reduce_size"),
        ({"shuffle": True}, ConfigError, "shuffle: the plan decides this"),
    ],
)
def test_bad_options(folder, world, change, error, message):
    kw = {"dataset": Data(), "plan": folder, "rank": 0, **change}
    with pytest.raises(error, match=message):
        graphopt.PlanLoader(kw.pop("dataset"), kw.pop("plan"), **kw)


def test_metadata_of_another_data_set(tmp_path, world):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, shift in (("a", 0), ("b", 1)):
        pq.write_table(pa.table({"tokens": TOKENS + shift}), tmp_path / f"{name}.parquet")
    plan = plan_batches(tmp_path / "a.parquet", FIT, ranks=2, m_mem=21000)
    graphopt.PlanLoader(Data(), plan, rank=0, manifest=tmp_path / "a.parquet")
    with pytest.raises(PlanInfeasible, match="made for another data set"):
        graphopt.PlanLoader(Data(), plan, rank=0, manifest=tmp_path / "b.parquet")


def test_bad_states(folder, world):
    loader = graphopt.PlanLoader(Data(), folder, rank=0)
    good = loader.state_dict(3)
    steps = len(loader.plan)
    for step, message in ((None, "step count"), (steps + 1, "outside this plan"), (-1, "outside"), (1.5, "an integer")):
        with pytest.raises(ConfigError, match=message):
            loader.state_dict(step)
    for change, error, message in (
        ({"version": 9}, ConfigError, "not a state"),
        ({"plan": "0" * 64}, PlanInfeasible, "taken with plan 000000000000"),
        ({"step": steps + 5}, ConfigError, "outside its plan"),
    ):
        with pytest.raises(error, match=message):
            loader.load_state_dict({**good, **change})
        assert (loader.position.start, loader.epoch) == (0, 0)  # nothing was changed
    short = dict(good)
    del short["carry_in"]
    with pytest.raises(ConfigError, match="lacks carry_in"):
        loader.load_state_dict(short)


def rank_of_a_job(rank, size, tmp, case):
    dist.init_process_group("gloo", init_method=f"file://{tmp}/{case}", rank=rank, world_size=size)
    data, folder, kw = Data(), Path(tmp) / "plan", {"timeout_s": 60}
    wrong = rank == 1
    if case == "other plan" and wrong:
        folder = Path(tmp) / "other"
    if case == "no plan" and wrong:
        folder = Path(tmp) / "nowhere"
    if case == "other data" and wrong:
        data, kw["index"] = Data(7), lambda row: row % 7
    if case == "other name":
        kw["dataset_id"] = "b" if wrong else "a"
    if case == "one rank twice":
        kw["rank"] = 0
    start = time.monotonic()
    try:
        if case == "gone" and wrong:
            time.sleep(5)
            return
        if case == "gone":
            kw["timeout_s"] = 2
        loader = graphopt.PlanLoader(data, folder, **kw)
        if case == "other step" and wrong:
            loader.load_state_dict(loader.state_dict(2))
        result = [list(mb.samples) for _, mb in loader]
    except GraphoptError as e:
        result = f"{type(e).__name__}: {e}"
    (Path(tmp) / f"{case}-{rank}.json").write_text(json.dumps([time.monotonic() - start, result]))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("case", "size", "message"),
    [
        ("fine", 2, None),
        ("other plan", 2, "rank 1 has another plan"),
        ("no plan", 2, "not a plan folder"),
        ("other data", 2, "rank 1 has another data set length than rank 0: 7 instead of 300"),
        ("other name", 2, "another data set than rank 0"),
        ("other step", 2, "rank 1 has another start"),
        ("one rank twice", 2, "ranks 0 and 1 both run the plan's rank 0"),
        ("world", 3, "the plan is for 2 ranks, and the job has 3"),
        ("gone", 2, "rank 1 has not reported its plan in 2 s"),
    ],
)
def test_ranks_that_differ_are_an_error_on_all_within_seconds(folder, tmp_path, case, size, message):
    make(seed=1).save(tmp_path / "other")
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=rank_of_a_job, args=(r, size, str(tmp_path), case)) for r in range(size)]
    for p in jobs:
        p.start()
    for p in jobs:
        p.join(60)
        assert p.exitcode == 0, "a rank hangs or crashed"
    results = [json.loads((tmp_path / f"{case}-{r}.json").read_text()) for r in range(size) if (tmp_path / f"{case}-{r}.json").exists()]
    assert len(results) == (1 if case == "gone" else size)
    if message is None:
        assert Counter(i for _, items in results for x in items for i in x) == Counter(range(ROWS))
        return
    for seconds, text in results:
        assert isinstance(text, str), "this rank saw no error"
        assert message in text
        assert seconds < 30
