"""Streaming on a real GPU: equal weights with copies slowed until every race would show.

The reference is the resident model in eager mode: streamed weights under torch.optim.AdamW on host copies, the others
under graphopt's own kernel, on the device as in the streamed run.
"""

from __future__ import annotations

import copy

import pytest
import torch
from on_gpu import Reference, checkpointed_on_gpu, on_gpu, pair, same, streamed, trains_as_resident, wide
from resident import OPTIONS, jitter, layers, loss_of, train
from tiny_dit import TinyDiT, inputs
from torch.utils import _pytree as pytree

import graphopt
from graphopt.streaming import attach
from graphopt.streaming import checkpoint as checkpoints

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]
UPDATES = ["deferred", "priority", "in_backward"]


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_slowed_copies_change_nothing(update: str, slots: int) -> None:
    a, b, x = pair()
    want = train(a, Reference(a), x)
    opt, step = streamed(b, slots, update)
    assert train(step, opt, x) == want
    same(b, a)
    engine = attach.engine_of(b)
    assert engine.ring.misses == 0
    assert all(x.weights.is_pinned() for x in engine.store.layers)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("slots", [1, 2])
def test_first_layers_resident(slots: int, update: str, monkeypatch) -> None:
    monkeypatch.setattr(attach, "FEW_CPUS", 0)
    a, b, x = pair()
    want = train(a, Reference(a, resident=("blocks.0", "blocks.1")), x)
    opt, step = streamed(b, slots, update, resident="auto")
    assert train(step, opt, x) == want
    same(b, a)
    engine = attach.engine_of(b)
    assert [x.fqn for x in engine.resident] == ["blocks.0", "blocks.1"]
    assert engine.ring.misses == 0


@pytest.mark.parametrize("name", ["wan", "hunyuan_video", "flux", "ltx", "cogvideox"])
@pytest.mark.parametrize(("update", "graphs"), [("deferred", "off"), ("priority", "off"), ("deferred", "on")])
def test_zoo(name: str, update: str, graphs: str) -> None:
    model = trains_as_resident(name, update=update, graphs=graphs)
    assert bool(attach.engine_of(model).replays.replayed) == (graphs == "on")


@pytest.mark.parametrize("update", UPDATES)
def test_accumulated(update: str) -> None:
    a, b, x = pair()
    want = train(a, Reference(a), x, micro=3)
    opt, step = streamed(b, update=update, accumulate=3)
    assert train(step, opt, x, micro=3) == want
    same(b, a)


def test_clipped() -> None:
    a, b, x = pair()
    want = train(a, Reference(a), x, clip=0.05, clip_with=lambda c: torch.nn.utils.clip_grad_norm_(a.parameters(), c))
    opt, step = streamed(b)
    # the norm of all gradients is the same sum in another kernel
    torch.testing.assert_close(train(step, opt, x, clip=0.05, clip_with=opt.clip_grad_norm_), want, rtol=1e-6, atol=1e-6)
    for (name, p), q in zip(b.state_dict().items(), a.state_dict().values()):
        torch.testing.assert_close(p.cpu(), q.cpu(), rtol=0, atol=2e-6, msg=name)


def test_clipped_and_accumulated_with_an_average() -> None:
    a, b, x = pair()
    reference = Reference(a, ema=0.9)
    want = train(a, reference, x, micro=2, clip=0.05, clip_with=lambda c: torch.nn.utils.clip_grad_norm_(a.parameters(), c))
    opt, step = streamed(b, ema=0.9)
    got = train(step, opt, x, micro=2, clip=0.05, clip_with=opt.clip_grad_norm_)
    # sums of several gradients are on the host, where the norm is taken by another kernel
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    average = opt.ema_state_dict(b)
    for (name, _), q in zip(b.named_parameters(), a.parameters()):
        if name.startswith("blocks"):
            torch.testing.assert_close(average[name].cpu(), reference.average[id(q)], rtol=1e-5, atol=1e-5, msg=name)


def tie(m):
    m.blocks[2].up.weight = m.blocks[0].up.weight
    m.blocks[3].out.bias = m.time.bias
    return m


def freeze(m):
    m.blocks[1].requires_grad_(False)
    m.blocks[2].up.requires_grad_(False)
    m.head.requires_grad_(False)
    return m


class Adapted(torch.nn.Module):
    """A linear layer with a low-rank addition, as peft makes them."""

    def __init__(self, base) -> None:
        super().__init__()
        self.base = base
        self.lora_a = torch.nn.Linear(base.in_features, 2, bias=False)
        self.lora_b = torch.nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))


def adapt(m):
    torch.manual_seed(3)
    for block in m.blocks:
        block.qkv, block.up = Adapted(block.qkv), Adapted(block.up)
    for n, p in m.named_parameters():
        p.requires_grad_("lora" in n)
    return m


def checkpoint(m):
    m.checkpoint = True
    return m


@pytest.mark.parametrize("update", ["deferred", "priority"])
@pytest.mark.parametrize("change", [freeze, adapt])
def test_frozen_and_adapted(change, update) -> None:
    a, b, x = pair(change)
    want = train(a, Reference(a), x)
    opt, step = streamed(b, update=update)
    assert train(step, opt, x) == want
    same(b, a)


def test_tied() -> None:
    a, b, x = pair(tie, checkpoint=False)
    want = train(a, Reference(a), x, steps=2)
    opt, step = streamed(b)
    torch.testing.assert_close(train(step, opt, x, steps=2), want, rtol=1e-5, atol=1e-5)
    assert b.blocks[0].up.weight is b.blocks[2].up.weight


def test_user_checkpoints() -> None:
    a, b, x = pair()
    want = train(a, Reference(a), x)
    opt, step = streamed(checkpoint(b))
    assert train(step, opt, x) == want
    same(b, a)


def test_dropout() -> None:
    a, b, x = pair(dropout=0.3, checkpoint=False)
    for layer in layers(a):
        checkpointed_on_gpu(layer)
    torch.manual_seed(5)
    want = train(a, Reference(a), x)
    torch.manual_seed(5)
    opt, step = streamed(b)
    assert train(step, opt, x) == want
    same(b, a)


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_resumed(update, tmp_path) -> None:
    a, b, x = pair()
    want = train(a, Reference(a), x, steps=6)
    opt, step = streamed(b, update=update)
    got = train(step, opt, x, steps=3)
    checkpoints.save_checkpoint(b, opt, tmp_path / "c")
    torch._dynamo.reset()
    again = TinyDiT(layers=7, D=32, seed=4).train()
    opt2, step2 = streamed(again, slots=3, update=update)
    checkpoints.load_checkpoint(again, opt2, tmp_path / "c")
    assert got + train(step2, opt2, x, steps=3, start=3) == want
    same(again, a)


@pytest.mark.parametrize("order", [[0, 1, 0, 1, 2], [3, 1, 2, 0], [0, 2, 5]])
def test_layers_reused_reordered_skipped(order) -> None:
    a, b, x = pair(order=order, checkpoint=len(set(order)) == len(order))
    want = train(a, Reference(a), x, steps=2)
    opt, step = streamed(b)
    torch.testing.assert_close(train(step, opt, x, steps=2), want, rtol=1e-5, atol=1e-5)


def test_two_forwards_before_one_backward() -> None:
    def loss(m, x):
        return m(*x).square().mean() + m(x[0] * 0.5, x[1]).square().mean()

    a, b, x = pair()
    want = train(a, Reference(a), x, loss=loss)
    opt, step = streamed(b, slots=3)
    assert train(step, opt, x, loss=loss) == want
    same(b, a)


def test_layer_major() -> None:
    a, b, x = pair()
    batches = [x, on_gpu(inputs(seed=5))]
    reference = Reference(a)
    want = []
    for i in range(4):
        for k, z in enumerate(batches):
            want += train_half(a, z, 10 * i + k)
        reference.step()
        reference.zero_grad()
    opt, step = streamed(b)
    engine, got, moved = attach.engine_of(b), [], []
    for i in range(4):
        before = engine.ring.uploads, engine.gradients.downloads
        losses = graphopt.layer_major(lambda kz, i=i: loss_of(step, jitter(kz[1], 10 * i + kz[0])) / 2, list(enumerate(batches)))
        sum(losses).backward()
        got += [v.item() for v in losses]
        opt.step()
        opt.zero_grad()
        moved.append((engine.ring.uploads - before[0], engine.gradients.downloads - before[1]))
    assert got == want
    same(b, a)
    assert moved[1:] == [(2 * 7 - 2, 7)] * 3


def train_half(model, x, seed):
    loss = loss_of(model, jitter(x, seed)) / 2
    loss.backward()
    return [loss.item()]


def test_sequence_lengths_and_validation() -> None:
    a, b, _ = pair()
    reference = Reference(a)
    opt, step = streamed(b)
    for i, S in enumerate((60, 96, 140, 1, 60)):
        x = on_gpu(inputs(S=S))
        assert train(step, opt, x, steps=1, start=i) == train(a, reference, x, steps=1, start=i)
        with torch.no_grad():
            assert torch.equal(step(*x), a(*x))
    same(b, a)


def test_pageable_memory_is_slower_and_right(monkeypatch, caplog) -> None:
    from graphopt.streaming import memory

    runtime = torch.cuda.cudart()

    class Refusing:
        def cudaHostRegister(self, *_):
            return 2

        def cudaHostUnregister(self, address):  # models of other tests end here: what stays registered is never read again
            return runtime.cudaHostUnregister(address)

    monkeypatch.setattr(memory, "_warned", False)
    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    a, b, x = pair()
    want = train(a, Reference(a), x)
    with caplog.at_level("WARNING"):
        opt, step = streamed(b)
    assert caplog.text.count("pinning host memory was refused") == 1
    assert train(step, opt, x) == want
    same(b, a)
    assert not any(x.weights.is_pinned() for x in attach.engine_of(b).store.layers)


def test_a_timeline_of_real_events() -> None:
    _, b, x = pair()
    opt, step = streamed(b, update="priority", slow=1)
    train(step, opt, x, steps=2)
    opt.flush()
    with graphopt.stream_timeline(b) as line:
        train(step, opt, x, steps=1)
    for name in (f"blocks.{i}" for i in range(7)):
        of = lambda track, kind, name=name: [s for s in line.spans if (s.track, s.kind, s.name) == (track, kind, name)]
        (forward,), (backward,) = of("compute", "forward"), of("compute", "backward")
        (down,), (update,) = of("download", "download"), of("cpu", "optimizer")
        assert forward.end <= backward.start
        assert backward.start < down.start
        assert down.end <= update.start + 1e-3, "two clocks, aligned to well under a millisecond"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_and_the_compiled_optimizer(dtype: torch.dtype) -> None:
    model, x = wide(3)
    model.to(dtype)
    cast = lambda to: pytree.tree_map(lambda v: v.to(to) if isinstance(v, torch.Tensor) and v.is_floating_point() else v, x)
    exact = copy.deepcopy(model).double().cuda()
    loss_of(exact, cast(torch.float64)).backward()
    x = cast(dtype)
    graphopt.stream(model, "cuda", slots=2, resident=[])
    opt = graphopt.HostAdamW(model.parameters(), lr=1e-4)
    step = torch.compile(model, backend="graphopt")
    loss_of(step, x).backward()
    top, bottom = 0.0, 0.0
    for p, q in zip(model.parameters(), exact.parameters()):
        if q.grad is not None:
            top += (opt.gradient(p).cpu().double() - q.grad.cpu()).square().sum().item()
            bottom += q.grad.square().sum().item()
    assert (top / bottom) ** 0.5 < (1e-4 if dtype == torch.float32 else 3e-2)
    norm = opt.clip_grad_norm_(1e-3).item()
    assert abs(norm / bottom**0.5 - 1) < (1e-4 if dtype == torch.float32 else 2e-2)
    opt.step()
    opt.zero_grad()
    for _ in range(3):
        value = loss_of(step, x)
        value.backward()
        opt.step()
        opt.zero_grad()
    assert torch.isfinite(value)


@pytest.mark.parametrize("resident", [0, 2])
def test_device_bytes_are_those_of_the_plan(resident: int) -> None:
    """What is allocated between steps: slots, slabs, resident weights and their state, handles; no gradients."""
    # without what the allocator rounds up to; nothing is known before a process's first allocation
    asked = lambda: torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
    before = asked()
    model = TinyDiT(layers=6, D=768).bfloat16()
    plan = graphopt.stream_plan(model, tokens=12, slots=3, resident=resident)
    graphopt.stream(model, "cuda", slots=3, resident=resident)
    opt = graphopt.HostAdamW(model.parameters(), lr=1e-4)
    step = torch.compile(model, backend="graphopt", options=OPTIONS)
    train(step, opt, tuple(v.bfloat16() for v in on_gpu(inputs())), steps=2)
    opt.flush()
    torch.cuda.synchronize()
    want = plan.device_bytes - plan.device["resident gradients"]
    assert asked() - before == pytest.approx(want, rel=0.02)
    assert attach.engine_of(model).store.arena.nbytes == pytest.approx(plan.host_bytes, rel=0.02)
