"""Fine-tuning as diffusers users do it: LoRA adapters (peft), and blocks compiled one by one (regional compilation)."""

from __future__ import annotations

import contract
import pytest
import torch
import zoo
from blocks import ALL
from peft import LoraConfig, get_peft_model

import graphopt

COUNTS = {"wan": (5, 4), "flux": (11, 10)}
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"])


def open_adapters(model: torch.nn.Module) -> None:
    """lora_B starts at zero, which would leave lora_A without a gradient."""
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)


@pytest.mark.parametrize(("name", "how"), [
    ("wan", "add_adapter"), pytest.param("flux", "get_peft_model", marks=pytest.mark.nightly)])
def test_lora(name: str, how: str) -> None:
    """Frozen weights, adapters on the attention: every site is rewritten, the adapters' gradients are within the contract."""
    model = zoo.ZOO[name].build()[0]
    model.requires_grad_(False)
    if how == "add_adapter":
        model.add_adapter(LORA)
    else:
        model = get_peft_model(model, LORA)
    open_adapters(model)
    model.train()
    f = torch.compile(model, backend="graphopt", options=ALL, fullgraph=True)
    verdict = contract.measure(f, model, contract.fresh_inputs(zoo.ZOO[name]))
    assert verdict.holds, verdict
    assert set(verdict.ratios) == {"output"} | {n for n, p in model.named_parameters() if p.requires_grad}
    report = graphopt.check(f, dict(zip(("modulate", "gate"), COUNTS[name])), what="rewritten")
    forward, backward = ([k.direction for k in report.kernels].count(d) for d in ("forward", "backward"))
    assert backward < forward  # the first site stands before any adapter: nothing there needs a gradient


@pytest.mark.parametrize(("name", "expected"), [
    ("wan", {"blocks": (2, 2)}),
    pytest.param("flux", {"transformer_blocks": (4, 4), "single_transformer_blocks": (1, 1)}, marks=pytest.mark.nightly)])
def test_compile_repeated_blocks(name: str, expected: dict) -> None:
    """One compile per class of block; what is outside the blocks stays eager."""
    model, eager = (zoo.ZOO[name].build()[0].train() for _ in range(2))
    model.compile_repeated_blocks(backend="graphopt", options=ALL, fullgraph=True)
    verdict = contract.measure(model, model, contract.fresh_inputs(zoo.ZOO[name]), eager=eager)
    assert verdict.holds, verdict
    for blocks, (modulates, gates) in expected.items():
        report = graphopt.check(getattr(model, blocks)[0], {"modulate": modulates, "gate": gates}, what="rewritten")
        assert len(report.graphs) == 1
        assert (report.count("modulate"), report.count("gate")) == (modulates, gates)
        assert report.missed == []
