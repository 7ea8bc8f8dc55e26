"""A streamed step calls the products of a resident one: another operator may round in another order on a GPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from resident import OPTIONS, checkpointed, layers, loss_of
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import ZOO, liven

import graphopt
from graphopt.streaming import ring
from graphopt.streaming.program import Program


class Products(TorchDispatchMode):
    """Counts matrix products by their shapes and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm):
            given = [(tuple(x.shape), x.stride()) for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.seen[str(function), tuple(given)] += 1
        return function(*args, **(kwargs or {}))


def built(name):
    torch.manual_seed(0)
    model, x = ZOO[name].build()
    liven(model)
    return model.train(), x


@pytest.mark.parametrize("name", ["hunyuan_video", pytest.param("wan", marks=pytest.mark.nightly)])
def test_products_are_those_of_the_resident_model(name: str, monkeypatch) -> None:
    """Hunyuan's layers multiply slices of a joint sequence, where torch.matmul asks whether the weight trains."""
    model, x = built(name)
    for layer in layers(model):
        checkpointed(layer)
    want, found = Products(), Products()
    with want:
        loss_of(model, x).backward()
    model, x = built(name)
    graphopt.stream(model, "cpu", slots=2)
    opt = graphopt.HostAdamW(model.parameters(), kernel="torch")
    step = torch.compile(model, backend="graphopt", options=OPTIONS)
    loss_of(step, x).backward()  # compiles: torch compiles nothing while such a mode is on
    opt.zero_grad()
    plain = Program.__call__

    def counted(self, *args):
        with found:
            return plain(self, *args)

    monkeypatch.setattr(Program, "__call__", counted)
    loss = loss_of(step, x)
    with found:
        loss.backward()
    assert found.seen == want.seen


def test_autocast_keeps_no_casts_of_a_slot() -> None:
    w = torch.ones(4, 4, requires_grad=True)
    x = torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        with ring.casts_not_kept(torch.device("cpu")):
            first = torch.nn.functional.linear(x, w)
        w.mul_(2)
        with ring.casts_not_kept(torch.device("cpu")):
            assert torch.equal(torch.nn.functional.linear(x, w), 2 * first)
        assert torch.is_autocast_cache_enabled()
