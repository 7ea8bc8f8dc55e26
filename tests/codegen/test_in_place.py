"""A one-pass backward may write dx and dbranch over the gradients it reads (passes/reuse_gradients.py): the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import moved
from operator_forms import FORMS, Form, attributes, call, leaves, operands, plain, sized

from graphopt.codegen.form import FUSIONS

pytestmark = pytest.mark.kernel


class Aliased:
    """A kernel whose results lie over the gradients that arrive, where their form allows it; counts them."""

    def __init__(self, kernel: Any, count: list[int]) -> None:
        self.kernel, self.count = kernel, count

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            names, args = list(self.kernel.arg_names), list(args)
            name = self.kernel.fn.__name__
            pairs = []
            arriving = [n for n in names if n.rstrip("0123456789") in ("DY", "DH")] if name.endswith("_backward") else []
            for result in ("DX", "DBRANCH"):
                for n in arriving if result in names else ():
                    given, wanted = args[names.index(n)], args[names.index(result)]
                    if (given.dtype, given.stride()) == (wanted.dtype, wanted.stride()):
                        place = given.clone()
                        args[names.index(n)] = args[names.index(result)] = place
                        pairs.append((wanted, place))
                        arriving.remove(n)
                        break
            self.kernel[grid](*args, **kwargs)
            for wanted, place in pairs:
                wanted.copy_(place)
            self.count[0] += len(pairs)

        return launch


def check(form: Form, shape: tuple[int, int, int], device: str, monkeypatch, results: int) -> None:
    torch.manual_seed(0)
    form = sized(form, shape)
    t = moved(operands(form, torch.bfloat16, torch.float32, shape), device)
    outs = call(form, t, *attributes(form, torch.bfloat16), engine="triton")
    cotangents = [torch.randn_like(o) for o in outs]
    want = torch.autograd.grad(outs, leaves(t), cotangents, retain_graph=True)
    wrap, count = torch.library.wrap_triton, [0]
    with monkeypatch.context() as m:
        m.setattr(torch.library, "wrap_triton", lambda kernel: Aliased(wrap(kernel), count))
        for _ in range(3 if device == "cuda" else 1):
            got = torch.autograd.grad(outs, leaves(t), cotangents, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert count[0] == results * (3 if device == "cuda" else 1)


def results_of(form: Form) -> int:
    """How many results find a gradient of their form: dx where there is a norm, dbranch where another one arrives."""
    f = FUSIONS[form.fusion]
    dx, dbranch = form.norm != "none", f.front not in ("none", "residual")
    arriving = (f.front != "none") + len(form.outputs.split())
    return min(dx + dbranch, arriving)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form(form: Form, device: str, monkeypatch) -> None:
    if device == "cpu" and FORMS.index(form) % 7:
        pytest.skip("a seventh under the interpreter, where no row overtakes another")
    check(form, (2, 6, 72) if device == "cuda" else (2, 3, 40), device, monkeypatch, results_of(form))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 1152, 1536, 3072, 5120])
@pytest.mark.parametrize("fusion", list(FUSIONS))
def test_many_rows_through_the_ring(fusion: str, D: int, device: str, monkeypatch) -> None:
    """Enough rows that every program loads ahead of what it writes."""
    form = plain(fusion)
    check(form, (2, 3000, D), device, monkeypatch, results_of(form))
