"""A converted model: equal to the dense one where the window covers the grid, and the same however it is compiled."""

from __future__ import annotations

import copy

import pytest
import tiny_video
import torch
import torch.distributed as dist
import zoo
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

import graphopt
from graphopt.dsa import DSAConfig, convert, video_grid
from graphopt.errors import ConfigError

AOT = {"graphopt.compiler": "aot_eager"}
SELECT = {
    "wan": "blocks.*.attn1", "cogvideox_rope": "transformer_blocks.*.attn1",
    "hunyuan_video": ["transformer_blocks.*.attn", "single_transformer_blocks.*.attn"],
    "ltx": "transformer_blocks.*.attn1", "cosmos": "transformer_blocks.*.attn1", "allegro": "transformer_blocks.*.attn1",
}


def built(name: str) -> tuple[nn.Module, dict]:
    model, inputs = zoo.ZOO[name].build()
    if name == "hunyuan_video":  # a padded prompt
        inputs["encoder_attention_mask"] = torch.tensor([[1, 1, 1, 0, 0, 0], [1] * 6])
    return model.train(), inputs


def moved(model: nn.Module, select, window=(1, 3, 3), **config) -> graphopt.dsa.Handle:
    """Converted, with offsets that are not zero."""
    handle = convert(model, DSAConfig(window, **config), select=select)
    for p in handle.parameters():
        nn.init.normal_(p, std=0.1)
    return handle


def run(model: nn.Module, f=None, **inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    y = (model if f is None else f)(**inputs)
    y = y if isinstance(y, torch.Tensor) else y[0]
    y.square().mean().backward()
    return y.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(got, want, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=tolerance)
    assert set(got[1]) == set(want[1])
    for name, g in want[1].items():
        torch.testing.assert_close(got[1][name], g, rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", ["wan", "hunyuan_video", "cogvideox_rope"])
def test_a_window_over_the_grid_trains_as_the_dense_model(name: str) -> None:
    """Outputs and gradients of 20 training steps are equal bit by bit."""
    dense, inputs = built(name)
    model = copy.deepcopy(dense)
    handle = moved(model, SELECT[name], window=(9, 9, 9))
    own = {id(p) for p in handle.parameters()}
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if id(p) not in own], lr=1e-3) for m in (dense, model)]
    for _ in range(20):
        want, got = run(dense, **inputs), run(model, **inputs)
        heads = {n for n in got[1] if ".dsa." in n}
        assert len(heads) == 4 * len(handle.layers)
        assert all(not got[1].pop(n).any() for n in heads)
        assert_equal(got, want)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize(("name", "checkpointing"), [
    ("wan", True), *(pytest.param(n, c, marks=pytest.mark.nightly) for n, c in [
        ("wan", False), ("hunyuan_video", True), ("hunyuan_video", False), ("cogvideox_rope", True),
        ("cogvideox_rope", False)])])
def test_zoo_models_train_the_same_compiled(name: str, checkpointing: bool) -> None:
    """One graph, equal to eager bit by bit."""
    model, inputs = built(name)
    handle = moved(model, SELECT[name])
    want = run(model, **inputs)
    assert all(want[1][f"{n}.dsa.{p}"].any() for n in handle.layers for p, _ in handle.layers[n].named_parameters())
    if checkpointing:
        model.enable_gradient_checkpointing()
        assert_equal(run(model, **inputs), want)
    f = torch.compile(model, backend="graphopt", options=AOT, fullgraph=True)
    assert_equal(run(model, f, **inputs), want)
    # the mark is no obstacle to the other passes
    expected = zoo.ZOO[name].expected
    report = graphopt.report(f)
    assert (report.count("modulate", "matched"), report.count("gate", "matched")) == (expected.modulate, expected.gate)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_compiled_one_by_one_share_one_graph(checkpointing: bool) -> None:
    """One compile serves three converted blocks; after three grids, every grid."""
    model = tiny_video.TinyVideo(3)
    model.checkpointing = checkpointing
    moved(model, "blocks.*.attn", window=(3, 3, 3))
    latents = [tiny_video.latent(2, *grid) for grid in ((4, 4, 5), (4, 5, 4), (5, 6, 4), (6, 5, 7), (5, 7, 6))]
    want = [run(model, latent=x) for x in latents]
    for block in model.blocks:
        block.compile(backend="graphopt", options=AOT, fullgraph=True)
    counters.clear()
    for i, x in enumerate(latents):
        assert_equal(run(model, latent=x), want[i], 1e-7)
        if i == 0:  # the first block reads a view of the latent, on which torch guards
            assert counters["stats"]["unique_graphs"] <= 2
    assert counters["stats"]["unique_graphs"] <= 6


def test_layers_compiled_once_by_regions() -> None:
    model, x = tiny_video.TinyVideo(3), tiny_video.latent()
    moved(model, "blocks.*.attn")
    want = run(model, latent=x)
    f = torch.compile(model, backend="graphopt", options={**AOT, "graphopt.regions": "auto"}, fullgraph=True)
    assert_equal(run(model, f, latent=x), want)
    report = graphopt.report(f)
    assert report.graphs[0].notes == ["regions: 3 layers in 1 classes"]
    assert report.count("video_attention", "rewritten") == 3


@pytest.mark.nightly
def test_whole_model_with_dynamic_shapes() -> None:
    model = tiny_video.TinyVideo(2, text="first")
    moved(model, "blocks.*.attn", window=(3, 3, 3))
    f = torch.compile(model, backend="graphopt", options=AOT, fullgraph=True, dynamic=True)
    counters.clear()
    for grid in ((4, 4, 5), (5, 6, 7), (4, 6, 8)):
        inputs = {"latent": tiny_video.latent(2, *grid), "words": torch.randn(2, 6, 16)}
        assert_equal(run(model, f, **inputs), run(model, **inputs), 1e-7)
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("text", [None, "first"])
def test_images_among_videos(text) -> None:
    """Grids with axes of one, compiled as a whole: an axis of one leaves no trace in the graph's tokens."""
    model = tiny_video.TinyVideo(1, text=text)
    moved(model, "blocks.*.attn", window=(3, 3, 3))
    f = torch.compile(model, backend="graphopt", options=AOT, fullgraph=True, dynamic=True)
    for grid in ((3, 4, 5), (1, 4, 5), (1, 6, 3), *(((4, 1, 1), (3, 1, 5), (1, 1, 6)) if text is None else ())):
        inputs = {"latent": tiny_video.latent(2, *grid), **({} if text is None else {"words": torch.randn(2, 6, 16)})}
        assert_equal(run(model, f, **inputs), run(model, **inputs), 1e-7)


def test_fsdp2_with_dynamic_shapes() -> None:
    """Between FSDP2's hooks Dynamo takes a module's own numbers (window, heads) for sizes that may change."""
    model = tiny_video.TinyVideo(1)
    moved(model, "blocks.*.attn", window=(1, 3, 3))
    whole = copy.deepcopy(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model.compile(backend="graphopt", options={"graphopt.compiler": "eager"}, dynamic=True)
        for module in (*model.blocks, model):
            fully_shard(module)
        for grid in ((1, 4, 5), (3, 4, 5)):
            x = tiny_video.latent(2, *grid)
            y, want = model(x), whole(x)
            torch.testing.assert_close(y, want, rtol=0, atol=1e-6)
            y.square().mean().backward()
            want.square().mean().backward()
        for a, b in zip(model.parameters(), whole.parameters()):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=0, atol=1e-6)
    finally:
        dist.destroy_process_group()


def test_an_image_slides_with_the_option_alone() -> None:
    model, image = tiny_video.TinyVideo(1), tiny_video.latent(2, 1, 6, 7)
    options = {**AOT, "graphopt.dsa": {"window": (3, 3, 3), "select": "blocks.*.attn"}}
    f = torch.compile(model, backend="graphopt", options=options, dynamic=True)
    got = run(model, f, latent=image)
    assert graphopt.report(f).count("video_attention", "rewritten") == 1
    convert(model, DSAConfig((3, 3, 3), offsets="zero"), select="blocks.*.attn")
    assert_equal(got, run(model, latent=image), 1e-7)


@pytest.mark.parametrize("name", list(SELECT))
def test_the_grid_is_read_from_the_inputs_of_each_model(name: str) -> None:
    model, inputs = built(name)
    handle = moved(model, SELECT[name])
    assert {v.grid for v in handle.verify(**inputs)} == {(2, 4, 4)}


def test_a_block_alone_needs_video_grid() -> None:
    model = tiny_video.TinyVideo(2)
    moved(model, "blocks.*.attn", window=(1, 3, 3))
    x = torch.randn(2, 60, 16)
    with pytest.raises(ConfigError, match="video_grid"):
        model.blocks[0](x)
    with video_grid(3, 4, 5):
        first = model.blocks[0](x)
        with video_grid(3, 5, 4):
            second = model.blocks[0](x)
        assert torch.equal(model.blocks[0](x), first)
    assert not torch.equal(first, second)
    with pytest.raises(ConfigError, match="video_grid"):
        model.blocks[0](x)


def test_checkpointed_blocks_run_again_with_the_grid_of_their_forward() -> None:
    """Two forwards with transposed grids (equal numbers of tokens) before two backwards."""
    model = tiny_video.TinyVideo(2)
    moved(model, "blocks.*.attn", window=(1, 3, 3))
    latents = [tiny_video.latent(2, 3, 4, 5), tiny_video.latent(2, 3, 5, 4)]
    want = [run(model, latent=x) for x in latents]
    model.checkpointing = True
    outputs = [model(x) for x in latents]
    for y, expected in zip(reversed(outputs), reversed(want)):
        model.zero_grad()
        y.square().mean().backward()
        assert_equal((y.detach(), {n: p.grad for n, p in model.named_parameters()}), expected)
    outputs = [model(x) for x in latents]
    with pytest.raises(ConfigError, match="two forwards with different grids"):
        (outputs[0].sum() + outputs[1].sum()).backward()


def test_lora() -> None:
    """peft adapters on a converted model: they and the heads train, the rest is frozen."""
    from peft import LoraConfig

    model, inputs = built("wan")
    model.requires_grad_(False)
    handle = moved(model, SELECT["wan"])
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.05)
        if ".dsa." in name:
            p.requires_grad_()
    want = run(model, **inputs)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert set(want[1]) == trained
    assert all(g.any() for g in want[1].values())
    assert {"lora_A", "dsa"} <= {part for n in trained for part in n.split(".")}
    f = torch.compile(model, backend="graphopt", options=AOT, fullgraph=True)
    assert_equal(run(model, f, **inputs), want)
    assert len([s for s in graphopt.report(f).sites if s.kind == "video_attention"]) == len(handle.layers)


@pytest.mark.parametrize("name", ["wan", pytest.param("hunyuan_video", marks=pytest.mark.nightly),
                                  pytest.param("cogvideox_rope", marks=pytest.mark.nightly)])
def test_streamed_training_is_resident_training(name: str) -> None:
    from resident import OPTIONS, checkpointed, differing, layers, train

    resident, inputs = built(name)
    moved(resident, SELECT[name])
    streamed = copy.deepcopy(resident)
    for layer in layers(resident):
        checkpointed(layer, False)
    adam = dict(lr=1e-2, weight_decay=0.1)
    want = train(resident, torch.optim.AdamW(resident.parameters(), **adam), inputs, 3)
    graphopt.stream(streamed, "cpu", slots=2, resident=[])
    optimizer = graphopt.HostAdamW(streamed.parameters(), **adam, kernel="torch")
    step = torch.compile(streamed, backend="graphopt", options=OPTIONS)
    assert train(step, optimizer, inputs, 3) == want
    assert differing(streamed.state_dict(), resident.state_dict()) == {}
    assert any(".dsa." in n for n in streamed.state_dict())
