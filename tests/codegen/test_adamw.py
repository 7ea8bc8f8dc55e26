"""The optimizer kernels: against torch.optim.AdamW, and the split master against an fp32 one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from graphopt.codegen import adamw_cpp
from graphopt.codegen.adamw import Hyper, Piece, join, split, update_, update_all
from graphopt.errors import CodegenError

SIZES = (1, 3, 63, 64, 1000, 70001)


@pytest.fixture(scope="module")
def compiled():
    update = adamw_cpp.load(2)
    return lambda *piece: update([Piece(*piece)])


def hyper(step, scale=None, ema=None, wd=0.1):
    return Hyper(1e-2, 0.9, 0.99, 1e-8, wd, step, scale, ema)


def test_split_is_exact_for_every_kind_of_number() -> None:
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (1_000_000,), generator=g, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    ties = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000, 0x00008000, 0x7F7F8000], dtype=torch.int64).to(torch.int32)
    for f in (x, ties.view(torch.float32), torch.tensor([0.0, -0.0, float("inf"), -float("inf")])):
        high, rest = split(f)
        assert high.dtype == torch.bfloat16
        assert rest.dtype == torch.int16
        assert torch.equal(join(high, rest).view(torch.int32), f.view(torch.int32))
    finite = x[torch.isfinite(x) & (x.abs() < 3e38)]
    high, _ = split(finite)
    nearest = finite.bfloat16()
    different = (high != nearest) & ~((high == 0) & (nearest == 0))
    assert (finite.view(torch.int32)[different] & 0xFFFF == 0x8000).all(), "it differs on exact ties only"


@pytest.mark.parametrize("n", SIZES)
def test_torch_kernel_is_torch_adamw(n: int) -> None:
    p = torch.nn.Parameter(torch.randn(n))
    w, m, v = p.detach().clone(), torch.zeros(n), torch.zeros(n)
    opt = torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(1, 6):
        g = torch.randn(n)
        p.grad = g.clone()
        opt.step()
        update_(w, None, g, m, v, hyper(step))
        assert torch.equal(w, p.detach())
        assert torch.equal(m, opt.state[p]["exp_avg"])
        assert torch.equal(v, opt.state[p]["exp_avg_sq"])


@pytest.mark.parametrize("kernel", ["torch", "cpp"])
@pytest.mark.parametrize("n", SIZES)
def test_split_master_is_an_fp32_master(kernel: str, n: int, compiled) -> None:
    update = update_ if kernel == "torch" else compiled
    start = torch.randn(n).bfloat16()
    high, rest = start.clone(), torch.zeros(n, dtype=torch.int16)
    master = start.float()
    state = [torch.zeros(n) for _ in range(6)]
    state[2].copy_(master)
    state[5].copy_(master)
    for step in range(1, 11):
        g = torch.randn(n).bfloat16()
        update(high, rest, g, state[0], state[1], hyper(step, 0.7, 0.99), state[2])
        update(master, None, g, state[3], state[4], hyper(step, 0.7, 0.99), state[5])
        assert torch.equal(join(high, rest), master)
        assert torch.equal(high, split(master)[0])
        for a, b in zip(state[:3], state[3:]):
            assert torch.equal(a, b)


@pytest.mark.parametrize("n", SIZES)
def test_compiled_kernel_is_the_torch_one(n: int, compiled) -> None:
    a, b = [[torch.randn(n, generator=torch.Generator().manual_seed(1)), torch.zeros(n), torch.zeros(n)] for _ in range(2)]
    for step in range(1, 6):
        g = torch.randn(n)
        update_(a[0], None, g, a[1], a[2], hyper(step, 0.3))
        compiled(b[0], None, g, b[1], b[2], hyper(step, 0.3))
    for x, y in zip(a, b):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


def test_every_instruction_set_gives_the_same_bits() -> None:
    here = list(adamw_cpp.ISAS)[list(adamw_cpp.ISAS).index(adamw_cpp.instruction_set()):]
    assert here[-1] == "portable"
    results = []
    for isa in here:
        update = adamw_cpp.load(2, isa)
        g = torch.Generator().manual_seed(3)
        new = lambda n, g=g: torch.randn(n, generator=g)
        high, rest = split(new(40001))
        pieces = [Piece(high, rest, new(40001).bfloat16(), new(40001), new(40001).abs(), hyper(3, 0.7, 0.99), new(40001)),
                  Piece(new(33), None, new(33), new(33), new(33).abs(), hyper(2))]
        update(pieces)
        results.append([t for p in pieces for t in p if isinstance(t, torch.Tensor)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_the_instruction_set_is_that_of_the_machine(tmp_path, monkeypatch) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(adamw_cpp, "CPUINFO", info)
    for flags, want in (("fpu avx2 avx512f avx512bw avx512dq avx512vl", "avx512"), ("fpu avx2 avx512f", "avx2"), ("fpu sse2", "portable")):
        info.write_text(f"processor : 0\nflags\t\t: {flags}\n")
        assert adamw_cpp.instruction_set() == want
    info.write_text("processor : 0\nFeatures : asimd\n")
    assert adamw_cpp.instruction_set() == "portable"
    info.unlink()
    assert adamw_cpp.instruction_set() == "portable"


def test_settings_are_run_time_numbers(compiled) -> None:
    w, m, v = torch.ones(4), torch.zeros(4), torch.zeros(4)
    compiled(w, None, torch.full((4,), 0.5), m, v, Hyper(1e-2, 0.9, 0.999, 1e-8, 0.0, 1))
    torch.testing.assert_close(w, torch.full((4,), 0.99))


def test_without_a_compiler_the_torch_kernel_runs(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("GRAPHOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(CodegenError, match="failed on the AdamW kernel"):
        adamw_cpp.load(1)
    with caplog.at_level("WARNING"):
        assert adamw_cpp.best(1) is update_all
    assert "torch operators" in caplog.text
    assert not list(tmp_path.glob("*.so"))


def test_two_processes_may_compile_at_once(tmp_path) -> None:
    code = "from graphopt.codegen import adamw_cpp; adamw_cpp.load(1); print('fine')"
    env = {**os.environ, "GRAPHOPT_CACHE_DIR": str(tmp_path)}
    runs = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [r.communicate()[0].strip() for r in runs] == ["fine", "fine"]
    assert len(list(tmp_path.glob("*.so"))) == 1


def test_many_parameters_in_one_call_are_as_many_calls() -> None:
    update = adamw_cpp.load(3)
    pieces, want = [], []
    for i, n in enumerate((1, 40000, 64, 100001, 7, 32768)):
        w, g = torch.randn(n), torch.randn(n)
        state = [torch.zeros(n), torch.zeros(n)]
        split_, h = i % 2 == 1, hyper(3, 0.5 if i % 3 else None, wd=0.1 * i)
        high, rest = split(w) if split_ else (w.clone(), None)
        pieces.append(Piece(high, rest, g.bfloat16() if i == 2 else g, *state, h))
        alone = [None if t is None else t.clone() for t in pieces[-1][:5]]
        update([Piece(*alone, h)])
        want.append(alone)
    update(pieces)
    for p, w in zip(pieces, want):
        assert all(torch.equal(a, b) for a, b in zip(p[:5], w) if a is not None)
