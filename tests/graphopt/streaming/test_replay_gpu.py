"""Layers replayed as CUDA graphs on a real GPU: the weights of plain launches, bit by bit."""

from __future__ import annotations

import pytest
import torch
from on_gpu import Reference, on_gpu, pair, same, streamed, wide
from resident import train
from tiny_dit import TinyDiT, inputs
from torch.utils import _pytree as pytree

import graphopt
from graphopt.streaming import attach, replay
from graphopt.streaming.link import CudaLink

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]


@pytest.mark.parametrize("update", ["deferred", "priority"])
@pytest.mark.parametrize(("slots", "resident"), [(1, ()), (3, ()), (2, "auto")])
def test_replayed_graphs_change_nothing(update: str, slots: int, resident) -> None:
    a, b, x = pair()
    want = train(a, Reference(a, resident=("blocks.0", "blocks.1") if resident else ()), x)
    opt, step = streamed(b, slots, update, resident=resident, graphs="on")
    assert train(step, opt, x) == want
    same(b, a)
    replays = attach.engine_of(b).replays
    stay = 2 if resident else 0
    assert 2 * (slots + stay) <= replays.recorded <= 3 * slots + 2 * stay  # a backward per slot and slab
    assert replays.replayed == 2 * (5 * 7 - 3)


def test_graphs_are_recorded_again_for_another_ring() -> None:
    a, b, x = pair()
    reference = Reference(a)
    opt, step = streamed(b, 2, graphs="on")
    for start, slots in ((0, 3), (5, 1), (10, 2)):
        assert train(step, opt, x, start=start) == train(a, reference, x, start=start)
        opt.flush()
        assert attach.engine_of(b).replays.recorded
        attach.engine_of(b).set_slots(slots)
    same(b, a)


def test_auto_records_where_launches_show() -> None:
    a, b, x = pair(checkpoint=False)
    _, step = streamed(b, 7, slow=1, graphs="auto")
    replays = attach.engine_of(b).replays
    with torch.no_grad():  # all layers are in slots and no update is awaited: only launches take time
        want = a(*x)
        for _ in range(2 * replay.RECENT // 7):
            assert torch.equal(step(*x), want)
        assert replays.active
        for _ in range(3):
            assert torch.equal(step(*x), want)
    assert replays.replayed


def test_auto_launches_plainly_where_kernels_are_long() -> None:
    model = TinyDiT(layers=7, D=2048).train()
    x = on_gpu(inputs(B=2, S=8192))  # some milliseconds a layer
    opt, step = streamed(model, 2, slow=1, graphs="auto")
    train(step, opt, x, steps=6)
    replays = attach.engine_of(model).replays
    assert len(replays._recent) == replay.RECENT
    assert not replays.active


def test_what_a_layer_does_wrong_is_raised_and_what_cannot_be_recorded_is_not(caplog) -> None:
    link = CudaLink(torch.device("cuda"))

    def run(work):
        replays = replay.Replays(link, "on")
        x = torch.ones(4, device="cuda")
        for _ in range(replay.WARM):
            replays.run("code", [], [x], lambda given: [given[0] * 2])
        return replays.run("code", [], [x], work), replays

    with caplog.at_level("WARNING"):
        found, replays = run(lambda given: [given[0] * given[0].sum().item()])
    assert found is None
    assert replays.mode == "off"
    assert caplog.text.count("cannot be recorded as a CUDA graph") == 1
    with pytest.raises(RuntimeError, match="size"):
        run(lambda given: [given[0] + torch.ones(3, device="cuda")])
    found, replays = run(lambda given: [given[0] + 1])  # and the device is as before
    assert found[0].tolist() == [2.0] * 4
    assert replays.mode == "on"


def test_inductors_kernels_in_graphs() -> None:
    losses = []
    for graphs in ("off", "on"):
        torch._dynamo.reset()
        model, x = wide(4)
        model.bfloat16()
        x = pytree.tree_map(lambda v: v.bfloat16() if isinstance(v, torch.Tensor) and v.is_floating_point() else v, x)
        graphopt.stream(model, "cuda", slots=2, resident=1, graphs=graphs)
        opt = graphopt.HostAdamW(model.parameters(), lr=1e-3)
        step = torch.compile(model, backend="graphopt")
        losses.append(train(step, opt, x, steps=5))
        engine = attach.engine_of(model)
        assert (engine.replays.replayed > 0) == (graphs == "on")
        assert (min(engine.replays.nbytes) > 0) == (graphs == "on")
        products = 10  # of a Wan block; their gradients are written into the slab by the product itself
        assert engine.gradients.copied == 5 * 3 * (len(engine.store.layers[0].trained) - products)
    assert losses[0] == losses[1]
