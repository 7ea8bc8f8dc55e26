"""Unequal numbers of microbatches over two processes: no hang, and one process's gradients."""

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt.errors import ConfigError
from graphopt.loading.microbatch import MicrobatchInfo
from graphopt.schedule.bench import Shape

D = 32
STEPS = 2


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(D, elementwise_affine=False)
        self.up, self.down = torch.nn.Linear(D, 2 * D), torch.nn.Linear(2 * D, D)
        self.table = torch.nn.Parameter(torch.randn(1, 3, D) / D**0.5)

    def forward(self, x, temb):
        scale, shift, gate = (self.table + temb).chunk(3, dim=1)
        return x + gate * self.down(torch.nn.functional.gelu(self.up(self.norm(x) * (1 + scale) + shift)))


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(D, 4)
        self.recompute = False

    def forward(self, x, temb):
        for block in self.blocks:
            x = checkpoint(block, x, temb, use_reentrant=False) if self.recompute else block(x, temb)
        return self.head(x)


def build():
    torch.manual_seed(3)
    return Stack()


def microbatches(counts, steps, sync="step", weight="token"):
    """Per step and rank: (info, x, temb), sizes all different."""
    made = []
    for step in range(steps):
        sizes = [[(1 + (step + r + k) % 3, 5 + 2 * k + 3 * r + step) for k in range(n)] for r, n in enumerate(counts)]
        total = sum((b * s if weight == "token" else b) for row in sizes for b, s in row)
        made.append([])
        for r, row in enumerate(sizes):
            g = torch.Generator().manual_seed(100 * step + r)
            made[-1].append([
                (MicrobatchInfo(0, step, step, k, len(row), len(counts) / total, Shape(b, 1, 1, s), b * s, tuple(range(b)), sync, 1.0, None),
                 torch.randn(b, s, D, generator=g), torch.randn(b, 3, D, generator=g))
                for k, (b, s) in enumerate(row)
            ])
    return made


def loss_sum(out, weight="token"):
    per_token = out.square().mean(-1)
    return per_token.sum() if weight == "token" else per_token.mean(1).sum()


def reference(counts, steps, weight="token"):
    """One process, the whole batch of every step."""
    model = build()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    grads = []
    for step in microbatches(counts, steps, weight=weight):
        for row in step:
            for mb, x, temb in row:
                (loss_sum(model(x, temb), weight) * mb.loss_scale / len(counts)).backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
        opt.step()
        opt.zero_grad()
    return grads


CASES = [  # counts per rank, wrapper, weight, compiled with graphopt
    ((1, 3), "fsdp2", "token", True),
    ((2, 5), "fsdp2", "token", True),
    ((1, 3), "ddp", "token", True),
    ((2, 5), "ddp", "token", True),
    ((3, 1), "fsdp2", "sample", False),
    ((1, 3), "fsdp2, blocks recomputed", "token", False),
    ((2, 2), "zero3", "token", False),
]


def wrapped(wrap, compile):
    model = build()
    options = {"graphopt.compiler": "aot_eager", "graphopt.select": "all"}
    if wrap == "ddp":
        if compile:
            model.compile(backend="graphopt", options=options, dynamic=True)
        return torch.nn.parallel.DistributedDataParallel(model)
    for block in model.blocks:
        if compile:
            block.compile(backend="graphopt", options=options, dynamic=True)
        fully_shard(block)  # the default reshards: accumulate has to change it
    model.recompute = wrap.endswith("recomputed")
    return fully_shard(model)


def train(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    torch.set_num_threads(1)
    for i, (counts, wrap, weight, compile) in enumerate(CASES):
        model = wrapped(wrap, compile)
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        found = []
        torch._dynamo.reset()
        for step in microbatches(counts, STEPS, "microbatch" if wrap == "zero3" else "step", weight):
            for mb, x, temb in step[rank]:
                with graphopt.accumulate(model, mb):
                    (loss_sum(model(x, temb), weight) * mb.loss_scale).backward()
            grads = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
            found.append({n: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for n, g in grads.items()})
            opt.step()
            opt.zero_grad()
        if compile:
            sites = graphopt.last_report()
            assert sites.count("modulate", what="rewritten") >= 1
            assert sites.count("gate", what="rewritten") >= 1
        torch.save(found, f"{folder}/{rank}-{i}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # everything is saved; torch's threads sometimes abort the process when the interpreter takes them down


def joined(context, seconds):
    """False (and the processes are killed) if they have not ended in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if context.join(timeout=1):
            return True
    for p in context.processes:
        p.kill()
    return False


def test_unequal_counts_give_one_process_gradients(tmp_path):
    context = mp.start_processes(train, (str(tmp_path),), 2, join=False, start_method="spawn")
    assert joined(context, 400), "the processes hang"
    for i, (counts, wrap, weight, _) in enumerate(CASES):
        expected = reference(counts, STEPS, weight)
        for rank in range(2):
            for got, grads in zip(torch.load(tmp_path / f"{rank}-{i}.pt"), expected, strict=True):
                assert got.keys() == grads.keys()
                for name, e in grads.items():
                    assert e.norm() > 0
                    assert ((got[name] - e).norm() / e.norm()).item() <= 1e-6, (counts, wrap, name)


def info(step, k, K, iteration=1, sync="step"):
    return MicrobatchInfo(0, step, step, k, K, 1.0, Shape(1, 1, 1, 5), 5, (0,), sync, 1.0, None, iteration)


@pytest.mark.parametrize(
    ("order", "fails"),
    [
        ([(0, 0, 2), (0, 1, 2), (1, 0, 1)], None),
        ([(0, 0, 3), (0, 2, 3)], "microbatch 3 of 3 of step 0 comes after 1 of 3"),  # sharded twice over two ranks
        ([(0, 0, 2), (1, 0, 2)], "microbatch 1 of 2 of step 1 comes after 1 of 2 of step 0"),
        ([(0, 1, 2)], "microbatch 2 of 2 of step 0 comes at the start"),
        ([(0, 0, 2), (0, 0, 2)], "microbatch 1 of 2"),
    ],
)
def test_a_gap_is_an_error_and_not_a_hang(order, fails):
    model = build()

    def run():
        for step, k, K in order:
            with graphopt.accumulate(model, info(step, k, K)):
                pass

    if fails is None:
        return run()
    with pytest.raises(ConfigError, match=fails):
        run()
    with graphopt.accumulate(model, info(5, 0, 2)):  # and the next one starts anew
        pass


def test_a_new_iteration_or_a_failed_microbatch_starts_anew():
    model = build()
    with graphopt.accumulate(model, info(3, 0, 2)):
        pass
    with graphopt.accumulate(model, info(3, 0, 2, iteration=2)):
        pass
    with pytest.raises(ZeroDivisionError), graphopt.accumulate(model, info(3, 1, 2, iteration=2)):
        raise ZeroDivisionError
    with graphopt.accumulate(model, info(3, 0, 2, iteration=2)):
        pass


def test_zero3_cannot_run_a_plan_of_unequal_counts():
    with pytest.raises(ConfigError, match="different numbers"), graphopt.accumulate(build(), info(0, 0, 1), reshard=True):
        pass
    with graphopt.accumulate([build(), build()], info(0, 0, 1, sync="microbatch"), reshard=True):
        pass
