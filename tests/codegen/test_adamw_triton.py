"""The optimizer kernel of resident parameters: against torch operators, in one launch per kind."""

from __future__ import annotations

import pytest
import torch

from graphopt.codegen.adamw import Hyper, Piece, join, split, update_all

pytestmark = pytest.mark.kernel


def pieces(device, clip):
    g = torch.Generator().manual_seed(0)
    new = lambda n: torch.randn(n, generator=g)
    scale = None if clip == "no" else 0.3 if clip == "number" else torch.tensor(0.3, device=device)
    found = []
    for i, n in enumerate((1, 4096, 9000, 33, 0, 4095, 128)):
        high, rest = split(new(n)) if i % 2 else (new(n), None)
        hyper = Hyper(1e-2, 0.9, 0.99, 1e-8, 0.1 * i, 3, scale if i % 3 else None, 0.99 if i > 3 else None)
        tensors = [high, rest, new(n).bfloat16() if i % 2 else new(n), new(n), new(n).abs()]
        average = new(n) if i > 3 else None
        on = [None if t is None else t.to(device) for t in (*tensors, average)]
        found.append(Piece(*on[:5], hyper, on[5]))
    return found


@pytest.mark.parametrize("clip", ["no", "number", "tensor"])
def test_values(device, clip) -> None:
    from graphopt.codegen import adamw_triton

    got, want = pieces(device, clip), pieces("cpu", clip)
    for _ in range(3):
        adamw_triton.update_all(got)
        update_all(want)
    for a, b in zip(got, want):
        values = [(a.weight, b.weight)] if a.residual is None else [(join(a.weight, a.residual), join(b.weight, b.residual))]
        values += [(a.exp_avg, b.exp_avg), (a.exp_avg_sq, b.exp_avg_sq)] + ([(a.average, b.average)] if a.average is not None else [])
        for x, y in values:
            torch.testing.assert_close(x.cpu(), y, rtol=2e-6, atol=1e-6)
        if a.residual is not None:
            assert torch.equal(split(join(a.weight, a.residual))[0], a.weight)


def test_launches(device, monkeypatch) -> None:
    from graphopt.codegen import adamw_triton

    launches = []
    launch = adamw_triton._launch
    monkeypatch.setattr(adamw_triton, "_launch", lambda group, *kind: (launches.append(len(group)), launch(group, *kind)))
    adamw_triton.update_all(pieces(device, "no"))
    assert sorted(launches) == [1, 1, 2, 2], "fp32 and split, with and without an average; nothing for no elements"


@pytest.mark.parametrize("clip", ["no", "number"])
def test_the_default_dtype_does_not_round_the_settings(device, clip, request) -> None:
    from graphopt.codegen import adamw_triton

    got, want = pieces(device, clip), pieces(device, clip)
    adamw_triton.update_all(want)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.bfloat16)
    adamw_triton.update_all(got)
    for a, b in zip(got, want):
        assert torch.equal(a.weight, b.weight)
        assert torch.equal(a.exp_avg_sq, b.exp_avg_sq)
