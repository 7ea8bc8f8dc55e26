"""The kernels of an RMS norm per head with a rotary embedding against fp64, through operators and autograd."""

from __future__ import annotations

import pytest
import torch

from graphopt.codegen import head_rotary_operators

pytestmark = pytest.mark.kernel

# heads, channels per head: one sub-block, several, one that overhangs, HunyuanVideo's and FLUX's
SHAPES = [(2, 8), (3, 16), (5, 64), (24, 128)]
# rows of the first tensor, of the second (0: there is none), rows the tables turn
ROWS = {"all": (5, 0, 5), "image of image and text": (7, 0, 4), "text first": (2, 3, 5), "text behind": (4, 3, 4),
        "one": (3, 2, 1)}
CALL = head_rotary_operators.operator("triton")


def operands(device: str, heads: int, d: int, dtype: torch.dtype, rows: str, table=torch.float32, weight=None,
             B: int = 2) -> dict:
    n0, n1, R = ROWS[rows]
    new = lambda *shape: torch.randn(*shape, device=device)
    x = lambda n: new(B, n, heads, d).to(dtype).requires_grad_()
    w = lambda: (1 + 0.1 * new(d)).to(weight or dtype).requires_grad_()
    return dict(x0=x(n0), weight0=w(), x1=x(n1) if n1 else None, weight1=w() if n1 else None,
                cos=new(1, R, 1, d).to(table), sin=new(1, R, 1, d).to(table))


def plain(x0, weight0, x1, weight1, cos, sin):
    """As models write it."""
    parts = [torch.nn.functional.rms_norm(x, (x.shape[-1],), None if w is None else w.to(x.dtype), 1e-6)
             for x, w in ((x0, weight0), (x1, weight1)) if x is not None]
    n, R, wide = torch.cat(parts, 1), cos.shape[1], torch.promote_types(x0.dtype, torch.float32)
    h = n[:, :R]
    real, imaginary = h.reshape(*h.shape[:-1], -1, 2).unbind(-1)
    rotated = torch.stack([-imaginary, real], dim=-1).flatten(3)
    out = (h.to(wide) * cos + rotated.to(wide) * sin).to(h.dtype)
    return torch.cat([out, n[:, R:]], 1)


def ours(**t):
    return CALL(*t.values(), 1e-6, t["x0"].dtype)


def gradients(f, t: dict, cotangent: torch.Tensor) -> list[torch.Tensor]:
    leaves = [v for v in list(t.values())[:4] if v is not None]
    y = f(**t)
    return [y.detach(), *torch.autograd.grad(y, leaves, cotangent.to(y.dtype))]


def compare(t: dict) -> None:
    cotangent = torch.randn(plain(**t).shape, device=t["x0"].device)
    wide = {k: None if v is None else v.detach().double().requires_grad_(v.requires_grad) for k, v in t.items()}
    got, old = gradients(ours, t, cotangent), gradients(plain, t, cotangent)
    want = gradients(plain, wide, cotangent.to(t["x0"].dtype))
    assert len(got) == len(want)
    for g, e, w in zip(got, old, want):
        assert (g.shape, g.dtype, g.stride()) == (e.shape, e.dtype, w.contiguous().stride())
        error = lambda v: ((v.double() - w).norm() / w.norm()).item()
        assert error(g) <= max(1e-5 if g.dtype == torch.float32 else 0.0, 1.25 * error(e))
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(ours, t, cotangent)))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("heads,d", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values(device: str, heads: int, d: int, dtype: torch.dtype, rows: str) -> None:
    if device == "cpu" and heads == 24 and (dtype == torch.float32 or rows != "text behind"):
        pytest.skip("slow under the interpreter")
    compare(operands(device, heads, d, dtype, rows))


@pytest.mark.parametrize("dtype,table,weight", [
    (torch.float16, torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32), (torch.float32, torch.float16, torch.float32)])
@pytest.mark.parametrize("B", [1, 3])
def test_dtypes(device: str, dtype: torch.dtype, table: torch.dtype, weight: torch.dtype, B: int) -> None:
    compare(operands(device, 3, 16, dtype, "text first", table, weight, B))
    compare(operands(device, 3, 16, dtype, "image of image and text", table, weight, B))


@pytest.mark.parametrize("rows", ["image of image and text", "text behind"])
def test_without_weights(device: str, rows: str) -> None:
    compare(operands(device, 6, 32, torch.float32, rows) | {"weight0": None, "weight1": None})


def test_many_rows(device: str) -> None:
    """More rows than programs: each walks several, and its sums meet in a fixed order."""
    ROWS["many"] = (61, 13, 61)
    compare(operands(device, 2, 8, torch.float32, "many", B=3))


def test_strides(device: str) -> None:
    """x slices of a fused projection, or with heads in front; dy as attention returns it; tables cut from longer ones."""
    heads, d, B = 4, 16, 2
    t = operands(device, heads, d, torch.float32, "text first", B=B)
    n0, n1, _ = ROWS["text first"]
    fused = [torch.randn(B, n, 3 * heads * d, device=device) for n in (n0, n1)]
    slices = [f[..., heads * d:2 * heads * d].unflatten(-1, (heads, d)) for f in fused]
    behind = [torch.randn(B, heads, n, d, device=device).transpose(1, 2) for n in (n0, n1)]
    apart = [torch.randn(B, n, d, heads, device=device).transpose(2, 3) for n in (n0, n1)]
    tables = {k: torch.cat([t[k], t[k]], 1)[:, :n0 + n1] for k in ("cos", "sin")}
    for xs in (slices, behind, apart):
        for cotangent in (torch.randn(B, heads, n0 + n1, d, device=device).transpose(1, 2),
                          torch.randn(B, n0 + n1, d, heads, device=device).transpose(2, 3)):
            results = []
            for change in (lambda v: v, lambda v: v.contiguous()):
                x0, x1 = (change(x.detach()).requires_grad_() for x in xs)
                results.append(gradients(ours, {**t, **tables, "x0": x0, "x1": x1}, change(cotangent)))
            for a, b in zip(*results):
                assert torch.equal(a, b)


@pytest.mark.parametrize("rows", ROWS)
def test_reference_is_what_the_kernel_is(device: str, rows: str) -> None:
    t = operands(device, 3, 8, torch.float32, rows)
    y = [head_rotary_operators.operator(e)(*t.values(), 1e-6, torch.float32) for e in ("reference", "triton")]
    torch.testing.assert_close(y[0], y[1], rtol=1e-5, atol=1e-5)
    assert head_rotary_operators._fake_forward(*t.values(), 1e-6, torch.float32).shape == y[0].shape
    cotangent, leaves = torch.randn_like(y[0]), [v for v in list(t.values())[:4] if v is not None]
    for a, b in zip(*(torch.autograd.grad(v, leaves, cotangent) for v in y)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.library.opcheck(head_rotary_operators.operator("reference"), (*t.values(), 1e-6, torch.float32),
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


def test_buffers_start_as_nan(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element of every result is written."""
    empty, like = torch.empty, torch.empty_like
    poison = lambda make: lambda *a, **k: (lambda t: t.fill_(float("nan")) if t.is_floating_point() else t)(make(*a, **k))
    monkeypatch.setattr(torch, "empty", poison(empty))
    monkeypatch.setattr(torch, "empty_like", poison(like))
    for rows in ROWS:
        t = operands(device, 3, 16, torch.float32, rows)
        y = head_rotary_operators.forward(*t.values(), 1e-6, torch.float32)
        grads = head_rotary_operators.backward(torch.ones_like(t["x0"][:1, :1]).expand_as(y), *t.values(), 1e-6)
        assert all(bool(v.isfinite().all()) for v in (y, *grads))


def test_empty(device: str) -> None:
    t = operands(device, 2, 8, torch.float32, "text first", B=0)
    y = ours(**t)
    grads = torch.autograd.grad(y, list(t.values())[:4], torch.zeros_like(y))
    assert y.shape == (0, 5, 2, 8)
    assert [g.shape for g in grads] == [v.shape for v in list(t.values())[:4]]
    assert torch.equal(grads[1], torch.zeros_like(grads[1]))


@pytest.mark.parametrize("rows", [(61, 13, 61), (3, 70, 73), (64, 1, 64), (0, 9, 9)])
def test_programs_share_two_tensors(device: str, rows: tuple[int, int, int]) -> None:
    """Every row of both is walked once, however few rows one of them has."""
    ROWS["shared"] = rows
    t = operands(device, 2, 8, torch.float32, "shared", B=3)
    if rows[0]:
        compare(t)
    cotangent = torch.randn(3, sum(rows[:2]), 2, 8, device=device)
    leaves = [v for v in list(t.values())[:4] if v is not None]
    results = [torch.autograd.grad(head_rotary_operators.operator(e)(*t.values(), 1e-6, torch.float32), leaves, cotangent)
               for e in ("reference", "triton")]
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
