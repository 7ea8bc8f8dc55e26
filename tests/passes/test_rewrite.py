"""What a rewrite must refuse, and that what it does keeps values, order and metadata."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rewriting import D, adaln, capture, names, operands, refused, rewritten

from graphopt.codegen.operators import operator
from graphopt.errors import RewriteError
from graphopt.passes import catalogue, rewrite


def test_escaping_intermediate() -> None:
    def f(x, s, b):
        p = F.layer_norm(x, (D,)) * (1 + s)
        return p + b, p.relu()

    reasons = refused(f, *operands())
    assert "its intermediate p is also read by relu" in reasons


def test_a_norm_with_other_readers_stays() -> None:
    def f(x, s, b):
        n = F.layer_norm(x, (D,))
        return n * (1 + s) + b, n * (1 + b) + s, n.relu()

    x = operands()
    _gm, found, out = rewritten(f, *x)
    assert names(found) == ["norm_modulates"]
    assert found.matches[0].shared
    for a, b in zip(out, f(*x)):
        torch.testing.assert_close(a, b)


def test_a_written_shared_norm_is_refused() -> None:
    def f(x, s, b):
        n = F.layer_norm(x, (D,))
        n.add_(1)
        return n * (1 + s) + b, n.relu()

    assert "in-place write" in refused(f, *operands())


def rms(x, weight=None):
    n = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return n if weight is None else n * weight


@pytest.mark.parametrize("dynamic", [None, True])
def test_rms_norm_spellings_slices_and_scale_alone(dynamic) -> None:
    forms = {
        "functional": lambda x, s, b: F.rms_norm(x, (D,)) * (1 + s) + b,
        "written out": lambda x, s, b: rms(x) * (1 + s) + b,
        "scale alone": lambda x, s, b: torch.tanh(rms(x) * (1 + s)),
        "slice": lambda x, s, b: F.layer_norm(x, (D,))[:, 1:] * (1 + s) + b,
    }
    for name, f in forms.items():
        x = operands()
        _gm, found, out = rewritten(f, *x, dynamic=dynamic)
        torch.testing.assert_close(out, f(*x))
        assert names(found) == ["norm_modulate"], name  # with a symbolic width, too


def test_shared_casts_and_scale_do_not_hinder() -> None:
    def f(x, s, b):
        wide, gain = x.double(), 1 + s.double()
        return (F.layer_norm(wide, (D,)) * gain + b.double()).float(), wide.sum(), gain.sum()

    x = operands()
    _gm, found, out = rewritten(f, *x)
    assert names(found) == ["norm_modulate"]
    for a, b in zip(out, f(*x)):
        torch.testing.assert_close(a, b)


def test_autocast_border() -> None:
    def f(x, s, b):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            n = F.layer_norm(x, (D,))
        return n * (1 + s) + b

    assert "crosses an autocast or grad-mode border" in refused(f, *operands())


def test_inside_autocast() -> None:
    def f(x, s, b):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return adaln(x, s, b) @ torch.eye(D)

    x = operands()
    _gm, found, out = rewritten(f, *x)
    assert names(found) == ["norm_modulate"]
    torch.testing.assert_close(out, f(*x))


def test_h_read_before_the_scale_exists() -> None:
    """F2 would have to come before a reader of h and after the scale it needs: F1 and F3 are made instead."""

    def f(x, g, s, b):
        h = x + g * torch.tanh(x)
        early = h.sum(1, keepdim=True)
        s = s + early
        return F.layer_norm(h, (D,)) * (1 + s) + b, h

    x, s, b = operands()
    gm, found, out = rewritten(f, x, torch.randn(2, 1, D), s, b)
    # the scale comes from h, so it is no modulation of it: only the gate and the plain norm are left
    assert names(found) == ["gate_norm"]

    def g(x, g, s, b):
        h = x + g * torch.tanh(x)
        early = torch.cumsum(h, 1)
        return F.layer_norm(h, (D,)) * (1 + torch.sin(s)) + b, early

    args = (x, torch.randn(2, 1, D), s, b)
    _gm, found, out = rewritten(g, *args)
    assert names(found) == ["norm_modulate", "gate_residual"]
    for a, want in zip(out, g(*args)):
        torch.testing.assert_close(a, want)


def test_several_norms_of_one_h() -> None:
    def f(x, g, s, b):
        h = x + g * torch.tanh(x)
        return adaln(h, s, b), adaln(h, b, s), h

    x, s, b = operands()
    args = (x, torch.randn(2, 1, D), s, b)
    _gm, found, out = rewritten(f, *args)
    assert sorted(names(found)) == ["gate_norm_modulate", "norm_modulate"]
    for a, want in zip(out, f(*args)):
        torch.testing.assert_close(a, want)


def test_look_alikes_are_left_alone() -> None:
    w = torch.nn.Parameter(torch.ones(D))

    def rotary(x, c, s):
        n = F.layer_norm(x, (D,))
        return n * c.cos() + torch.cat([-n[..., D // 2:], n[..., : D // 2]], -1) * c.sin()

    def layer_scale(x, s, b):
        return x + w * torch.tanh(F.layer_norm(x, (D,)))

    def gated_unit(x, s, b):
        return x + F.silu(x @ torch.eye(D)) * x

    def gated_norm(x, s, b):
        n = F.layer_norm(x, (D,))
        return n * F.silu(n @ torch.eye(D)) + b

    def scalar_gate(x, s, b):
        return x + s[:, :, :1] * torch.tanh(x)

    def alpha(x, s, b):
        return torch.add(F.layer_norm(x, (D,)) * (1 + s), b, alpha=2)

    def over_two_dimensions(x, s, b):
        return F.layer_norm(x, (5, D)) * (1 + s) + b

    def detached(x, s, b):
        return F.layer_norm(x, (D,)).detach() * (1 + s) + b

    for f in (rotary, layer_scale, gated_unit, gated_norm, scalar_gate, alpha, over_two_dimensions, detached):
        _gm, found, _out = rewritten(f, *operands())
        assert found.matches == [], f.__name__


def test_full_size_addend_of_another_origin_is_no_shift() -> None:
    def residual(x, s, r):
        return F.layer_norm(x, (D,)) * (1 + s) + r

    x, s, _ = operands()
    gm, found, out = rewritten(residual, x, s, torch.randn(2, 5, D))
    assert "norm_modulate" not in names(found)

    def per_token(x, m):
        s, b = m.chunk(2, -1)
        return F.layer_norm(x, (D,)) * (1 + s) + b

    args = (x, torch.randn(2, 5, 2 * D))
    _gm, found, out = rewritten(per_token, *args)
    assert names(found) == ["norm_modulate"]
    torch.testing.assert_close(out, per_token(*args))


def test_spellings() -> None:
    forms = [
        lambda x, s, b: b + (s + 1) * F.layer_norm(x, (D,)),
        lambda x, s, b: torch.add(torch.mul(F.layer_norm(x, [D]), torch.add(s, 1)), b),
        lambda x, s, b: F.layer_norm(x, (D,)).mul(s.add(1)).add(b),
        lambda x, s, b: F.layer_norm(x, (D,)) * (1 + s[:, 0])[:, None] + b[:, 0].unsqueeze(1),
        lambda x, s, b: F.layer_norm(x, (D,)) * (1 + s.squeeze(1)).view(2, 1, D) + b,
        lambda x, s, b: F.layer_norm(x, (D,)) * s + b,
        lambda x, s, b: F.layer_norm(x, (D,), torch.ones(D), torch.zeros(D)) * (1 + s) + b,
        lambda x, s, b: (F.layer_norm(x.float(), (D,)).to(torch.float32) * (1 + s) + b).type_as(x),
        lambda x, s, b: F.layer_norm(input=x, normalized_shape=(D,), eps=1e-3) * (1 + s) + b,
    ]
    for i, f in enumerate(forms):
        for dynamic in (False, True):
            x = operands()
            if i in (4,) and dynamic:
                continue  # the view names the batch size
            _gm, found, out = rewritten(f, *x, dynamic=dynamic)
            assert names(found) == ["norm_modulate"], (i, dynamic)
            torch.testing.assert_close(out, f(*x), msg=str(i))


def test_the_narrowest_copy_of_an_input_is_read() -> None:
    """Wan casts bf16 to fp32 in front of the norm and the gate: reading and saving the cast would double the bytes."""

    def wan(x, branch, g, s, b):
        h = (x.float() + branch.float() * g).type_as(x)
        return h, (F.layer_norm(h.float().float(), (D,)) * (1 + s.double()) + b).type_as(x)

    x, s, b = operands()
    args = (x.bfloat16(), x.bfloat16(), s, s, b)
    _, found, _ = rewritten(wan, *args)
    (match,) = found.matches
    dtypes = {n: v.meta["example_value"].dtype for n, v in match.replacement.inputs.items() if v is not None}
    assert dtypes == {"x": torch.bfloat16, "branch": torch.bfloat16, "gate": torch.float32, "scale": torch.float32,
                      "shift": torch.float32}

    def rounded(x, s, b):
        return F.layer_norm(x.bfloat16().float(), (D,)) * (1 + s) + b

    _, found, out = rewritten(rounded, *operands())
    (match,) = found.matches
    assert match.replacement.inputs["x"].meta["example_value"].dtype == torch.bfloat16  # a rounding that was asked for


def test_new_nodes_carry_metadata() -> None:
    gm, _found, _out = rewritten(adaln, *operands())
    (call,) = [n for n in gm.graph.nodes if "graphopt" in str(n.target)]
    (part,) = call.users
    assert "rewriting.py" in call.meta["stack_trace"]
    assert part.meta["example_value"].shape == (2, 5, D)
    assert all(n.meta.get("example_value") is not None for n in gm.graph.nodes if n.op == "call_function" and n is not call)


def test_operands_of_another_kind_are_refused() -> None:
    def f(x, s, b):
        return F.layer_norm(x, (D,)) * (1 + s) + b

    x, s, _ = operands()
    assert "shift is int64" in refused(f, x, s, torch.ones(2, 1, D, dtype=torch.int64))


def test_results_keep_the_strides_of_eager_or_are_refused() -> None:
    """Eager keeps the strides of a gated sum; the operator writes contiguous tensors."""

    def swapped(x, g):
        y = x.transpose(1, 2)
        return y + g * torch.tanh(y)

    x, g = torch.randn(2, D, 5), torch.randn(2, 1, D)
    _gm, found, out = rewritten(swapped, x, g)
    assert names(found) == ["gate_residual"]
    assert out.stride() == swapped(x, g).stride()
    torch.testing.assert_close(out, swapped(x, g))

    def f(x, g):
        y = x.transpose(0, 1)
        return y + g * torch.tanh(y)

    assert "not dense in eager mode" in refused(f, torch.randn(5, 2, D), torch.randn(2, 1, D))


def test_inside_a_graph_results_are_rows() -> None:
    """Nobody sees the strides of a value that a linear layer reads; a view after it, or the caller, does."""
    w = torch.randn(D, D)

    def gated(x, g):
        y = x.transpose(1, 2)
        return y + g * torch.tanh(y)

    x, g = torch.randn(2, D, 5), torch.randn(2, 1, D)
    for f, laid_out in (
        (lambda x, g: F.linear(gated(x, g), w), False),
        (lambda x, g: F.linear(gated(x, g) * 2, w), False),
        (lambda x, g: gated(x, g) * 2, True),
        (lambda x, g: F.linear(gated(x, g).transpose(1, 2).view(2, D * 5), torch.ones(3, D * 5)), True),
    ):
        _gm, found, out = rewritten(f, x, g)
        (match,) = found.matches
        assert bool(match.replacement.layouts) == laid_out
        assert out.stride() == f(x, g).stride()
        torch.testing.assert_close(out, f(x, g))


def test_an_inconsistent_match_is_an_error() -> None:
    gm = capture(lambda x, s, b: (adaln(x, s, b), x.sum()), *operands())
    (match,) = rewrite.find(gm, catalogue.RULES).matches
    match.core = [n for n in match.core if n is not match["norm"]]
    match.core.append(match["product"].args[0])
    match.anchor = None
    with pytest.raises(RewriteError, match="not accepted"):
        rewrite.apply(gm, [match], lambda m: operator(m.replacement.fusion, "reference"))
