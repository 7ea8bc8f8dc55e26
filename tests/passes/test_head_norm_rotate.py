"""The pass that puts an RMS norm per head and its rotary embedding into one operator: what it finds, leaves, computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import graphopt

NAME = "head_norm_rotate"
OPTIONS = {"graphopt.select": "all", "graphopt.compiler": "aot_eager"}


def rotate(x, cos, sin):
    """apply_rotary_emb of diffusers."""
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    rotated = torch.stack([-imaginary, real], dim=-1).flatten(3)
    return (x.float() * cos + rotated.float() * sin).to(x.dtype)


def written_out(x, weight):
    """RMSNorm of diffusers."""
    hidden = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)
    return hidden.to(weight.dtype) * weight


class Queries(torch.nn.Module):
    """form: how text stands beside the image; change: what makes it another computation."""

    def __init__(self, form: str = "single", change: str = "", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.form, self.change = form, change
        self.linear, self.text = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
        self.weight, self.added = (torch.nn.Parameter(1 + 0.1 * torch.randn(8)) for _ in range(2))
        self.to(dtype)

    def norm(self, x, weight):
        if self.change == "no weight":
            return F.rms_norm(x, (8,), None, 1e-6)
        return written_out(x, weight) if "written out" in self.change else F.rms_norm(x, (8,), weight, 1e-6)

    def forward(self, image, text, cos, sin):
        q, t = (m(x).unflatten(2, (4, -1)) for m, x in ((self.linear, image), (self.text, text)))
        if self.change == "all heads":
            q = F.rms_norm(self.linear(image), (32,), None, 1e-6).unflatten(2, (4, -1))
            return rotate(q, cos, sin).flatten(2)
        n = self.norm(q, self.weight)
        if self.form == "double":
            return torch.cat([rotate(n, cos, sin), self.norm(t, self.added)], dim=1).flatten(2)
        if self.form == "text first":
            return rotate(torch.cat([self.norm(t, self.added), n], dim=1), cos, sin).flatten(2)
        if self.form == "cut":
            m = text.shape[1]
            turned = rotate(n[:, :-m], cos, sin)
            rest = n[:, -m:] if self.change != "rows again" else n[:, :m]
            return torch.cat([turned, rest], dim=1).flatten(2)
        y = rotate(n, cos, sin)
        if self.change == "other reader":
            y = y + n
        if self.change == "swapped":
            real, imaginary = n.reshape(*n.shape[:-1], -1, 2).unbind(-1)
            y = n * cos + torch.stack([imaginary, -real], dim=-1).flatten(3) * sin
        if self.change == "halves":
            real, imaginary = n.reshape(*n.shape[:-1], 2, -1).unbind(-2)
            y = n * cos + torch.cat([-imaginary, real], dim=-1) * sin
        if self.change == "no difference":
            real, imaginary = n.reshape(*n.shape[:-1], -1, 2).unbind(-1)
            y = n * cos - torch.stack([-imaginary, real], dim=-1).flatten(3) * sin
        if self.change == "other tensor":
            real, imaginary = n.reshape(*n.shape[:-1], -1, 2).unbind(-1)
            y = q * cos + torch.stack([-imaginary, real], dim=-1).flatten(3) * sin
        return y.flatten(2)


ROWS = {"single": 6, "double": 6, "text first": 9, "cut": 3}


def operands(form: str = "single", B: int = 2, more: int = 0, dtype: torch.dtype = torch.float32):
    image, text = (torch.randn(B, n, 32, dtype=dtype, requires_grad=True) for n in (6 + more, 3))
    angle = torch.randn(ROWS[form] + more, 4).repeat_interleave(2, -1)
    return image, text, angle.cos()[None, :, None, :], angle.sin()[None, :, None, :]


def compiled(model, **options):
    return torch.compile(model, backend="graphopt", options={**OPTIONS, **options})


def count(f) -> int:
    return graphopt.report(f).count("rotary", what="rewritten")


def gradients(f, model, args):
    y = f(*args)
    torch.manual_seed(1)
    leaves = [args[0], args[1], *model.parameters()]
    return [y, *torch.autograd.grad(y, leaves, torch.randn(y.shape).to(y.dtype), allow_unused=True)]


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("change", ["", "written out", "no weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(form: str, change: str, dtype: torch.dtype) -> None:
    """Within the contract: at most 1.25 times eager's error against fp64."""
    model, args = Queries(form, change, dtype), operands(form, dtype=dtype)
    f = compiled(model)
    got = gradients(f, model, args)
    assert count(f) == 1
    assert graphopt.report(f).sites[0].rule == NAME
    old = gradients(model, model, args)
    exact = Queries(form, change.replace("written out", ""), torch.float64)
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    # rotate() rounds to fp32 on the way, so the truth is good to 1e-7 or so
    want = gradients(exact, exact, [t.detach().double().requires_grad_(t.requires_grad) for t in args])
    squares = {}
    for g, e, w in zip(got, old, want):
        assert (g is None) == (w is None)
        if g is not None:
            assert (g.shape, g.dtype, g.stride()) == (e.shape, e.dtype, e.stride())
            for name, v in (("ours", g), ("eager", e)):
                squares[name] = squares.get(name, 0.0) + ((v.double() - w).norm() / w.norm().clamp_min(1e-30)).square()
    assert squares["ours"].sqrt() <= max(1e-5, 1.25 * squares["eager"].sqrt())


@pytest.mark.parametrize("form", ROWS)
def test_two_shapes(form: str) -> None:
    model = Queries(form)
    f = torch.compile(model, backend="graphopt", options=OPTIONS)
    for B, more in ((2, 0), (3, 4), (3, 7)):
        args = operands(form, B, more)
        torch.testing.assert_close(f(*args), model(*args), rtol=1e-5, atol=1e-5)
    assert count(f) >= 1


@pytest.mark.parametrize("form", ROWS)
def test_rows_that_change(form: str) -> None:
    """A symbolic number of rows: the same graph for every length."""
    model = Queries(form)
    f = compiled(model)
    for more in (0, 5):
        args = operands(form, more=more)
        torch._dynamo.maybe_mark_dynamic(args[0], 1)
        for table in args[2:]:
            torch._dynamo.maybe_mark_dynamic(table, 1)
        got, want = gradients(f, model, args), gradients(model, model, args)
        for a, b in zip(got, want):
            if b is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(graphopt.report(f).graphs) == 1


@pytest.mark.parametrize("form,change", [
    *(("single", c) for c in ("all heads", "other reader", "swapped", "halves", "no difference", "other tensor")),
    ("cut", "rows again")])
def test_near_misses_stay(form: str, change: str) -> None:
    model, args = Queries(form, change), operands(form)
    f = compiled(model)
    torch.testing.assert_close(f(*args), model(*args), rtol=1e-5, atol=1e-5)
    assert graphopt.report(f).count("rotary") == 0


def test_a_table_that_learns_stays() -> None:
    model, (image, text, cos, sin) = Queries(), operands()
    f = compiled(model)
    cos = cos.requires_grad_()
    y = f(image, text, cos, sin)
    assert graphopt.report(f).count("rotary") == 0
    assert torch.autograd.grad(y.sum(), cos)[0].abs().sum() > 0


def test_a_table_per_sample_or_of_one_row_stays() -> None:
    image, text, cos, sin = operands()
    for tables in ((cos.repeat(2, 1, 1, 1), sin.repeat(2, 1, 1, 1)), (cos[:, :1], sin[:, :1])):
        torch._dynamo.reset()
        model = Queries()
        f = compiled(model)
        torch.testing.assert_close(f(image, text, *tables), model(image, text, *tables), rtol=1e-5, atol=1e-5)
        assert graphopt.report(f).count("rotary") == 0


def test_a_write_between_stays() -> None:
    class Writes(Queries):
        def forward(self, image, text, cos, sin):
            n = self.norm(image.unflatten(2, (4, -1)), self.weight)
            image.mul_(2.0)
            return rotate(n, cos, sin).flatten(2)

    def once(f):
        torch.manual_seed(3)
        image, text, cos, sin = operands()
        return f(image.detach(), text, cos, sin)

    model = Writes()
    f = compiled(model)
    torch.testing.assert_close(once(f), once(model), rtol=1e-5, atol=1e-5)
    assert graphopt.report(f).count("rotary") == 0


def test_a_border_between_stays() -> None:
    """A norm under no_grad passes no gradient on, the operator would."""
    class Border(Queries):
        def forward(self, image, text, cos, sin):
            with torch.no_grad():
                n = self.norm(self.linear(image).unflatten(2, (4, -1)), self.weight)
            return (rotate(n, cos, sin) + image.unflatten(2, (4, -1))).flatten(2)

    model, args = Border(), operands()
    f = compiled(model)
    assert gradients(f, model, args)[3] is None
    assert graphopt.report(f).count("rotary") == 0


def test_forward_mode_stays() -> None:
    model, (image, text, cos, sin) = Queries(), operands()
    f = compiled(model)
    image, tangent = image.detach(), torch.randn(2, 6, 32)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(image, tangent)
        y = torch.autograd.forward_ad.unpack_dual(f(dual, text, cos, sin)).tangent
        want = torch.autograd.forward_ad.unpack_dual(model(dual, text, cos, sin)).tangent
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads_first", [True, False])
def test_other_layouts(heads_first: bool) -> None:
    """Queries that are slices of one projection fit; those with heads in front of rows have other tables."""
    class Fused(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(32, 96)

        def forward(self, image, text, cos, sin):
            q = self.linear(image).chunk(3, dim=-1)[1].unflatten(2, (4, -1))
            if heads_first:
                y = rotate(F.rms_norm(q.transpose(1, 2), (8,), None, 1e-6), cos.transpose(1, 2), sin.transpose(1, 2))
                return y.transpose(1, 2).flatten(2)
            return rotate(F.rms_norm(q, (8,), None, 1e-6), cos, sin).flatten(2)

    model, args = Fused(), operands()
    f = compiled(model)
    for a, b in zip(gradients(f, model, args), gradients(model, model, args)):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert count(f) == (0 if heads_first else 1)


def test_norms_that_differ_are_not_joined() -> None:
    """Text with another eps keeps its norm and the `cat`; the image's is fused alone."""
    class Other(Queries):
        def forward(self, image, text, cos, sin):
            q, t = (m(x).unflatten(2, (4, -1)) for m, x in ((self.linear, image), (self.text, text)))
            n = rotate(F.rms_norm(q, (8,), self.weight, 1e-6), cos, sin)
            return torch.cat([n, F.rms_norm(t, (8,), self.added, 1e-5)], dim=1).flatten(2)

    model, args = Other(), operands("double")
    f = compiled(model)
    torch.testing.assert_close(f(*args), model(*args), rtol=1e-5, atol=1e-5)
    assert count(f) == 1
    assert graphopt.report(f).sites[0].shape == (2, 6, 4, 8)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    args = operands()
    f = compiled(Queries())
    f(*args)
    assert graphopt.report(f).count("rotary") == 1
    for options in ({"graphopt.numerics": "eager"}, {"graphopt.disable": [NAME]}, {"graphopt.verify": True},
                    {"graphopt.select": "profitable"}, {"graphopt.rules": ["norm_modulate"]}):
        torch._dynamo.reset()
        f = compiled(Queries(), **options)
        f(*args)
        assert graphopt.report(f).count("rotary") == 0, options
    torch._dynamo.reset()
    monkeypatch.setenv("GRAPHOPT_DISABLE", NAME)
    f = compiled(Queries())
    f(*args)
    assert graphopt.report(f).count("rotary") == 0
