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


def batches(name: str, first: dict, dtype: torch.dtype = torch.float32, n: int = 3) -> list[dict]:
    """`first`, and fresh inputs of the same shapes."""
    return [first, *(zoo.ZOO[name].build(dtype, seed)[1] for seed in range(1, n))]


def open_adapters(model: torch.nn.Module) -> None:
    """lora_B starts at zero, which would leave lora_A without a gradient."""
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)


@pytest.mark.parametrize(("name", "how"), [("wan", "add_adapter"), ("flux", "get_peft_model")])
def test_lora(name: str, how: str) -> None:
    """Frozen weights, adapters on the attention: every site is rewritten, the adapters' gradients are within the contract."""
    model, inputs = zoo.ZOO[name].build()
    model.requires_grad_(False)
    if how == "add_adapter":
        model.add_adapter(LORA)
    else:
        model = get_peft_model(model, LORA)
    open_adapters(model)
    model.train()
    f = torch.compile(model, backend="graphopt", options=ALL, fullgraph=True)
    verdict = contract.measure(f, model, batches(name, inputs))
    assert verdict.holds, (verdict.mean, verdict.worst)
    assert set(verdict.ratios) == {"output"} | {n for n, p in model.named_parameters() if p.requires_grad}
    report = graphopt.check(f, dict(zip(("modulate", "gate"), COUNTS[name])), what="rewritten")
    forward, backward = ([k.direction for k in report.kernels].count(d) for d in ("forward", "backward"))
    assert backward < forward  # the first site stands before any adapter: nothing there needs a gradient


@pytest.mark.parametrize(("name", "expected"), [
    ("wan", {"blocks": (2, 2)}), ("flux", {"transformer_blocks": (4, 4), "single_transformer_blocks": (1, 1)})])
def test_compile_repeated_blocks(name: str, expected: dict) -> None:
    """One compile per class of block; what is outside the blocks stays eager."""
    model, inputs = zoo.ZOO[name].build()
    model.train()
    eager, _ = zoo.ZOO[name].build()
    model.compile_repeated_blocks(backend="graphopt", options=ALL, fullgraph=True)
    ours, theirs = contract.Errors(), contract.Errors()
    for seed, batch in enumerate(batches(name, inputs)):
        got, want = contract.run(model, model, batch, seed), contract.run(eager.train(), eager, batch, seed)
        contract.same_form(got, want)
        true = contract.truth(eager, batch, seed)
        ours.add(got, true)
        theirs.add(want, true)
    verdict = contract.compare(ours, theirs)
    assert verdict.holds, (verdict.mean, verdict.worst)
    for blocks, (modulates, gates) in expected.items():
        report = graphopt.check(getattr(model, blocks)[0], {"modulate": modulates, "gate": gates}, what="rewritten")
        assert len(report.graphs) == 1
        assert (report.count("modulate"), report.count("gate")) == (modulates, gates)
        assert report.missed == []
