"""What loops do beside forward, backward, step: leave a step out, fail in the middle, ask for some gradients only, save
half-way, touch parts of the model.  Equal to the resident model, or a StreamError that says what to do."""

from __future__ import annotations

import copy

import pytest
import torch
from resident import OPTIONS, checkpointed, differing, jitter, layers, loss_of, train
from streamed import ADAM, both
from tiny_dit import TinyDiT, inputs
from torch import nn

import graphopt
from graphopt.errors import ConfigError, StreamError, unwrap
from graphopt.streaming import attach
from graphopt.streaming.link import LateLink


def ready(model, **settings):
    graphopt.stream(model, "cpu", resident=[], link=LateLink(2))
    opt = graphopt.HostAdamW(model.parameters(), **ADAM, kernel="torch", **settings)
    return opt, torch.compile(model, backend="graphopt", options=OPTIONS)


def twins(**settings):
    """(optimizer, callable, model) resident, the same streamed, and inputs."""
    a, b, x = both()
    for layer in layers(a):
        checkpointed(layer)
    return (torch.optim.AdamW(a.parameters(), **ADAM), a, a), (*ready(b, **settings), b), x


def equal(a, b) -> None:
    assert differing(dict(b.state_dict()), dict(a.state_dict())) == {}


@pytest.mark.parametrize("forget", ["optimizer", "model"])
def test_a_step_left_out_after_clipping(forget) -> None:
    """As where the norm is not finite: the factor goes with its gradients."""
    (one, a, _), (two, step, b), x = twins()
    for i in range(4):
        left_out = i in (0, 2)
        for opt, f, m in ((one, a, a), (two, step, b)):
            loss_of(f, jitter(x, i)).backward()
            if opt is one:
                torch.nn.utils.clip_grad_norm_(a.parameters(), 0.05)
            else:
                opt.clip_grad_norm_(0.05)
            if not left_out:
                opt.step()
            (opt if forget == "optimizer" else m).zero_grad()
    loss_of(a, x).backward(), loss_of(step, x).backward()
    one.step(), two.step()  # not clipped, after a clip that was left out would have been
    equal(a, b)


def test_a_factor_is_not_for_later_gradients() -> None:
    (one, a, _), (two, step, b), x = twins()
    loss_of(step, x).backward()
    two.clip_grad_norm_(1e-3)
    b.zero_grad()
    loss_of(a, x).backward(), loss_of(step, x).backward()
    one.step(), two.step()
    equal(a, b)


@pytest.mark.parametrize("forget", ["optimizer", "model"])
def test_gradients_forgotten_in_the_middle_of_accumulation(forget) -> None:
    (one, a, _), (two, step, b), x = twins(update="priority", accumulate=2)
    loss_of(step, x).backward()
    (two if forget == "optimizer" else b).zero_grad()
    assert train(step, two, x, steps=2, micro=2) == train(a, one, x, steps=2, micro=2)
    equal(a, b)


@pytest.mark.parametrize("phase", ["forward", "train"])
@pytest.mark.parametrize("update", ["deferred", pytest.param("priority", marks=pytest.mark.nightly)])
def test_a_layer_fails_and_training_goes_on(update, phase) -> None:
    (one, a, _), (two, step, b), x = twins(update=update)
    assert train(step, two, x, steps=1) == train(a, one, x, steps=1)
    call = attach.engine_of(b).program().calls[-1 if update == "priority" else 1]
    kept = getattr(call, phase)

    def fails(*_):
        raise RuntimeError("boom")

    setattr(call, phase, fails)
    with pytest.raises(RuntimeError, match="boom"):
        loss_of(step, x).backward()
    setattr(call, phase, kept)
    two.zero_grad()
    assert train(step, two, x, steps=2, start=1) == train(a, one, x, steps=2, start=1)
    equal(a, b)
    engine = attach.engine_of(b)
    assert not any(engine.outstanding.values())
    assert not any(s.readers for s in engine.ring.slots)


@pytest.mark.parametrize("how", ["folder", "dicts"])
def test_after_a_failure_the_last_checkpoint_is_loaded_in_place(how, tmp_path) -> None:
    """Early updates have changed some weights when a backward fails: the checkpoint replaces all of them."""
    from graphopt.streaming import checkpoint

    (one, a, _), (two, step, b), x = twins(update="priority")
    assert train(step, two, x, steps=1) == train(a, one, x, steps=1)
    checkpoint.save_checkpoint(b, two, tmp_path / "c")
    kept = copy.deepcopy((dict(b.state_dict()), two.state_dict()))
    call = attach.engine_of(b).program().calls[0]  # the last one of a backward
    backward, loss = call.train, loss_of(step, jitter(x, 9))
    call.train = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    call.train = backward
    if how == "folder":
        checkpoint.load_checkpoint(b, two, tmp_path / "c")
    else:
        b.load_state_dict(kept[0])
        two.load_state_dict(kept[1])
    two.zero_grad()
    assert train(step, two, x, steps=2, start=1) == train(a, one, x, steps=2, start=1)
    equal(a, b)


def test_host_memory_for_a_second_backward_is_checked(monkeypatch) -> None:
    """One backward per step needs no sum; more of them do, in fp32, and nothing said so when the optimizer was made."""
    from graphopt.streaming import memory

    (one, a, _), (two, step, b), x = twins()
    loss_of(step, x).backward()
    need = 4 * sum(x.elements for x in two.store.layers)
    monkeypatch.setattr(memory, "available", lambda: need - 1)
    with pytest.raises(StreamError, match=f"the sum of several gradients needs .*{need} bytes"):
        loss_of(step, x).backward()
    monkeypatch.undo()
    two.zero_grad()
    assert train(step, two, x, steps=2, micro=2) == train(a, one, x, steps=2, micro=2)
    equal(a, b)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_would_never_run_are_told(hook) -> None:
    for resident in (0, 1):
        torch._dynamo.reset()
        model = graphopt.stream(TinyDiT(), "cpu", resident=resident)
        getattr(model.blocks[0].up.weight, hook)(lambda _: None)
        with pytest.raises(Exception, match=r"blocks\.0\.up\.weight has a hook") as caught:
            torch.compile(model, backend="graphopt", options=OPTIONS)(*inputs())
        assert isinstance(unwrap(caught.value), StreamError)


def test_a_failed_micro_batch_leaves_nothing_behind() -> None:
    two, step = ready(TinyDiT().train())
    x = inputs()
    train(step, two, x, steps=1)
    calls = []

    def fails(batch):
        loss = loss_of(step, batch)
        calls.append(batch)
        if len(calls) == 2:
            raise RuntimeError("boom")
        return loss

    with pytest.raises(RuntimeError, match="boom"):
        graphopt.layer_major(fails, [x, x, x])
    assert set(attach.engine_of(step._orig_mod).outstanding.values()) == {0}, "no forward waits for its backward"


@pytest.mark.parametrize("update", ["deferred", "priority"])
def test_gradients_of_inputs_leave_weights_alone(update) -> None:
    (one, a, _), (two, step, b), x = twins(update=update)
    assert train(step, two, x, steps=1) == train(a, one, x, steps=1)
    noise = x[0].clone().requires_grad_()
    found = [torch.autograd.grad(loss_of(f, (noise, x[1])), noise)[0] for f in (a, step)]
    assert torch.equal(*found)
    assert all(p.grad is None for p in b.parameters())
    one.zero_grad()  # the reference's way of recomputing layers does not know
    # and the weights' gradients may come after, through the same forward
    two_losses = loss_of(step, (noise, x[1]))
    torch.autograd.grad(two_losses, noise, retain_graph=True)
    two_losses.backward()
    loss_of(a, (noise, x[1])).backward()
    one.step(), two.step()
    equal(a, b)


def test_backward_of_other_tensors_trains_no_streamed_weight_and_says_so(caplog) -> None:
    two, step = ready(TinyDiT())
    model = step._orig_mod
    for inputs_of in ([model.embed.weight], list(model.parameters())):
        loss_of(step, inputs()).backward(inputs=inputs_of)
        assert model.embed.weight.grad is not None
        assert all(p.grad is None for p in model.blocks.parameters())
        with caplog.at_level("WARNING"):
            two.step()
        assert caplog.text.count("no streamed weight has a gradient") == 1
        caplog.clear()
        two.zero_grad()
    train(step, two, inputs(), steps=1)
    assert not caplog.text


def test_sampling_in_inference_mode_before_and_between_steps() -> None:
    (one, a, _), (two, step, b), x = twins()
    for i in range(2):
        with torch.inference_mode():
            assert torch.equal(step(*x), a(*x))
            assert torch.equal(b(*x), a(*x))
        assert train(step, two, x, steps=1, start=i) == train(a, one, x, steps=1, start=i)
    equal(a, b)


def test_a_second_step_with_the_same_gradients() -> None:
    two, step = ready(TinyDiT())
    loss_of(step, inputs()).backward()
    two.step()
    with pytest.raises(StreamError, match="used up"):
        two.step()
    two.zero_grad()
    two.step()  # nothing to do, as in torch


@pytest.mark.parametrize("update", ["priority", "in_backward"])
def test_half_a_step_is_neither_saved_nor_sampled_from(update, tmp_path) -> None:
    from graphopt.streaming import checkpoint

    two, step = ready(TinyDiT(), update=update)
    model, x = step._orig_mod, inputs()
    loss_of(step, x).backward()

    def sample(f):
        with torch.no_grad():
            f(*x)

    for use in (model.state_dict, two.state_dict, lambda: checkpoint.save_checkpoint(model, two, tmp_path / "c"),
                lambda: sample(step), lambda: sample(model)):
        with pytest.raises(StreamError, match=r"step\(\) was not called"):
            use()
    two.step()
    sample(step), sample(model)
    assert len(two.state_dict()["state"]) == len(list(model.parameters()))


def test_a_rate_changed_in_place_is_seen() -> None:
    two, step = ready(TinyDiT(), update="priority")
    two.param_groups[0]["lr"] = torch.tensor(1e-2)
    loss_of(step, inputs()).backward()
    two.param_groups[0]["lr"].mul_(2)
    with pytest.raises(StreamError, match="changed between backward and step"):
        two.step()


def test_values_written_to_a_handle_are_told() -> None:
    _, step = ready(TinyDiT())
    nn.init.zeros_(step._orig_mod.blocks[0].out.weight)
    with pytest.raises(Exception, match=r"blocks\.0\.out\.weight was written to") as caught:
        step(*inputs())
    assert isinstance(unwrap(caught.value), StreamError)


def test_parts_are_not_moved_cast_or_copied(tmp_path) -> None:
    two, step = ready(TinyDiT())
    model = step._orig_mod
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for part in (model.blocks[1], model.blocks, model.blocks[1].qkv):
        assert part.to("cpu") is part
        with pytest.raises(StreamError, match="moved or cast"):
            part.to(torch.bfloat16)
        with pytest.raises(StreamError, match="copied"):
            copy.deepcopy(part)
        with pytest.raises(StreamError, match="pickled"):
            torch.save(part, tmp_path / "part.pt")
    assert copy.deepcopy(model.head).weight.dtype == torch.float32, "what is not streamed is as it was"
    assert differing(dict(model.state_dict()), before) == {}
    train(step, two, inputs(), steps=1)


@pytest.mark.parametrize(("settings", "match"), [
    (dict(amsgrad=True), "amsgrad"), (dict(maximize=True), "maximize"), (dict(decoupled_weight_decay=False), "decoupled"),
    (dict(lr=-1.0), "lr is -1.0"), (dict(betas=(0.9, 1.0)), "betas"), (dict(weight_decay=float("nan")), "weight_decay"),
])
def test_settings_of_a_group_that_would_be_ignored(settings, match) -> None:
    model = graphopt.stream(TinyDiT(), "cpu", resident=[])
    with pytest.raises(ConfigError, match=match):
        graphopt.HostAdamW([dict(params=list(model.parameters()), **settings)])
    opt = graphopt.HostAdamW([dict(params=list(model.parameters()), amsgrad=False, fused=True, name="all")])
    with pytest.raises(ConfigError, match=match):
        opt.add_param_group(dict(params=[nn.Parameter(torch.ones(2))], **settings))


def test_a_slice_of_another_tensor_is_a_parameter_like_any_other() -> None:
    a, b, x = both()
    wide = torch.randn(16, 20)
    kept = wide.clone()
    for m in (a, b):
        m.embed.weight = nn.Parameter(wide[:, :8])
        m.blocks[1].up.weight = nn.Parameter(torch.randn(32, 40, generator=torch.Generator().manual_seed(1))[:, :16])
    a.embed.weight = nn.Parameter(kept[:, :8].clone())
    for layer in layers(a):
        checkpointed(layer)
    two, step = ready(b)
    assert train(step, two, x, steps=2) == train(a, torch.optim.AdamW(a.parameters(), **ADAM), x, steps=2)
    equal(a, b)
    assert torch.equal(wide[:, 8:], kept[:, 8:]), "the rest of the tensor is somebody else's"


class Mixed(nn.Module):
    """A layer of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 8).bfloat16()

    def forward(self, x):
        return x + self.out(self.norm(x).bfloat16()).float()


def test_layers_of_two_dtypes_are_saved_by_torch(tmp_path) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(Mixed() for _ in range(3))
    want = {k: v.clone() for k, v in model.state_dict().items()}
    graphopt.stream(model, "cpu", resident=[])
    torch.save(model.state_dict(), tmp_path / "m.pt")
    assert differing(torch.load(tmp_path / "m.pt"), want) == {}
    torch.save(model.layers[0].norm.state_dict(), tmp_path / "norm.pt")
    assert (tmp_path / "norm.pt").stat().st_size < 4096, "a part's file holds that part"


def test_schedulers_that_keep_settings_in_the_groups_resume() -> None:
    def cycle(opt, last=-1):
        return torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=10, last_epoch=last)

    two, step = ready(TinyDiT(), )
    scheduler = cycle(two)
    train(step, two, inputs(), steps=3, scheduler=scheduler)
    again, _ = ready(TinyDiT(seed=3))
    again.load_state_dict(two.state_dict())
    cycle(again, last=3)
    assert set(again.param_groups[0]) == set(two.param_groups[0])
    assert again.param_groups[0]["max_lr"] == 1e-2


def test_a_default_device_is_not_the_hosts(tmp_path, request) -> None:
    """torch.set_default_device("cuda") moves every tensor that is made without a device; here to one without values.
    And torch.set_default_dtype makes numbers of those that are made without a dtype."""
    from graphopt.streaming import checkpoint

    a, b, x = both()
    a, b, x = a.bfloat16(), b.bfloat16(), tuple(v.bfloat16() for v in x)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    found = []
    for model, device in ((a, "cpu"), (b, "meta")):
        torch._dynamo.reset()
        with torch.device(device):
            opt, step = ready(model, ema=0.9)
        loss_of(step, x).backward()
        torch.set_default_dtype(torch.bfloat16 if model is b else torch.float32)
        with torch.device(device):
            opt.clip_grad_norm_(0.05)
            opt.step()
            opt.zero_grad()
            checkpoint.save_checkpoint(model, opt, tmp_path / device)
            checkpoint.load_checkpoint(model, opt, tmp_path / device)
            state = opt.state_dict()
            opt.load_state_dict(state)
        torch.set_default_dtype(torch.float32)
        assert all(v.device.type == "cpu" for s in state["state"].values() for v in s.values())
        assert all(v.dtype == torch.float32 for s in state["state"].values() for v in s.values()), "bf16 cannot count to 257"
        found.append((train(step, opt, x, steps=1), opt.ema_state_dict(model)))
    assert found[0][0] == found[1][0]
    equal(a, b)
    assert differing(*(f[1] for f in found)) == {}


def test_the_state_of_another_optimizer_is_refused() -> None:
    model = TinyDiT()
    adam = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    loss_of(model, inputs()).backward()
    adam.step()
    opt, _ = ready(TinyDiT())
    with pytest.raises(StreamError, match="decoupled_weight_decay"):
        opt.load_state_dict(adam.state_dict())


def test_a_step_before_the_last_backward_of_early_updates() -> None:
    two, step = ready(TinyDiT(), update="priority", accumulate=2)
    before = {k: v.clone() for k, v in step._orig_mod.state_dict().items()}
    loss_of(step, inputs()).backward()
    with pytest.raises(StreamError, match="step\\(\\) after fewer than accumulate=2"):
        two.step()
    assert differing(dict(step._orig_mod.state_dict()), before) == {}
    loss_of(step, inputs()).backward()
    two.step()
    assert {int(s["step"]) for s in two.state_dict()["state"].values()} == {1}
