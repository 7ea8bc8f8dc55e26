"""Kernels that can be used are told from those that cannot, before a graph is changed; no GPU needed."""

from __future__ import annotations

import logging
import re

import pytest
import torch
import torch.nn.functional as F

from graphopt.codegen import compiler, emit_base, readiness
from graphopt.codegen.configure import closed_form, cut
from graphopt.codegen.emit import emit
from graphopt.codegen.examples import example
from graphopt.codegen.form import OPERANDS
from graphopt.codegen.spec import KernelSpec
from graphopt.errors import CodegenError
from graphopt.passes import adaln, catalogue, pipeline

ATTRIBUTES = dict(outputs="scale+shift", norm="layer_norm", eps=1e-6, offset=1.0, branch_norm="none", branch_eps=0.0,
                  activation="identity", h_dtype=torch.bfloat16, y_dtype=torch.bfloat16, rounding="")


def values(D=64, S=64, dtype=torch.bfloat16, mod=(2, 1)):
    new = lambda *shape, dtype=dtype: torch.empty(*shape, dtype=dtype, device="meta")
    factor = lambda: new(*mod, D, dtype=torch.float32)
    return dict.fromkeys(OPERANDS) | dict(x=new(2, S, D), branch=new(2, S, D), gate=factor(), scale=factor(), shift=factor())


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
@pytest.mark.parametrize("mod", [(2, 1), (2, 64), (1, 64)], ids=str)
def test_compiles_offline(target: str, mod: tuple) -> None:
    assert readiness.check(values(mod=mod), ATTRIBUTES, target, training=True) is None


@pytest.mark.parametrize("D", [1536, 2240, 5120])
def test_ring_and_no_spills_on_sm90(D: int) -> None:
    """The backward holds its rows in a ring of shared memory; a forward has one of two rows, or, of wide rows, none."""
    forward, backward = readiness.specs(values(D), ATTRIBUTES, True)
    two_rows = 2 * 2 * (2 * D + 512) if D <= 3072 else 1024   # x and branch in 16 bits
    for spec, least, most in ((forward, 0, two_rows), (backward, 16 * 1024, 100 * 1024)):
        found = readiness.compile_for(spec, "sm90")
        assert least <= found.shared <= most
        assert found.spills == 0


def test_eager_numerics_compile() -> None:
    assert readiness.check(values(), ATTRIBUTES | {"rounding": "gated=float32 norm=bfloat16"}, "sm90", True) is None


def test_what_has_no_kernel_says_why() -> None:
    assert "float64: no kernel" in readiness.check(values(dtype=torch.float64), ATTRIBUTES, "sm90", True)


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
def test_six_dimensions_that_do_not_merge_compile(target: str) -> None:
    x = torch.empty(2, 3, 2, 3, 2, 3, 64, device="meta", dtype=torch.bfloat16).permute(4, 1, 2, 3, 0, 5, 6)
    scale = torch.empty(2, 1, 2, 1, 2, 1, 64, device="meta")
    wide = values() | dict(x=x, branch=None, gate=None, scale=scale)
    assert readiness.check(wide, ATTRIBUTES, target, True) is None
    assert "two indices" not in str(readiness.specs(wide, ATTRIBUTES, True))
    assert max(s.group_dims for s in readiness.specs(wide, ATTRIBUTES, True)) == 3


def test_more_shared_memory_than_the_target_has_is_an_error(monkeypatch) -> None:
    """Triton compiles such a kernel for a GPU that is not here; only a launch would fail."""
    (spec,) = [s for s in readiness.specs(values(5120), ATTRIBUTES, True) if s.direction == "backward"]
    unit = compiler.unit_of(spec, closed_form(spec), emit(spec, closed_form(spec)))
    assert compiler.shared().compile(unit, "sm90").shared > 32 * 1024
    monkeypatch.setattr(compiler, "shared_limit", lambda target: 32 * 1024)
    with pytest.raises(CodegenError, match=r"needs \d+ bytes of shared memory; sm90 has 32768"):
        compiler.shared().compile(unit, "sm90")


def test_many_per_token_factors_fit() -> None:
    """Five rows and three fp32 factors per token, D = 5120: the ring alone would fit into 227 KB, its scratch would not."""
    specs = example("gate_norm_modulates", 5120, layout="token", target="sm90")
    assert [readiness.compile_for(s, "sm90").shared <= 227 * 1024 for s in specs] == [True] * len(specs)


def test_a_width_without_kernel() -> None:
    with pytest.raises(CodegenError, match="1 to 65536"):
        readiness.check(values(65537), ATTRIBUTES, "sm90", True)


@pytest.mark.parametrize("target", ["tpu9", "sm12", "gfx", ""])
def test_unknown_target(target: str) -> None:
    with pytest.raises(CodegenError, match="sm80, sm90, sm100 or gfx942"):
        compiler.gpu_target(target)


def test_spec_refuses_a_width_without_kernel() -> None:
    with pytest.raises(ValueError, match="1 to 65536"):
        KernelSpec("k", "forward", "layer_norm", 1.0, 1e-6, 65537, (("x", torch.bfloat16),))


@pytest.fixture
def fresh_compiler():
    readiness.outcome.cache_clear()
    compiler.shared().stop()
    yield
    compiler.shared().stop()
    readiness.outcome.cache_clear()


@pytest.mark.parametrize(("worker", "message"), [
    ("import os; input(); os.kill(os.getpid(), 11)", "crashed on norm_modulate_forward .*exit code -11"),
    ("import time; time.sleep(60)", "took more than 0.5 s"),
    ("input(); raise SystemExit(3)", "exit code 3"),
])
def test_a_compiler_that_crashes_or_hangs(worker: str, message: str, tmp_path, monkeypatch, fresh_compiler) -> None:
    """The site falls back with one warning, and the next kernel gets a new compiler."""
    broken = tmp_path / "worker.py"
    broken.write_text(worker)
    with monkeypatch.context() as m:
        m.setattr(compiler, "WORKER", broken)
        m.setattr(compiler, "LIMIT_S", 0.5 if "sleep" in worker else 30.0)
        gm, warnings = graph(), []
        record = adaln.AdaLN().run(gm, context(warnings))
        assert [s.status for s in record.sites] == ["declined"]
        assert len(warnings) == 1
        assert re.search(message, warnings[0])
    assert readiness.check(values(), ATTRIBUTES, "sm90", training=False) is None


@pytest.mark.parametrize("cap", [256, 1024, 2048])
def test_sub_blocks_cover_the_row(cap: int) -> None:
    for D in [*range(1, 300), 1152, 1536, 2240, 2304, 3072, 4096, 5120, 16384]:
        blocks = cut(D, cap)
        assert all(b & (b - 1) == 0 and b <= cap for b in blocks)
        assert sum(blocks) >= D
        assert sum(blocks[:-1]) < D  # only the last may overhang
        if D >= 256:
            assert sum(blocks) <= 1.25 * D


def graph(D: int = 64, sites: int = 1):
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    def f(x, s, b):
        for _ in range(sites):
            x = torch.tanh(F.layer_norm(x, (D,)) * (1 + s) + b)
        return x

    torch._dynamo.reset()
    torch.compile(f, backend=backend)(torch.randn(2, 3, D, requires_grad=True), torch.randn(2, 1, D), torch.randn(2, 1, D))
    return graphs[0]


def context(warnings: list[str], target: str = "sm90", **settings):
    return pipeline.PassContext(rules=catalogue.select(None), select="all", target=target, warn=warnings.append, **settings)


@pytest.mark.parametrize(("D", "target", "reason"), [
    (65537, "sm90", "no kernel for D = 65537: supported are 1 to 65536"),
    (64, "tpu9", "unknown target 'tpu9'"),
])
def test_what_has_no_kernel_falls_back_with_one_warning(D: int, target: str, reason: str) -> None:
    """Two sites that cannot be built: both are left to the compiler with the reason, one warning, or an error."""
    gm, warnings = graph(D, sites=2), []
    record = adaln.AdaLN().run(gm, context(warnings, target=target))
    assert [s.status for s in record.sites] == ["declined", "declined"]
    assert all(reason in s.reason for s in record.sites)
    assert len(warnings) == 1
    assert reason in warnings[0]
    assert not any("graphopt" in str(n.target) for n in gm.graph.nodes)
    with pytest.raises(CodegenError, match=reason.replace("(", "")):
        adaln.AdaLN().run(graph(D), context([], target=target, on_error="raise"))


def test_a_hanging_compiler_is_waited_for_once(tmp_path, monkeypatch, fresh_compiler) -> None:
    """Three sites with the same kernel: one time limit, one warning, three reasons."""
    broken = tmp_path / "worker.py"
    broken.write_text("import os, time; open(os.environ['STARTED'], 'a').write('x'); time.sleep(60)")
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    monkeypatch.setattr(compiler, "WORKER", broken)
    monkeypatch.setattr(compiler, "LIMIT_S", 1.0)
    warnings = []
    record = adaln.AdaLN().run(graph(sites=3), context(warnings))
    assert [s.status for s in record.sites] == ["declined"] * 3
    assert len(warnings) == 1
    assert (tmp_path / "started").read_text() == "x"


def test_a_rewrite_for_a_gpu_that_is_not_here() -> None:
    gm = graph()
    record = adaln.AdaLN().run(gm, context([]))
    assert [s.status for s in record.sites] == ["rewritten"]
    assert any("norm_modulate_triton" in str(n.target) for n in gm.graph.nodes)


def test_a_kernel_that_does_not_compile_falls_back_with_one_warning(monkeypatch) -> None:
    readiness.outcome.cache_clear()
    monkeypatch.setattr(emit_base.Base, "columns", lambda self: self("c_0 = tl.no_such_thing(0)"))
    gm, warnings = graph(), []
    record = adaln.AdaLN().run(gm, context(warnings))
    assert [s.status for s in record.sites] == ["declined"]
    assert "does not compile for sm90" in record.sites[0].reason
    assert len(warnings) == 1
    assert "test_readiness.py" in warnings[0]
    assert not any("graphopt" in str(n.target) for n in gm.graph.nodes)
    with pytest.raises(CodegenError, match="no_such_thing"):
        adaln.AdaLN().run(graph(), context([], on_error="raise"))
    readiness.outcome.cache_clear()


def test_without_triton_the_reference_runs(monkeypatch, caplog) -> None:
    monkeypatch.setattr(adaln.operators, "has_triton", lambda: False)
    gm = graph()
    with caplog.at_level(logging.INFO):
        record = adaln.AdaLN().run(gm, context([]))
    assert [s.status for s in record.sites] == ["rewritten"]
    assert not any("triton" in str(n.target) for n in gm.graph.nodes)
