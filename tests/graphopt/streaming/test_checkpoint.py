"""State dicts with stock names, shapes and dtypes, and exact resume: case C18."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
from resident import OPTIONS, differing, train
from tiny_dit import TinyDiT, inputs
from torch import nn

import graphopt
from graphopt.errors import CheckpointError, StreamError
from graphopt.streaming import checkpoint, dcp, loading

ADAM = dict(lr=1e-2)


class C18(nn.Module):
    """a, tanh, c, b: b's weight is a's, c's is frozen."""

    def __init__(self, seed=0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        a, c, b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        b.weight = a.weight
        c.weight.requires_grad_(False)
        self.parts = nn.ModuleList([a, nn.Sequential(nn.Tanh(), c), b])

    def forward(self, x):
        for p in self.parts:
            x = p(x)
        return x


def fresh(model, ema=None, **kwargs):
    graphopt.stream(model, "cpu", resident=[], **kwargs)
    opt = graphopt.HostAdamW(model.parameters(), **ADAM, ema=ema)
    return model, opt, torch.compile(model, backend="graphopt", options=OPTIONS)


@pytest.mark.parametrize(("build", "dtype"), [
    (C18, torch.float32), (C18, torch.bfloat16), (TinyDiT, torch.bfloat16),
    pytest.param(TinyDiT, torch.float32, marks=pytest.mark.nightly),
])
def test_c18_resume_is_exact(build, dtype, tmp_path) -> None:
    x = (torch.randn(4, 6),) if build is C18 else inputs()
    x = tuple(v.to(dtype) for v in x)
    straight, opt, step = fresh(build(seed=1).to(dtype))
    train(step, opt, x, steps=6)
    want, want_state = straight.state_dict(), opt.state_dict()
    first, opt1, step1 = fresh(build(seed=1).to(dtype))
    train(step1, opt1, x, steps=3)
    torch.save({"model": first.state_dict(), "opt": opt1.state_dict()}, tmp_path / "c.pt")  # right after step()
    saved = torch.load(tmp_path / "c.pt")
    resumed, opt2, step2 = fresh(build(seed=9).to(dtype))
    resumed.load_state_dict(saved["model"])
    opt2.load_state_dict(saved["opt"])
    train(step2, opt2, x, steps=3, start=3)
    assert differing(resumed.state_dict(), want) == {}
    got_state = opt2.state_dict()
    assert got_state["param_groups"] == want_state["param_groups"]
    assert got_state["state"].keys() == want_state["state"].keys()
    for i, s in want_state["state"].items():
        assert s.keys() == got_state["state"][i].keys()
        assert all(torch.equal(v, got_state["state"][i][k]) for k, v in s.items()), i


def test_c18_stock_names_shapes_and_sharing(tmp_path) -> None:
    stock = C18(seed=1)
    model, opt, step = fresh(C18(seed=1))
    state = model.state_dict()
    assert {k: (v.shape, v.dtype) for k, v in state.items()} == {k: (v.shape, v.dtype) for k, v in stock.state_dict().items()}
    assert len(state) == 4
    assert len({v.data_ptr() for v in state.values()}) == 3, "tied tensors still share storage"
    assert all(not v.is_meta and v.numel() for v in state.values())
    train(step, opt, (torch.randn(4, 6),), steps=2)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    plain = C18(seed=5)
    plain.load_state_dict(torch.load(tmp_path / "m.pt"))
    assert differing(plain.state_dict(), model.state_dict()) == {}


def test_state_goes_from_and_to_torch() -> None:
    """Three steps of torch.optim.AdamW, three of HostAdamW: as six of either, up to the order of sums."""
    x = inputs()
    stock = TinyDiT()
    adam = torch.optim.AdamW(stock.parameters(), eps=1e-3, **ADAM)
    train(stock, adam, x, steps=3)
    model = graphopt.stream(TinyDiT(seed=4), "cpu", resident=[])
    opt = graphopt.HostAdamW(model.parameters(), eps=1e-3, **ADAM)
    model.load_state_dict(stock.state_dict())
    opt.load_state_dict(adam.state_dict())
    step = torch.compile(model, backend="graphopt", options=OPTIONS)
    train(step, opt, x, steps=3, start=3)
    train(stock, adam, x, steps=3, start=3)
    assert max(differing(model.state_dict(), stock.state_dict()).values()) < 1e-5
    back = torch.optim.AdamW(TinyDiT().parameters(), **ADAM)
    back.load_state_dict(opt.state_dict())
    assert all(int(s["step"]) == 6 for s in back.state.values())


def test_a_part_of_the_model_has_its_state_too() -> None:
    model, _, _ = fresh(TinyDiT(seed=2))
    part = model.blocks[1].state_dict()
    assert differing(part, TinyDiT(seed=2).blocks[1].state_dict()) == {}
    model.blocks[1].load_state_dict(TinyDiT(seed=3).blocks[1].state_dict())
    assert differing(model.blocks[1].state_dict(), TinyDiT(seed=3).blocks[1].state_dict()) == {}
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.blocks[1].load_state_dict({k: v[:1] for k, v in part.items()})
    assert model.blocks[1].qkv.weight is next(p for n, p in model.named_parameters() if n == "blocks.1.qkv.weight")


def test_a_part_of_a_state_leaves_the_other_masters_alone() -> None:
    """strict=False, as adapters are loaded: what is not in it keeps the low half of its fp32 value."""
    model, opt, step = fresh(TinyDiT(seed=2).bfloat16())
    train(step, opt, tuple(v.bfloat16() for v in inputs()), steps=2)
    masters = lambda: [s["master"].clone() for s in opt.state_dict()["state"].values()]
    before, value = masters(), torch.ones_like(model.state_dict()["blocks.1.table"])
    assert any((m != m.bfloat16()).any() for m in before), "there is a low half"
    model.load_state_dict({"blocks.1.table": value}, strict=False)
    names = [n for n, _ in model.named_parameters()]
    for name, old, new in zip(names, before, masters()):
        assert torch.equal(new, value.float() if name == "blocks.1.table" else old), name


def test_a_state_of_another_model_is_refused_whole() -> None:
    model, opt, step = fresh(TinyDiT())
    x = inputs()
    train(step, opt, x, steps=1)
    before = {i: {k: v.clone() for k, v in s.items()} for i, s in opt.state_dict()["state"].items()}
    bad = opt.state_dict()
    bad["state"] = {**bad["state"], 7: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}}
    with pytest.raises(StreamError, match="shape"):
        opt.load_state_dict(bad)
    bad = opt.state_dict()
    bad["param_groups"][0]["amsgrad"] = True
    with pytest.raises(StreamError, match="amsgrad"):
        opt.load_state_dict(bad)
    after = opt.state_dict()["state"]
    assert all(torch.equal(v, after[i][k]) for i, s in before.items() for k, v in s.items())


def test_meta_model_is_loaded_straight_into_the_store() -> None:
    with torch.device("meta"):
        model = TinyDiT()
    graphopt.stream(model, "cpu", resident=[])
    step = torch.compile(model, backend="graphopt", options=OPTIONS)
    x = inputs()
    with pytest.raises(Exception, match="never loaded"), torch.no_grad():
        step(*x)
    model.load_state_dict(TinyDiT(seed=6).state_dict())
    with torch.no_grad():
        assert torch.equal(step(*x), TinyDiT(seed=6)(*x))


def test_weights_from_safetensors(tmp_path) -> None:
    from safetensors.torch import save_file

    source = TinyDiT(seed=6)
    state = source.state_dict()
    save_file({k: v for k, v in state.items() if k.startswith("blocks.0")}, tmp_path / "a.safetensors")
    save_file({k: v for k, v in state.items() if not k.startswith("blocks.0")}, tmp_path / "b.safetensors")
    x = inputs()
    for weights in (tmp_path, [tmp_path / "a.safetensors", tmp_path / "b.safetensors"], state):
        torch._dynamo.reset()
        with torch.device("meta"):
            model = TinyDiT()
        graphopt.stream(model, "cpu", resident=[], weights=weights)
        assert differing(model.state_dict(), state) == {}
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="graphopt", options=OPTIONS)(*x), source(*x))
    for bad, match in (({k: v for k, v in state.items() if "head" not in k}, "missing: head"),
                       ({**state, "more": torch.ones(1)}, "unknown to the model: more"),
                       ({**state, "blocks.1.table": torch.ones(3)}, "of another shape: blocks.1.table"),
                       (tmp_path / "none.safetensors", "does not exist")):
        with pytest.raises(StreamError, match=match):
            loading.load(model, bad)
        assert differing(model.state_dict(), state) == {}, "nothing was written"


def test_safetensors_of_diffusers_names(tmp_path) -> None:
    import json

    model, opt, step = fresh(C18(seed=1))
    train(step, opt, (torch.randn(4, 6),), steps=2)
    index = json.loads(loading.save_safetensors(model, tmp_path).read_text())
    assert set(index["weight_map"].values()) == {f.name for f in tmp_path.glob("*.safetensors")}
    assert not list(tmp_path.glob("*.part"))
    again = graphopt.stream(C18(seed=3), "cpu", resident=[], weights=tmp_path)
    assert differing(again.state_dict(), model.state_dict()) == {}


@pytest.mark.parametrize(("dtype", "ema"), [(torch.bfloat16, 0.9), *(pytest.param(torch.float32, e, marks=pytest.mark.nightly) for e in (None, 0.9))])
def test_dcp_resume_is_exact(dtype, ema, tmp_path) -> None:
    x = tuple(v.to(dtype) for v in inputs())
    make = lambda seed: fresh(TinyDiT(seed=seed).to(dtype), ema=ema, slots=2)
    straight, opt, step = make(1)
    train(step, opt, x, steps=2)
    checkpoint.save_checkpoint(straight, opt, tmp_path / "c")
    train(step, opt, x, steps=2, start=2)
    resumed, opt2, step2 = make(2)
    train(step2, opt2, x, steps=1)  # not new: everything must be replaced
    opt2.param_groups[0]["lr"] = 7.0
    checkpoint.load_checkpoint(resumed, opt2, tmp_path / "c")
    assert opt2.param_groups[0]["lr"] == ADAM["lr"]
    train(step2, opt2, x, steps=2, start=2)
    assert differing(resumed.state_dict(), straight.state_dict()) == {}
    for i, s in opt.state_dict()["state"].items():
        assert all(torch.equal(v, opt2.state_dict()["state"][i][k]) for k, v in s.items()), i


@pytest.mark.parametrize("whole", [True, False])
def test_frozen_weights_may_stay_out_of_a_jobs_checkpoints(whole, tmp_path) -> None:
    """As LoRA has them over a base that is elsewhere; a checkpoint that holds the base is read, too."""
    def make(seed):
        model = TinyDiT(seed=1)
        torch.manual_seed(seed)
        for name, p in model.named_parameters():
            p.requires_grad_("up" in name)
            if p.requires_grad:
                nn.init.normal_(p, std=0.2)
        return fresh(model)

    straight, opt, step = make(2)
    train(step, opt, inputs(), steps=2)
    jobs = graphopt.Checkpoints(tmp_path, about={"lora": 1}, frozen=whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # also torch's, that nothing is distributed
        folder = jobs.save(2, straight, opt)
    held = {k for k in dcp.shapes(folder) if k.startswith("model.")}
    everything = {f"model.{n}" for n in straight.state_dict()}  # buffers, too
    frozen = {f"model.{n}" for n, p in straight.named_parameters() if not p.requires_grad}
    assert len(everything) > len(frozen) + 4 > 4
    assert held == (everything if whole else everything - frozen)
    train(step, opt, inputs(), steps=2, start=2)
    resumed, opt2, step2 = make(3)
    assert graphopt.Checkpoints(tmp_path, about={"lora": 1}, frozen=False).restore(resumed, opt2) == 2
    train(step2, opt2, inputs(), steps=2, start=2)
    assert differing(resumed.state_dict(), straight.state_dict()) == {}
    if not whole:
        with pytest.raises(CheckpointError, match="another model"):
            graphopt.Checkpoints(tmp_path, about={"lora": 1}).restore(resumed, opt2)
        with pytest.raises(StreamError, match="missing: model"):
            checkpoint.load_checkpoint(resumed, opt2, folder)


def test_a_checkpoint_holds_no_second_copy(tmp_path, monkeypatch) -> None:
    """Masters are put together one at a time, and read back one at a time."""
    model, opt, step = fresh(TinyDiT(layers=6).bfloat16())
    train(step, opt, tuple(v.bfloat16() for v in inputs()), steps=1)
    made = []
    real = checkpoint.join

    def watched(*args):
        assert all(r() is None for r in made), "the one before is gone"
        value = real(*args)
        made.append(weakref.ref(value))
        return value

    monkeypatch.setattr(checkpoint, "join", watched)
    checkpoint.save_checkpoint(model, opt, tmp_path / "c")
    assert len(made) == sum(p.requires_grad for p in model.parameters())
    rooms = []
    take = dcp._Taker.commit_tensor
    monkeypatch.setattr(dcp._Taker, "commit_tensor", lambda self, *a: (rooms.append(len(self._room)), take(self, *a)))
    checkpoint.load_checkpoint(model, opt, tmp_path / "c")
    assert max(rooms) == 1
    held = dcp.shapes(tmp_path / "c")
    assert sum("/master" in k for k in held) == sum(p.requires_grad for p in model.parameters())


def test_a_checkpoint_of_another_model_is_refused_whole(tmp_path) -> None:
    model, opt, step = fresh(TinyDiT())
    train(step, opt, inputs(), steps=1)
    checkpoint.save_checkpoint(model, opt, tmp_path / "c")
    for other, match in ((TinyDiT(layers=5), "missing: model.blocks.4"), (TinyDiT(layers=3), "unknown"),
                         (TinyDiT(D=24), "another shape")):
        b, opt2, _ = fresh(other)
        before = {k: v.clone() for k, v in b.state_dict().items()}
        with pytest.raises(StreamError, match=match):
            checkpoint.load_checkpoint(b, opt2, tmp_path / "c")
        assert differing(b.state_dict(), before) == {}
