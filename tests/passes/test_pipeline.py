from __future__ import annotations

import pytest
import torch
from torch import fx

from graphopt.errors import PassOrderError
from graphopt.passes import pipeline
from graphopt.passes.record import PassRecord


class P:
    def __init__(self, name, requires=(), provides=(), conflicts=()):
        self.name, self.requires = name, frozenset(requires)
        self.provides, self.conflicts = frozenset(provides), frozenset(conflicts)

    def run(self, gm, context):
        return PassRecord(self.name, len(gm.graph.nodes), len(gm.graph.nodes))


def test_order_is_checked_before_anything_runs() -> None:
    pipeline.check_order([P("a", provides=["x"]), P("b", requires=["x"])])
    with pytest.raises(PassOrderError, match="b requires x"):
        pipeline.check_order([P("b", requires=["x"]), P("a", provides=["x"])])
    with pytest.raises(PassOrderError, match="b conflicts with x"):
        pipeline.check_order([P("a", provides=["x"]), P("b", conflicts=["x"])])
    with pytest.raises(PassOrderError, match="b conflicts with a"):
        pipeline.check_order([P("a"), P("b", conflicts=["a"])])


def test_run_times_and_names() -> None:
    gm = fx.symbolic_trace(lambda x: x + 1)
    records = pipeline.run(gm, [P("a"), P("b")], pipeline.PassContext(rules=()))
    assert [r.name for r in records] == ["a", "b"]
    assert all(r.milliseconds > 0 for r in records)


def test_copy_is_independent_and_complete() -> None:
    class M(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x):
            return {"y": self.linear(x) + 1}

    gm = fx.symbolic_trace(M())
    gm.meta["mark"] = 1
    next(iter(gm.graph.nodes)).meta["example_value"] = "v"
    twin = pipeline.copy(gm)
    x = torch.randn(2, 3)
    torch.testing.assert_close(twin(x)["y"], gm(x)["y"])
    assert twin.meta["mark"] == 1
    assert next(iter(twin.graph.nodes)).meta["example_value"] == "v"
    assert twin.linear.weight is gm.linear.weight
    before = len(gm.graph.nodes)
    add = next(n for n in twin.graph.nodes if n.name == "add")
    add.replace_all_uses_with(add.args[0])
    twin.graph.erase_node(add)
    twin.recompile()
    assert len(gm.graph.nodes) == before
    torch.testing.assert_close(twin(x)["y"], gm(x)["y"] - 1)


def test_graphs_inside_checkpointing_are_copied_and_found() -> None:
    from torch.utils.checkpoint import checkpoint

    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch.compile(lambda x: checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False) + 1, backend=backend)(
        torch.randn(3, requires_grad=True))
    inner = pipeline.nested(graphs[0])
    assert len(inner) == 2
    twin = pipeline.nested(pipeline.copy(graphs[0]))
    assert len(twin) == 2
    assert not set(map(id, inner)) & set(map(id, twin))
