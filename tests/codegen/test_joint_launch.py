"""Two launches of one kernel joined: which ones, what moves, and the same values bit by bit (interpreter or GPU)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch_graphs import LaunchGraph, launches
from torch import fx

from graphopt import _compat_triton
from graphopt.codegen import joint, kernels
from graphopt.codegen.emit_sums import tile
from graphopt.passes import joint_launch

pytestmark = pytest.mark.kernel
aten = torch.ops.aten


class Builder(LaunchGraph):
    """A graph of matmuls and launches over tensors of its own."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.results: list[fx.Node] = []

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> fx.Node:
        return self.tensor(torch.randn(*shape, device=self.device).to(dtype))

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        return self.tensor(torch.full(shape, float("nan"), device=self.device, dtype=dtype))

    def forward(self, x: fx.Node, factors: list[fx.Node]) -> dict[str, fx.Node]:
        """F1 of x [B, N, D]."""
        value = x.meta["val"]
        spec, plan, given = kernels.prepare_forward(
            value, *([None] * 7), [f.meta["val"] for f in factors], "scale+shift", "layer_norm", 1e-6, 1.0, "none", 0.0,
            "identity", value.dtype, value.dtype, "")
        kernel, config = kernels.kernel_of(spec)
        nodes = dict(zip(given, (x, *factors)))
        outs = {t: self.empty(*value.shape, dtype=spec.dtype(t)) for t in spec.rows_out}
        outs |= {t: self.empty(value.shape[0] * value.shape[1]) for t in spec.statistics}
        P = -(-plan.N // config.rows)
        sizes = {"N": plan.N} | ({"P": P} if config.rows > 1 else {})
        return self.launch(kernel, config.warps, plan.G * P, self.named({**nodes, **outs}, sizes, spec, plan),
                           [t.upper() for t in outs])

    def backward(self, dy: fx.Node, x: fx.Node, factors: list[fx.Node], statistics: dict[str, fx.Node]) -> list[fx.Node]:
        """dx, dscale and dshift of F1, both stages."""
        value, B = x.meta["val"], x.meta["val"].shape[0]
        spec, plan, given = kernels.prepare_backward(
            None, [dy.meta["val"]], value, *([None] * 7), [f.meta["val"] for f in factors], "scale+shift", "layer_norm",
            1.0, "none", "identity", value.dtype)
        kernel, config = kernels.kernel_of(spec)
        P = max(1, min(3 * config.programs_per_sm // plan.G, -(-plan.N // 4)))
        nodes = {n: v for n, v in zip(("dy", "h", "scale", "shift"), (dy, x, *factors)) if n in
                 (*spec.rows_in, *spec.factors)}
        outs = {"dx": self.empty(*value.shape, dtype=value.dtype),
                "partial": self.empty(plan.G * P, len(spec.sums) * spec.D)}
        wanted = {n: statistics[n.upper()] for n in spec.statistics}
        made = self.launch(kernel, config.warps, plan.G * P,
                           self.named({**nodes, **outs, **wanted}, {"N": plan.N, "P": P}, spec, plan), ["DX", "PARTIAL"])
        results = tuple((f"d{f}", k * spec.D, torch.float32) for k, f in enumerate(spec.sums))
        shape = tile(spec.D, P)
        second = kernels.sum_kernel(f"{spec.name}_sums", spec.D, len(spec.sums) * spec.D, results, shape)
        grads = {f"D{f.upper()}": self.empty(B, 1, spec.D) for f in spec.sums}
        done = self.launch(second, shape.warps, -(-spec.D // shape.columns) * len(grads) * B,
                           {"PARTIAL": made["PARTIAL"], **grads, "P": P}, list(grads))
        return [made["DX"], *done.values()]

    def named(self, tensors: dict[str, fx.Node], sizes: dict[str, int], spec: Any, plan: Any) -> dict[str, Any]:
        numbers = dict(zip((f"{t}_{i}" for t, i in spec.stride_arguments), kernels._strides(spec, plan)))
        return {**{n.upper(): v for n, v in tensors.items()}, **sizes, **numbers}

    def done(self) -> fx.GraphModule:
        self.graph.output(tuple(self.results))
        return fx.GraphModule(self.root, self.graph)


def joined(gm: fx.GraphModule, count: int, everything: bool = False) -> None:
    """Joins `count` pairs, and computes the same as before, bit by bit."""
    before = [t.clone() for t in gm()]
    assert joint_launch.fold(gm.graph, everything=everything) == count
    gm.graph.lint()
    gm.recompile()
    for a, b in zip(before, gm()):
        assert not a.isnan().any()
        assert torch.equal(a, b)


def factors(b: Builder, B: int, D: int) -> list[fx.Node]:
    """Scale and shift, chunks of one buffer."""
    both = torch.randn(B, 1, 2, D, device=b.device) * 0.3
    return [b.tensor(t) for t in both.unbind(2)]


@pytest.mark.parametrize("D,rows,text", [
    (96, 23, 5), (96, 3, 2), (640, 4, 16), (1152, 9, 5),
    *(pytest.param(D, rows, text, marks=pytest.mark.nightly) for D in (640, 1152, 3072) for rows, text in ((23, 5), (3, 2))),
])
def test_forward_and_backward(device: str, D: int, rows: int, text: int) -> None:
    gm = two_streams(device, D, rows, text)
    assert len(launches(gm)) == 6
    joined(gm, 3, everything=True)
    assert all(name.endswith("_joint") for name in launches(gm))
    assert len(launches(gm)) == 3


def test_forwards_alone_by_default(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gm = two_streams(device, 96, 23, 5)
    joined(gm, 1)
    assert sorted(launches(gm)) == sorted(["norm_modulate_forward_joint", *["norm_modulate_backward"] * 2,
                                           *["norm_modulate_sums"] * 2])
    monkeypatch.setattr(joint_launch, "MOST", 23 * 96 * 2 * 2 - 1)  # bytes of the larger stream, less one
    joined(two_streams(device, 96, 23, 5), 0)


def two_streams(device: str, D: int, rows: int, text: int) -> fx.GraphModule:
    """F1 of an image and a text stream and its backward, six launches."""
    b, B = Builder(device), 2
    streams = [(b.random(B, n, D), factors(b, B, D), b.random(B, n, D)) for n in (rows, text)]
    made = [b.forward(x, f) for x, f, _ in streams]
    b.results += [m["Y"] for m in made]
    for (x, f, dy), m in zip(streams, made):
        b.results += b.backward(dy, x, f, m)
    return b.done()


def test_what_the_second_needs_moves_up(device: str) -> None:
    b, D = Builder(device), 64
    image, f, g = b.random(1, 24, D), factors(b, 1, D), factors(b, 1, D)
    y = b.forward(image, f)["Y"]
    b.results.append(b.call(aten.mm.default, b.call(aten.view.default, y, [24, D]), b.random(D, D)))
    text = b.call(aten.view.default, b.call(aten.mm.default, b.random(6, D), b.random(D, D)), [1, 6, D])
    b.results.append(b.forward(text, g)["Y"])
    joined(b.done(), 1)


def test_what_follows_from_the_first_moves_down(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_launch, "LONGER", 20_000)
    b, D = Builder(device), 64
    text, f, g = b.random(1, 6, D), factors(b, 1, D), factors(b, 1, D)
    first = b.call(aten.neg.default, text)
    y = b.forward(first, f)["Y"]
    b.results.append(b.call(aten.mm.default, b.call(aten.view.default, y, [6, D]), b.random(D, D)))
    image = b.call(aten.view.default, b.call(aten.mm.default, b.random(400, D), b.random(D, D)), [1, 400, D])
    b.results.append(b.forward(image, g)["Y"])
    gm = b.done()
    joined(gm, 1)
    order = [n.target for n in gm.graph.nodes if n.target is aten.mm.default or _compat_triton.triton_call(n)]
    assert order[0] is aten.mm.default  # the image's matmul, then the launch, then the text's
    assert order[2] is aten.mm.default


@pytest.mark.parametrize("change", ["depends", "large", "widths", "long", "dtypes"])
def test_left_alone(device: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if change == "long":
        monkeypatch.setattr(joint_launch, "LONGER", 100)
    b, D = Builder(device), 64
    other = 96 if change == "widths" else D
    f, g = factors(b, 1, D), factors(b, 1, other)
    image = b.call(aten.neg.default, b.random(1, 24, D))
    y = b.forward(image, f)["Y"]
    b.results.append(b.call(aten.neg.default, y))
    text = y if change == "depends" else b.random(1, 6, other, dtype=torch.float32 if change == "dtypes" else torch.bfloat16)
    b.results.append(b.forward(b.call(aten.neg.default, text), g)["Y"])
    gm = b.done()
    assert joint_launch.fold(gm.graph, small=100 if change == "large" else 1 << 20) == 0
    assert len(launches(gm)) == 2


def test_a_joint_kernel_is_not_joined_again(device: str) -> None:
    b, D = Builder(device), 64
    for n in (9, 5, 3, 2):
        b.results.append(b.forward(b.random(1, n, D), factors(b, 1, D))["Y"])
    gm = b.done()
    joined(gm, 2)
    assert len(launches(gm)) == 2


def test_shared_arguments_are_passed_once() -> None:
    source = joint.emit("import a\n\n\n@triton.jit\ndef k(X, Y, N):\n    row = tl.program_id(0)\n", "k", frozenset({"N"}))
    assert f"def k_joint(X, Y, N, X{joint.SECOND}, Y{joint.SECOND}, {joint.COUNT}):" in source
    assert "    row = program\n" in source
    assert "N = tl.where" not in source
