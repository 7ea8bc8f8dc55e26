"""What a rank reads from a plan: everything once, with its place in the step, through any loader."""

from collections import Counter

import numpy as np
import pytest
import torch
from plan_data import ROWS, TOKENS, Data, make, read

import graphopt
from graphopt.errors import ConfigError, PlanInfeasible
from graphopt.loading.microbatch import MicrobatchIds
from graphopt.schedule.costmodel import CostFit, MemoryModel
from graphopt.schedule.dataset import Samples
from graphopt.schedule.planner import plan_batches


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
