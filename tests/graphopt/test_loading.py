"""What a job reads from a plan: everything once, the same after a kill, an error and not a hang where ranks differ."""

import json
import logging
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import graphopt
from graphopt.errors import ConfigError, GraphoptError, PlanInfeasible
from graphopt.loading.microbatch import MicrobatchIds, Replacement
from graphopt.schedule.costmodel import CostFit, MemoryModel
from graphopt.schedule.dataset import Samples
from graphopt.schedule.planner import plan_batches

FIT = CostFit.two_term(0.5, 2.43e-4, 9.2e-9)
ROWS = 300
TOKENS = np.random.default_rng(0).choice([256, 500, 1024, 4096, 9000, 20000], ROWS)


class Data(torch.utils.data.Dataset):
    def __init__(self, rows=ROWS, bad=(), missing=(), short=()):
        self.rows, self.bad, self.missing, self.short = rows, set(bad), set(missing), set(short)

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        if row in self.bad:
            raise OSError(f"truncated file {row}")
        if row in self.missing:
            return None
        return {"row": row, "tokens": int(TOKENS[row]) - (row in self.short)}


def make(ranks=2, **kw):
    return plan_batches(Samples.of_tokens(TOKENS), FIT, **{"ranks": ranks, "m_mem": 21000, **kw})


@pytest.fixture
def folder(tmp_path):
    make().save(tmp_path / "plan")
    return tmp_path / "plan"


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    return lambda n: monkeypatch.setenv("WORLD_SIZE", str(n))


def read(loader):
    return [(mb.epoch, mb.step, loader.sampler.rank, mb.k, mb.samples) for _, mb in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_is_every_sample_once_with_its_place_in_the_step(folder, world, workers):
    plan = graphopt.Plan.load(folder)
    seen = Counter()
    for rank in range(2):
        loader = graphopt.PlanLoader(Data(), folder, rank=rank, num_workers=workers)
        expected = [mb for step in plan.steps(rank) for mb in step]
        assert len(loader) == len(expected)
        assert loader.steps == len(plan)
        for (batch, mb), planned in zip(loader, expected, strict=True):
            assert batch["row"].tolist() == list(mb.samples) == planned.samples
            assert (mb.step, mb.k, mb.K, mb.tokens) == (planned.step, planned.k, planned.microbatches, planned.tokens)
            assert set(batch["tokens"].tolist()) == {mb.shape.S}
            assert len(mb.samples) == mb.shape.B
            assert mb.first == (mb.k == 0)
            assert mb.last == (mb.k == mb.K - 1)
            seen.update(mb.samples)
        assert loader.epoch == 1
    assert seen == Counter(range(ROWS))


@pytest.mark.parametrize(("weight", "unit"), [("token", "tokens"), ("sample", "samples")])
def test_loss_scales_of_a_step_add_up_to_one_mean(folder, world, weight, unit):
    total = graphopt.Plan.load(folder).step_table.column(unit).to_numpy()
    share = np.zeros(len(total))
    for rank in range(2):
        for _, mb in graphopt.PlanLoader(Data(), folder, rank=rank, weight=weight):
            share[mb.step] += mb.loss_scale * (mb.tokens if weight == "token" else len(mb.samples)) / 2  # DDP averages
    assert np.allclose(share, 1, rtol=1e-12)
    one = next(iter(graphopt.PlanLoader(Data(), folder, rank=0, weight=weight, reduce_size=1)))[1]
    assert np.isclose(one.loss_scale * total[0], 1)


def test_largest_microbatch_comes_first():
    samples = Samples.of_tokens(TOKENS)
    for kw in ({}, {"window_steps": 2}, {"sync": "microbatch"}, {"policy": "equal_token"}):
        plan = make(4, **kw)
        tokens = plan.column("tokens")
        i = int(np.argmax(tokens))
        assert (plan.column("step")[i], plan.column("k")[i]) == (0, 0)
        assert tokens[i] == max(tokens)
        assert sorted(plan.samples()[0].tolist()) == sorted(set(range(ROWS)) - set(plan.carried))
        step, rank, k = (plan.column(n).tolist() for n in ("step", "rank", "k"))
        assert list(zip(step, rank, k)) == sorted(zip(step, rank, k))
        assert (samples.shape_id[plan.samples()[0]] == np.repeat(plan.column("shape"), plan.column("batch"))).all()
    # By bytes, where captions weigh more than pixels.
    fit = CostFit.two_term(0.5, 1e-4, 1e-9, memory=MemoryModel(0, 1.0, 1000.0))
    shapes = type(samples.shapes)(*(np.array(c) for c in ([1000, 900], [1, 1], [1, 1], [0, 512])))
    plan = plan_batches(Samples.of_shapes(np.array([0] * 40 + [1]), shapes), fit, ranks=2, memory_bytes=1e9, tau=1.3)
    i = int(np.argmax(plan.column("bytes")))
    assert plan.column("shape")[i] == 1
    assert plan.column("tokens")[i] < plan.column("tokens").max()
    assert (plan.column("step")[i], plan.column("k")[i]) == (0, 0)


# ---- resume


def trainer(folder, rank, log, checkpoint, workers, epochs):
    """A job that writes down what it trains on, saves after each step, and may be killed at any moment."""
    torch.set_num_threads(1)
    loader = graphopt.PlanLoader(Data(), folder, rank=rank, num_workers=workers, prefetch_factor=4 if workers else None)
    if checkpoint.exists():
        loader.load_state_dict(json.loads(checkpoint.read_text()))
    with open(log, "a", buffering=1) as f:
        while loader.epoch < epochs:
            for batch, mb in loader:
                f.write(json.dumps([mb.epoch, mb.step, mb.k, batch["row"].tolist()]) + "\n")
                time.sleep(0.001)
                if mb.last:
                    part = checkpoint.with_suffix(".part")
                    part.write_text(json.dumps(loader.state_dict(mb.step + 1)))
                    part.replace(checkpoint)


def whole_lines(log):
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("]]")]


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_at_random_moments_the_job_goes_on_exactly(folder, world, tmp_path, workers):
    context = multiprocessing.get_context("fork")
    rng = random.Random(workers)
    straight = tmp_path / "straight"
    rank = 1 if workers else 0
    trainer(folder, rank, straight, tmp_path / "unused", 0, 2)
    expected = {(e, s, k): rows for e, s, k, rows in whole_lines(straight)}
    log, checkpoint, kills = tmp_path / "log", tmp_path / "checkpoint.json", 0
    while kills < 10:  # ten with workers and ten without
        p = context.Process(target=trainer, args=(folder, rank, log, checkpoint, workers, 2))
        p.start()
        p.join(rng.uniform(0.05, 0.25))
        if p.exitcode is None:
            os.kill(p.pid, signal.SIGKILL)
            kills += 1
        p.join()
        if p.exitcode == 0:  # it finished before it was killed: once more from somewhere
            checkpoint.unlink()
    trainer(folder, rank, log, checkpoint, workers, 2)
    got = {}
    for e, s, k, rows in whole_lines(log):
        assert got.setdefault((e, s, k), rows) == rows  # a repeated microbatch is the same one
    assert got == expected
    assert Counter(r for (e, _, _), rows in expected.items() for r in rows if e == 0).most_common(1)[0][1] == 1


def test_every_step_resumes_to_the_suffix_of_the_epoch(folder, world):
    loader = graphopt.PlanLoader(Data(), folder, rank=1)
    everything = read(loader)
    for step in range(len(graphopt.Plan.load(folder)) + 1):
        first = graphopt.PlanLoader(Data(), folder, rank=1)
        again = graphopt.PlanLoader(Data(), folder, rank=1, num_workers=0)
        again.load_state_dict(json.loads(json.dumps(first.state_dict(step))))
        rest = [e for e in everything if e[1] >= step]
        if rest:
            assert len(again) == len(rest)
            assert read(again) == rest
        else:  # a finished epoch resumed: the next one starts at once
            assert again.epoch == 1
            assert again.state_dict(step)["epoch"] == 1
            items = read(again)
            assert items[0][:2] == (1, step)
            assert Counter(i for x in items for i in x[4]).most_common(1)[0][1] == 1


def test_set_epoch_after_a_resume_keeps_the_place(folder, world):
    loader = graphopt.PlanLoader(Data(), folder, rank=0)
    loader.load_state_dict(graphopt.PlanLoader(Data(), folder, rank=0).state_dict(4))
    loader.set_epoch(0)
    assert read(loader)[0][1] == 4
    assert (loader.epoch, loader.position.first_step) == (1, len(graphopt.Plan.load(folder)))
    loader.set_epoch(1)
    second = read(loader)
    loader.set_epoch(0)
    assert [x[4] for x in read(loader)] != [x[4] for x in second]


def test_an_unfinished_pass_starts_again_where_it_began(folder, world):
    loader = graphopt.PlanLoader(Data(), folder, rank=0)
    loader.load_state_dict(loader.state_dict(3))
    first = [mb.samples for (_, mb), _ in zip(loader, range(5))]
    assert [mb.samples for (_, mb), _ in zip(loader, range(5))] == first


def test_carried_samples_come_back_in_the_next_epoch(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    plan = make(3, policy="equal_token")
    assert plan.carried
    loaders = [graphopt.PlanLoader(Data(), plan, rank=r) for r in range(3)]
    for loader in loaders:
        read(loader)
    used = Counter(i for loader in loaders for x in read(loader) for i in x[4])
    used.update(loaders[0].position.carry_in)  # what this epoch carries on
    assert used == Counter(range(ROWS)) + Counter(plan.carried)


def test_plans_made_ahead_are_taken_epoch_by_epoch(world):
    plans = [make(epoch=e) for e in range(2)]
    loader = graphopt.PlanLoader(Data(), lambda epoch: plans[epoch], rank=0)
    for plan in plans:
        assert [x[4] for x in read(loader)] == [tuple(mb.samples) for step in plan.steps(0) for mb in step]
    again = graphopt.PlanLoader(Data(), lambda epoch: plans[epoch], rank=0)
    again.load_state_dict({**again.state_dict(len(plans[0]))})
    assert again.epoch == 1
    assert read(again)[0][4] == tuple(plans[1].steps(0)[0][0].samples)
    wrong = graphopt.PlanLoader(Data(), lambda epoch: plans[0], rank=0)
    wrong.set_epoch(1)
    with pytest.raises(ConfigError, match="given for epoch 1 is of epoch 0"):
        len(wrong)


def test_sequence_parallel_ranks_read_the_same_and_average_over_all(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    plan = make(4, sp=2)
    loaders = [graphopt.PlanLoader(Data(), plan, rank=r) for r in range(4)]
    items = [[(mb.step, mb.k, mb.samples, mb.loss_scale) for _, mb in loader] for loader in loaders]
    assert items[0] == items[1] != items[2] == items[3]
    assert items[0][0][3] == 4 / plan.step_table.column("tokens")[0].as_py()


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_another_world_covers_what_is_left(folder, world, ranks, caplog):
    plan = graphopt.Plan.load(folder)
    half = len(plan) // 2
    state = graphopt.PlanLoader(Data(), folder, rank=0).state_dict(half)
    world(ranks)
    with caplog.at_level(logging.WARNING):
        loaders = [graphopt.PlanLoader(Data(), folder, rank=r) for r in range(ranks)]
        for loader in loaders:
            loader.load_state_dict(state)
    assert f"for {ranks} ranks instead of 2" in caplog.text
    assert len({loader.plan.hash for loader in loaders}) == 1
    done = Counter(i for r in range(2) for step in plan.steps(r)[:half] for mb in step for i in mb.samples)
    states = loaders[0].state_dict(half + 2)
    everything = [read(loader) for loader in loaders]
    used = Counter(i for items in everything for x in items for i in x[4])
    assert done + used == Counter(range(ROWS))
    assert {x[1] for x in everything[0]} == set(range(half, half + len({x[1] for x in everything[-1]})))
    # And a kill in the re-planned part, then a third world.
    same = graphopt.PlanLoader(Data(), folder, rank=0)
    same.load_state_dict(json.loads(json.dumps(states)))
    assert read(same) == [x for x in everything[0] if x[1] >= half + 2]
    world(2)
    third = [graphopt.PlanLoader(Data(), folder, rank=r) for r in range(2)]
    for loader in third:
        loader.load_state_dict(states)
    before = Counter(i for items in everything for x in items if x[1] < half + 2 for i in x[4])
    after = Counter(i for loader in third for x in read(loader) for i in x[4])
    assert done + before + after == Counter(range(ROWS))


def test_too_little_for_the_new_world_is_carried_on(folder, world):
    plan = graphopt.Plan.load(folder)
    last = len(plan) - 1
    state = graphopt.PlanLoader(Data(), folder, rank=0).state_dict(last)
    left = plan.remaining(last).tolist()
    world(len(left) + 1)
    loader = graphopt.PlanLoader(Data(), folder, rank=0)
    loader.load_state_dict(state)
    assert loader.epoch == 1
    assert sorted(loader.position.carry_in) == sorted(left)


# ---- samples that cannot be read


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


def test_batched_access_of_the_data_set_is_used(folder, world):
    calls = []

    class Batched(Data):
        def __getitems__(self, rows):
            calls.append(list(rows))
            return [self[r] for r in rows]

    items = read(graphopt.PlanLoader(Batched(bad=[17]), folder, rank=0))
    assert len(calls) == len(items)
    loader = graphopt.PlanLoader([None] * 7, folder, rank=0, index=lambda row: row % 7)
    with pytest.raises(PlanInfeasible, match="returned None"):
        read(loader)


# ---- other loaders


def test_stateful_data_loader_resumes_at_the_microbatch(folder, world):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def new(workers):
        sampler = graphopt.PlanBatchSampler(folder, rank=0)
        return stateful(sampler.dataset(Data()), batch_sampler=sampler, collate_fn=sampler.collate_fn(), num_workers=workers)

    everything = [mb.samples for _, mb in new(0)]
    for workers in (0, 2):
        loader = new(workers)
        it = iter(loader)
        for _ in range(7):
            next(it)
        state = loader.state_dict()
        again = new(workers)
        again.load_state_dict(state)
        assert [mb.samples for _, mb in again] == everything[7:]
    # Through PlanLoader the trainer's step counts.
    mine = graphopt.PlanLoader(Data(), folder, rank=0, loader_class=stateful, num_workers=2)
    mine.load_state_dict(mine.state_dict(5))
    assert read(mine)[0][1] == 5


def test_accelerate_does_not_shard_it_twice(folder, world, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    from accelerate.data_loader import BatchSamplerShard

    loader = graphopt.PlanLoader(Data(), folder, rank=0)
    with monkeypatch.context() as m:
        m.delenv("WORLD_SIZE")  # accelerate would start a process group
        assert accelerate.Accelerator(cpu=True).prepare(loader) is loader
    # A plain DataLoader around the sampler would be; accumulate then stops before a collective can hang.
    sampler = graphopt.PlanBatchSampler(folder, rank=0)
    shard = BatchSamplerShard(sampler, num_processes=2, process_index=0, even_batches=False)
    model = torch.nn.Linear(1, 1)
    loader = torch.utils.data.DataLoader(sampler.dataset(Data()), batch_sampler=shard, collate_fn=sampler.collate_fn())

    def train():
        for _, mb in loader:
            with graphopt.accumulate(model, mb):
                pass

    with pytest.raises(ConfigError, match="sharded twice"):
        train()


def test_own_data_loader_needs_both_ends(folder, world):
    sampler = graphopt.PlanBatchSampler(folder, rank=0)
    with pytest.raises(ConfigError, match="lost their place"):
        next(iter(torch.utils.data.DataLoader(Data(), batch_sampler=sampler, collate_fn=sampler.collate_fn())))
    with pytest.raises(ConfigError, match="lost their place"):
        sampler.dataset(Data()).__getitems__([1, 2])
    assert type(next(iter(sampler))) is MicrobatchIds


# ---- bad input, one process


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


# ---- several processes


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
