"""HostAdamW's contract: case C17, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from resident import OPTIONS
from torch import nn

import graphopt
from graphopt.errors import ConfigError, StreamError


class One(nn.Module):
    """Two layers of one weight each: the output is the sum, so every gradient is what the loss says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x + self.w


def make(kernel="torch", **kwargs):
    model = graphopt.stream(One(), "cpu", resident=[])
    opt = graphopt.HostAdamW(model.parameters(), lr=1e-2, kernel=kernel, **kwargs)
    return model, opt, torch.compile(model, backend="graphopt", options=OPTIONS)


def step_and_flush(opt):
    """A thread that dies at once is told by step() already."""
    opt.step()
    opt.flush()


def weights(model):
    return [v.item() for v in model.state_dict().values()]


@pytest.mark.parametrize("kernel", ["torch", "cpp"])
@pytest.mark.parametrize("update", ["deferred", "priority", "in_backward"])
@pytest.mark.parametrize(("settings", "passes", "want"), [
    (dict(weight_decay=0.0), 1, 0.9900), (dict(weight_decay=0.1), 1, 0.9890), (dict(weight_decay=0.0, eps=1.0), 1, 0.99667),
    (dict(weight_decay=0.0, eps=1.0), 2, 0.9950),
])
def test_c17_closed_forms(kernel, update, settings, passes, want) -> None:
    model, opt, step = make(kernel, update=update, accumulate=passes, **settings)
    assert isinstance(opt, torch.optim.Optimizer)
    for _ in range(passes):
        (0.5 * step(torch.zeros(1))).sum().backward()
    opt.step()
    opt.flush()
    assert weights(model) == pytest.approx([want, want], abs=1e-5)


@pytest.mark.parametrize("kernel", ["torch", "cpp"])
def test_c17_accumulated_then_clipped(kernel) -> None:
    model, opt, step = make(kernel, weight_decay=0.0, eps=1.0)
    for _ in range(2):
        (0.5 * step(torch.zeros(1))).sum().backward()
    norm = opt.clip_grad_norm_(0.5 * 2**0.5)  # two weights with gradient 1 each
    assert norm.item() == pytest.approx(2**0.5)
    opt.step()
    assert weights(model) == pytest.approx([0.99667, 0.99667], abs=1e-5)


def test_c17_no_grad_and_frozen_stay() -> None:
    model = One()
    model.layers[1].w.requires_grad_(False)
    model.layers[0].unused = nn.Parameter(torch.ones(3))
    graphopt.stream(model, "cpu", resident=[])
    opt = graphopt.HostAdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    step = torch.compile(model, backend="graphopt", options=OPTIONS)
    for _ in range(3):
        step(torch.zeros(1)).sum().backward()
        opt.step()
        opt.zero_grad()
    state = model.state_dict()
    assert torch.equal(state["layers.0.unused"], torch.ones(3)), "no gradient: not even decayed, as in torch"
    assert state["layers.1.w"].item() == 1.0
    assert state["layers.0.w"].item() < 0.99
    assert len(opt.state_dict()["state"]) == 1


def test_gradients_can_be_read_and_are_none_after_zero_grad() -> None:
    model, opt, step = make()
    p = model.layers[0].w
    assert p.grad is None
    assert opt.gradient(p) is None
    (0.5 * step(torch.zeros(1))).sum().backward()
    assert p.grad is not None
    assert opt.gradient(p).item() == 0.5
    assert opt.grad_norm().item() == pytest.approx(0.5 * 2**0.5)
    for zero in (opt.zero_grad, model.zero_grad):
        zero()
        assert p.grad is None
        assert opt.gradient(p) is None
        (0.25 * step(torch.zeros(1))).sum().backward()
        assert opt.gradient(p).item() == 0.25, "nothing is left of the gradients before"


def test_torch_cannot_clip_or_step_what_is_elsewhere() -> None:
    model, opt, step = make()
    step(torch.zeros(1)).sum().backward()
    with pytest.raises(StreamError, match="opt.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    stock = torch.optim.AdamW(model.parameters())
    with pytest.raises(StreamError, match="host memory"):
        stock.step()
    with pytest.raises(StreamError, match="host memory"):
        model.layers[0].w.grad.add_(1)
    opt.step()
    assert weights(model) == pytest.approx([0.9899, 0.9899], abs=1e-4)


@pytest.mark.parametrize("update", ["priority", "in_backward"])
def test_early_updates_refuse_what_they_cannot_do(update) -> None:
    model, opt, step = make(update=update)
    step(torch.zeros(1)).sum().backward()
    with pytest.raises(StreamError, match="update='deferred'"):
        opt.clip_grad_norm_(1.0)
    with pytest.raises(StreamError, match="step\\(\\) was not called"):
        step(torch.zeros(1))
    opt.param_groups[0]["lr"] = 1.0
    with pytest.raises(StreamError, match="changed between backward and step"):
        opt.step()
    opt.param_groups[0]["lr"] = 1e-2
    opt.step()
    opt.zero_grad()
    step(torch.zeros(1)).sum().backward()
    opt.step()
    assert all(w < 0.99 for w in weights(model))


def test_deferred_orders_of_calls() -> None:
    model, opt, step = make(weight_decay=0.0)
    loss = step(torch.zeros(1)).sum()
    opt.zero_grad()  # between forward and backward
    loss.backward()
    opt.step()
    loss = step(torch.zeros(1)).sum()
    with pytest.raises(StreamError, match="zero_grad"):
        loss.backward()
    opt.zero_grad()
    loss = step(torch.zeros(1)).sum()
    step(torch.zeros(1)).sum().backward()
    opt.step()
    opt.zero_grad()
    with pytest.raises(StreamError, match="updated between this forward and its backward"):
        loss.backward()
    assert weights(model) == pytest.approx([0.98, 0.98], abs=1e-5)


def test_a_resident_layer_updated_before_its_backward_is_told() -> None:
    model = One()
    model.layers[1].w.requires_grad_(False)
    graphopt.stream(model, "cpu", resident=1)
    opt = graphopt.HostAdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    step = torch.compile(model, backend="graphopt", options=OPTIONS)
    loss = step(torch.zeros(1)).sum()
    step(torch.zeros(1)).sum().backward()
    opt.step()
    with pytest.raises(StreamError, match="updated between"):
        loss.backward()
    assert weights(model) == pytest.approx([0.99, 1.0])


def test_double_backward_and_retain_graph_are_refused() -> None:
    model, opt, step = make()
    x = torch.zeros(1, requires_grad=True)
    out = step(x).square().sum()
    with pytest.raises(StreamError, match="differentiated twice"):
        torch.autograd.grad(out, x, create_graph=True)
    out = step(x).square().sum()
    out.backward(retain_graph=True)
    with pytest.raises(StreamError, match="second backward"):
        out.backward()


def test_bad_settings() -> None:
    model = graphopt.stream(One(), "cpu", resident=[])
    for bad in (dict(lr=-1), dict(betas=(1.0, 0.9)), dict(update="later"), dict(accumulate=0), dict(ema=2.0), dict(kernel="gpu")):
        with pytest.raises(ConfigError):
            graphopt.HostAdamW(model.parameters(), **bad)
    with pytest.raises(StreamError, match="0 streamed models"):
        graphopt.HostAdamW(One().parameters())
    opt = graphopt.HostAdamW(model.parameters())
    with pytest.raises(StreamError, match="has a HostAdamW already"):
        graphopt.HostAdamW(model.parameters())
    del opt


def test_a_dying_thread_is_told_and_weights_stay() -> None:
    model, opt, step = make()
    before = copy.deepcopy(weights(model))

    def broken(*args):
        raise RuntimeError("out of order")

    opt.updates.kernel = broken
    step(torch.zeros(1)).sum().backward()
    with pytest.raises(StreamError, match="out of order"):
        step_and_flush(opt)
    with pytest.raises(StreamError, match="out of order"):
        step(torch.zeros(1))
    assert [x.weights[:4].view(torch.float32).item() for x in opt.store.layers] == before


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_few_pieces_and_the_same_bits(groups, dtype) -> None:
    """Neighbours with equal settings are one piece for the compiled kernel; its results are those of one by one."""
    from tiny_dit import TinyDiT

    from graphopt.codegen import adamw_cpp

    kernels = adamw_cpp.load(2), adamw_cpp.load(2)
    kernels[0].joins = False
    found, pieces = [], []
    for joins in (False, True):
        model = graphopt.stream(TinyDiT(D=20).to(dtype), "cpu", resident=[])
        flat = [p for p in model.parameters() if p.dim() == 1]
        parameters = [dict(params=flat, weight_decay=0.0), dict(params=[p for p in model.parameters() if p.dim() > 1])]
        opt = graphopt.HostAdamW(parameters if groups else model.parameters(), lr=1e-2, ema=0.9)
        opt.updates.kernel = lambda p, k=kernels[joins]: (pieces.append(len(p)), k(p))
        opt.updates.kernel.joins = joins
        g = torch.Generator().manual_seed(0)
        for layer in opt.store.layers:
            slab = opt.store.allocate_slab(layer)
            for e in layer.trained:
                e.gradient(slab).copy_(torch.randn(e.shape, generator=g))
            opt.engine.gradients.landings[layer].fresh += layer.trained
        opt.clip_grad_norm_(1.0)
        opt.step()
        opt.flush()
        found.append((model.state_dict(), opt.state_dict()["state"], opt.ema_state_dict(model)))
    n = len(opt.store.layers[0].trained)
    assert pieces[:4] == [n] * 4
    assert pieces[4:] == [1 if not groups else pieces[4]] * 4
    assert pieces[4] < n
    (a, sa, ea), (b, sb, eb) = found
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert all(torch.equal(ea[k], eb[k]) for k in ea)
    assert all(torch.equal(v, sb[i][k]) for i, s in sa.items() for k, v in s.items())
