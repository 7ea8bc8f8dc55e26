"""Rewrites between in-place writes and where gradients are switched on and off."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rewriting import D, adaln, names, operands, refused, rewritten


def test_in_place_write_to_the_input_between() -> None:
    def f(x, s, b):
        x = x + 1
        n = F.layer_norm(x, (D,))
        x.square_()
        return n * (1 + s) + b + x

    assert "in-place write (square_)" in refused(f, *operands())


def test_in_place_write_through_a_view() -> None:
    def f(x, s, b):
        x = x + 1
        n = F.layer_norm(x, (D,))
        x[:, 0] = 0
        return n * (1 + s) + b

    assert "in-place write (setitem)" in refused(f, *operands())


def test_in_place_write_elsewhere_is_no_obstacle() -> None:
    def f(x, s, b):
        other = torch.zeros_like(x)
        n = F.layer_norm(x, (D,))
        other[:, 0] = 3
        return n * (1 + s) + b + other

    x = operands()
    _gm, found, out = rewritten(f, *x)
    assert names(found) == ["norm_modulate"]
    torch.testing.assert_close(out, f(*x))


def test_in_place_write_to_the_result_afterwards() -> None:
    def f(x, s, b):
        y = adaln(x, s, b)
        y.mul_(2)
        return y

    x = operands()
    _gm, found, out = rewritten(f, *x)
    assert names(found) == ["norm_modulate"]
    torch.testing.assert_close(out, f(*x))


def test_grad_mode_border() -> None:
    def f(x, s, b):
        with torch.no_grad():
            n = F.layer_norm(x, (D,))
        return n * (1 + s) + b

    x, s, b = operands()
    assert "crosses an autocast or grad-mode border" in refused(f, x.requires_grad_(), s, b)


def as_wan(x, s, b):
    return (F.layer_norm(x.float(), (D,)) * (1 + s) + b).type_as(x)


def test_validation_reads_the_narrow_copy() -> None:
    """Under no_grad the weights still ask for gradients: casts and `1 + s` are looked through all the same."""
    x, s, b = operands()
    x, s, b = x.bfloat16().requires_grad_(), s.requires_grad_(), b.requires_grad_()
    calls = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            gm, _found, out = rewritten(as_wan, x, s, b)
            torch.testing.assert_close(out, as_wan(x, s, b), atol=0.05, rtol=0.02)
        (call,) = (n for n in gm.graph.nodes if "norm_modulate" in str(n.target))
        assert call.kwargs["x"].op == "placeholder", mode
        calls.append((call.kwargs["x"].name, call.kwargs["offset"], [m.name for m in call.kwargs["modulation"]]))
    assert calls[0] == calls[1] == calls[2]


def test_gradients_switched_on_inside_no_grad_are_not_invented() -> None:
    def f(x, s, b):
        wide = x.float()
        with torch.enable_grad():
            return F.layer_norm(wide, (D,)) * (1 + s) + b

    x, s, b = operands()
    x, s, b = x.bfloat16().requires_grad_(), s.requires_grad_(), b.requires_grad_()
    with torch.no_grad():
        gm, _found, out = rewritten(f, x, s, b)
    assert out.requires_grad
    assert torch.autograd.grad(out.sum(), x, allow_unused=True) == (None,)
