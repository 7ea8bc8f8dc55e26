"""Sizes that data decides: a graph whose number of tokens has no value when it is compiled."""

from __future__ import annotations

import pytest
import torch
from blocks import Block, adaln, compiled, step

import graphopt
from graphopt import backend, config, reporting

D = 32


@pytest.mark.parametrize("target", [None, "sm90"])
def test_tokens_kept_by_a_mask(target: str | None) -> None:
    class Kept(Block):
        def forward(self, x, t, keep):
            tokens = x[keep]
            each = t[:1].expand(tokens.shape[0], D)
            return super().forward(tokens[None], t[:1]) + adaln(tokens, each, each)

    module, record = Kept(D), reporting.GraphRecord("0/0", [])
    x, t = torch.randn(2, 24, D), torch.randn(2, D)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        if target is not None:
            pytest.importorskip("triton")
            settings = config.Config(select="all", on_error="raise")

            def capture(gm, inputs):
                backend.rewrite(gm, settings, record, target=target)
                return gm.forward

            torch.compile(module, backend=capture, fullgraph=True)(x, t, torch.rand(2, 24) > 0.4)
            assert [s.status for s in record.sites] == ["rewritten"] * 5
            return
        f = compiled(module, fullgraph=True)
        for _ in range(2):
            keep = torch.rand(2, 24) > 0.4
            got, want = (step(lambda x, t: g(x, t, keep), module.parameters(), x, t) for g in (f, module))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    report = graphopt.report(f)
    assert len(report.graphs) == 1
    assert (report.count("modulate", "rewritten"), report.count("gate", "rewritten")) == (3, 2)
