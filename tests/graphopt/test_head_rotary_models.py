"""head_norm_rotate on HunyuanVideo and FLUX: the counts, and a training step against fp64 (CPU; GPU through Inductor)."""

from __future__ import annotations

from dataclasses import replace

import contract
import pytest
import torch
import zoo

import graphopt

ASKED = {"graphopt.select": "all", "graphopt.on_error": "raise"}


def hunyuan() -> zoo.Built:
    """Heads of 16 channels, so that they fit a tile."""
    return zoo.hunyuan(attention_head_dim=16, rope_axes_dim=(4, 6, 6)), zoo.hunyuan_video()[1]


# model, its rotary sites: two per block, whatever stands beside the image
MODELS = {"hunyuan": (replace(zoo.ZOO["hunyuan_video"], name="hunyuan", make=hunyuan), 8), "flux": (zoo.ZOO["flux"], 8),
          "bria": (zoo.ZOO["bria"], 8)}


def step_of(name: str, dtype: torch.dtype, device: str, compiler: str, most: int = 64):
    entry, sites = MODELS[name]
    model, _ = entry.build(dtype)
    model = model.to(device)
    f = torch.compile(model, backend="graphopt", options={**ASKED, "graphopt.compiler": compiler})
    verdict = contract.measure(f, model, contract.fresh_inputs(entry, dtype, device), most=most)
    report = graphopt.report(f)
    assert report.count("rotary", what="rewritten") == sites, report
    shapes = {s.shape[1] for s in report.sites if s.kind == "rotary"}
    assert len(shapes) == 1, "text stands beside the image in every site"
    assert verdict.holds, verdict
    return f, model, contract.fresh_inputs(entry, dtype, device)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cpu(name: str, dtype: torch.dtype) -> None:
    step_of(name, dtype, "cpu", "aot_eager")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hunyuan", "flux"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_gpu(name: str, dtype: torch.dtype) -> None:
    """Two steps give the same bits where attention does (its backward adds up in no fixed order: the math kernel is)."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        f, model, batches = step_of(name, dtype, "cuda", "inductor", most=6)
        batch = next(batches)
        one, two = contract.run(f, model, batch), contract.run(f, model, batch)
    assert all(torch.equal(one[n], two[n]) for n in one if "norm_q" in n or "norm_k" in n)
