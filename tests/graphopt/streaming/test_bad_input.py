"""What cannot be streamed says so, with the remedy, and the model is left as it was."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from resident import OPTIONS, differing
from tiny_dit import Block, TinyDiT, inputs
from torch import nn

import graphopt
from graphopt.errors import StreamError, unwrap
from graphopt.streaming import attach, memory


def untouched(model, before):
    assert differing(model.state_dict(), before) == {}
    assert all(p.data_ptr() for p in model.parameters())
    x = inputs()
    if isinstance(model, TinyDiT):
        model(*x).sum().backward()


@pytest.fixture
def model():
    return TinyDiT()


def refused(model, match, **kwargs):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StreamError, match=match) as caught:
        graphopt.stream(model, "cpu", **kwargs)
    assert caught.value.remedy
    untouched(model, before)


def test_host_memory_is_checked_first(model, monkeypatch) -> None:
    for p in model.parameters():  # what is on the host already is given back as it moves
        p.requires_grad_(True)
    monkeypatch.setattr(memory, "available", lambda: -1000)
    need = sum((p.numel() + 63) // 64 * 64 * 4 for b in model.blocks for p in b.parameters())
    refused(model, f"{need} bytes")
    monkeypatch.undo()
    graphopt.stream(model, "cpu")
    monkeypatch.setattr(memory, "available", lambda: 1000)
    with pytest.raises(StreamError, match="optimizer state"):
        graphopt.HostAdamW(model.parameters())


@pytest.mark.parametrize(("kwargs", "match"), [
    (dict(slots=0), "slots is 0"), (dict(resident=9), "resident=9"), (dict(resident="first"), "resident is 'first'"),
    (dict(resident=["blocks.9"]), "names no layer"), (dict(layers=["nothing.*"]), "no module matches"),
    (dict(resident=["blocks.*"]), "no layers to stream"),
])
def test_arguments(model, kwargs, match) -> None:
    refused(model, match, **kwargs)


def test_what_has_no_layers() -> None:
    refused(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "no layers to stream")


@pytest.mark.parametrize("mark", ["_hf_hook", "_diffusers_hook", "ds_id", "_fsdp_wrapped_module"])
def test_other_offload_systems(model, mark) -> None:
    setattr(model.blocks[1], mark, object())
    refused(model, "another system")


def test_accelerates_hooks_are_seen(model) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(StreamError, match="another system"):
        graphopt.stream(model, "cpu")


def test_weights_are_given_back_as_they_move() -> None:
    """A model on the host never exists twice: each parameter's memory is free before the next one is copied."""
    model = TinyDiT(layers=6, D=32)
    storages = {n: weakref.ref(p.untyped_storage()) for n, p in model.named_parameters() if n.startswith("blocks")}
    alive = []
    move = attach._move

    def watched(entry, pool):
        move(entry, pool)
        alive.append(sum(s() is not None for s in storages.values()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attach, "_move", watched)
        graphopt.stream(model, "cpu", resident=[])
    assert len(alive) == len(storages)
    assert alive == list(range(len(storages) - 1, -1, -1))


def test_fp16_training(model) -> None:
    refused(model.half().float().requires_grad_(True), "names no layer", resident=["x"])
    half = TinyDiT().half()
    with pytest.raises(StreamError, match="trained in torch.float16"):
        graphopt.stream(half, "cpu")


def test_world_size(model, monkeypatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    refused(model, "one of 4")


def test_streamed_twice(model) -> None:
    graphopt.stream(model, "cpu")
    with pytest.raises(StreamError, match="streamed already"):
        graphopt.stream(model, "cpu")


def test_moving_copying_pickling(model, tmp_path) -> None:
    graphopt.stream(model, "cpu")
    assert model.to("cpu") is model
    for move in (lambda: model.to(torch.bfloat16), lambda: model.to("meta"), lambda: model.half(), lambda: model.double()):
        with pytest.raises(StreamError, match="moved or cast"):
            move()
    with pytest.raises(StreamError, match="copied"):
        copy.deepcopy(model)
    with pytest.raises(StreamError, match="pickled"):
        torch.save(model, tmp_path / "m.pt")


def test_eager_use(model) -> None:
    twin = copy.deepcopy(model)
    graphopt.stream(model, "cpu")
    x = inputs()
    with pytest.raises(StreamError, match="eager mode with gradients"):
        model(*x)
    with torch.no_grad():
        assert torch.equal(model(*x), twin(*x))
    assert torch.isnan(model.blocks[0].qkv.weight).all(), "a handle read directly is NaN, never old or foreign numbers"


def test_trained_after_it_was_frozen(model) -> None:
    model.blocks[1].requires_grad_(False)
    graphopt.stream(model, "cpu", resident=[])
    model.blocks[1].requires_grad_(True)
    step = torch.compile(model, backend="graphopt", options=OPTIONS)
    with pytest.raises(Exception, match="was frozen when") as caught:
        step(*inputs())
    assert isinstance(unwrap(caught.value), StreamError)


class Reading(TinyDiT):
    def forward(self, x, t):
        return super().forward(x, t) * self.blocks[0].table.sum()


class Writing(Block):
    def forward(self, x, temb, rope=None):
        x.add_(1.0)
        return super().forward(x, temb, rope)


def step_and_flush(opt):
    """A thread that dies at once is told by step() already."""
    opt.step()
    opt.flush()


def compiled(model):
    graphopt.stream(model, "cpu", resident=[])
    opt = graphopt.HostAdamW(model.parameters())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    return opt, torch.compile(model, backend="graphopt", options=OPTIONS), before


def test_a_layer_that_cannot_be_cut_out() -> None:
    writing = TinyDiT()
    writing.blocks[1] = Writing()
    for model, match in ((Reading(), "read outside its layer"), (writing, "writes in place")):
        torch._dynamo.reset()
        opt, step, before = compiled(model)
        with pytest.raises(Exception, match=match) as caught:
            step(*inputs()).sum().backward()
        error = unwrap(caught.value)
        assert isinstance(error, StreamError)
        assert error.remedy
        opt.flush()
        assert differing(model.state_dict(), before) == {}


def test_cuda_graphs_are_refused(model) -> None:
    graphopt.stream(model, "cpu", resident=[])
    step = torch.compile(model, backend="graphopt", options={"graphopt.mode": "reduce-overhead"})
    with pytest.raises(Exception, match="CUDA graphs") as caught:
        step(*inputs())
    assert isinstance(unwrap(caught.value), StreamError)


def test_a_crash_in_a_step_leaves_the_checkpoint_before(tmp_path) -> None:
    x = inputs()
    opt, step, _ = compiled(TinyDiT())
    model = step._orig_mod
    step(*x).sum().backward()
    opt.step()
    opt.zero_grad()
    torch.save({"m": model.state_dict(), "o": opt.state_dict()}, tmp_path / "c.pt")
    want = torch.load(tmp_path / "c.pt")
    step(*x).sum().backward()
    opt.updates.kernel = lambda *a: (_ for _ in ()).throw(RuntimeError("crash"))
    with pytest.raises(StreamError, match="crash"):
        step_and_flush(opt)
    torch._dynamo.reset()
    opt2, step2, _ = compiled(TinyDiT(seed=8))
    step2._orig_mod.load_state_dict(want["m"])
    opt2.load_state_dict(want["o"])
    assert differing(step2._orig_mod.state_dict(), want["m"]) == {}
    for i, s in opt2.state_dict()["state"].items():
        assert all(torch.equal(v, want["o"]["state"][i][k]) for k, v in s.items())
