"""After a kill, an epoch's end or with another number of ranks: the same samples in the same steps."""

import json
import logging
import multiprocessing
import os
import random
import signal
import time
from collections import Counter

import pytest
import torch
from plan_data import ROWS, Data, read

import graphopt


def trainer(folder, rank, log, checkpoint, workers, epochs, skip=0):
    """A job that writes down what it trains on, saves after each step, and may be killed at any moment.

    skip: steps that its checkpoints are ahead of it, a fault.
    """
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
                    part.write_text(json.dumps(loader.state_dict(min(mb.step + 1 + skip, last_step(loader)))))
                    part.replace(checkpoint)


def last_step(loader):
    return loader.position.first_step + len(loader.plan)


def consumed(log):
    """{(epoch, step, k): rows}; a microbatch that ran again must have been the same."""
    found = {}
    for line in log.read_text().splitlines():
        if line.endswith("]]"):  # a kill may have cut the last one
            epoch, step, k, rows = json.loads(line)
            assert found.setdefault((epoch, step, k), rows) == rows
    return found


def size(log):
    return log.stat().st_size if log.exists() else 0


def killed(folder, rank, tmp_path, workers, kills, skip=0):
    """What each job consumed in two epochs; jobs are killed at random moments and started again until they finish."""
    context = multiprocessing.get_context("fork")
    rng = random.Random(workers)
    found = []
    while kills:
        log, checkpoint = tmp_path / f"log-{len(found)}", tmp_path / f"checkpoint-{len(found)}.json"
        code = None
        while code != 0:
            p = context.Process(target=trainer, args=(folder, rank, log, checkpoint, workers, 2, skip))
            more = size(log) + (rng.choice([0, *range(20, 800)]) if kills else 1 << 40)  # 0: while it still starts
            p.start()
            while p.is_alive() and size(log) < more:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.003))
            if p.is_alive():
                os.kill(p.pid, signal.SIGKILL)
                kills -= 1
            p.join()
            code = p.exitcode
            assert code in (0, -signal.SIGKILL)
        found.append(consumed(log))
    return found


@pytest.mark.parametrize(("rank", "workers"), [(0, 0), (1, 2)])
def test_killed_at_ten_random_moments_the_job_goes_on_exactly(folder, world, tmp_path, rank, workers):
    trainer(folder, rank, tmp_path / "straight", tmp_path / "unused", 0, 2)
    expected = consumed(tmp_path / "straight")
    jobs = killed(folder, rank, tmp_path, workers, 10)  # ten with workers and ten without
    assert all(job == expected for job in jobs)
    assert Counter(r for (e, _, _), rows in expected.items() for r in rows if e == 0).most_common(1)[0][1] == 1


def test_a_checkpoint_one_step_ahead_would_be_noticed(folder, world, tmp_path):
    trainer(folder, 0, tmp_path / "straight", tmp_path / "unused", 0, 2)
    expected = consumed(tmp_path / "straight")
    assert any(job != expected for job in killed(folder, 0, tmp_path, 0, 4, skip=1))


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
