"""The order of a linear's two backward matmuls: fewer bytes alive, the same values."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from graphopt.passes.freeing_order import MATMULS, base, free_early, last_readers, nbytes

N, WIDE, D = 512, 256, 64


def backward(grad: torch.Tensor, act: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What AOTAutograd writes for a linear: the gradient of its input first."""
    wide = torch.ops.aten.mm.default(grad, torch.ops.aten.permute.default(weight, [1, 0]))
    dweight = torch.ops.aten.mm.default(torch.ops.aten.permute.default(grad, [1, 0]), act)
    return torch.ops.aten.sum.dim_IntList(wide, [0]), dweight


def args() -> list[torch.Tensor]:
    return [torch.randn(N, D, dtype=torch.float64), torch.randn(N, WIDE, dtype=torch.float64), torch.randn(WIDE, D, dtype=torch.float64)]


def peak(graph: fx.Graph) -> int:
    """Bytes alive at the worst moment, a gradient and an activation among the inputs being freed after their last use."""
    last = last_readers(graph)
    alive = sum(nbytes(n) for n in graph.nodes if n.op == "placeholder")
    worst = alive
    for node in graph.nodes:
        if node.op == "call_function" and base(node) is node:
            alive += nbytes(node)
        worst = max(worst, alive)
        alive -= sum(nbytes(b) for b, reader in last.items() if reader is node and base(node) is node)
    return worst


def test_the_weight_gradient_comes_first_and_frees_its_activation() -> None:
    gm = make_fx(backward)(*args())
    before = peak(gm.graph)
    assert free_early(gm.graph) == 1
    gm.graph.lint()
    gm.recompile()
    first = next(n for n in gm.graph.nodes if n.target in MATMULS)
    assert tuple(first.meta["val"].shape) == (D, WIDE)
    # the activation (N x WIDE) and the gradient of the input (N x WIDE) are never alive together
    assert before - peak(gm.graph) == (N - D) * WIDE * 8
    values = args()
    for mine, theirs in zip(gm(*values), backward(*values)):
        assert torch.equal(mine, theirs)
    assert free_early(gm.graph) == 0


def test_symbolic_sizes_count_as_they_were_traced() -> None:
    gm = make_fx(backward, tracing_mode="symbolic")(*args())
    wide = next(n for n in gm.graph.nodes if n.target in MATMULS)
    assert not isinstance(wide.meta["val"].shape[0], int)
    guards = len(wide.meta["val"].shape[0].node.shape_env.guards)
    assert free_early(gm.graph) == 1
    assert len(wide.meta["val"].shape[0].node.shape_env.guards) == guards
    gm.graph.lint()
    gm.recompile()
    values = args()
    for mine, theirs in zip(gm(*values), backward(*values)):
        assert torch.equal(mine, theirs)


def test_an_activation_that_is_still_needed_moves_nothing() -> None:
    def kept(grad, act, weight):
        dx, dweight = backward(grad, act, weight)
        return dx, dweight, act + 1

    gm = make_fx(kept)(*args())
    before = [n.name for n in gm.graph.nodes]
    assert free_early(gm.graph) == 0
    assert [n.name for n in gm.graph.nodes] == before


def test_nothing_moves_over_a_write() -> None:
    gm = make_fx(backward)(*args())
    mms = [n for n in gm.graph.nodes if n.target in MATMULS]
    act = [n for n in gm.graph.nodes if n.op == "placeholder"][1]
    with gm.graph.inserting_after(mms[0]):
        write = gm.graph.call_function(torch.ops.aten.mul_.Scalar, (act, 2.0))
        write.meta["val"] = act.meta["val"]
    gm.recompile()
    values = args()
    expected = [values[0].t() @ (values[1] * 2.0)]
    assert free_early(gm.graph) == 0
    assert torch.equal(gm(*values)[1], expected[0])


@pytest.mark.parametrize("small", [True, False])
def test_a_matmul_that_depends_on_the_other_stays(small: bool) -> None:
    def chained(grad, act, weight):
        wide = grad @ weight.t()
        return (grad.t() @ wide,) if small else (grad.t() @ (wide + act),)

    gm = make_fx(chained)(*args())
    assert free_early(gm.graph) == 0
