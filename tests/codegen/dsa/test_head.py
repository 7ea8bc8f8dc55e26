"""The offset head: reference against torch's layers, kernels against the reference."""

from __future__ import annotations

import pytest
import torch

from graphopt.codegen.dsa import head, head_launch


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
@pytest.mark.parametrize(("engine", "grid", "C", "out", "dtype"), [
    ("dot, several tiles", (2, 3, 3), 20, 6, torch.float16), ("dot", (1, 2, 5), 70, 3, torch.bfloat16),
    ("dot", (2, 2, 5), 8, 3, torch.float16), ("mma", (2, 2, 3), 16, 6, torch.float16),
    ("mma", (1, 1, 7), 48, 20, torch.float16), ("mma", (2, 3, 5), 16, 3, torch.bfloat16),
    pytest.param("mma", (3, 5, 19), 80, 36, torch.float16, marks=pytest.mark.gpu),
    pytest.param("mma", (5, 17, 23), 320, 36, torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param("mma", (5, 17, 23), 1536, 36, torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param("dot", (5, 17, 23), 320, 36, torch.bfloat16, marks=pytest.mark.gpu)])
def test_kernels(engine, grid, C, out, dtype, device, monkeypatch) -> None:
    if engine == "dot, several tiles":
        monkeypatch.setattr(head_launch, "BACKWARD", head_launch.Walk((1, 2), (1, 2), 2))
        monkeypatch.setattr(head_launch, "FORWARD", head_launch.Walk((1, 2), (2, 1), 1))
    if engine != "mma":
        monkeypatch.setattr(head_launch, "engine_of", lambda *_a: "dot")
    else:
        assert head_launch.engine_of(torch.empty(1, 1, C, dtype=dtype, device=device), out) == "mma"
    x, *rest = sample(grid, C, out, dtype=dtype, device=device)
    wide = [t.double() for t in (x, *rest)]
    y, u = head.triton_forward(x, *rest, *grid)
    Y, kept = head.reference_forward(*wide, *grid)
    limit = 4e-3 if dtype == torch.bfloat16 else 1e-3  # u, z and dy are rounded, as by eager layers
    error = lambda a, b: ((a.double() - b).norm() / b.norm()).item()
    assert y.dtype == torch.float32
    assert error(u, head._convolve(*wide[:3], *grid)) < limit
    if dtype == torch.bfloat16 and device == "cpu":
        return  # the interpreter multiplies the bits of bf16 as whole numbers
    assert error(y, Y) < limit
    dy = torch.randn_like(y)
    got = head.triton_backward(dy, x, u, *rest[:3], *grid)
    again = got if device == "cpu" else head.triton_backward(dy, x, u, *rest[:3], *grid)
    want = head.reference_backward(dy.double(), wide[0], kept, *wide[1:4], *grid)
    for a, b, c in zip(got, want, again):
        assert error(a, b) < limit
        assert torch.equal(a, c)


@pytest.mark.kernel
def test_an_empty_batch(device) -> None:
    x, weight, bias, matrix, last = sample((2, 3, 4), 16, 6, B=0, dtype=torch.float16, device=device)
    y, kept = head.triton_forward(x, weight, bias, matrix, last, 2, 3, 4)
    assert y.shape == (0, 24, 6)
    got = head.triton_backward(y, x, kept, weight, bias, matrix, 2, 3, 4)
    for a, b in zip(got, (x, weight, bias, matrix, last)):
        assert a.shape == b.shape
        assert not a.any()


def test_values_spread_over_threads_are_noticed() -> None:
    plain = "#ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [8], order = [0]}>"
    text = '#blocked = {}\n %1:4 = tt.elementwise_inline_asm "mma.sync.aligned" %2 : tensor<256xi32, #blocked> -> x\n'
    assert head_launch.one_per_thread(text.format(plain))
    assert not head_launch.one_per_thread(text.format(plain.replace("[1]", "[2]")))
    assert not head_launch.one_per_thread(text.format("#ttg.linear<{register = []}>"))
    assert not head_launch.one_per_thread("no matrix step at all")


@pytest.mark.kernel
def test_inputs_that_are_not_whole_words_are_copied(device) -> None:
    grid, C = (1, 2, 3), 8
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


def test_a_cache_without_its_text_is_not_trusted(monkeypatch, caplog) -> None:
    """Triton's cache may hold the binary alone; then nothing tells how values lie in threads."""
    from types import SimpleNamespace

    kernel = SimpleNamespace(__name__="head_slope", warmup=lambda *_a, **_k: SimpleNamespace(asm={"cubin": b""}))
    monkeypatch.setattr(head_launch, "_products", lambda *_a: kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda _d: torch.no_grad())
    assert not head_launch._sound.__wrapped__(16, 3, torch.bfloat16, torch.device("cpu"))
    assert "empty the cache" in caplog.text
