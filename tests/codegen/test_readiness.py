"""Kernels that can be used are told from those that cannot, before a graph is changed; no GPU needed."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

from graphopt.codegen import emit, readiness
from graphopt.codegen.spec import KernelSpec, configure, cut
from graphopt.errors import CodegenError
from graphopt.passes import adaln, catalogue, pipeline

ATTRIBUTES = dict(norm="layer_norm", eps=1e-6, offset=1.0, h_dtype=torch.bfloat16, y_dtype=torch.bfloat16, rounding="")


def values(D=64, S=64, dtype=torch.bfloat16, mod=(2, 1)):
    new = lambda *shape, dtype=dtype: torch.empty(*shape, dtype=dtype, device="meta")
    factor = lambda: new(*mod, D, dtype=torch.float32)
    return dict(x=new(2, S, D), branch=new(2, S, D), gate=factor(), scale=factor(), shift=factor(), weight=None, bias=None)


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
def test_compiles_offline(target: str) -> None:
    assert readiness.check(values(), ATTRIBUTES, target, training=True) is None


@pytest.mark.parametrize("D", [1536, 2240, 5120])
def test_ring_and_no_spills_on_sm90(D: int) -> None:
    """The backward holds its rows in a ring of shared memory; the forward needs next to none."""
    forward, backward = readiness.specs(values(D), ATTRIBUTES, True)
    for spec, least, most in ((forward, 0, 1024), (backward, 16 * 1024, 100 * 1024)):
        config = configure(spec)
        kernel = readiness.compile_source(spec, config, emit.emit(spec, config), "sm90")
        assert least <= kernel.metadata.shared <= most


@pytest.mark.parametrize(("change", "reason"), [
    (dict(dtype=torch.float64), "float64: no kernel"),
    (dict(D=20000), "over 16384"),
    (dict(S=1, mod=(2, 1)), "serves 1 rows"),
    (dict(mod=(2, 64)), "per-token"),
    (dict(mod=(1, 64)), "prefix"),
])
def test_what_has_no_kernel_says_why(change: dict, reason: str) -> None:
    assert reason in readiness.check(values(**change), ATTRIBUTES, "sm90", True)


def test_eager_numerics_have_no_kernel_yet() -> None:
    assert "numerics='eager'" in readiness.check(values(), ATTRIBUTES | {"rounding": "norm=bfloat16"}, "sm90", True)


def test_unknown_target() -> None:
    with pytest.raises(CodegenError, match="sm80, sm90, sm100 or gfx942"):
        readiness.gpu_target("tpu9")


def test_spec_refuses_a_width_without_kernel() -> None:
    with pytest.raises(ValueError, match="1 to 16384"):
        KernelSpec("k", "forward", "layer_norm", 1.0, 1e-6, 20000, (("x", torch.bfloat16),))


@pytest.mark.parametrize("cap", [256, 1024, 2048])
def test_sub_blocks_cover_the_row(cap: int) -> None:
    for D in [*range(1, 300), 1152, 1536, 2240, 2304, 3072, 4096, 5120, 16384]:
        blocks = cut(D, cap)
        assert all(b & (b - 1) == 0 and b <= cap for b in blocks)
        assert sum(blocks) >= D
        assert sum(blocks[:-1]) < D  # only the last may overhang
        if D >= 256:
            assert sum(blocks) <= 1.25 * D


def graph():
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    def f(x, s, b):
        return F.layer_norm(x, (64,)) * (1 + s) + b

    torch.compile(f, backend=backend)(torch.randn(2, 64, 64, requires_grad=True), torch.randn(2, 1, 64), torch.randn(2, 1, 64))
    return graphs[0]


def context(warnings: list[str], **settings):
    return pipeline.PassContext(rules=catalogue.select(None), select="all", target="sm90", warn=warnings.append, **settings)


def test_a_rewrite_for_a_gpu_that_is_not_here() -> None:
    gm = graph()
    record = adaln.AdaLN().run(gm, context([]))
    assert [s.status for s in record.sites] == ["rewritten"]
    assert any("norm_modulate_triton" in str(n.target) for n in gm.graph.nodes)


def test_a_kernel_that_does_not_compile_falls_back_with_one_warning(monkeypatch) -> None:
    readiness.compile_for.cache_clear()
    monkeypatch.setattr(emit._Emitter, "columns", lambda self: self.out("c0 = tl.no_such_thing(0)"))
    gm, warnings = graph(), []
    record = adaln.AdaLN().run(gm, context(warnings))
    assert [s.status for s in record.sites] == ["declined"]
    assert "does not compile for sm90" in record.sites[0].reason
    assert len(warnings) == 1
    assert "test_readiness.py" in warnings[0]
    assert not any("graphopt" in str(n.target) for n in gm.graph.nodes)
    with pytest.raises(CodegenError, match="no_such_thing"):
        adaln.AdaLN().run(graph(), context([], on_error="raise"))
    readiness.compile_for.cache_clear()


def test_without_triton_the_reference_runs(monkeypatch, caplog) -> None:
    monkeypatch.setattr(adaln.operators, "has_triton", lambda: False)
    gm = graph()
    with caplog.at_level(logging.INFO):
        record = adaln.AdaLN().run(gm, context([]))
    assert [s.status for s in record.sites] == ["rewritten"]
    assert not any("triton" in str(n.target) for n in gm.graph.nodes)
