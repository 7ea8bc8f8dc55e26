"""table + embedding: folded per token, left alone where it is small or read elsewhere; values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import graphopt

B, S, D = 2, 6, 8
OPTIONS = {"graphopt.select": "all", "graphopt.compiler": "aot_eager"}


class Block(nn.Module):
    """A Wan block's modulation; `form` is how the six pieces are cut."""

    def __init__(self, form: str = "chunk") -> None:
        super().__init__()
        self.table, self.form = nn.Parameter(torch.randn(1, 6, D)), form
        self.f1, self.f2 = nn.Linear(D, D), nn.Linear(D, D)

    def pieces(self, e):
        if self.form == "chunk":
            return [p.squeeze(2) for p in (self.table.unsqueeze(0) + e.float()).chunk(6, dim=2)]
        if self.form == "unbind":
            return (self.table[None] + e.float()).unbind(dim=2)
        m = e + self.table[None]
        return [m[:, :, i] for i in range(6)]

    def forward(self, x, e):
        b, s, g, d, c, h = self.pieces(e)
        x = x + g * self.f1((F.layer_norm(x.float(), (D,)) * (1 + s) + b).type_as(x))
        x = x + torch.tanh(h) * self.f2((F.layer_norm(x.float(), (D,)) * (1 + c) + d).type_as(x))
        return x


def graph_of(model, *inputs):
    from graphopt import backend, config, reporting

    seen = []

    def capture(gm, example_inputs):
        seen.append(backend.rewrite(gm, config.parse(None, OPTIONS)[0], reporting.GraphRecord("0/0", [])))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=capture)(*inputs)
    return seen[0].graph


def calls(graph):
    return [n for n in graph.nodes if "graphopt" in str(n.target)]


@pytest.mark.parametrize("form", ["chunk", "unbind", "index"])
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_folded_per_token(form: str, dynamic: bool | None) -> None:
    model = Block(form)
    x, e = torch.randn(B, S, D, requires_grad=True), torch.randn(B, S, 6, D, requires_grad=True)
    graph = graph_of(model, x, e)
    words = [n.kwargs["outputs"] for n in calls(graph)]
    assert words[:2] == ["scale+scale_table+shift+shift_table"] * 2
    assert all(n.kwargs["gate_table"] is not None for n in calls(graph) if n.kwargs["gate"] is not None)
    sums = [n for n in graph.nodes if n.name.startswith("add") and n.meta["example_value"].dim() == 4]
    assert sums == []
    step = torch.compile(model, backend="graphopt", dynamic=dynamic, options=OPTIONS)
    leaves = [x, e, *model.parameters()]
    for out in (lambda: step(x, e), lambda: model(x, e)):
        leaves.append(torch.autograd.grad(out().square().sum(), leaves[:2] + list(model.parameters())))
    for got, want in zip(*leaves[-2:], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_bf16_embedding_is_read_as_it_is() -> None:
    x, e = torch.randn(B, S, D).bfloat16(), torch.randn(B, S, 6, D).bfloat16()
    model = Block()

    def modulate(x, e):
        b, s, *_ = model.pieces(e)
        return (F.layer_norm(x.float(), (D,)) * (1 + s) + b).type_as(x)

    (first,) = calls(graph_of(modulate, x, e))
    scale, table, shift, other = (n.meta["example_value"] for n in first.kwargs["modulation"])
    assert (scale.dtype, shift.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (table.dtype, other.dtype) == (torch.float32, torch.float32)
    assert (scale.shape, table.shape) == ((B, S, D), (1, 1, D))


def test_left_alone_where_it_is_small_or_read_elsewhere() -> None:
    x = torch.randn(B, S, D)
    assert all("table" not in n.kwargs["outputs"] for n in calls(graph_of(Block(), x, torch.randn(B, 1, 6, D))))

    class Shared(Block):
        def pieces(self, e):
            m = self.table.unsqueeze(0) + e
            self.total = m.sum()
            return [p.squeeze(2) for p in m.chunk(6, dim=2)]

        def forward(self, x, e):
            out = super().forward(x, e)
            return out, self.total

    e = torch.randn(B, S, 6, D)
    assert all("table" not in n.kwargs["outputs"] for n in calls(graph_of(Shared(), x, e)))


def test_wan_ti2v() -> None:
    """Two blocks of Wan 2.2 TI2V: every factor is folded.  The last norm's embedding is one row that the sum repeats."""
    model, inputs = zoo.ZOO["wan_ti2v"].build()
    found = calls(graph_of(lambda: model(**inputs, return_dict=False)[0]))
    assert sum("scale_table" in n.kwargs["outputs"] for n in found) == 4
    assert sum(n.kwargs["gate_table"] is not None for n in found) == 4
    step = torch.compile(model, backend="graphopt", options=OPTIONS)
    torch.testing.assert_close(step(**inputs, return_dict=False)[0], model(**inputs, return_dict=False)[0],
                               rtol=1e-4, atol=1e-4)
    graphopt.check(step, {"modulate": 5, "gate": 4}, what="rewritten")


@pytest.mark.parametrize("name", ["tables", "joined"])
def test_kernels_of_a_gpu_that_is_not_here(name: str) -> None:
    """Folded tables and joined slices compile for sm90, one call per slice."""
    from graphopt import backend, config, reporting

    pytest.importorskip("triton")
    width = 32

    def joined(x, g, h):
        y = torch.tanh(x)
        return x + torch.cat([y[:, :16] * g, y[:, 16:] * h], 1)

    def tables(x, table, e):
        b, s = (p.squeeze(2) for p in (table + e).chunk(2, dim=2))
        return F.layer_norm(x, (width,)) * (1 + s) + b

    x, record = torch.randn(2, 48, width, requires_grad=True), reporting.GraphRecord("0/0", [])
    f, inputs = {
        "joined": (joined, [x, torch.randn(2, 1, width), torch.randn(2, 1, width)]),
        "tables": (tables, [x, nn.Parameter(torch.randn(1, 1, 2, width)), torch.randn(2, 48, 2, width)]),
    }[name]
    seen = []

    def capture(gm, example_inputs):
        options, _ = config.parse(None, {"graphopt.select": "all", "graphopt.on_error": "raise"})
        seen.append(backend.rewrite(gm, options, record, target="sm90"))
        return gm.forward

    torch.compile(f, backend=capture)(*inputs)
    assert [s.status for s in record.sites] == ["rewritten"]
    found = calls(seen[0].graph)
    assert all("_triton_" in str(n.target) for n in found)
    assert [n.kwargs["outputs"] for n in found] == (
        ["", ""] if name == "joined" else ["scale+scale_table+shift+shift_table"])


@pytest.mark.parametrize("frozen", ["sum", "cast", "pieces"])
def test_no_gradient_is_invented(frozen: str) -> None:
    """A modulation made under no_grad, in whole or in part: folding it would pass gradients to table and embedding."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(1, 1, 2, D))

        def forward(self, x, e):
            with torch.set_grad_enabled(frozen != "cast"):
                wide = e.float()
            with torch.set_grad_enabled(frozen != "sum"):
                total = self.table + wide
            with torch.set_grad_enabled(frozen != "pieces"):
                s, b = total.unbind(2)
            return F.layer_norm(x, (D,)) * (1 + s) + b

    model, inputs = Frozen(), (torch.randn(B, S, D), torch.randn(B, S, 2, D).bfloat16())
    compiled, grads = torch.compile(model, backend="graphopt", options=OPTIONS), []
    for f in (compiled, model):
        model.zero_grad()
        leaves = [v.clone().requires_grad_() for v in inputs]
        f(*leaves).square().sum().backward()
        grads.append([v.grad for v in (*leaves, model.table)])
    assert [g is None for g in grads[0]] == [g is None for g in grads[1]] == [False, True, frozen != "cast"]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-4)
    assert graphopt.report(compiled).count("modulate", "rewritten") == 1
