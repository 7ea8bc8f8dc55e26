"""Weights after training streamed, against the resident model under torch.optim.AdamW: equal bit by bit."""

from __future__ import annotations

import copy

import pytest
import torch
from resident import OPTIONS, checkpointed, differing, layers, train
from streamed import ADAM, both, nightly, reference, streamed
from zoo import ZOO

import graphopt
from graphopt.streaming import attach
from graphopt.streaming.link import LateLink


@pytest.mark.parametrize("name", ["wan", "hunyuan_video", *nightly("flux", "ltx", "cogvideox")])
def test_zoo_trains_as_resident(name: str) -> None:
    a, inputs = ZOO[name].build()
    b = copy.deepcopy(a.train())
    want, _ = reference(a, inputs)
    got, opt = streamed(b, inputs, late=7)
    assert got == want
    assert differing(b.state_dict(), a.state_dict()) == {}
    ring = attach.engine_of(b).ring
    n = len(attach.engine_of(b).store.layers)
    assert ring.misses == 0
    assert ring.uploads == 5 * (2 * n - min(2, n)) + min(2, n), "forward and backward, less what stays at the turn"


@pytest.mark.parametrize("update", ["deferred", "priority", "in_backward"])
def test_orders_and_slots(update: str) -> None:
    a, b, x = both(layers=7)
    for layer in layers(a):
        checkpointed(layer)
    one = torch.optim.AdamW(a.parameters(), **ADAM)
    graphopt.stream(b, "cpu", slots=2, resident=[], link=LateLink(11))
    two = graphopt.HostAdamW(b.parameters(), **ADAM, update=update, kernel="torch")
    step, engine = torch.compile(b, backend="graphopt", options=OPTIONS), attach.engine_of(b)
    for i, slots in enumerate((1, 2, 3, 5, 7)):
        engine.set_slots(slots)
        for k in range(2):
            assert train(step, two, x, steps=1, start=2 * i + k) == train(a, one, x, steps=1, start=2 * i + k), slots
        assert engine.ring.misses == 0
    assert differing(b.state_dict(), a.state_dict()) == {}


@pytest.mark.parametrize("resident", [2, *nightly(["blocks.1", "blocks.3"])])
@pytest.mark.parametrize("update", ["priority", *nightly("deferred")])
def test_resident_layers_run_like_streamed_ones(resident, update) -> None:
    """Recomputed, of the same class, without a slot; their weights are ordinary parameters."""
    a, b, x = both()
    want, _ = reference(a, x)
    graphopt.stream(b, "cpu", slots=1, resident=resident, link=LateLink(4))
    opt = graphopt.HostAdamW(b.parameters(), **ADAM, update=update, kernel="torch")
    step = torch.compile(b, backend="graphopt", options=OPTIONS)
    assert train(step, opt, x) == want
    assert differing(b.state_dict(), a.state_dict()) == {}
    engine = attach.engine_of(b)
    stay = [b.blocks[0], b.blocks[1]] if resident == 2 else [b.blocks[1], b.blocks[3]]
    assert all(torch.isfinite(p).all() for m in stay for p in m.parameters())
    assert [x.fqn for x in engine.resident] == (["blocks.0", "blocks.1"] if resident == 2 else resident)
    program = engine.program()
    assert len({id(c.train) for c in program.calls}) == 1, "one class with the streamed ones"
    assert engine.ring.misses == 0


def test_the_ring_grows_into_spare_memory() -> None:
    a, b, x = both(layers=7)
    want, _ = reference(a, x)
    link = LateLink(3)
    graphopt.stream(b, "cpu", slots="auto", resident=[], link=link)
    opt = graphopt.HostAdamW(b.parameters(), **ADAM, kernel="torch")
    engine = attach.engine_of(b)
    link.spare = lambda: 4 * engine.store.layers[0].nbytes
    step = torch.compile(b, backend="graphopt", options=OPTIONS)
    got, seen = [], []
    for i in range(5):
        before = engine.ring.uploads
        got += train(step, opt, x, steps=1, start=i)
        seen.append((len(engine.ring.slots), engine.ring.uploads - before))
    assert got == want
    assert differing(b.state_dict(), a.state_dict()) == {}
    assert [n for n, _ in seen] == [5] * 5, "two, and three quarters of the room for four"
    assert engine.ring.misses == 0
    assert seen[-1][1] == 2 * 7 - 5


def test_clipped_by_the_global_norm() -> None:
    a, b, x = both()
    want, _ = reference(a, x, clip=0.05)
    got, _ = streamed(b, x, clip=0.05, late=1)
    assert got == want
    assert differing(b.state_dict(), a.state_dict()) == {}


@pytest.mark.parametrize("update", ["deferred", "priority", *nightly("in_backward")])
def test_accumulated(update: str) -> None:
    a, b, x = both()
    clip = 0.05 if update == "deferred" else None
    want, _ = reference(a, x, micro=3, clip=clip)
    got, _ = streamed(b, x, micro=3, clip=clip, update=update, accumulate=3, late=2)
    assert got == want
    assert differing(b.state_dict(), a.state_dict()) == {}


def test_param_groups_and_a_scheduler() -> None:
    def groups(m):
        flat = [p for n, p in m.named_parameters() if p.dim() == 1]
        return [dict(params=flat, weight_decay=0.0, lr=3e-3), dict(params=[p for p in m.parameters() if p.dim() > 1], betas=(0.8, 0.95))]

    a, b, x = both()
    for layer in layers(a):
        checkpointed(layer)
    one = torch.optim.AdamW(groups(a), **ADAM)
    want = train(a, one, x, scheduler=torch.optim.lr_scheduler.LambdaLR(one, lambda n: 1 / (1 + n)))
    graphopt.stream(b, "cpu", resident=[], link=LateLink(3))
    two = graphopt.HostAdamW(groups(b), **ADAM, kernel="torch")
    got = train(torch.compile(b, backend="graphopt", options=OPTIONS), two, x,
                scheduler=torch.optim.lr_scheduler.LambdaLR(two, lambda n: 1 / (1 + n)))
    assert got == want
    assert differing(b.state_dict(), a.state_dict()) == {}
    assert len(graphopt.last_report().graphs) == 1, "a schedule of learning rates compiles nothing again"


def test_frozen_parts() -> None:
    def freeze(m):
        m.blocks[1].requires_grad_(False)
        m.blocks[2].up.requires_grad_(False)
        m.head.requires_grad_(False)
        return m

    a, b, x = both()
    want, _ = reference(freeze(a), x)
    got, opt = streamed(freeze(b), x, late=4)
    assert got == want
    assert differing(b.state_dict(), a.state_dict()) == {}
    engine = attach.engine_of(b)
    assert engine.gradients.downloads == 5 * 3, "a frozen layer sends nothing down"
    assert engine.store.layers[1].slab is None
    assert not opt.state_dict()["state"].keys() & {i for i, p in enumerate(b.parameters()) if not p.requires_grad}


def test_tied_weights_stay_on_the_device() -> None:
    def tie(m):
        m.blocks[2].up.weight = m.blocks[0].up.weight
        m.head.weight = torch.nn.Parameter(m.embed.weight.detach().T.clone())
        m.blocks[3].out.bias = m.time.bias
        return m

    a, b, x = both()
    want, _ = reference(tie(a), x, checkpoint=False)
    got, _ = streamed(tie(b), x, late=5)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    gaps = differing(b.state_dict(), a.state_dict())
    assert max(gaps.values(), default=0) <= 1e-6, gaps
    assert b.blocks[0].up.weight is b.blocks[2].up.weight
    assert torch.isfinite(b.blocks[0].up.weight).all(), "shared weights are ordinary parameters"


def test_lora_by_peft() -> None:
    peft = pytest.importorskip("peft")

    def adapt(m):
        torch.manual_seed(3)
        m = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["qkv", "up"], init_lora_weights=False), m)
        for n, p in m.named_parameters():
            p.requires_grad_("lora" in n)
        return m

    a, b, x = both()
    want, _ = reference(adapt(a), x)
    got, _ = streamed(adapt(b), x, late=6)
    assert got == want
    assert differing(b.state_dict(), a.state_dict()) == {}
    engine = attach.engine_of(b)
    small = sum(p.numel() * 4 for n, p in b.blocks[0].named_parameters() if "lora" in n)
    assert engine.gradients.downloaded_bytes <= 5 * 4 * (small + 8 * 256), "only adapters' gradients come down"


@pytest.mark.parametrize("clip", [0.05, *nightly(None)])
def test_user_checkpointing_is_not_recomputed_twice(clip) -> None:
    a, b, x = both()
    b.checkpoint = True
    want, _ = reference(a, x, clip=clip)
    got, _ = streamed(b, x, clip=clip, late=7)
    assert got == want
    assert differing(b.state_dict(), a.state_dict()) == {}
    program = attach.engine_of(b).program()
    assert len(program.calls) == 4
    assert not any("checkpoint" in str(n.target) for c in program.calls for n in c.train.__self__.graph.nodes)


def test_moving_average() -> None:
    a, b, x = both()
    average = {k: p.detach().clone() for k, p in a.named_parameters()}
    for layer in layers(a):
        checkpointed(layer)
    one = torch.optim.AdamW(a.parameters(), **ADAM)
    for i in range(5):
        train(a, one, x, steps=1, start=i)
        for k, p in a.named_parameters():
            average[k].lerp_(p.detach(), 1 - 0.9)
    _, opt = streamed(b, x, ema=0.9, late=8)
    got = opt.ema_state_dict(b)
    assert differing(got, average) == {}


def test_dropout_draws_the_same_numbers_again() -> None:
    a, b, x = both(dropout=0.3)
    torch.manual_seed(5)
    want, _ = reference(a, x, random=True)
    torch.manual_seed(5)
    got, _ = streamed(b, x, late=9)
    assert got == want
    assert differing(b.state_dict(), a.state_dict()) == {}


def test_validation_between_steps() -> None:
    a, b, x = both()
    for layer in layers(a):
        checkpointed(layer)
    one = torch.optim.AdamW(a.parameters(), **ADAM)
    graphopt.stream(b, "cpu", resident=[], link=LateLink(2))
    two = graphopt.HostAdamW(b.parameters(), **ADAM, kernel="torch")
    step = torch.compile(b, backend="graphopt", options=OPTIONS)
    for i in range(3):
        assert train(step, two, x, steps=1, start=i) == train(a, one, x, steps=1, start=i)
        with torch.no_grad():
            assert torch.equal(step(*x), a(*x)), "compiled"
            assert torch.equal(b(*x), a(*x)), "eager layers fetch on demand"


@pytest.mark.parametrize("compiler", ["aot_eager", *nightly("eager")])
def test_autocast_is_that_of_the_forward(compiler) -> None:
    def loss(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            out = m(*x)
        return out.float().square().mean()

    a, b, x = both()
    for layer in layers(a):
        checkpointed(layer)
    for value in (loss(a, x), loss(a, x)):
        with torch.autocast("cpu", torch.bfloat16):  # the reference recomputes under the setting of its backward
            value.backward()
    graphopt.stream(b, "cpu", resident=[], link=LateLink(1))
    opt = graphopt.HostAdamW(b.parameters())
    step = torch.compile(b, backend="graphopt", options={**OPTIONS, "graphopt.compiler": compiler})
    for _ in range(2):
        loss(step, x).backward()
    for (name, p), q in zip(b.named_parameters(), a.parameters()):
        torch.testing.assert_close(opt.gradient(p), q.grad, rtol=2e-2, atol=1e-4, msg=name)


def test_bf16_is_an_fp32_master() -> None:
    from graphopt.codegen.adamw import split

    a, b, x = both()
    a, b = a.bfloat16(), b.bfloat16()
    x = tuple(v.bfloat16() for v in x)
    masters = {k: torch.nn.Parameter(p.detach().float()) for k, p in a.named_parameters()}
    opt = torch.optim.AdamW(masters.values(), **ADAM)
    for layer in layers(a):
        checkpointed(layer)

    class Masters:
        def step(self):
            for k, p in a.named_parameters():
                masters[k].grad = p.grad.float()
            opt.step()
            for k, p in a.named_parameters():
                p.data.copy_(split(masters[k].detach())[0])

        def zero_grad(self):
            a.zero_grad()

    want = train(a, Masters(), x)
    got, two = streamed(b, x, late=2)
    assert got == want
    assert differing(b.state_dict(), a.state_dict()) == {}
    state = two.state_dict()["state"]
    for i, (k, _) in enumerate(b.named_parameters()):
        assert torch.equal(state[i]["master"], masters[k].detach()), k


def test_the_compiled_optimizer_is_close_to_torch() -> None:
    a, b, x = both()
    for layer in layers(a):
        checkpointed(layer)
    adam = dict(lr=1e-2, eps=1e-3)  # the gradient of a key's bias is zero but for rounding: a small eps would amplify it
    want = train(a, torch.optim.AdamW(a.parameters(), **adam), x)
    graphopt.stream(b, "cpu", resident=[])
    opt = graphopt.HostAdamW(b.parameters(), **adam)
    got = train(torch.compile(b, backend="graphopt", options=OPTIONS), opt, x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert max(differing(b.state_dict(), a.state_dict()).values()) <= 1e-5
