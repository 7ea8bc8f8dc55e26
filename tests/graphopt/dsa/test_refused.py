"""Bad input: each is refused with its name, its place and a remedy, and the model is left as it was."""

from __future__ import annotations

import pytest
import tiny_video
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from torch.distributed.fsdp import fully_shard

import graphopt
from graphopt.dsa import DSAConfig, convert
from graphopt.dsa.grid import CELLS
from graphopt.errors import ConfigError

SMALL = DSAConfig((1, 3, 3))


def tiny(**changes) -> torch.nn.Module:
    return tiny_video.TinyVideo(2, **changes)


def wrong(**changes):
    return lambda: DSAConfig(**changes)


@pytest.mark.parametrize(("make", "match"), [
    (wrong(window=(3, 7)), "window"), (wrong(window=(0, 1, 1)), "window"), (wrong(offsets="learned"), "'head', 'tap'"),
    (wrong(boundary="wrap"), "inside"), (wrong(text="left"), "auto"), (wrong(groups=0), "groups"),
    (wrong(max_offset=-1.0), "max_offset"), (wrong(max_offset=float("inf")), "max_offset"),
    (wrong(max_offset="2"), "max_offset"), (wrong(window=(3.7, 7, 7)), "window"), (wrong(window="377"), "window"),
    (wrong(window=(True, 3, 3)), "window"), (wrong(groups=1.5), "groups"), (wrong(groups=True), "groups"),
])
def test_configurations(make, match) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


@pytest.mark.parametrize(("arguments", "match"), [
    (dict(config=SMALL), "which modules"), (dict(config=SMALL, select="layers.*.attn"), "blocks.0.attn"),
    (dict(config="missing"), "no configuration"), (dict(config=3, select="*"), "DSAConfig"),
    (dict(config={"blocks.0.attn": SMALL}, select="*"), "select beside"),
    (dict(config=SMALL, select="blocks.*.ff"), "no attention module"),
    (dict(config=SMALL, select="blocks.*.attn", keep_dense=(0, -1)), "every selected layer"),
    (dict(config=SMALL, select="blocks.*.attn", keep_dense=5), "layer 5 of 2"),
    (dict(config=SMALL, select="blocks.*.attn", grid="guess"), "'auto'"),
    (dict(config=SMALL, select="blocks.*.attn", grid=(3, 4)), r"\(T, H, W\)"),
    (dict(config=DSAConfig((1, 3, 3), groups=3), select="blocks.*.attn"), "3 groups do not divide 2 heads"),
    (dict(config={}), "selection is empty"), (dict(config=SMALL, select=[]), "selection is empty"),
    (dict(config={"blocks.*.attn": {"window": (1, 3, 3)}}), "configuration of 'blocks"),
    (dict(config=SMALL, select=3), "select is 3"),
    (dict(config=SMALL, select="blocks.*.attn", keep_dense="first"), "keep_dense is 'first'"),
    (dict(config=SMALL, select="blocks.*.attn", keep_dense=None), "keep_dense is None"),
    (dict(config=SMALL, select="blocks.*.attn", grid=(3.0, 4, 5)), "three sizes"),
])
def test_arguments(arguments, match) -> None:
    model = tiny()
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ConfigError, match=match):
        convert(model, **arguments)
    assert [type(m) for m in model.modules()] == kinds
    assert not any(".dsa." in n for n in model.state_dict())


def test_after_the_optimizer() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ConfigError, match="SGD was made before convert"):
        convert(model, SMALL, select="blocks.*.attn")
    del optimizer
    convert(model, SMALL, select="blocks.*.attn")


def test_after_compile_and_twice_and_streamed() -> None:
    model = tiny()
    model.blocks[0].compile(backend="eager")
    with pytest.raises(ConfigError, match="is compiled"):
        convert(model, SMALL, select="blocks.*.attn")
    model = tiny()
    convert(model, SMALL, select="blocks.*.attn")
    with pytest.raises(ConfigError, match="converted already"):
        convert(model, SMALL, select="blocks.*.attn")
    model = tiny()
    graphopt.stream(model, "cpu")
    with pytest.raises(ConfigError, match="before graphopt.stream"):
        convert(model, SMALL, select="blocks.*.attn")


def test_after_fsdp() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = tiny()
        fully_shard(model)
        with pytest.raises(ConfigError, match="is a DTensor") as caught:
            convert(model, SMALL, select="blocks.*.attn")
        assert "before FSDP" in str(caught.value)
    finally:
        dist.destroy_process_group()


def test_cross_attention() -> None:
    model, _ = zoo.ZOO["wan"].build()
    with pytest.raises(ConfigError, match="cross-attention has no window"):
        convert(model, SMALL, select="blocks.*.attn2")


def test_a_grid_that_does_not_match() -> None:
    model = tiny()
    convert(model, SMALL, select="blocks.*.attn", grid=(3, 4, 6))
    with pytest.raises(ConfigError, match=r"72 tokens, the input has 60"):
        model(tiny_video.latent())
    f = torch.compile(model, backend="graphopt", options={"graphopt.compiler": "aot_eager"})
    with pytest.raises(ConfigError, match=r"72 tokens, the input has 60"):
        f(tiny_video.latent())


@pytest.mark.parametrize("returned", [(3, 4), 60, (3.0, 4, 5), (0, 4, 5)])
def test_a_function_that_gives_no_grid(returned) -> None:
    model = tiny()
    convert(model, SMALL, select="blocks.*.attn", grid=lambda *args, **kwargs: returned)
    with pytest.raises(ConfigError, match="three sizes") as caught:
        model(tiny_video.latent())
    assert "the function given as grid=" in str(caught.value)


def test_video_grid_takes_whole_sizes_and_can_be_entered_twice() -> None:
    for sizes in ((3.0, 4, 5), ("a", 1, 1), (0, 1, 1)):
        with pytest.raises(ConfigError, match="three sizes"):
            graphopt.dsa.video_grid(*sizes)
    grid = graphopt.dsa.video_grid(3, 4, 5)
    with grid, graphopt.dsa.video_grid(5, 4, 3), grid:
        assert CELLS[0].read() == (3, 4, 5)
    assert CELLS[0].read() is None


def test_a_grid_of_as_many_tokens_in_another_order(caplog) -> None:
    """Nothing but the graph can tell which order is the tokens': eagerly a warning, compiled as a whole an error."""
    model = tiny()
    convert(model, SMALL, select="blocks.*.attn", grid=(5, 4, 3))
    model(tiny_video.latent())
    assert "(5, 4, 3) it was given, and its inputs look like (3, 4, 5)" in caplog.text
    f = torch.compile(model, backend="graphopt", options={"graphopt.compiler": "aot_eager"})
    with pytest.raises(Exception, match=r"the grid \(5, 4, 3\) .* is not the graph's, \(3, 4, 5\)") as caught:
        f(tiny_video.latent())
    assert isinstance(graphopt.errors.unwrap(caught.value), ConfigError)


def test_what_is_no_model() -> None:
    with pytest.raises(ConfigError, match=r"no torch\.nn\.Module"):
        convert(lambda x: x, SMALL, select="*")
    model = tiny()
    for wrong_plan, match in ((dict(config=(3, 7, 7)), "config is"), (dict(device="tpu"), "device is")):
        with pytest.raises(ConfigError, match=match):
            graphopt.dsa.plan(model, tiny_video.latent(), **wrong_plan)
    with pytest.raises(ConfigError, match=r"owners here: blocks\.0\.attn"):
        graphopt.dsa.plan(model, tiny_video.latent())["blocks.7"]


def test_a_grid_that_cannot_be_read() -> None:
    model = tiny(channels=3)
    convert(model, SMALL, select="blocks.*.attn")
    with pytest.raises(ConfigError, match="video_grid"), torch.no_grad():
        model.blocks[0](torch.randn(2, 60, 16))
    model.blocks[0].compile(backend="graphopt", options={"graphopt.compiler": "aot_eager"})
    with pytest.raises(Exception, match="video_grid") as caught:
        model.blocks[0](torch.randn(2, 60, 16))
    assert isinstance(graphopt.errors.unwrap(caught.value), ConfigError)


@pytest.mark.parametrize(("attend", "match"), [
    (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, is_causal=True), "causal"),
    (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1), "dropout"),
    (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(60, 60).tril().bool()), "mask"),
    (tiny_video.written_matmul, "no self-attention through scaled_dot_product_attention"),
])
def test_attention_that_cannot_slide(attend, match) -> None:
    """The same reason eagerly and from the compiler (written-out attention slides where it is compiled)."""
    model = tiny(kind=tiny_video.attention_as(attend))
    convert(model, SMALL, select="blocks.*.attn")
    with pytest.raises(ConfigError, match=match):
        model(tiny_video.latent())
    f = torch.compile(model, backend="graphopt", options={"graphopt.compiler": "aot_eager"})
    if "written" in getattr(attend, "__name__", ""):
        f(tiny_video.latent())
        return
    with pytest.raises(Exception, match=match) as caught:
        f(tiny_video.latent())
    assert isinstance(graphopt.errors.unwrap(caught.value), ConfigError)


def test_context_parallelism() -> None:
    """diffusers' enable_parallelism sets a processor's `_parallel_config`."""
    model, _ = zoo.ZOO["wan"].build()
    model.blocks[1].attn1.processor._parallel_config = object()
    with pytest.raises(ConfigError, match="context parallelism") as caught:
        convert(model, SMALL, select="blocks.*.attn1")
    assert "blocks.1.attn1" in str(caught.value)


def test_nested_sequences_are_named() -> None:
    model = tiny()
    convert(model, SMALL, select="blocks.*.attn", grid=(3, 4, 5))
    packed = torch.nested.nested_tensor([torch.randn(60, 16), torch.randn(40, 16)], layout=torch.jagged)
    with pytest.raises(ConfigError, match="packed"), graphopt.dsa.video_grid(3, 4, 5):
        model.blocks[0].attn(packed)


def test_packed_sequences_are_named() -> None:
    """A mask that keeps two samples of one sequence apart is no padding of text."""
    model = tiny(text="last")
    convert(model, SMALL, select="blocks.*.attn")
    mask = torch.block_diag(torch.ones(30, 30), torch.ones(36, 36)).bool()
    with pytest.raises(ConfigError, match="a mask is not supported"):
        model(tiny_video.latent(), torch.randn(2, 6, 16), mask)


def test_distillation_and_probing_are_eager() -> None:
    model = tiny()
    handle = convert(model, SMALL, select="blocks.*.attn")
    with pytest.raises(ConfigError, match="no layer recorded"):
        handle.distill_loss()
    f = torch.compile(model, backend="graphopt", options={"graphopt.compiler": "aot_eager"})
    with handle.distilling(), pytest.raises(ConfigError, match="run eagerly"):
        f(tiny_video.latent())
