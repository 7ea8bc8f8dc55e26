"""What graphopt assumes about users' Triton kernels in torch's graphs (graphopt/_compat_triton.py)."""

from __future__ import annotations

import pytest
import torch

from graphopt import _compat_triton


def test_functional_kernel_calls_name_their_kernel_and_arguments() -> None:
    triton = pytest.importorskip("triton")
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional

    @triton.jit
    def copy_rows(X, Y):
        pass

    @triton.jit
    def scale_rows(X, X2, Y, N):
        pass

    graph = torch.fx.Graph()
    x, y, z = (graph.placeholder(name) for name in "xyz")
    kwargs = dict(kernel_idx=kernel_side_table.add_kernel(copy_rows), constant_args_idx=0, grid=[(1,)],
                  tma_descriptor_metadata={}, kwargs={"X": x, "Y": y}, tensors_to_clone=["Y"])
    node = graph.call_function(triton_kernel_wrapper_functional, (), kwargs)
    found = _compat_triton.triton_call(node)
    assert (found.name, found.module) == ("copy_rows", __name__)
    assert found.arguments == {"X": x, "Y": y}
    assert _compat_triton.triton_call(x) is None
    _compat_triton.set_triton_argument(node, "Y", z)
    assert _compat_triton.triton_call(node).arguments == {"X": x, "Y": z}
    assert not y.users
    assert (found.kernel, found.written, found.read) == (copy_rows, ("Y",), {"X": x})
    # another kernel in its place, with one more tensor
    fresh = graph.call_function(triton_kernel_wrapper_functional, (), {**kwargs, "kwargs": {"X": x, "Y": y, "N": 7}})
    _compat_triton.replace_kernel(fresh, scale_rows, 4, {"X": z, "X2": x})
    call = _compat_triton.triton_call(fresh)
    assert (call.kernel, call.arguments) == (scale_rows, {"X": z, "X2": x, "Y": y, "N": 7})
    assert fresh.kwargs["grid"] == [(1,)]
    added = _compat_triton.add_triton_call(graph, copy_rows, 4, (3,), {"X": x, "Y": y}, ["Y"])
    call = _compat_triton.triton_call(added)
    assert (call.name, call.written, call.read) == ("copy_rows", ("Y",), {"X": x})
    (config,) = kernel_side_table.get_kernel(added.kwargs["kernel_idx"]).configs
    assert config.num_warps == 4


def test_two_calls_of_a_kernel_become_one_of_another() -> None:
    triton = pytest.importorskip("triton")
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    @triton.jit
    def scale_rows(X, S, Y, N):
        pass

    @triton.jit
    def scale_both(X, S, Y, N, X_2, Y_2, N_2, first):
        pass

    graph = torch.fx.Graph()
    x, s, y, z = (graph.placeholder(name) for name in "xsyz")
    one = _compat_triton.add_triton_call(graph, scale_rows, 2, (3, 1, 1), {"X": x, "S": s, "Y": y, "N": 5}, ["Y"])
    two = _compat_triton.add_triton_call(graph, scale_rows, 2, (4, 1, 1), {"X": z, "S": s, "Y": y, "N": 6}, ["Y"])
    assert (_compat_triton.triton_grid(one), _compat_triton.triton_warps(one)) == ((3, 1, 1), 2)
    shared = _compat_triton.equal_arguments(one, two)
    assert shared == {"S"}, "what a call writes is its own"
    both = _compat_triton.join_calls(graph, one, two, scale_both, shared, "_2", "first")
    call = _compat_triton.triton_call(both)
    assert call.arguments == {"X": x, "S": s, "Y": y, "N": 5, "X_2": z, "Y_2": y, "N_2": 6, "first": 3}
    assert (call.kernel, call.written) == (scale_both, ("Y", "Y_2"))
    assert _compat_triton.triton_grid(both) == (7, 1, 1)
    (config,) = kernel_side_table.get_kernel(both.kwargs["kernel_idx"]).configs
    assert config.num_warps == 2


def test_changed_calls_pass_through_inductors_decomposition() -> None:
    """torch 2.11 walks a call's arguments beside what it remembers of them: both must keep one structure."""
    triton = pytest.importorskip("triton")
    import operator

    from torch._inductor.fx_passes.post_grad import decompose_triton_kernel_wrapper_functional
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode

    @triton.jit
    def scale_rows(X, Y, N):
        pass

    @triton.jit
    def scale_more(X, X2, Y, N):
        pass

    mode, graph = FakeTensorMode(), torch.fx.Graph()
    x, z, y = (graph.placeholder(name) for name in "xzy")
    for node in (x, z, y):
        node.meta["val"] = mode.from_tensor(torch.empty(4))
    call = _compat_triton.add_triton_call(graph, scale_rows, 2, (3, 1, 1), {"X": x, "Y": y, "N": 7}, ["Y"])
    call.meta["val"] = {"Y": y.meta["val"]}
    assert call.meta["eager_input_vals"][1]["kwargs"] == {"X": x.meta["val"], "Y": y.meta["val"], "N": 7}
    read = graph.call_function(operator.getitem, (call, "Y"))
    read.meta["val"] = y.meta["val"]
    graph.output((read,))
    _compat_triton.set_triton_argument(call, "X", z)
    _compat_triton.replace_kernel(call, scale_more, 4, {"X": x, "X2": z})
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    with mode, V.set_fake_mode(mode):
        decompose_triton_kernel_wrapper_functional(gm.graph)
    gm.graph.lint()
    names = [getattr(n.target, "__name__", "") for n in gm.graph.nodes]
    assert "triton_kernel_wrapper_mutation" in names
    assert "triton_kernel_wrapper_functional" not in names
