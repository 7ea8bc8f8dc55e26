"""The generated kernels against fp64, under Triton's interpreter or on a GPU, through their operators and autograd.

Error rule (relative L2 against fp64 eager): bf16 and fp16 results at most 1.25x the error of eager in that dtype, fp32
ones at most max(1e-5, 1.25x eager's); gradients the same, in the dtype of their leaf.  Every buffer starts as NaN.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from operator_forms import FORMS, Form, attributes, call, chain, leaves, operands, plain, with_leaves
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphopt.codegen import kernels, layout
from graphopt.codegen.form import FUSIONS

pytestmark = pytest.mark.kernel

WIDTHS = [1, 3, 17, 64, 1152, 1536, 2240, 3072, 4096, 5120, 20000]
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16), "bf16-fp32": (torch.bfloat16, torch.float32),
    "fp16-fp32": (torch.float16, torch.float32), "fp32": (torch.float32, torch.float32),
    "fp32-bf16": (torch.float32, torch.bfloat16),
}
# what a model has: F1, F2, F2a, F3, several outputs, RMS sandwich
MAIN = ["norm_modulate", "gate_norm_modulate"]
USUAL = ["norm_modulate", "gate_norm_modulate", "gate_norm", "gate_residual", "norm_modulates",
         "branch_norm_gate_norm_modulate"]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer starts as NaN, so an element no kernel wrote shows."""
    empty = torch.empty

    def nan(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(kernels.torch, "empty", nan)


def error(got: Tensor, want: Tensor) -> float:
    if got.numel() == 0:
        return 0.0
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


def limit(dtype: torch.dtype, eager: float) -> float:
    return max(1e-5 if dtype == torch.float32 else 1e-6, 1.25 * eager)


def moved(t: dict, device: str, mean: float = 0.0) -> dict:
    """Operands of the test's device; factors are strided chunks of one buffer, as in a model; x has this mean."""
    t = with_leaves(t, [v.detach().to(device) for v in leaves(t)])
    t["x"] = (t["x"] + mean).to(t["x"].dtype)
    for i in range(len(t["modulation"])):
        t["modulation"][i] = strided(0.3 * t["modulation"][i])
    if t["gate"] is not None:
        t["gate"] = strided(0.3 * t["gate"])
    return with_leaves(t, [v.requires_grad_() for v in leaves(t)])


def strided(v: Tensor) -> Tensor:
    """The same values as the middle third of a larger buffer."""
    return torch.cat([v, v, v], -1).chunk(3, -1)[1] if v.dim() > 1 else v


def gradients(outs: list[Tensor], t: dict, cotangents: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(outs, leaves(t), [c.to(o.dtype) for o, c in zip(outs, cotangents)]))


def compare(form: Form, trials: list[dict], dtype: torch.dtype) -> None:
    """The rule of the module, over the trials together (a few elements alone would measure luck)."""
    sums: dict[str, list[float]] = {}  # name -> squared error, squared error of eager, squared norm
    dtypes: dict[str, torch.dtype] = {}
    for t in trials:
        outs = call(form, t, *attributes(form, dtype), engine="triton")
        cotangents = [torch.randn(o.shape).to(o.device, o.dtype) for o in outs]
        got = gradients(outs, t, cotangents)
        truth_t = with_leaves(t, [v.detach().double().requires_grad_() for v in leaves(t)])
        truth = chain(form, truth_t)
        rough_t = with_leaves(t, [v.detach().clone().requires_grad_() for v in leaves(t)])
        rough = chain(form, rough_t)
        want, rough_grads = gradients(truth, truth_t, cotangents), gradients(rough, rough_t, cotangents)
        for o in outs:
            assert (o.dtype, o.is_contiguous()) == (dtype, True)
        for leaf, g in zip(leaves(t), got, strict=True):
            assert (g.shape, g.dtype) == (leaf.shape, leaf.dtype)
            assert torch.isfinite(g).all()
        if t["x"].shape[-1] == 1:  # a norm over one channel amplifies the rounding of dy * gain by 1 / sqrt(eps)
            got = want = rough_grads = []
        triples = [(f"output {i}", *v) for i, v in enumerate(zip(outs, truth, [r.to(dtype) for r in rough], strict=True))]
        triples += [(f"gradient {i}", *v) for i, v in enumerate(zip(got, want, rough_grads, strict=True))]
        for name, a, b, c in triples:
            dtypes[name] = a.dtype
            each = [(v.double() - b).square().sum().item() for v in (a, c)] + [b.square().sum().item()]
            sums[name] = [p + q for p, q in zip(sums.get(name, [0.0, 0.0, 0.0]), each)]
    for name, (ours, eager, size) in sums.items():
        if size > 0:
            ours, eager = (ours / size) ** 0.5, (eager / size) ** 0.5
            assert ours <= limit(dtypes[name], eager), f"{name}: {ours:.3e}, eager {eager:.3e}"


def run(form: Form, B: int, S: int, D: int, dtypes: str, device: str, mean: float = 0.0) -> None:
    dtype, factors = DTYPES[dtypes]
    width = lambda size: D if size == 7 else B if size == 2 else S if size == 6 else size
    form = replace(form, layout=tuple(map(width, form.layout)))
    trials = []
    for seed in range(min(8, -(-600 // D))):  # the gradient of a vector has D elements
        torch.manual_seed(seed)
        trials.append(moved(operands(form, dtype, factors, (B, S, D)), device, mean))
    compare(form, trials, dtype)


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


@pytest.mark.nightly
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("fusion", list(FUSIONS))
def test_matrix(fusion: str, D: int, dtypes: str, device: str, poisoned: None) -> None:
    """Every batch size and length; the interpreter skips what takes it minutes."""
    for B in (1, 2, 3):
        for S in (0, 1, 77, 4095):
            if device == "cpu" and B * S * max(D, 500) > 250_000:
                continue
            if B * S * D > 9e7:  # eager in fp64 takes ten times as much, and several processes share the GPU
                continue
            run(plain(fusion), B, S, D, dtypes, device)
    for mean in (1e3, -1e3):
        run(plain(fusion), 2, 9, D, dtypes, device, mean)


@pytest.mark.parametrize("reduction", ["one_pass", "two_pass"])
@pytest.mark.parametrize("form", [plain("gate_norm_modulate"), plain("branch_norm_gate_norm_modulate"),
                                  FORMS[-4], FORMS[-3]], ids=str)
def test_two_reductions(form: Form, reduction: str, device: str, monkeypatch, poisoned: None) -> None:
    """A separate pass over columns (always used for very wide rows) gives the same gradients."""
    monkeypatch.setenv("GRAPHOPT_REDUCTION", reduction)
    run(form, 2, 13, 200, "fp32", device)


# -- numerics="eager" --------------------------------------------------------------------------------

EAGER = [replace(plain(n), affine=False) for n in ("norm_modulate", "gate_norm_modulate", "gate_norm", "gate_residual")]
EAGER += [replace(plain("norm_modulate"), norm="rms_norm", outputs="scale"), plain("norm_modulates"),
          replace(plain("branch_norm_gate"), activation="identity")]


def ulp(v: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place of values of a dtype."""
    exponent = torch.frexp(v.double().abs().clamp_min(torch.finfo(dtype).tiny)).exponent
    return torch.ldexp(torch.full_like(v, torch.finfo(dtype).eps / 2, dtype=torch.float64), exponent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", EAGER, ids=str)
def test_eager_numerics(form: Form, dtype: torch.dtype, device: str) -> None:
    """Within one ulp per source op: of n (times the gain), of the product, of the sum; h where nothing is normed: equal."""
    name = str(dtype).removeprefix("torch.")
    points = ("branch_norm", "activated", "gated", "residual", "norm", "gain", "product")
    rounding = " ".join(f"{p}={name}" for p in points)
    for seed in range(5):
        torch.manual_seed(seed)
        t = moved(operands(form, dtype, dtype, (2, 6, 96)), device)
        got = call(form, t, *attributes(form, dtype, rounding=rounding), engine="triton")
        want = chain(form, t)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert (a.dtype, b.dtype) == (dtype, dtype)
            if FUSIONS[form.fusion].front == "gate" and i == 0:
                assert torch.equal(a, b)
                continue
            # values of the chain are below 16; an op's ulp is that of what it returned
            bound = 3 * ulp(b, dtype) + 3 * ulp(torch.full_like(b, 2.0), dtype)
            assert ((a.double() - b.double()).abs() <= bound).all()


def test_eager_numerics_do_not_contract(device: str) -> None:
    """x + g * b in fp32 with the product rounded first: an fma would keep the digits that the rounding drops."""
    form = plain("gate_residual")
    t = operands(form, torch.float32, torch.float32, (2, 6, 64))
    t = with_leaves(t, [v.detach().to(device) for v in leaves(t)])
    t["x"] = -(t["gate"] * t["branch"])
    (exact,) = call(form, t, *attributes(form, torch.float32, rounding="gated=float32 residual=float32"), engine="triton")
    assert (exact == 0).all()


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


def test_dimensions_that_do_not_merge(device: str) -> None:
    """Three indices per group: the one layout that is copied."""
    form = plain("norm_modulate")
    x = torch.randn(2, 3, 2, 3, 2, 3, 16, device=device).permute(4, 1, 2, 3, 0, 5, 6).requires_grad_()
    scale = torch.randn(2, 1, 2, 1, 2, 1, 16, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="more than two indices"):
        layout.plan(x, {"x": x}, {"scale": scale})
    shift = torch.randn(16, device=device, requires_grad=True)
    t = operands(form, torch.float32) | {"x": x, "modulation": [scale, shift]}
    with pytest.raises(ValueError, match="more than two indices"):  # three interleaved groups: not even then
        compare(form, [t], torch.float32)
    t["modulation"][0] = torch.randn(2, 3, 1, 1, 1, 1, 16, device=device, requires_grad=True)
    compare(form, [t], torch.float32)


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
