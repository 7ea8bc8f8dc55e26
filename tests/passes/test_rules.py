"""Each rule: what it matches in which spellings, values and gradients, and what it must leave alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import graphopt
from graphopt.codegen.operators import operator
from graphopt.passes import canonical, catalogue, near_miss, rewrite

B, S, D = 2, 6, 8


def rewritten(f, inputs, dynamic=None, numerics="fp32"):
    """(rules that matched, what was found, the rewritten graph's results), canonical form first."""
    seen = []

    def backend(gm, example_inputs):
        canonical.out_of_place(gm)
        found = rewrite.find(gm, catalogue.RULES, numerics)
        found.near_misses = near_miss.explain(gm, found)
        rewrite.apply(gm, found.matches, lambda m: operator(m.replacement.fusion, "reference"))
        seen.append((gm, found))
        return gm.forward

    torch._dynamo.reset()
    out = torch.compile(f, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    _gm, found = seen[-1]
    return sorted(m.rule.name for m in found.matches), found, out


def ln(x, w=None, b=None):
    return F.layer_norm(x, (D,), w, b)


def rms(x, w=None):
    return F.rms_norm(x, (D,), w)


def written_rms(x):
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)


def written_ln(x):
    m = x.mean(-1, keepdim=True)
    return (x - m) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-6)


def centred_ln(x):
    c = x - x.mean(-1, keepdim=True)
    return c * torch.rsqrt((c * c).mean(-1, keepdim=True) + 1e-6)


W, BIAS = torch.nn.Parameter(torch.randn(D)), torch.nn.Parameter(torch.randn(D))
act = torch.tanh  # a branch

# x [B, S, D]; s, t, g, u [B, 1, D]; m [B, S, 2 D]
FORMS = {
    # F1
    "scale and shift": (lambda x, s, t, g, u, m: ln(x) * (1 + s) + t, ["norm_modulate"]),
    "scale alone": (lambda x, s, t, g, u, m: act(rms(x, W) * (1 + s)), ["norm_modulate"]),
    "plain scale": (lambda x, s, t, g, u, m: ln(x, W, BIAS) * s + t, ["norm_modulate"]),
    "n + n * s + t": (lambda x, s, t, g, u, m: (lambda n: n + n * s + t)(ln(x)), ["norm_modulate"]),
    "n + n * s": (lambda x, s, t, g, u, m: act((lambda n: n * s + n)(ln(x))), ["norm_modulate"]),
    "two norms": (lambda x, s, t, g, u, m: ln(x) + ln(x) * s + t, ["norm_modulate"]),
    "addcmul": (lambda x, s, t, g, u, m: torch.addcmul(t, ln(x), 1 + s), ["norm_modulate"]),
    "addcmul, n + n * s": (lambda x, s, t, g, u, m: (lambda n: torch.addcmul(n, s, n))(ln(x)) + t, ["norm_modulate"]),
    "alpha of 1": (lambda x, s, t, g, u, m: torch.add(t, ln(x) * torch.add(s, 1), alpha=1), ["norm_modulate"]),
    "in place": (lambda x, s, t, g, u, m: ln(x).mul_(1 + s).add_(t), ["norm_modulate"]),
    "written-out rms": (lambda x, s, t, g, u, m: written_rms(x) * W * (1 + s) + t, ["norm_modulate"]),
    "written-out layer norm": (lambda x, s, t, g, u, m: written_ln(x) * (1 + s) + t, ["norm_modulate"]),
    "centred layer norm": (lambda x, s, t, g, u, m: (centred_ln(x) * W + BIAS) * (1 + s) + t, ["norm_modulate"]),
    "power -0.5": (lambda x, s, t, g, u, m: x * (x.square().mean(-1, keepdim=True) + 1e-6) ** -0.5 * (1 + s) + t,
                   ["norm_modulate"]),
    "per token": (lambda x, s, t, g, u, m: ln(x) * (1 + m.chunk(2, -1)[0]) + m.chunk(2, -1)[1], ["norm_modulate"]),
    "[D]": (lambda x, s, t, g, u, m: ln(x) * (1 + s[0, 0]) + t[0, 0], ["norm_modulate"]),
    "stride 0": (lambda x, s, t, g, u, m: ln(x) * (1 + s.expand(B, S, D)) + t, ["norm_modulate"]),
    "per frame": (lambda x, s, t, g, u, m: (ln(x.unflatten(1, (2, 3))) * (1 + m[:, :2, None, :D]) + t[:, None]),
                  ["norm_modulate"]),
    "sequence first": (lambda x, s, t, g, u, m: ln(x.transpose(0, 1).contiguous()) * (1 + s[:, 0]) + t[:, 0],
                       ["norm_modulate"]),
    "type_as is no dependence": (lambda x, s, t, g, u, m: ln(x) * (1 + s.double().type_as(x)) + t, ["norm_modulate"]),
    # F2r
    "residual": (lambda x, s, t, g, u, m: (lambda h: (h, ln(h) * (1 + s) + t))(x + act(x) @ torch.eye(D)),
                 ["residual_norm_modulate"]),
    # F2
    "gate, modulate": (lambda x, s, t, g, u, m: (lambda h: (h, ln(h) * (1 + s) + t))(x + g * act(x)),
                       ["gate_norm_modulate"]),
    "tanh gate": (lambda x, s, t, g, u, m: (lambda h: (h, rms(h) * (1 + s)))(x + act(x) * torch.tanh(g[:, 0])[:, None]),
                  ["gate_norm_modulate"]),
    "gate by addcmul": (lambda x, s, t, g, u, m: (lambda h: (h, ln(h) * (1 + s) + t))(torch.addcmul(x, g, act(x))),
                        ["gate_norm_modulate"]),
    "gate in place": (lambda x, s, t, g, u, m: (lambda h: (h.add_(g * act(h)), ln(h) * (1 + s) + t))(x + 1),
                      ["gate_norm_modulate"]),
    "per-frame gate": (lambda x, s, t, g, u, m: (lambda y: y + m[:, :2, None, :D] * act(y))(x.unflatten(1, (2, 3))),
                       ["gate_residual"]),
    # F2a, F3
    "gate, affine norm": (lambda x, s, t, g, u, m: (lambda h: (h, ln(h, W, BIAS)))(x + g * act(x)), ["gate_norm"]),
    "gate": (lambda x, s, t, g, u, m: x + g * act(x), ["gate_residual"]),
    "joined gates": (lambda x, s, t, g, u, m: (lambda y: x + torch.cat([y[:, :2] * g, y[:, 2:] * u], 1))(act(x)),
                     ["gate_residual_joined"]),
    # F4
    "two modulates": (lambda x, s, t, g, u, m: (lambda n: (n * (1 + s) + t, n * (1 + g) + u))(ln(x)), ["norm_modulates"]),
    "two modulates, casts": (
        lambda x, s, t, g, u, m: (lambda n: ((n * (1 + s) + t).bfloat16(), act(n * (1 + u)).bfloat16()))(ln(x.double())),
        ["norm_modulate", "norm_modulate"]),
    "gate, two modulates": (
        lambda x, s, t, g, u, m: (lambda h: (lambda n: (h, n * (1 + s) + t, n * (1 + u) + s))(ln(h)))(x + g * act(x)),
        ["gate_norm_modulates"]),
    "residual, three": (
        lambda x, s, t, g, u, m: (lambda h: (lambda n: (n * (1 + s) + t, n * (1 + u) + s, act(n * (1 + g))))(
            rms(h, W)))(x + act(x) @ torch.eye(D)), ["residual_norm_modulates"]),
    # F5
    "normed branch": (lambda x, s, t, g, u, m: x + torch.tanh(g) * written_rms(act(x)), ["branch_norm_gate"]),
    "normed branch, norm": (lambda x, s, t, g, u, m: (lambda h: (h, rms(h, W)))(x + g * ln(act(x), W)),
                            ["branch_norm_gate_norm"]),
    "normed branch, modulate": (
        lambda x, s, t, g, u, m: (lambda h: (h, rms(h) * (1 + s)))(x + torch.tanh(g) * rms(act(x), W)),
        ["branch_norm_gate_norm_modulate"]),
}


def operands(dtype=torch.float32):
    x = torch.randn(B, S, D).to(dtype)
    return [x, *(torch.randn(B, 1, D).to(dtype) for _ in range(4)), torch.randn(B, S, 2 * D).to(dtype)]


def flat(out):
    return [o for o in (out if isinstance(out, tuple) else (out,)) if o.is_floating_point()]


CASES = [
    pytest.param(name, dynamic, id=f"{name}-{'dynamic' if dynamic else 'static'}",
                 marks=[pytest.mark.nightly] if dynamic and i % 3 else [])
    for i, name in enumerate(FORMS) for dynamic in (False, True)
]


@pytest.mark.parametrize(("name", "dynamic"), CASES)
def test_matches_values_and_gradients(name: str, dynamic: bool) -> None:
    f, rules = FORMS[name]
    inputs = [v.requires_grad_() for v in operands()]
    got_rules, found, out = rewritten(f, inputs, dynamic or None)
    assert got_rules == rules, [(r.rule, r.reason) for r in found.rejects] + [m.reason for m in found.near_misses]
    want = flat(f(*inputs))
    for a, b in zip(flat(out), want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())
    leaves = [*inputs, W, BIAS]
    cotangents = [torch.randn_like(o) for o in want]
    for a, b in zip(torch.autograd.grad(flat(out), leaves, cotangents, allow_unused=True),
                    torch.autograd.grad(want, leaves, cotangents, allow_unused=True), strict=True):
        assert (a is None) == (b is None) or (a if b is None else b).abs().max() == 0
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["scale and shift", "gate, modulate", "tanh gate", "gate by addcmul",
                                  "two modulates", "gate"])
def test_eager_numerics_round_after_every_op(name: str) -> None:
    """bf16 with numerics="eager": at most two units in the last place from eager, mostly none."""
    f, rules = FORMS[name]
    inputs = operands(torch.bfloat16)
    got_rules, _found, out = rewritten(f, inputs, numerics="eager")
    assert got_rules == rules
    for a, b in zip(flat(out), flat(f(*inputs)), strict=True):
        ulp = b.float().abs().clamp_min(0.25) * 2**-7
        assert ((a.float() - b.float()).abs() <= 2 * ulp).all()
        assert (a == b).float().mean() > 0.9


def left_alone(f, *inputs):
    """The reasons given where nothing matches."""
    rules, found, out = rewritten(f, list(inputs))
    assert rules == []
    for a, b in zip(flat(out), flat(f(*inputs))):
        torch.testing.assert_close(a, b)
    return " / ".join([r.reason for r in found.rejects] + [m.reason for m in found.near_misses])


NEAR = {  # what it is: (form of x, s, t), the reason that `why` gives
    "alpha": (lambda x, s, t: torch.add(t, ln(x) * (1 + s), alpha=2), "alpha"),
    "value": (lambda x, s, t: torch.addcmul(t, ln(x), 1 + s, value=2), "scales an operand"),
    "unbiased": (lambda x, s, t: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6) * (1 + s)
                 + t, ""),
    "another mean": (lambda x, s, t: (x - t) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-6) * (1 + s), ""),
    "shift alone": (lambda x, s, t: ln(x) + t, "a shift without a scale is left to the compiler"),
    "no scale": (lambda x, s, t: ln(x) @ torch.eye(D), "no scale multiplies it"),
    "gated unit": (lambda x, s, t: x + F.silu(x @ torch.eye(D)) * x, "gates a branch by the tokens themselves"),
    "layer scale": (lambda x, s, t: x + W * act(x), "made of parameters alone"),
    "two norms that differ": (lambda x, s, t: ln(x) + F.layer_norm(x, (D,), eps=1e-2) * s + t, ""),
    "clamped gate": (lambda x, s, t: x + s[..., :1] * act(x), "not channel-wide"),
    "joined slices out of order": (
        lambda x, s, t: (lambda y: x + torch.cat([y[:, 2:] * s, y[:, :2] * t], 1))(act(x)), ""),
    "joined slices, one gate through tanh": (
        lambda x, s, t: (lambda y: x + torch.cat([y[:, :2] * s, y[:, 2:] * torch.tanh(t)], 1))(act(x)), "activation"),
    "joined slices with a gap": (
        lambda x, s, t: (lambda y: x + torch.cat([y[:, :2] * s, y[:, 2:5] * s, y[:, 4:5] * t], 1))(act(x)), ""),
}


@pytest.mark.parametrize("name", list(NEAR))
def test_near_misses_are_left_alone_and_say_why(name: str) -> None:
    f, reason = NEAR[name]
    x, s, t = operands()[:3]
    assert reason in left_alone(f, x, s, t)


def test_in_place_writes_that_can_be_observed_stay() -> None:
    """A written input, a view that is read after the write, a part of a tensor, a write under no_grad."""
    forms = {
        "input": lambda x, g: (x.add_(g * act(x)), x.sum()),
        "view": lambda x, g: (lambda h: (lambda v: (h.add_(g * act(h)), v.sum()))(h[:, 0]))(x + 1),
        "part": lambda x, g: (lambda h: (h[:, :2].add_(g * act(h[:, :2])), h.sum()))(x + 1),
    }
    for name, f in forms.items():
        x, g = torch.randn(B, S, D), torch.randn(B, 1, D)
        seen = []

        def backend(gm, example_inputs):
            seen.append(canonical.out_of_place(gm))
            return gm.forward

        torch._dynamo.reset()
        a, b = x.clone(), x.clone()
        for p, q in zip(flat(torch.compile(f, backend=backend, fullgraph=True)(a, g)), flat(f(b, g))):
            torch.testing.assert_close(p, q)
        assert torch.equal(a, b), name
        assert seen == [0], name

    def under_no_grad(x, g):
        h = x * 2
        with torch.no_grad():
            h.mul_(g)
        return h

    x, g = torch.randn(B, S, D, requires_grad=True), torch.randn(B, 1, D)
    rewritten(under_no_grad, [x, g])
    torch.testing.assert_close(torch.autograd.grad(torch.compile(
        under_no_grad, backend="graphopt", options={"graphopt.compiler": "eager"})(x, g).sum(), x),
        torch.autograd.grad(under_no_grad(x, g).sum(), x))


def test_an_in_place_result_keeps_its_dtype() -> None:
    def f(x, s, t):
        n = ln(x)
        n *= 1 + s.double()
        n += t
        return n

    x, s, t = operands()[:3]
    rules, _found, out = rewritten(f, [x, s, t])
    assert rules == ["norm_modulate"]
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, f(x, s, t))


def test_why_answers_for_every_norm_and_every_gated_sum() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2, self.norm_q = (torch.nn.LayerNorm(D) for _ in range(3))
            self.proj = torch.nn.Linear(D, D)

        def forward(self, x, s, t, g):
            y = self.norm1(x) * (1 + s) + t
            q = self.norm_q(self.proj(y)) @ y.transpose(1, 2)
            h = x + g * (q @ y)
            return self.norm2(h), h + self.proj.bias * self.proj(h)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([Block()])

        def forward(self, *inputs):
            return self.blocks[0](*inputs)

    model = Model()
    step = torch.compile(model, backend="graphopt", options={"graphopt.select": "all", "graphopt.compiler": "aot_eager"})
    step(*operands()[:4])
    report = graphopt.report(step)
    said = {n: [str(w) for w in report.why(n)] for n in ("blocks.0", "blocks.0.norm1", "blocks.0.norm2", "blocks.0.norm_q")}
    assert "modulate: rewritten by norm_modulate" in said["blocks.0.norm1"][0]
    assert "norm: rewritten by gate_norm" in said["blocks.0.norm2"][0]
    assert "no site: its result is read by matmul: no scale multiplies it" in said["blocks.0.norm_q"][0]
    gates = said["blocks.0"]
    assert len(gates) == 2
    assert "gate: rewritten by gate_norm" in gates[0]
    assert "blocks.0.proj.bias is made of parameters alone" in gates[1]
    assert all("test_rules.py:" in line for lines in said.values() for line in lines)
    assert len(report.why("blocks")) == 5
    with pytest.raises(graphopt.GraphoptError, match="did you mean 'blocks.0.norm2'"):
        report.why("blocks.0.norm3")
