"""Sums of gradients folded into the backward kernel: which sums, and the values against fp64 (interpreter or GPU)."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx

from graphopt import _compat_triton
from graphopt.codegen import kernels
from graphopt.codegen.form import split_outputs
from graphopt.codegen.reference import backward as reference
from graphopt.codegen.tuned import configuration
from graphopt.passes import gradient_addends

pytestmark = pytest.mark.kernel
aten = torch.ops.aten
OUTPUTS = {"F1": "scale+shift", "F2": "scale+shift", "F4": "scale+shift scale plain"}


class Case:
    """One backward of F1, F2 or F4 and the graph of its launch behind sums of matmuls."""

    def __init__(self, code: str, device: str, D: int = 96, dtype: torch.dtype = torch.bfloat16) -> None:
        self.outputs, self.gated = OUTPUTS[code], code == "F2"
        B, N = 2, 7
        new = lambda *shape: torch.randn(*shape, device=device)
        self.h, self.branch, self.dh = (new(B, N, D).to(dtype) for _ in range(3))
        self.mean = self.h.float().mean(-1).flatten()
        self.rstd = torch.rsqrt(self.h.float().var(-1, correction=0) + 1e-6).flatten()
        self.gate = 0.3 * new(B, 1, D)
        words = self.outputs.split()
        self.modulation = [0.3 * new(B, 1, D) for w in words if w != "plain" for _ in w.split("+")]
        self.left = [[new(B * N, 16).to(dtype) for _ in range(5)] for _ in words]
        self.right = [[new(16, D).to(dtype) for _ in range(5)] for _ in words]

    @property
    def rest(self) -> tuple:
        gated = self.gated
        return (self.h, self.branch if gated else None, self.gate if gated else None, None, None, None, None, None,
                self.modulation)

    def launch(self, addends: list[int]) -> tuple[fx.GraphModule, list[str]]:
        """dy_i is the sum of addends[i] matmuls; the graph returns what the kernel writes, named."""
        graph, tensors, dys = fx.Graph(), {}, []
        root = torch.nn.Module()

        def constant(name: str, value: Tensor) -> fx.Node:
            setattr(root, name, value)
            node = graph.get_attr(name)
            node.meta["val"] = value
            return node

        def call(target, *args) -> fx.Node:
            node = graph.call_function(target, args)
            node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
            return node

        for i, count in enumerate(addends):
            total = None
            for k in range(count):
                mm = call(aten.mm.default, constant(f"l{i}_{k}", self.left[i][k]), constant(f"r{i}_{k}", self.right[i][k]))
                part = call(aten.view.default, mm, list(self.h.shape))
                total = part if total is None else call(aten.add.Tensor, total, part)
            dys.append(total)
        spec, plan, given = kernels.prepare_backward(
            self.dh if self.gated else None, [d.meta["val"] for d in dys], *self.rest, self.outputs, "layer_norm", 1.0,
            "none", "identity", self.h.dtype,
        )
        kernel, config = kernels.kernel_of(spec)
        P = max(1, min(3 * config.programs_per_sm // plan.G, (plan.N + 3) // 4))
        device = self.h.device
        written = {t: torch.full(self.h.shape, float("nan"), dtype=spec.dtype(t), device=device) for t in spec.rows_out}
        written["partial"] = torch.full((plan.G * P, len(spec.sums) * spec.D), float("nan"), device=device)
        wanted = {*spec.rows_in, *spec.factors, *spec.statistics, *written}  # not the shifts
        for name, value in {**given, "mean": self.mean, "rstd": self.rstd, **written}.items():
            if name not in wanted:
                continue
            tensors[name.upper()] = constant(f"t_{name}", value)
        for i, d in enumerate(dys):
            tensors[kernels.numbered("dy", i).upper()] = d
        numbers = dict(zip((f"{t}_{i}" for t, i in spec.stride_arguments), kernels._strides(spec, plan)))
        scalars = {"N": plan.N, "P": P, **numbers}
        node = _compat_triton.add_triton_call(graph, kernel, config.warps, (plan.G * P,), {**tensors, **scalars},
                                         [t.upper() for t in written])
        results = [graph.call_function(operator.getitem, (node, t.upper())) for t in written]
        graph.output(tuple(results))
        return fx.GraphModule(root, graph), list(written)

    def want(self, addends: list[int]) -> dict[str, Tensor]:
        """fp64 values of dx, dbranch and the sums of the factors' gradients."""
        dys = [sum((a.double() @ b.double() for a, b in zip(self.left[i][:n], self.right[i][:n])))
               .reshape(self.h.shape) for i, n in enumerate(addends)]
        wide = lambda t: None if t is None else t.double()
        single = [wide(t) for t in self.rest[:8]]
        dx, dbranch, dgate, *others = reference(
            wide(self.dh) if self.gated else None, dys, *single, [m.double() for m in self.modulation],
            self.mean.double(), self.rstd.double(), self.h.new_empty(0), self.h.new_empty(0), self.outputs,
            "layer_norm", 1.0, "none", "identity", torch.float64,
        )
        found = {"dx": dx, "dbranch": dbranch} if self.gated else {"dx": dx}
        sums = {"gate": dgate} if self.gated else {}
        dmodulation = iter(others[5:])
        for i, parts in enumerate(split_outputs(self.modulation, self.outputs)):
            sums |= {kernels.numbered(p, i): next(dmodulation) for p in parts}
        return {**found, **sums}


def run(gm: fx.GraphModule, names: list[str], case: Case, sums: tuple[str, ...]) -> dict[str, Tensor]:
    """What the graph computes, the partial sums added up."""
    found = dict(zip(names, gm()))
    partial = found.pop("partial").double()
    D, B = case.h.shape[-1], case.h.shape[0]
    total = partial.reshape(B, -1, len(sums), D).sum(1)
    return found | {f: total[:, k].reshape(B, 1, D) for k, f in enumerate(sums)}


def spec_in(gm: fx.GraphModule):
    (launch,) = (found for n in gm.graph.nodes if (found := _compat_triton.triton_call(n)) is not None)
    return kernels.spec_of(launch.kernel)


@pytest.mark.parametrize("code,addends", [
    ("F1", [2]), ("F1", [3]), ("F1", [4]), ("F1", [5]), ("F2", [3]), ("F4", [2, 3, 1]),
])
def test_values(device: str, code: str, addends: list[int]) -> None:
    case = Case(code, device)
    gm, names = case.launch(addends)
    sums = spec_in(gm).sums
    before = run(gm, names, case, sums)
    assert gradient_addends.fold(gm.graph) == sum(n > 1 for n in addends)
    gm.recompile()
    spec = spec_in(gm)
    assert [len(spec.addends(kernels.numbered("dy", i))) for i in range(len(addends))] == [min(n, 4) for n in addends]
    left = sum(n.target is aten.add.Tensor for n in gm.graph.nodes)
    assert left == sum(n - 4 for n in addends if n > 4)  # what is over stays one sum
    after, want = run(gm, names, case, sums), case.want(addends)
    assert set(after) == set(want)
    for name, value in want.items():
        error = lambda got: ((got.double() - value).norm() / value.norm()).item()
        assert error(after[name]) <= 1.05 * error(before[name]), name  # one rounding less at every addition
        assert error(after[name]) <= 5e-3, name
    again = run(gm, names, case, sums)
    assert all(torch.equal(after[n], again[n]) for n in after)


def test_fp32_and_a_mixed_sum(device: str) -> None:
    case = Case("F1", device, dtype=torch.float32)
    gm, names = case.launch([3])
    assert gradient_addends.fold(gm.graph) == 1
    gm.recompile()
    found, want = run(gm, names, case, spec_in(gm).sums), case.want([3])
    for name, value in want.items():
        assert ((found[name].double() - value).norm() / value.norm()).item() <= 1e-5, name


def sums_of(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.target is aten.add.Tensor]


def test_a_sum_with_another_reader_stays(device: str) -> None:
    gm, _ = Case("F1", device).launch([3])
    output = next(n for n in gm.graph.nodes if n.op == "output")
    output.args = ((*output.args[0], sums_of(gm)[-1]),)
    assert gradient_addends.fold(gm.graph) == 0
    gm, _ = Case("F1", device).launch([3])
    output = next(n for n in gm.graph.nodes if n.op == "output")
    output.args = ((*output.args[0], sums_of(gm)[0]),)  # the inner sum: only it and the third stay apart
    assert gradient_addends.fold(gm.graph) == 0  # a sum is computed, so one addend alone is in memory


@pytest.mark.parametrize("change", ["alpha", "broadcast", "strided", "computed"])
def test_other_sums_stay(device: str, change: str) -> None:
    case = Case("F1", device)
    gm, _ = case.launch([2])
    (total,) = sums_of(gm)
    if change == "alpha":
        total.kwargs = {"alpha": 2}
    elif change == "computed":
        with gm.graph.inserting_before(total):
            total.args = tuple(gm.graph.call_function(aten.tanh.default, (a,)) for a in total.args)
        for a in total.args:
            a.meta["val"] = case.h
    else:
        value = case.h[:, :1] if change == "broadcast" else case.h.transpose(1, 2).contiguous().transpose(1, 2)
        total.args[1].meta["val"] = value
    assert gradient_addends.fold(gm.graph) == 0


def test_addends_keep_the_grid() -> None:
    """A launch keeps its grid, so a kernel with addends must want as many programs as the one it replaces."""
    from graphopt.codegen.examples import example

    for fusion in ("norm_modulate", "gate_norm_modulate", "norm_modulates", "residual_norm_modulate"):
        for D in (64, 1152, 1536, 2240, 3072, 4096, 5120):
            base = example(fusion, D)[1]
            fold = gradient_addends.Fold("dy", [[fx.Graph().placeholder("a")]] * 3)
            for nodes in fold.parts:
                nodes[0].meta["val"] = torch.empty(1, dtype=torch.bfloat16)
            wider = gradient_addends.with_addends(base, [fold])
            assert wider.without_addends == base
            assert len(wider.rows_in) == len(base.rows_in) + 2
            assert configuration(wider).programs_per_sm == configuration(base).programs_per_sm


def test_what_torch_remembers_of_the_inputs_follows() -> None:
    """Torch walks a call's inputs and their remembered values together, so both need the same keys."""
    gm, _ = Case("F1", "cpu").launch([3])
    (node,) = (n for n in gm.graph.nodes if _compat_triton.triton_call(n) is not None)
    node.meta["eager_input_vals"] = ((), fx.map_arg(dict(node.kwargs), lambda n: n.meta["val"]))
    assert gradient_addends.fold(gm.graph) == 1
    _, remembered = node.meta["eager_input_vals"]
    assert remembered.keys() == node.kwargs.keys()
    assert remembered["kernel_idx"] == node.kwargs["kernel_idx"]
    assert list(remembered["kwargs"]) == list(node.kwargs["kwargs"])
    for name, value in node.kwargs["kwargs"].items():
        if isinstance(value, fx.Node):
            assert remembered["kwargs"][name] is value.meta["val"]


@pytest.mark.gpu
def test_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """Through torch.compile: q, k, v and an MLP read one modulated value."""
    import logging

    D = 256
    linears = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in range(4)).cuda().bfloat16()

    def f(x, scale, shift):
        y = (torch.nn.functional.layer_norm(x.float(), (D,)) * (1 + scale) + shift).type_as(x)
        return [layer(y) for layer in linears]

    x = torch.randn(2, 640, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    factors = [torch.randn(2, 1, D, device="cuda", requires_grad=True) for _ in range(2)]
    with caplog.at_level(logging.INFO, "graphopt"):
        options = {"graphopt.select": "all"}
        compiled = torch.compile(f, backend="graphopt", options=options, dynamic=False)
        outs = compiled(x, *factors)
        cotangents = [torch.randn_like(o) for o in outs]
        got = torch.autograd.grad(outs, [x, *factors], cotangents)
    assert "1 sums of gradients folded" in caplog.text
    linears.double()
    wide = [t.detach().double().requires_grad_() for t in (x, *factors)]
    y = torch.nn.functional.layer_norm(wide[0], (D,)) * (1 + wide[1]) + wide[2]
    want = torch.autograd.grad([layer(y) for layer in linears], wide, [c.double() for c in cotangents])
    for g, w in zip(got, want):
        assert ((g.double() - w).norm() / w.norm()).item() < 5e-3
