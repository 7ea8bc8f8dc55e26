"""The generated kernels against fp64, under Triton's interpreter or on a GPU, through their operators and autograd.

The error rule is that of accuracy.py.  Every buffer starts as NaN.  The whole matrix of fusions, widths, batches, lengths
and dtypes is a program of its own: benchmarks/kernel_matrix.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import accuracy
import pytest
import torch
from accuracy import DTYPES, compare, moved, run
from operator_forms import FORMS, Form, attributes, call, chain, leaves, operands, plain, sized, with_leaves
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.kernel

WIDTHS = [1, 3, 17, 64, 1152, 1536, 2240, 3072, 4096, 5120, 20000]
# what a model has: F1, F2, F2a, F3, several outputs, RMS sandwich
MAIN = ["norm_modulate", "gate_norm_modulate"]
USUAL = ["norm_modulate", "gate_norm_modulate", "gate_norm", "gate_residual", "norm_modulates",
         "branch_norm_gate_norm_modulate"]


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every buffer starts as NaN, so an element no kernel wrote shows."""
    with accuracy.poisoned():
        yield


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form(form: Form, device: str, poisoned: None) -> None:
    run(form, 2, 6, 600, "bf16-fp32", device)


@pytest.mark.parametrize("D", WIDTHS[:-1])
@pytest.mark.parametrize("fusion", USUAL)
def test_widths(fusion: str, D: int, device: str, poisoned: None) -> None:
    if device == "cpu" and D not in (3, 64, 1152) and fusion not in MAIN:
        pytest.skip("the interpreter takes seconds: nightly, and on a GPU")
    run(plain(fusion), 2, 5 if D < 1000 else 3, D, "bf16-fp32", device)


@pytest.mark.parametrize(("fusion", "D"), [
    ("gate_norm_modulate", 20000), pytest.param("norm_modulate", 65536, marks=pytest.mark.nightly),
    pytest.param("branch_norm_gate_norm_modulate", 65536, marks=pytest.mark.nightly),
])
def test_very_wide(fusion: str, D: int, device: str, poisoned: None) -> None:
    """Rows that do not fit in registers are walked in chunks."""
    run(plain(fusion), 1, 2, D, "bf16-fp32", device)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize(("B", "S"), [(1, 1), (3, 5)])
@pytest.mark.parametrize("fusion", USUAL)
def test_dtypes(fusion: str, B: int, S: int, dtypes: str, device: str, poisoned: None) -> None:
    if device == "cpu" and dtypes != "bf16" and fusion not in MAIN:
        pytest.skip("the interpreter takes seconds: nightly, and on a GPU")
    run(plain(fusion), B, S, 600, dtypes, device)


@pytest.mark.parametrize(("fusion", "D"), [("norm_modulate", 17), ("norm_modulate", 1152), ("norm_modulate", 20000),
                                           ("gate_norm_modulate", 1152), ("gate_norm", 3072)])
def test_large_mean(fusion: str, D: int, device: str, poisoned: None) -> None:
    """A variance from E[x^2] - E[x]^2, or padded lanes in it, would be off by far more."""
    run(plain(fusion), 1, 5, D, "fp32", device, mean=1e3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [3, 17, 1152, 5120, 20000])
@pytest.mark.parametrize("fusion", ["norm_modulate", "residual_norm_modulate"])
def test_constant_rows(fusion: str, D: int, dtype: torch.dtype, device: str) -> None:
    """A row of one value (8 significant bits) is its mean: the norm is 0, y the shift, the gradient of the scale 0."""
    form = sized(plain(fusion), (2, 5, D))
    t = moved(operands(form, dtype, torch.float32, (2, 5, D)), device)
    with torch.no_grad():
        values = torch.tensor([1000.0, -996.0, 3.140625, 0.0078125, 255.0], device=device)
        t["x"].copy_(values[None, :, None].expand(2, 5, D))
        if t["branch"] is not None:
            t["branch"].copy_(-t["x"] / 4)
    *_, y = call(form, t, *attributes(form, dtype), engine="triton")
    scale, shift = t["modulation"]
    assert torch.equal(y, shift.to(dtype).expand_as(y))
    dscale, dshift = torch.autograd.grad(y, (scale, shift), torch.ones_like(y))
    assert not dscale.any()
    assert torch.equal(dshift, torch.full_like(dshift, 5.0))


@pytest.mark.parametrize("reduction", ["one_pass", "two_pass"])
@pytest.mark.parametrize("form", [plain("gate_norm_modulate"), plain("branch_norm_gate_norm_modulate"),
                                  FORMS[-4], FORMS[-3]], ids=str)
def test_two_reductions(form: Form, reduction: str, device: str, monkeypatch, poisoned: None) -> None:
    """A separate pass over columns (always used for very wide rows) gives the same gradients."""
    monkeypatch.setenv("GRAPHOPT_REDUCTION", reduction)
    run(form, 2, 13, 200, "fp32", device)


# -- layouts -----------------------------------------------------------------------------------------


class Copies(TorchDispatchMode):
    """Counts what copies a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("clone", "copy_", "_to_copy", "contiguous"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


LAYOUTS = {
    "sequence first": lambda v: v.transpose(0, 1).contiguous().transpose(0, 1),
    "channels outside": lambda v: v.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced rows": lambda v: torch.cat([v, v], 1)[:, 1:1 + v.shape[1]] if v.shape[1] > 1 else v,
    "sliced columns": lambda v: torch.cat([v, v], -1)[..., v.shape[-1]:],
    "every second row": lambda v: torch.repeat_interleave(v, 2, 1)[:, ::2],
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("fusion", ["norm_modulate", "gate_norm_modulate", "gate_residual"])
def test_layouts_are_read_in_place(fusion: str, name: str, device: str, poisoned: None) -> None:
    form, lay = plain(fusion), LAYOUTS[name]
    t = moved(operands(form, torch.float32, torch.float32, (3, 10, 48)), device)
    t = t if t["gate"] is None else t | {"gate": t["gate"][:1].expand(3, 1, 48)}
    form = replace(form, layout=(3, 1, 48))
    shapes = [v.detach() for v in leaves(t)]
    t = with_leaves(t, [(lay(v) if v.shape[1] > 1 else v).requires_grad_() for v in shapes])
    t["modulation"] = [f.detach().expand(3, 1, 48).requires_grad_() if f.shape[0] == 2 else f for f in
                       (m if m.shape[0] == 3 else m[:1].detach().expand(3, 1, 48).requires_grad_() for m in t["modulation"])]
    with Copies() as copies:
        outs = call(form, t, *attributes(form, torch.float32), engine="triton")
        cotangents = [lay(torch.randn(o.shape, device=device)) for o in outs]
        del copies.seen[:]  # those of making the cotangents
        got = torch.autograd.grad(outs, leaves(t), cotangents)
    assert copies.seen == []
    high = with_leaves(t, [v.detach().double().requires_grad_() for v in leaves(t)])
    want_outs = chain(form, high)
    want = torch.autograd.grad(want_outs, leaves(high), [c.double() for c in cotangents])
    for a, b in zip([*outs, *got], [*want_outs, *want]):
        assert error(a, b) < 1e-5


FACTORS = [(40,), (1, 1, 1, 40), (2, 1, 1, 40), (2, 3, 1, 40), (1, 3, 1, 40), (1, 1, 17, 40), (2, 1, 17, 40), (2, 3, 17, 40),
           (3, 1, 40), (3, 17, 40)]


@pytest.mark.parametrize("gate", FACTORS, ids=str)
@pytest.mark.parametrize("scale", FACTORS, ids=str)
def test_factor_layouts(scale: tuple, gate: tuple, device: str) -> None:
    """Any factor that broadcasts, also two that vary over different dimensions."""
    if device == "cpu" and (FACTORS.index(scale) + 3 * FACTORS.index(gate)) % 10:
        pytest.skip("a tenth of the pairs under the interpreter")
    form = plain("gate_norm_modulate")
    new = lambda *s: torch.randn(*s, device=device, requires_grad=True)
    t = operands(form, torch.float32) | {"x": new(2, 3, 17, 40), "branch": new(2, 3, 17, 40), "gate": new(*gate),
                                         "modulation": [new(*scale), new(*gate)]}
    compare(form, [t], torch.float32)


SIX = [(2, 1, 2, 1, 2, 1, 16), (1, 3, 1, 3, 1, 3, 16), (2, 3, 2, 3, 2, 3, 16), (2, 3, 1, 1, 1, 1, 16), (16,)]


@pytest.mark.parametrize("gate", SIX, ids=str)
@pytest.mark.parametrize("scale", SIX, ids=str)
def test_dimensions_that_do_not_merge(scale: tuple, gate: tuple, device: str) -> None:
    """Six leading dimensions, permuted, factors that vary in every other: three indices per group and per row, no copy."""
    if device == "cpu" and (SIX.index(scale) + 2 * SIX.index(gate)) % 5 != 2:
        pytest.skip("a fifth of the pairs under the interpreter")
    form = plain("gate_norm_modulate")
    turn = lambda v: v.permute(4, 1, 2, 3, 0, 5, 6)
    new = lambda *s: torch.randn(*s, device=device)
    x, branch = (turn(new(2, 3, 2, 3, 2, 3, 16)).requires_grad_() for _ in range(2))
    g, s, t = (new(*shape).requires_grad_() for shape in (gate, scale, (16,)))
    operands_ = operands(form, torch.float32) | {"x": x, "branch": branch, "gate": g, "modulation": [s, t]}
    with Copies() as copies:
        outs = call(form, operands_, *attributes(form, torch.float32), engine="triton")
        torch.autograd.grad(outs, leaves(operands_), [torch.ones_like(o) for o in outs])
    assert copies.seen == []
    compare(form, [operands_], torch.float32)


@pytest.mark.parametrize("shape", [(2, 0, 24), (0, 5, 24)])
@pytest.mark.parametrize("fusion", USUAL)
def test_empty(fusion: str, shape: tuple, device: str) -> None:
    form = replace(plain(fusion), layout=(shape[0], 1, 24))
    t = moved(operands(form, torch.float32, None, shape), device)
    outs = call(form, t, *attributes(form, torch.float32), engine="triton")
    grads = torch.autograd.grad(outs, leaves(t), [torch.zeros_like(o) for o in outs])
    assert all(o.shape == shape for o in outs)
    assert all(g.shape == v.shape and not g.any() for g, v in zip(grads, leaves(t)))


def test_absent_cotangents(device: str) -> None:
    """Only some of h and the y_i are used downstream."""
    form = replace(plain("gate_norm_modulates"), affine=True)
    for used in ((0,), (1,), (2,), (0, 2), (1, 2)):
        t = moved(operands(form, torch.float32, None, (2, 20, 64)), device)
        outs = call(form, t, *attributes(form, torch.float32), engine="triton")
        high = with_leaves(t, [v.detach().double().requires_grad_() for v in leaves(t)])
        truth = chain(form, high)
        cot = [torch.randn(o.shape, device=device) for o in outs]
        pick = lambda o: [o[i] for i in used]
        got = torch.autograd.grad(pick(outs), leaves(t), pick(cot), allow_unused=True)
        want = torch.autograd.grad(pick(truth), leaves(high), [c.double() for c in pick(cot)], allow_unused=True)
        for a, b in zip(got, want):
            assert (a is None or not a.any()) if b is None else error(a, b) < 1e-5


@pytest.mark.parametrize("D", [192, pytest.param(20000, marks=pytest.mark.nightly)])
def test_repeatable(D: int, device: str) -> None:
    """Bitwise, gradients of all leaves, two runs."""
    form = plain("gate_norm_modulate")
    t = moved(operands(form, torch.bfloat16, torch.float32, (2, 29 if D < 1000 else 7, D)), device)
    outs = call(form, t, *attributes(form, torch.bfloat16), engine="triton")
    cot = [torch.randn_like(o) for o in outs]
    runs = []
    for _ in range(2):
        outs = call(form, t, *attributes(form, torch.bfloat16), engine="triton")
        runs.append(torch.autograd.grad(outs, leaves(t), cot))
    assert all(torch.equal(a, b) for a, b in zip(*runs))
