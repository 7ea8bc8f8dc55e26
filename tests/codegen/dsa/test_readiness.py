"""The kernels compile offline for the targets they are chosen for."""

from __future__ import annotations

import pytest
import torch

from graphopt.codegen.dsa import head_launch, readiness
from graphopt.codegen.dsa.spec import Spec
from graphopt.errors import CodegenError

BF = torch.bfloat16


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(engine, name, target, window=(2, 3, 3), **changes):
    for kernel, constants, stages in readiness.kernels_of(engine, Spec(window, 64, BF), target):
        if kernel.__name__ == name:
            return readiness.compile_kernel(kernel, {**constants, **changes}, stages, BF, target, engine == "window")
    raise AssertionError(name)


def test_interpolation_in_registers_moves_nothing_on_hopper() -> None:
    asm = compiled("fused", "taps", "sm90").asm
    loop = asm["ttgir"].split("scf.for")[-1]
    assert "wgmma" in asm["ptx"]
    assert "convert_layout" not in loop.split("scf.yield")[0]


@pytest.mark.parametrize(("engine", "name", "target"), [
    ("lattice", "score", "gfx942"), ("lattice", "soften", "sm80"), ("window", "window_forward", "gfx942")])
def test_a_kernel_of_each_portable_engine(engine, name, target) -> None:
    assert compiled(engine, name, target).asm


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
@pytest.mark.parametrize("offsets", ["shift", "none"])
@pytest.mark.parametrize(("window", "D"), [((3, 7, 7), 128), ((3, 3, 3), 96)])
def test_everything(window, D, offsets, target) -> None:
    assert readiness.check.__wrapped__(window, D, BF, target, offsets) != "reference"


def test_shared_memory_beyond_the_target_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(readiness, "SHARED_LIMIT", {"sm90": 8 << 10})
    with pytest.raises(CodegenError, match="shared memory"):
        readiness.check.__wrapped__((1, 2, 2), 64, BF, "sm90", "none")


def test_a_kernel_that_does_not_compile_is_named(monkeypatch) -> None:
    def broken(*_args, **_kw):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(readiness, "compile_kernel", broken)
    with pytest.raises(CodegenError, match="out of registers") as caught:
        readiness.check.__wrapped__((2, 3, 3), 64, BF, "sm90")
    assert caught.value.remedy


@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_the_offset_head_holds_one_value_per_thread(target) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, warps = head_launch._products("head_slope", 36), head_launch.WARPS
    constants = {"C": 128, "NW": warps, "HALF": False, "PTX": True, "AHEAD": head_launch.AHEAD}
    kinds = {"DU": "*bf16", "U": "*bf16", "DY": "*bf16", "SUMS": "*fp32", "WEIGHT": "*bf16"}
    signature = {a: "constexpr" if a in constants else kinds.get(a, "i32") for a in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={a: c for a, c in constants.items() if a in signature},
                       attrs={(i,): [["tt.divisibility", 16]] for i, s in enumerate(signature.values()) if s[0] == "*"})
    asm = triton.compile(source, target=GPUTarget("cuda", int(target[2:]), 32), options={"num_warps": warps, "num_stages": 1}).asm
    assert head_launch.one_per_thread(asm["ttgir"])
    assert "mma.sync" in asm["ptx"]
