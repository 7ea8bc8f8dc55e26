"""Gradients written by the compiled backward straight into slabs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._inductor.config as inductor
from resident import differing, train
from tiny_dit import TinyDiT, inputs
from torch.fx.experimental.proxy_tensor import make_fx

import graphopt
from graphopt.codegen import landing
from graphopt.passes import land_gradients
from graphopt.streaming import attach
from graphopt.streaming import compile as streaming


def test_a_product_lands_where_it_fits() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    place = torch.full((3, 5), float("nan"))
    assert torch.equal(landing.landing_mm(a, b, 1), a @ b)
    with landing.into([None, place]):
        found = landing.landing_mm(a, b, 1)
        assert found.data_ptr() == place.data_ptr()
        assert torch.equal(place, a @ b)
        other = landing.landing_mm(a, b, 0)
        assert other.data_ptr() != place.data_ptr()
        with landing.into(None):
            assert landing.landing_mm(a, b, 1).data_ptr() != place.data_ptr()
    for wrong in (torch.empty(5, 3).t(), torch.empty(3, 5, dtype=torch.float64), torch.empty(5, 3)):
        with landing.into([wrong]):
            assert torch.equal(landing.landing_mm(a, b, 0), a @ b)
    assert landing.landing_mm(a.to("meta"), b.to("meta"), 0).shape == (3, 5)


def test_only_products_that_leave_the_graph_land() -> None:
    def backward(tangents_1, x, w):
        first, second = tangents_1.t() @ x, tangents_1 @ w
        third = x.t() @ x
        return second, first, third, third.sum()

    x = torch.randn(6, 3), torch.randn(6, 4), torch.randn(3, 4)
    g = make_fx(backward)(*x).graph
    assert land_gradients.land(g) == 2
    forward = make_fx(lambda primals_1, b: (primals_1 @ b,))(x[2], x[1].t()).graph
    assert land_gradients.land(forward) == 0
    put = {n.args[2] for n in g.nodes if n.target is landing.landing_mm}
    assert put == {0, 1}, "the third product is read again"


@pytest.mark.nightly  # two compiles by Inductor
def test_weights_are_those_of_copied_gradients(monkeypatch) -> None:
    model, x = TinyDiT(layers=3).train(), inputs()
    made, copies = [], []
    for lands in (False, True):
        torch._dynamo.reset()
        streaming._shared.clear()
        with monkeypatch.context() as m, inductor.patch(force_disable_caches=True):
            if not lands:
                m.setattr(land_gradients, "land", lambda graph: 0)
            twin = copy.deepcopy(model)
            graphopt.stream(twin, "cpu", slots=2, resident=["blocks.0"], graphs="on")
            opt = graphopt.HostAdamW(twin.parameters(), lr=1e-2, kernel="torch")
            step = torch.compile(twin, backend="graphopt")
            losses = train(step, opt, x, steps=3, micro=2)
        opt.flush()
        made.append((losses, {k: v.clone() for k, v in twin.state_dict().items()}))
        copies.append(attach.engine_of(twin).gradients.copied)
    assert made[0][0] == made[1][0]
    assert differing(made[0][1], made[1][1]) == {}
    # qkv, out, up and down of two layers, in six backward passes
    assert copies[0] - copies[1] == 4 * 2 * 6
