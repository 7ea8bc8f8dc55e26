"""dx goes into the memory of a gradient that dies: how often, and never where something reads it later."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import fx

from graphopt import _compat, _compat_triton, backend, config
from graphopt._compat import size_hint
from graphopt.codegen import operators
from graphopt.passes.reuse_gradients import reuse

pytest.importorskip("triton")
B, S, D = 2, 8, 64


class Driver:
    """Tells Triton which GPU to analyse kernels for, where there is none."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture(autouse=True)
def _a_gpu_to_analyse_for(monkeypatch):
    if not torch.cuda.is_available():
        import triton

        monkeypatch.setattr(triton.runtime.driver, "_active", Driver())


def call(fusion: str, *single, modulation=(), outputs="scale+shift", norm="layer_norm"):
    op = CALLS[fusion]
    return op(*single, *[None] * (8 - len(single)), list(modulation), outputs, norm, 1e-6, 1.0, "none", 0.0, "identity",
              torch.bfloat16, torch.bfloat16, "")


CALLS = {f: operators.operator(f, "triton") for f in ("norm_modulate", "gate_norm_modulate")}


def backward_graph(f, *inputs, dynamic: bool = False) -> fx.GraphModule:
    """The backward graph of f as AOTAutograd gives it to Inductor."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def compile_(gm, _inputs):
        graphs.append(gm)
        out = next(n for n in gm.graph.nodes if n.op == "output").args[0]
        values = [concrete(n.meta["val"]) if isinstance(n, fx.Node) else None for n in out]
        return make_boxed_func(lambda *args: values)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compile_, bw_compiler=compile_, partition_fn=min_cut_rematerialization_partition)
    torch.compile(f, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs).backward()
    return graphs[-1]


def concrete(value):
    """Zeros where the graph has a tensor, a number where it has a symbol: of the sizes it was traced with."""
    if isinstance(value, torch.Tensor):
        return torch.zeros([size_hint(s) for s in value.shape], dtype=value.dtype)
    return size_hint(value) if isinstance(value, torch.SymInt) else value


def inputs():
    new = lambda *shape, dtype=torch.bfloat16: torch.randn(*shape, dtype=dtype, requires_grad=True)
    return [new(B, S, D), new(B, S, D), *(new(B, 1, D, dtype=torch.float32) for _ in range(3)), new(D, D)]


def calls(gm: fx.GraphModule) -> list[tuple[fx.Node, _compat_triton.TritonCall]]:
    """The backward kernels of a graph."""
    found = [(n, _compat_triton.triton_call(n)) for n in gm.graph.nodes]
    return [(n, c) for n, c in found if c is not None and c.name.endswith("_backward")]


@pytest.mark.parametrize("dynamic", [False, True])
def test_dx_takes_the_place_of_a_gradient_that_dies(dynamic: bool) -> None:
    def f(x, branch, g, s, b, w):
        return (call("norm_modulate", x @ w, modulation=(s, b))[5] @ w).float().square().sum()

    gm = backward_graph(f, *inputs(), dynamic=dynamic)
    ((node, before),) = calls(gm)
    assert before.arguments["DX"].target is torch.ops.aten.empty.memory_format
    assert reuse(gm.graph) == 1
    gm.graph.lint()
    after = _compat_triton.triton_call(node).arguments
    assert after["DX"] is after["DY"]
    assert reuse(gm.graph) == 0


def test_inductor_then_writes_there_without_a_copy() -> None:
    from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core

    def f(x, branch, g, s, b, w):
        return (call("norm_modulate", x @ w, modulation=(s, b))[5] @ w).float().square().sum()

    gm = backward_graph(f, *inputs())
    assert reuse(gm.graph) == 1
    reinplace_inplaceable_ops_core(gm.graph)
    ((node, _),) = calls(gm)
    assert node.kwargs["tensors_to_clone"] == []


def test_two_results_take_two_gradients() -> None:
    def f(x, branch, g, s, b, w):
        h, *_, y = call("gate_norm_modulate", x @ w, branch @ w, g, modulation=(s, b))
        return (y @ w).float().square().sum() + (h @ w).float().square().sum()

    gm = backward_graph(f, *inputs())
    assert reuse(gm.graph) == 2
    ((_, found),) = calls(gm)
    assert {found.arguments["DX"], found.arguments["DBRANCH"]} == {found.arguments["DY"], found.arguments["DH"]}


def test_a_gradient_read_later_is_left_alone() -> None:
    """y's gradient is also that of another tensor: it leaves the graph."""
    def f(x, branch, g, s, b, w):
        y = call("norm_modulate", x @ w, modulation=(s, b))[5] + branch
        return (y @ w).float().square().sum()

    gm = backward_graph(f, *inputs())
    assert reuse(gm.graph) == 0


def test_an_input_of_the_graph_is_left_alone() -> None:
    """The gradient of a result that leaves the forward belongs to the caller."""
    def f(x, branch, g, s, b, w):
        return call("norm_modulate", x @ w, modulation=(s, b))[5]

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []
    keep = lambda gm, _: (graphs.append(gm), make_boxed_func(gm.forward))[1]
    torch._dynamo.reset()
    meta = [v.detach().to("meta").requires_grad_() for v in inputs()]
    y = torch.compile(f, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), dynamic=False)(*meta)
    y.backward(torch.empty_like(y))
    assert reuse(graphs[-1].graph) == 0


def test_other_dtypes_have_memory_of_their_own() -> None:
    """An fp32 x: its gradient does not fit over a bf16 one."""
    def f(x, branch, g, s, b, w):
        x = (x @ w).float()
        return (call("norm_modulate", x, modulation=(s, b))[5] @ w).float().square().sum()

    assert reuse(backward_graph(f, *inputs()).graph) == 0


def test_switched_off_by_name(monkeypatch) -> None:
    """GRAPHOPT_DISABLE=reuse_gradients: the pass Inductor gets does not call it, and its cache knows."""
    seen, names = [], []
    monkeypatch.setattr(backend.reuse_gradients, "reuse", seen.append)
    for value, calls_ in (("", 1), ("reuse_gradients", 1)):
        monkeypatch.setenv("GRAPHOPT_DISABLE", value)
        options = backend.with_order({}, config.parse(None, {})[0], [SimpleNamespace(status="rewritten")])
        change = options[_compat.POST_GRAD]
        change(fx.Graph())
        names.append(change.uuid())
        assert len(seen) == calls_
    assert names[0] != names[1]
