"""What a kernel divides, roots and takes the tanh of is right to the last bit, whatever the hardware approximates.

Under the interpreter `/`, `tl.sqrt`, `tl.exp` and `tl.exp2` are exact, so here each is off by as much as the PTX manual
allows div.full, sqrt.approx and ex2.approx to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from accuracy import measure, moved
from operator_forms import attributes, call, operands, plain, sized
from torch import Tensor

from graphopt.codegen import kernels
from graphopt.codegen.form import BRANCH_RSTD, OPERANDS, RSTD

pytestmark = pytest.mark.kernel

# units in the last place (of a root and a power the manual gives relative errors, 2^-23 and 2^-22.5)
HARDWARE = {"create_fdiv": 2, "create_sqrt": 1, "create_exp": 2, "create_exp2": 2}


@pytest.fixture(autouse=True)
def approximate(device: str, monkeypatch) -> None:
    """On a GPU nothing; under the interpreter each approximate instruction is off, by chance, within its bound."""
    if device != "cpu":
        return
    import triton.runtime.interpreter as interpreter

    chance = np.random.default_rng(0)
    for name, bound in HARDWARE.items():
        exact = getattr(interpreter.InterpreterBuilder, name)

        def off(self, *args, exact=exact, bound=bound):  # type: ignore[no-untyped-def]
            out = exact(self, *args)
            ordinary = np.isfinite(out.data) & (out.data != 0)  # 0, inf and NaN are exact
            size = np.where(ordinary, np.spacing(np.abs(out.data)), 0.0).astype(np.float64)
            wide = out.data.astype(np.float64) + size * chance.uniform(-bound, bound, out.data.shape)
            return interpreter.TensorHandle(wide.astype(out.data.dtype), out.dtype.scalar)

        monkeypatch.setattr(interpreter.InterpreterBuilder, name, off)


def ulp(got: Tensor, want: Tensor) -> Tensor:
    """Distances of fp32 values from fp64 ones, in units of the last place of the latter."""
    spacing = np.spacing(want.abs().cpu().numpy().astype(np.float32)).astype(np.float64)
    return (got.double() - want).abs().cpu() / torch.from_numpy(spacing)


def gated(gate: Tensor) -> Tensor:
    """tanh(gate) as the kernels compute it: the gated residual of x = 0 and a branch of 1."""
    form = replace(plain("gate_residual"), activation="tanh", layout=(gate.numel(),))
    t = dict.fromkeys(OPERANDS) | {"x": torch.zeros(1, 1, gate.numel(), device=gate.device), "modulation": []}
    return call(form, t | {"branch": torch.ones_like(t["x"]), "gate": gate}, *attributes(form, torch.float32), engine="triton")[0].flatten()


def test_tanh(device: str) -> None:
    """Less than one unit in the last place off: fp32 numbers from 2^-30 to 20, of both signs."""
    size = torch.from_numpy(np.random.default_rng(1).integers(0x30800000, 0x41A00000, 16384).astype(np.int32))
    gate = (size.view(torch.float32) * torch.tensor([1.0, -1.0]).repeat(8192)).to(device)
    got = gated(gate)
    assert ulp(got, gate.double().tanh()).max() < 1
    assert torch.equal(got.sign(), gate.sign())


def test_tanh_of_what_is_no_ordinary_number(device: str) -> None:
    gate = torch.tensor([0.0, 1e-45, -1e-40, 1.0, -1.0, 9.5, 1e4, -3e38, torch.inf, -torch.inf, torch.nan], device=device)
    torch.testing.assert_close(gated(gate), gate.tanh(), rtol=1e-7, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("fusion", ["norm_modulate", "branch_norm_gate"])
def test_inverse_root(fusion: str, device: str) -> None:
    """Of rows of one channel with squares that are exact, so that only eps is added: half a unit in the last place."""
    form = sized(replace(plain(fusion), norm="rms_norm" if fusion == "norm_modulate" else "none"), (1, 400, 1))
    t = operands(form, torch.float32, shape=(1, 400, 1), device=device)
    of = "x" if fusion == "norm_modulate" else "branch"
    kept = 1 + torch.arange(400).to(torch.int32) * 10  # 12 bits
    t[of] = (kept.float() * 2.0 ** (torch.arange(400) % 41 - 30).float()).view(1, 400, 1).to(device)
    given = attributes(form, torch.float32)
    with torch.no_grad():
        found = kernels.forward(*(t[n] for n in OPERANDS), list(t["modulation"]), *given)
    rstd, eps = (found[RSTD], given[2]) if of == "x" else (found[BRANCH_RSTD], given[5])
    around = t[of].flatten() ** 2 + torch.tensor(eps, dtype=torch.float32, device=device)
    assert ulp(rstd.flatten(), around.double().rsqrt()).max() < 0.51


@pytest.mark.parametrize("value", [torch.inf, 3e38, torch.nan])
def test_a_row_that_overflows(value: float, device: str) -> None:
    """NaN only where eager on a CPU has it: the root of an infinite variance is no reason."""
    form = sized(replace(plain("norm_modulate"), norm="rms_norm", outputs="scale"), (1, 1, 3))
    t = operands(form, torch.float32, shape=(1, 1, 3), device=device)
    t["x"] = torch.tensor([[[1.0, value, 2.0]]], device=device)
    got = call(form, t, *attributes(form, torch.float32), engine="triton")[0]
    want = torch.nn.functional.rms_norm(t["x"].cpu(), (3,), None, 1e-6)  # CUDA's own kernel has NaN in the whole row
    assert torch.equal(got.isnan().cpu(), want.isnan())


def near_zero(device: str) -> Iterator[dict]:
    """Trials of branch_norm_gate_norm at D = 1 in which every h = x + tanh(gate) * weight * norm(branch) is small.

    That norm's gradient grows as 1 / |h|^3: of the 98,280 rows of a case of the matrix the four nearest to h = 0 decide.
    """
    form = sized(plain("branch_norm_gate_norm"), (1, 40, 1))
    for seed in range(6):
        torch.manual_seed(seed)
        t = moved(operands(form, torch.float32, torch.float32, (1, 40, 1), device), device)
        with torch.no_grad():
            t["gate"].fill_(0.53 + 0.1 * seed)  # beyond 0.5, where the series of tanh ended
            t["branch_weight"].fill_(1.5)
            normed = torch.nn.functional.rms_norm(t["branch"].double(), (1,), None, 1e-5)
            h = 6e-4 * torch.randn(1, 40, 1, device=device).double()
            t["x"].copy_(h - t["gate"].double().tanh() * 1.5 * normed)
        yield t


def test_a_sum_near_zero_behind_two_norms(device: str) -> None:
    """fp32, one channel: the gradient of x is no farther from fp64 than 1.25 times eager's, over 240 rows that all count."""
    form = sized(plain("branch_norm_gate_norm"), (1, 40, 1))
    *_, dx = [m for m in measure(form, near_zero(device), torch.float32) if m.name == "gradient 0"]
    assert dx.ratio <= 1, str(dx)
