"""Converted models on a GPU in bf16, with the kernels, against eager fp64: output and gradients, compiled and not."""

from __future__ import annotations

import copy
import os
from contextlib import contextmanager

import pytest
import torch
import video_models
from torch import nn
from video_models import cogvideox, hunyuan, wan

import graphopt
from graphopt.dsa import DSAConfig, convert

pytestmark = pytest.mark.gpu
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch's deterministic mode asks for, before cuBLAS starts


def run(model: nn.Module, inputs: dict, f=None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    y = (model if f is None else f)(**inputs, return_dict=False)[0]
    y.float().square().mean().backward()
    return y.detach().double(), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def gap(got: torch.Tensor, want: torch.Tensor, floor: float = 0.0) -> float:
    return float((got - want).norm() / max(float(want.norm()), floor, 1e-12))


def assert_close(got, want, output: float, gradient: float) -> None:
    assert gap(got[0], want[0]) <= output
    floor = 1e-2 * max(float(g.norm()) for g in want[1].values())  # gradients that are rounding have no limit of their own
    for name, g in want[1].items():
        assert gap(got[1][name], g, floor) <= gradient, name


@contextmanager
def deterministic():
    """Torch's own attention (of text queries, and to text) has an atomic backward otherwise."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def converted(make, window=(3, 5, 5)) -> tuple[nn.Module, dict, graphopt.dsa.Handle]:
    """On the GPU in fp32, nothing zero, offsets up to 1.5 tokens and more."""
    model, inputs, handle = video_models.converted(make, window)
    return model.cuda(), {k: v.cuda() for k, v in inputs.items()}, handle


def exact(model: nn.Module, inputs: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Eager in fp64."""
    return run(copy.deepcopy(model).double(), {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()})


def halved(model: nn.Module, inputs: dict) -> tuple[nn.Module, dict]:
    """In bf16."""
    return copy.deepcopy(model).bfloat16(), {
        k: v.bfloat16() if v.is_floating_point() and k != "guidance" else v for k, v in inputs.items()}


@pytest.mark.parametrize("make", [wan, hunyuan, cogvideox])
def test_kernels_in_a_model(make) -> None:
    model, inputs, _ = converted(make)
    high = exact(model, inputs)
    low, x = halved(model, inputs)
    assert_close(run(low, x), high, 2e-2, 0.15)
    assert all(r.error <= r.limit for r in graphopt.dsa.verify(low, **x))
    f = torch.compile(low, backend="graphopt", fullgraph=True)
    with deterministic():
        once, again = run(low, x, f), run(low, x, f)
    assert_close(once, high, 2e-2, 0.15)
    assert [n for n in once[1] if not torch.equal(once[1][n], again[1][n])] == [], "bitwise repeatable"
    assert {s.status for s in graphopt.report(f).sites if s.kind == "video_attention"} == {"rewritten"}


@pytest.mark.parametrize("make", [wan, hunyuan, cogvideox])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_compiled_one_by_one(make, checkpointing: bool) -> None:
    model, inputs, _ = converted(make)
    high = exact(model, inputs)
    low, x = halved(model, inputs)
    if checkpointing:
        low.enable_gradient_checkpointing()
    for module in low.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                block.compile(backend="graphopt")
    assert_close(run(low, x), high, 2e-2, 0.15)


def test_checkpointed_and_compiled_as_one_graph() -> None:
    model, inputs, _ = converted(wan)
    high = exact(model, inputs)
    low, x = halved(model, inputs)
    low.enable_gradient_checkpointing()
    assert_close(run(low, x, torch.compile(low, backend="graphopt", fullgraph=True)), high, 2e-2, 0.15)


def test_lora() -> None:
    from peft import LoraConfig

    model, inputs, _ = converted(wan)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.05)
        if ".dsa." in name:
            p.requires_grad_()
    high = exact(model, inputs)
    low, x = halved(model, inputs)
    got = run(low, x, torch.compile(low, backend="graphopt", fullgraph=True))
    assert set(got[1]) == set(high[1]) == {n for n, p in low.named_parameters() if p.requires_grad}
    assert_close(got, high, 2e-2, 0.15)


def test_streamed() -> None:
    model, inputs, handle = converted(wan)
    high = exact(model, inputs)
    low, x = halved(model.cpu(), inputs)
    names = {n: p for n, p in low.named_parameters()}
    graphopt.stream(low, "cuda", slots=2, resident=[])
    optimizer = graphopt.HostAdamW(low.parameters(), lr=1e-4)
    step = torch.compile(low, backend="graphopt")
    y = step(**x, return_dict=False)[0]
    y.float().square().mean().backward()
    assert_close((y.detach().double(), {n: optimizer.gradient(p).cuda().double() for n, p in names.items()}), high, 2e-2, 0.15)
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
        value = step(**x, return_dict=False)[0].float().square().mean()
        value.backward()
    assert torch.isfinite(value)
    heads = [n for n in low.state_dict() if ".dsa." in n]
    assert len(heads) == 4 * len(handle.layers)
    assert any(not torch.equal(low.state_dict()[n].cpu(), model.state_dict()[n].cpu()) for n in heads), "they trained"


def test_convert_train_save_load_resume_is_bitwise(tmp_path) -> None:
    """Ten steps, a checkpoint, five more steps: the same losses and weights from the checkpoint, compiled, in bf16."""
    torch.manual_seed(0)
    fresh, inputs, select = wan()
    inputs = {k: v.cuda().bfloat16() if v.is_floating_point() else v.cuda() for k, v in inputs.items()}

    def start(config) -> tuple[nn.Module, graphopt.dsa.Handle, torch.optim.Optimizer, object]:
        model = copy.deepcopy(fresh).bfloat16().cuda()
        handle = convert(model, config, select=None if isinstance(config, type(tmp_path)) else select)
        optimizer = torch.optim.AdamW(handle.param_groups(1e-2, weight_decay=0.1))
        return model, handle, optimizer, torch.compile(model, backend="graphopt", fullgraph=True)

    def train(f, optimizer, seed: int, steps: int) -> list[float]:
        torch.manual_seed(seed)
        losses = []
        for _ in range(steps):
            x = torch.randn_like(inputs["hidden_states"])
            loss = (f(**{**inputs, "hidden_states": x}, return_dict=False)[0] - x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    with deterministic():
        model, handle, optimizer, f = start(DSAConfig((3, 5, 5)))
        train(f, optimizer, 0, 10)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
        handle.save(tmp_path)
        want = train(f, optimizer, 1, 5)
        assert all(h.out_weight.any() for h in handle.layers.values())
        resumed, _, optimizer, f = start(tmp_path)
        state = torch.load(tmp_path / "state.pt")
        resumed.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        assert train(f, optimizer, 1, 5) == want
    for (n, a), b in zip(model.state_dict().items(), resumed.state_dict().values()):
        assert torch.equal(a, b), n


@pytest.mark.parametrize("make", [wan, hunyuan, cogvideox])
def test_a_window_over_the_grid_trains_as_the_dense_model(make) -> None:
    """bf16: 20 steps, outputs and gradients equal bit by bit."""
    torch.manual_seed(0)
    dense, inputs, select = make()
    dense, x = halved(dense.cuda(), {k: v.cuda() for k, v in inputs.items()})
    model = copy.deepcopy(dense)
    handle = convert(model, DSAConfig((9, 99, 99)), select=select)
    own = {id(p) for p in handle.parameters()}
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if id(p) not in own], lr=1e-3) for m in (dense, model)]
    with deterministic():
        for _ in range(20):
            want, got = run(dense, x), run(model, x)
            assert not any(got[1].pop(n).any() for n in [*got[1]] if ".dsa." in n)
            assert torch.equal(got[0], want[0])
            for n, g in want[1].items():
                assert torch.equal(got[1][n], g), n
            for optimizer in optimizers:
                optimizer.step()
