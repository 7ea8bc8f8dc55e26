"""`graphopt.dsa.video_attention`: text, padding, limits that must equal dense attention, and what it refuses."""

from __future__ import annotations

import dsa_oracle as oracle
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import graphopt
from graphopt.errors import ConfigError

GRIDS = [(1, 1, 1), (1, 3, 5), (2, 7, 9), (3, 5, 7)]


@pytest.mark.parametrize("grid", GRIDS)
def test_c13_limits(grid) -> None:
    N = grid[0] * grid[1] * grid[2]
    q, k, v = (torch.randn(1, 2, N, 16) for _ in range(3))
    zero = torch.zeros(1, 2, N, 3)
    for offsets in (None, zero):
        wide = graphopt.dsa.video_attention(q, k, v, offsets, grid=grid, window=tuple(2 * n - 1 for n in grid))
        torch.testing.assert_close(wide, scaled_dot_product_attention(q, k, v), rtol=0, atol=1e-5)
        one = graphopt.dsa.video_attention(q, k, v, offsets, grid=grid, window=(1, 1, 1))
        torch.testing.assert_close(one, v, rtol=0, atol=1e-6)
        ones = graphopt.dsa.video_attention(q * 0, k, torch.ones_like(v), offsets, grid=grid, window=(3, 3, 3))
        torch.testing.assert_close(ones, torch.ones_like(v), rtol=0, atol=1e-6)


@pytest.mark.parametrize("first", [False, True])
def test_text_is_one_softmax_with_the_window(first) -> None:
    grid, window, text = (3, 4, 5), (3, 3, 3), 7
    leaves = [torch.randn(2, 4, 60 + text, 6, dtype=torch.float64).requires_grad_() for _ in range(3)]
    kk, vv = (x[:, :2].detach().clone().requires_grad_() for x in leaves[1:])
    leaves = [leaves[0], kk, vv]
    mask = torch.ones(60 + text, 60 + text, dtype=torch.bool)
    mask[slice(text, None) if first else slice(60), slice(text, None) if first else slice(60)] = oracle.natten_mask(grid, window)
    want = scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    got = graphopt.dsa.video_attention(*leaves, grid=grid, window=window, text=text, text_first=first)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    for a, b in zip(torch.autograd.grad(got.sin().sum(), leaves), torch.autograd.grad(want.sin().sum(), leaves)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_text_with_offsets_against_explicit_sampling() -> None:
    grid, window, text = (2, 4, 5), (2, 3, 3), 3
    q, k, v = (torch.randn(1, 2, 43, 6, dtype=torch.float64).requires_grad_() for _ in range(3))
    offsets = torch.randn(1, 2, 40, 3, dtype=torch.float64).requires_grad_()
    got = graphopt.dsa.video_attention(q, k, v, offsets, grid=grid, window=window, text=text)[:, :, :40]
    at = oracle.starts(offsets, grid, window)[..., None, :] + oracle.coordinates(window)
    keys = torch.cat([oracle.sample(k[:, :, :40], at, grid), k[:, :, None, 40:].expand(1, 2, 40, 3, 6)], 3)
    values = torch.cat([oracle.sample(v[:, :, :40], at, grid), v[:, :, None, 40:].expand(1, 2, 40, 3, 6)], 3)
    weights = ((q[:, :, :40, None] * keys).sum(-1) * 6**-0.5).softmax(-1)
    want = (weights[..., None] * values).sum(-2)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    leaves = [q, k, v, offsets]
    for a, b in zip(torch.autograd.grad(got.sin().sum(), leaves), torch.autograd.grad(want.sin().sum(), leaves)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_padded_tails_are_neither_read_nor_written() -> None:
    grid = (2, 3, 4)
    q, k, v = (torch.randn(1, 2, 30, 8) for _ in range(3))
    for x in (q, k, v):
        x[:, :, 24:] = float("nan")
    y = graphopt.dsa.video_attention(q, k, v, grid=grid, window=(3, 3, 3), padding=6)
    assert torch.equal(y[:, :, 24:], torch.zeros(1, 2, 6, 8))
    want = graphopt.dsa.video_attention(q[:, :, :24], k[:, :, :24], v[:, :, :24], grid=grid, window=(3, 3, 3))
    assert torch.equal(y[:, :, :24], want)


@pytest.mark.parametrize("window", [(1, 3, 3), (2, 3, 4)])
@pytest.mark.parametrize("first", [False, True])
def test_a_mask_over_text_in_front_of_padding(window, first) -> None:
    """The window and, where it covers the grid, dense attention: both read neither hidden text nor padding."""
    grid, text, padding = (2, 3, 4), 5, 3
    q, k, v = (torch.randn(2, 2, 24 + text + padding, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(2, 1, 1, 24 + text + padding, dtype=torch.bool)
    start = 0 if first else 24
    mask[0, ..., start + 1], mask[1, ..., start + 3 : start + 5] = False, False
    options = {"grid": grid, "window": window, "text": text, "text_first": first}
    y = graphopt.dsa.video_attention(q, k, v, **options, padding=padding, attn_mask=mask)
    real = slice(0, 24 + text)
    want = graphopt.dsa.video_attention(*(x[:, :, real] for x in (q, k, v)), **options, attn_mask=mask[..., real])
    torch.testing.assert_close(y[:, :, real], want, rtol=0, atol=1e-13)
    assert not y[:, :, 24 + text :].any()


@pytest.mark.parametrize("text", [0, 3])
@pytest.mark.parametrize("kind", ["none", "shift", "tap"])
def test_an_empty_batch(kind, text) -> None:
    N = 24 + text
    q, k, v = (torch.zeros(0, heads, N, 8, requires_grad=True) for heads in (4, 2, 2))
    offsets = None if kind == "none" else torch.zeros(0, 2, 24, *([9] if kind == "tap" else []), 3, requires_grad=True)
    y = graphopt.dsa.video_attention(q, k, v, offsets, grid=(2, 3, 4), window=(1, 3, 3), text=text)
    assert y.shape == q.shape
    y.sum().backward()
    for x in (q, k, v, offsets):
        assert x is None or x.grad.shape == x.shape


def test_other_scale_and_strides() -> None:
    grid = (2, 3, 4)
    q, k, v = (torch.randn(1, 2, 8, 24).transpose(2, 3) for _ in range(3))
    y = graphopt.dsa.video_attention(q, k, v, grid=grid, window=(2, 3, 3), scale=0.3)
    want = scaled_dot_product_attention(q, k, v, attn_mask=oracle.natten_mask(grid, (2, 3, 3)), scale=0.3)
    torch.testing.assert_close(y, want)


Q = torch.randn(1, 2, 24, 8)
BAD = [
    ({"grid": (2, 3, 5)}, "30"),
    ({"grid": (2, 3, 4), "text": 2}, "26"),
    ({"grid": (2, 3, 4), "window": (0, 3, 3)}, "window"),
    ({"grid": (2, 3, 4), "window": (3, 3)}, "window"),
    ({"grid": (0, 3, 4)}, "grid"),
    ({"grid": (2, 3, 4), "is_causal": True}, "causal"),
    ({"grid": (2, 3, 4), "dropout_p": 0.1}, "dropout"),
    ({"grid": (2, 3, 4), "attn_mask": torch.ones(24, 24)}, "mask"),
    ({"grid": (2, 3, 4), "boundary": "wrap"}, "boundary"),
    ({"grid": (2, 3, 4), "offsets": torch.zeros(1, 2, 23, 3)}, "offsets"),
    ({"grid": (2, 3, 4), "offsets": torch.zeros(1, 3, 24, 3)}, "groups"),
    ({"grid": (2, 3, 4), "offsets": torch.zeros(1, 2, 24, 5, 3)}, "tap"),
    ({"grid": (2, 3, 4), "offsets": torch.zeros(1, 2, 24, 3, dtype=torch.bfloat16)}, "float32"),
    ({"grid": (2, 3, 4), "offsets": torch.ones(1, 2, 24, 3, dtype=torch.bool)}, "numbers of tokens"),
    ({"grid": (2, 3, 4), "offsets": torch.zeros(1, 2, 24, 3, dtype=torch.complex64)}, "numbers of tokens"),
    ({"grid": (2, 3, 4), "offsets": torch.zeros(1, 2, 24, 3, device="meta")}, "on meta"),
    ({"grid": (2, 3, 4), "offsets": torch.zeros(1, 0, 24, 3)}, "group"),
    ({"grid": (2, 3, 4), "offsets": [0, 0, 0]}, "list"),
    ({"grid": (2.0, 3, 4)}, "three sizes"),
    ({"grid": 24}, "three sizes"),
    ({"grid": None}, "three sizes"),
    ({"grid": (2, 3, 4), "window": (1.5, 3, 3)}, "three sizes"),
    ({"grid": (2, 3, 4), "window": "333"}, "three sizes"),
    ({"grid": (2, 3, 4), "scale": torch.tensor(0.3, requires_grad=True)}, "scale"),
]


@pytest.mark.parametrize(("options", "named"), BAD)
def test_bad_input_is_named(options, named) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        graphopt.dsa.video_attention(Q, Q, Q, **{"window": (3, 3, 3), **options})
    assert caught.value.remedy


def test_bad_tensors_are_named() -> None:
    for k, v, named in ((Q[:, :, :20], Q, "cross"), (Q.double(), Q, "dtypes"), (Q[:, :1].expand(1, 4, 24, 8), Q, "heads"),
                        (Q[..., :4], Q, "dimension")):
        with pytest.raises(ConfigError, match=named):
            graphopt.dsa.video_attention(Q, k, v, grid=(2, 3, 4))
    for x in (Q[:, :0], Q[..., :0]):
        with pytest.raises(ConfigError, match="no head"):
            graphopt.dsa.video_attention(x, x, x, grid=(2, 3, 4))
    whole = torch.ones(1, 2, 24, 8, dtype=torch.int32)
    with pytest.raises(ConfigError, match="not supported"):
        graphopt.dsa.video_attention(whole, whole, whole, grid=(2, 3, 4))


def test_offsets_without_effect_get_a_zero_gradient() -> None:
    q = torch.randn(1, 2, 24, 8)
    offsets = torch.randn(1, 2, 24, 3).requires_grad_()
    assert graphopt.dsa.explain(q, offsets, grid=(2, 3, 4), window=(2, 3, 4)).engine == "dense"
    graphopt.dsa.video_attention(q, q, q, offsets, grid=(2, 3, 4), window=(2, 3, 4)).sum().backward()
    assert torch.equal(offsets.grad, torch.zeros_like(offsets))


def test_compiles_whole_with_text_and_any_grid() -> None:
    def f(x, offsets, grid):
        q, k, v = x.unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return graphopt.dsa.video_attention(q, k, v, offsets, grid=grid, window=(2, 3, 3), text=3).sin().sum()

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    for grid in ((3, 4, 5), (4, 4, 6), (3, 6, 5)):
        N = grid[0] * grid[1] * grid[2]
        x, offsets = torch.randn(2, N + 3, 48, requires_grad=True), torch.randn(2, 2, N, 3, requires_grad=True)
        got = torch.autograd.grad(compiled(x, offsets, grid), (x, offsets))
        for a, b in zip(got, torch.autograd.grad(f(x, offsets, grid), (x, offsets))):
            torch.testing.assert_close(a, b)


def test_the_reason_is_told() -> None:
    q = torch.empty(1, 2, 24, 64, dtype=torch.bfloat16, device="meta")
    assert graphopt.dsa.explain(q, grid=(3, 9, 9)).engine == "reference"
    assert "meta" in graphopt.dsa.explain(q, grid=(3, 9, 9)).reason
    assert "whole grid" in graphopt.dsa.explain(q, grid=(2, 3, 4)).reason


@pytest.mark.parametrize("of", ["q", "k", "v", "offsets"])
def test_no_tangent_is_dropped(of: str) -> None:
    """Forward-mode AD: torch gives operators without such a formula no tangent, and says nothing.  Nor torch.func."""
    given = {n: torch.randn(1, 2, 24, 16) for n in "qkv"} | {"offsets": torch.zeros(1, 2, 24, 3)}
    with torch.autograd.forward_ad.dual_level():
        given[of] = torch.autograd.forward_ad.make_dual(given[of], torch.randn_like(given[of]))
        with pytest.raises(ConfigError, match="forward-mode"):
            graphopt.dsa.video_attention(**given, grid=(2, 3, 4), window=(1, 3, 3))

    def attend(x):
        return graphopt.dsa.video_attention(**{**given, of: x}, grid=(2, 3, 4), window=(1, 3, 3))

    x = torch.randn_like(given[of])
    with pytest.raises(ConfigError, match="forward-mode"):
        torch.func.jvp(attend, (x,), (torch.ones_like(x),))
    with pytest.raises(ConfigError, match="torch.func"):
        torch.func.grad(lambda x: attend(x).sum())(x)
    with pytest.raises(ConfigError, match="torch.func"):
        torch.func.vmap(attend)(x[None])
