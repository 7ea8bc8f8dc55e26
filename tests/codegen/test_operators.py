"""Names that change with the sources, two operators per fusion, and what caches make of that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from operator_forms import attributes, plain, results

from graphopt.codegen import operators
from graphopt.codegen.form import FUSIONS, Y

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fusion", list(FUSIONS))
def test_two_operators_per_fusion(fusion: str) -> None:
    reference, triton = operators.operator(fusion, "reference"), operators.operator(fusion, "triton")
    assert reference is not triton
    assert operators.source_hash() in str(reference)
    assert "triton" in str(triton)


def test_the_reference_operator_works_where_a_triton_one_with_a_cpu_kernel_fails() -> None:
    """On a machine without a driver, through aot_eager and Inductor, with gradients."""
    op = operators.operator("norm_modulate", "reference")

    def f(x, s, b):
        return op(*[x] + [None] * 7, [s, b], *attributes(plain("norm_modulate"), torch.float32))[Y] * 2

    def eager(x, s, b):
        return (torch.nn.functional.layer_norm(x, (8,), eps=1e-6) * (1 + s) + b) * 2

    args = [torch.randn(2, 5, 8, requires_grad=True), *(torch.randn(2, 1, 8, requires_grad=True) for _ in range(2))]
    want = torch.autograd.grad(eager(*args).square().sum(), args)
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        got = torch.autograd.grad(torch.compile(f, backend=backend)(*args).square().sum(), args)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_both_operators_trace_for_a_gpu_on_this_machine() -> None:
    """The operator for GPUs traces without a driver, forward and backward, and its launches appear once decomposed."""
    from torch.fx.experimental.proxy_tensor import make_fx

    op = operators.operator("gate_norm_modulate", "triton")

    def f(x, branch, factors):
        g, s, b = factors.chunk(3, -1)
        form = plain("gate_norm_modulate")
        h, y = results(form, op(x, branch, g, *[None] * 5, [s, b], *attributes(form, torch.bfloat16)))
        return torch.autograd.grad(h.float().sum() + y.float().sum(), (x, branch, factors))

    x, branch = (torch.randn(2, 64, 128).bfloat16().requires_grad_() for _ in range(2))
    factors = torch.randn(2, 1, 384, requires_grad=True)
    for mode in ("fake", "symbolic"):
        gm = make_fx(f, tracing_mode=mode)(x, branch, factors)
        names = [str(n.target) for n in gm.graph.nodes]
        assert sum("gate_norm_modulate_triton" in n for n in names) == 2


MODEL = """
import sys, torch, torch.nn.functional as F
from torch._dynamo.utils import counters
import graphopt
print("hash", __import__("graphopt.codegen.operators", fromlist=["x"]).source_hash())
f = torch.compile(lambda x, s, b: F.layer_norm(x, (16,)) * (1 + s) + b, backend="graphopt", options={"graphopt.select": "all"})
torch.manual_seed(0)
x, s, b = torch.randn(2, 5, 16, requires_grad=True), torch.randn(2, 1, 16, requires_grad=True), torch.randn(2, 1, 16)
f(x, s, b).square().sum().backward()
graphopt.check(f, {"modulate": 1}, what="rewritten")
print("hit", counters["aot_autograd"]["autograd_cache_hit"], "miss", counters["aot_autograd"]["autograd_cache_miss"])
print("grad", s.grad.sum().item())
"""


def run(source: Path, cache: Path) -> dict[str, list[str]]:
    """Run MODEL in a fresh process, with the packages of a source tree and a cache folder of its own."""
    loader = f"""
import sys, types, importlib.util, importlib.abc
class Finder(importlib.abc.MetaPathFinder):
    homes = {{"graphopt": "graphopt", "graphopt.passes": "passes", "graphopt.codegen": "codegen", "graphopt.schedule": "schedule"}}
    def find_spec(self, name, path=None, target=None):
        root = {str(source)!r}
        if name in self.homes:
            place = f"{{root}}/{{self.homes[name]}}"
            return importlib.util.spec_from_file_location(name, place + "/__init__.py", submodule_search_locations=[place])
sys.meta_path.insert(0, Finder())
"""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", loader + MODEL], capture_output=True, text=True, env=env, cwd="/", check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.split()[0] in ("hash", "hit", "grad")}


def test_second_process_hits_the_cache_and_a_changed_formula_misses(tmp_path: Path) -> None:
    """A changed backward under an unchanged operator name would keep returning the old gradient from a warm cache."""
    source, cache = tmp_path / "source", tmp_path / "cache"
    for folder in ("graphopt", "passes", "codegen", "schedule"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    first, second = run(source, cache), run(source, cache)
    assert first["hit"] == ["0", "miss", "1"]
    assert second["hit"] == ["1", "miss", "0"]
    assert second["grad"] == first["grad"]
    reference = source / "codegen" / "reference.py"
    text = reference.read_text()
    line = "dmodulation.append(_sum_to(through * n if part.startswith("
    assert line in text
    reference.write_text(text.replace(line, line.replace("through * n", "3 * through * n")))
    changed = run(source, cache)
    assert changed["hash"] != first["hash"]
    assert changed["hit"] == ["0", "miss", "1"]
    assert float(changed["grad"][0]) == pytest.approx(3 * float(first["grad"][0]), rel=1e-5)
