"""Gradients of biases summed where their matrix is made: which sums are taken, and values (interpreter or GPU)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from graphopt import _compat_triton
from graphopt.codegen import column_sums as kernels_of
from graphopt.codegen.column_sums import ColumnSums
from graphopt.passes import column_sums, reuse_gradients

pytestmark = pytest.mark.kernel
aten = torch.ops.aten


def decomposed(f, *args: Tensor) -> fx.GraphModule:
    """The graph Inductor would lower: elementwise ops in fp32 between casts."""
    from torch._inductor.decomposition import select_decomp_table

    gm = make_fx(f, select_decomp_table())(*args)
    for node, value in zip((n for n in gm.graph.nodes if n.op == "placeholder"), args):
        node.meta["val"] = value
    for node in gm.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            node.meta["val"] = node.target(*fx.map_arg(node.args, lambda n: n.meta["val"]),
                                           **fx.map_arg(node.kwargs, lambda n: n.meta["val"]))
        if node.op == "get_attr":
            node.meta["val"] = getattr(gm, node.target)
    return gm


def mlp(approximate: str):
    """The backward of gelu(x @ w.t() + b): gradients of x, w and b."""

    def f(dy: Tensor, pre: Tensor, x: Tensor, w: Tensor):
        g = aten.gelu_backward.default(dy, pre, approximate=approximate).reshape(-1, pre.shape[-1])
        return aten.mm.default(g, w), aten.mm.default(g.t(), x), aten.sum.dim_IntList(g, [0], True)

    return f


def operands(device: str, M: int = 52, N: int = 384, K: int = 16, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    new = lambda *shape: torch.randn(*shape, device=device).to(dtype)
    return [new(2, M // 2, N), 3 * new(2, M // 2, N), new(M, K), new(N, K)]


def launches(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if _compat_triton.triton_call(n) is not None]


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("N", [384, 320, 8])
def test_gelu(device: str, approximate: str, N: int) -> None:
    args = operands(device, N=N)
    if approximate == "none" and device == "cpu":
        pytest.skip("Triton's interpreter has no erf")
    gm = decomposed(mlp(approximate), *args)
    before = gm(*args)
    assert column_sums.fold(gm.graph, multiprocessors=3, smallest=0) == 1
    gm.graph.lint()
    gm.recompile()
    assert len(launches(gm)) == 2
    assert not any(n.target in (aten.sum.dim_IntList, aten.tanh.default, aten.erf.default) for n in gm.graph.nodes)
    after = gm(*args)
    wide = mlp(approximate)(*(a.double() for a in args))
    for got, old, want in zip(after, before, wide):
        assert got.shape == old.shape
        assert got.dtype == old.dtype
        error = lambda t: ((t.double() - want).norm() / want.norm()).item()
        assert error(got) <= 1.25 * error(old) + 1e-6
    assert all(torch.equal(a, b) for a, b in zip(after, gm(*args)))


def test_the_matrix_takes_the_place_of_a_gradient_that_dies(device: str) -> None:
    def f(dy: Tensor, w: Tensor, pre: Tensor, x: Tensor):
        g = aten.gelu_backward.default(aten.mm.default(dy, w).view(pre.shape), pre, approximate="tanh").view(-1, 384)
        return aten.mm.default(g.t(), x), aten.sum.dim_IntList(g, [0], True)

    dy, pre, x, _ = operands(device)
    args = [torch.randn(52, 8, device=device).bfloat16(), torch.randn(8, 384, device=device).bfloat16(), pre, x]
    gm = decomposed(f, *args)
    assert column_sums.fold(gm.graph, multiprocessors=3, smallest=0) == 1
    gm.recompile()
    before = gm(*args)
    assert reuse_gradients.reuse(gm.graph) == 1
    launch = _compat_triton.triton_call(launches(gm)[0])
    assert launch.arguments["OUT"].target is aten.mm.default
    assert launch.arguments["OUT"] is launch.arguments["IN0"]
    gm.recompile()
    assert all(torch.equal(a, b) for a, b in zip(before, gm(*args)))


@pytest.mark.parametrize("M,N", [(70, 256), (33, 320), (300, 128)])
def test_in_place(device: str, M: int, N: int) -> None:
    """OUT is IN0: the same bits as with memory of its own."""
    inputs = tuple(("full", torch.bfloat16) for _ in range(2))
    spec = ColumnSums(N, inputs, ("v0 = in0 * in1",), "v0", torch.bfloat16, True)
    a, b = (torch.randn(M, N, device=device).bfloat16() for _ in range(2))
    parts = spec.parts(M, 3)
    results = []
    for out in (torch.full_like(a, float("nan")), a):
        partial = torch.full((parts, N), float("nan"), device=device)
        kernels_of.kernel_of(spec)[(parts * spec.tiles,)](a, b, out, partial, M, parts, num_warps=kernels_of.WARPS)
        results.append((out, partial))
    assert all(torch.equal(p, q) for p, q in zip(*results))


def test_a_matrix_in_memory_is_read_once(device: str) -> None:
    def f(a: Tensor, b: Tensor, x: Tensor):
        g = aten.mm.default(a, b)
        return aten.mm.default(g.t(), x), aten.sum.dim_IntList(g, [0], True)

    args = [torch.randn(s, device=device).bfloat16() for s in ((70, 16), (16, 256), (70, 8))]
    gm = decomposed(f, *args)
    before = gm(*args)
    assert column_sums.fold(gm.graph, multiprocessors=3, smallest=0) == 1
    gm.recompile()
    launch = _compat_triton.triton_call(launches(gm)[0])
    assert set(launch.read) == {"IN0"}
    after = gm(*args)
    assert torch.equal(after[0], before[0])
    want = (args[0] @ args[1]).double().sum(0, keepdim=True)
    assert ((after[1].double() - want).norm() / want.norm()).item() < 3e-3


def test_what_cannot_be_expressed_is_read_after_the_compiler_made_it(device: str) -> None:
    def f(dy: Tensor, pre: Tensor, x: Tensor):
        g = aten.mul.Tensor(dy, aten.cos.default(pre))
        return aten.mm.default(g.t(), x), aten.sum.dim_IntList(g, [0], True)

    args = [torch.randn(40, 128, device=device) for _ in range(2)] + [torch.randn(40, 8, device=device)]
    gm = decomposed(f, *args)
    before = gm(*args)
    assert column_sums.fold(gm.graph, multiprocessors=3, smallest=0) == 1
    gm.recompile()
    assert any(n.target is aten.cos.default for n in gm.graph.nodes)
    torch.testing.assert_close(gm(*args), before, rtol=1e-5, atol=1e-5)


def test_a_vector_and_constants(device: str) -> None:
    def f(dy: Tensor, scale: Tensor, x: Tensor):
        g = aten.add.Tensor(aten.mul.Tensor(aten.mul.Tensor(dy, scale), 0.5), 1)
        return aten.mm.default(g.t(), x), aten.sum.dim_IntList(g, [0], False)

    args = [torch.randn(33, 130, device=device), torch.randn(130, device=device), torch.randn(33, 8, device=device)]
    gm = decomposed(f, *args)
    before = gm(*args)
    assert column_sums.fold(gm.graph, multiprocessors=3, smallest=0) == 1
    gm.recompile()
    torch.testing.assert_close(gm(*args), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["small", "columns", "no matmul", "strided", "integers"])
def test_other_sums_stay(device: str, change: str) -> None:
    def f(g: Tensor, x: Tensor):
        summed = g.t() if change == "strided" else g
        total = aten.sum.dim_IntList(summed, [1] if change == "columns" else [0], True)
        return total if change == "no matmul" else (aten.mm.default(summed.t().to(x.dtype), x), total)

    g = torch.randn(64, 64, device=device)
    args = [g.int() if change == "integers" else g, torch.randn(64, 8, device=device)]
    gm = decomposed(f, *args)
    assert column_sums.fold(gm.graph, multiprocessors=3, smallest=1 << 20 if change == "small" else 0) == 0


@pytest.mark.gpu
def test_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """Through torch.compile: an MLP behind a site; the gradients of both biases, against fp64."""
    import logging

    torch.manual_seed(0)
    D, wide = 256, 1024
    first, second = torch.nn.Linear(D, wide), torch.nn.Linear(wide, D)
    layers = torch.nn.ModuleList([first, second]).cuda().bfloat16()

    def f(x, scale, shift):
        y = (torch.nn.functional.layer_norm(x.float(), (D,)) * (1 + scale) + shift).type_as(x)
        return second(torch.nn.functional.gelu(first(y), approximate="tanh"))

    x = torch.randn(2, 8192, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    factors = [torch.randn(2, 1, D, device="cuda", requires_grad=True) for _ in range(2)]
    with caplog.at_level(logging.INFO, "graphopt"):
        options = {"graphopt.select": "all"}
        out = torch.compile(f, backend="graphopt", options=options, dynamic=False)(x, *factors)
        cotangent = torch.randn_like(out)
        got = torch.autograd.grad(out, [first.bias, second.bias, first.weight], cotangent)
    assert "gradients of biases" in caplog.text
    layers.double()
    y = torch.nn.functional.layer_norm(x.detach().double(), (D,)) * (1 + factors[0].double()) + factors[1].double()
    out = second(torch.nn.functional.gelu(first(y), approximate="tanh"))
    want = torch.autograd.grad(out, [first.bias, second.bias, first.weight], cotangent.double())
    for g, w in zip(got, want):
        assert ((g.double() - w).norm() / w.norm()).item() < 6e-3
