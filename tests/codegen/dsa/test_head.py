"""The offset head: reference against torch's layers, kernels against the reference."""

from __future__ import annotations

import pytest
import torch

from graphopt.codegen.dsa import head


def sample(grid, C, out, B=2, dtype=torch.float64, device="cpu"):
    N = grid[0] * grid[1] * grid[2]
    make = lambda *s: torch.randn(*s, dtype=dtype, device=device)
    return [make(B, N, C), make(C, 1, 3, 3, 3) * 0.3, make(C) * 0.1, make(out, C) * 0.3, make(out)]


@pytest.mark.parametrize("grid", [(3, 4, 5), (1, 2, 7)])
def test_reference_is_conv_gelu_linear(grid) -> None:
    leaves = [t.requires_grad_() for t in sample(grid, 6, 5)]
    conv = torch.nn.Conv3d(6, 6, 3, padding=1, groups=6, dtype=torch.float64)
    last = torch.nn.Linear(6, 5, dtype=torch.float64)
    names = [conv.weight, conv.bias, last.weight, last.bias]
    with torch.no_grad():
        for p, t in zip(names, leaves[1:]):
            p.copy_(t)
    x = leaves[0].detach().clone().requires_grad_()
    volume = x.transpose(1, 2).unflatten(2, grid)
    want = last(torch.nn.functional.gelu(conv(volume), approximate="tanh").flatten(2).transpose(1, 2))
    got = head.offset_head(*leaves, grid)
    torch.testing.assert_close(got, want)
    dy = torch.randn_like(got)
    for a, b in zip(torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, [x, *names], dy)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_gradcheck_and_opcheck() -> None:
    leaves = [t.requires_grad_() for t in sample((2, 2, 3), 2, 3, B=1)]
    assert torch.autograd.gradcheck(lambda *x: head.offset_head(*x, (2, 2, 3)), leaves)
    torch.library.opcheck(head.operator("reference"), (*sample((2, 2, 3), 4, 3, dtype=torch.float32), 2, 2, 3))


@pytest.mark.kernel
@pytest.mark.parametrize(("grid", "C", "out", "dtype"), [
    ((3, 3, 3), 20, 6, torch.float16), ((1, 2, 5), 70, 3, torch.bfloat16), ((2, 2, 5), 8, 3, torch.float16)])
def test_kernels(grid, C, out, dtype, device, monkeypatch) -> None:
    if out == 6:  # several tiles of a plane per program
        monkeypatch.setattr(head, "BACKWARD", head.Walk((1, 2), (1, 2), 2))
        monkeypatch.setattr(head, "FORWARD", head.Walk((1, 2), (2, 1), 1))
    x, *rest = sample(grid, C, out, dtype=dtype, device=device)
    wide = [t.double() for t in (x, *rest)]
    y, u = head.triton_forward(x, *rest, *grid)
    Y, kept = head.reference_forward(*wide, *grid)
    limit = 7e-3 if dtype == torch.bfloat16 else 1e-3  # u, z and dy are rounded, as by eager layers
    error = lambda a, b: ((a.double() - b).norm() / b.norm()).item()
    assert y.dtype == torch.float32
    assert error(u, head._convolve(*wide[:3], *grid)) < limit
    if dtype == torch.bfloat16 and device == "cpu":
        return  # the interpreter multiplies the bits of bf16 as whole numbers
    assert error(y, Y) < limit
    dy = torch.randn_like(y)
    got, again = (head.triton_backward(dy, x, u, *rest[:3], *grid) for _ in range(2))
    want = head.reference_backward(dy.double(), wide[0], kept, *wide[1:4], *grid)
    for a, b, c in zip(got, want, again):
        assert error(a, b) < limit
        assert torch.equal(a, c)


@pytest.mark.kernel
def test_inputs_that_are_not_whole_words_are_copied(device) -> None:
    grid, C = (2, 2, 3), 8
    wide, *rest = sample(grid, C + 1, 3, dtype=torch.float16, device=device)
    rest = [t[:C] if t.shape[0] == C + 1 else t[:, :C] if t.dim() == 2 else t for t in rest]
    x = wide[..., 1:]  # starts in the middle of a word
    y, u = head.triton_forward(x, *rest, *grid)
    same = head.triton_forward(x.contiguous(), *rest, *grid)
    assert torch.equal(y, same[0])
    assert torch.equal(u, same[1])


def test_odd_channels_and_wide_outputs_are_left_to_torch() -> None:
    for C, out, dtype, engine in ((32, 36, torch.bfloat16, "triton"), (31, 36, torch.bfloat16, "reference"),
                                  (32, 200, torch.bfloat16, "reference"), (32, 36, torch.float32, "reference")):
        x = torch.empty(1, 4, C, dtype=dtype, device="meta")
        assert head.pick(x, out) == "reference"  # no GPU
        assert head.fits(x, out) == (engine == "triton")
