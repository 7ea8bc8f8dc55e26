"""Streaming on a real GPU: equal weights with copies slowed until every race would show."""

from __future__ import annotations

import copy

import pytest
import torch
from resident import OPTIONS, checkpointed, differing, layers, loss_of, train
from torch.utils import _pytree as pytree
from zoo import ZOO, liven

import graphopt
from graphopt.streaming import attach
from graphopt.streaming.link import CudaLink

pytestmark = pytest.mark.gpu
ADAM = dict(lr=1e-2, weight_decay=0.1)


@pytest.fixture(autouse=True)
def _exact():
    """One algorithm per operator, so that two runs agree bit by bit."""
    backends = torch.backends.cuda
    before = backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.cudnn_sdp_enabled()
    backends.enable_flash_sdp(False), backends.enable_mem_efficient_sdp(False), backends.enable_cudnn_sdp(False)
    yield
    backends.enable_flash_sdp(before[0]), backends.enable_mem_efficient_sdp(before[1]), backends.enable_cudnn_sdp(before[2])


def build(n=5):
    _, inputs = ZOO["wan"].build()
    model = ZOO["wan"].build()[0]
    torch.manual_seed(0)
    model = type(model)(**{**{k: v for k, v in model.config.items() if not k.startswith("_")}, "num_layers": n,
                           "attention_head_dim": 32, "ffn_dim": 512})
    liven(model)
    for name, p in model.named_parameters():  # what stays on the GPU is updated there, with other rounding: frozen here
        p.requires_grad_(name.startswith("blocks."))
    return model.train(), pytree.tree_map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, inputs)


class HostReference:
    """torch.optim.AdamW on host copies of a resident model's weights."""

    def __init__(self, model) -> None:
        self.pairs = [(p, torch.nn.Parameter(p.detach().cpu())) for p in model.parameters() if p.requires_grad]
        self.opt = torch.optim.AdamW([q for _, q in self.pairs], **ADAM)

    def step(self) -> None:
        for p, q in self.pairs:
            q.grad = p.grad.cpu()
        self.opt.step()
        for p, q in self.pairs:
            p.data.copy_(q)

    def zero_grad(self) -> None:
        for p, _ in self.pairs:
            p.grad = None


@pytest.mark.parametrize("update", ["deferred", "priority", "in_backward"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_slowed_copies_change_nothing(update: str, slots: int) -> None:
    model, inputs = build()
    other = copy.deepcopy(model)
    model.cuda()
    for layer in layers(model):
        checkpointed(layer)
    want = train(model, HostReference(model), inputs)
    graphopt.stream(other, "cuda", slots=slots, resident=[], link=CudaLink(torch.device("cuda"), slow=40))
    opt = graphopt.HostAdamW(other.parameters(), **ADAM, update=update, kernel="torch")
    step = torch.compile(other, backend="graphopt", options=OPTIONS)
    got = train(step, opt, inputs)
    assert got == want
    assert differing({k: v.cpu() for k, v in other.state_dict().items()},
                     {k: v.cpu() for k, v in model.state_dict().items()}) == {}
    engine = attach.engine_of(other)
    assert engine.ring.misses == 0
    assert all(x.weights.is_pinned() for x in engine.store.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_and_the_compiled_optimizer(dtype: torch.dtype) -> None:
    model, inputs = build(3)
    model.to(dtype)
    inputs = pytree.tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, inputs)
    exact = copy.deepcopy(model).double().cuda()
    reference = pytree.tree_map(lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, inputs)
    loss_of(exact, reference).backward()
    graphopt.stream(model, "cuda", slots=2, resident=[])
    opt = graphopt.HostAdamW(model.parameters(), lr=1e-4)
    step = torch.compile(model, backend="graphopt")
    loss_of(step, inputs).backward()
    top, bottom = 0.0, 0.0
    for p, q in zip(model.parameters(), exact.parameters()):
        if q.grad is not None:
            top += (opt.gradient(p).double() - q.grad.cpu()).square().sum().item()
            bottom += q.grad.square().sum().item()
    assert (top / bottom) ** 0.5 < (1e-4 if dtype == torch.float32 else 3e-2)
    norm = opt.clip_grad_norm_(1e-3).item()
    assert abs(norm / bottom**0.5 - 1) < (1e-4 if dtype == torch.float32 else 2e-2)
    opt.step()
    opt.zero_grad()
    for _ in range(3):
        value = loss_of(step, inputs)
        value.backward()
        opt.step()
        opt.zero_grad()
    assert torch.isfinite(value)
