"""Attention that is asked to slide does, and nothing else does: case C13 (iv), (v), marks, the option `graphopt.dsa`."""

from __future__ import annotations

import copy

import pytest
import tiny_video
import torch
import torch.nn.functional as F
from tiny_video import SPELLINGS, attention_as
from torch import Tensor, nn

import graphopt
from graphopt.errors import ConfigError, unwrap

AOT = {"graphopt.compiler": "aot_eager"}
WINDOW = (1, 3, 3)


def compiled(model, dsa: dict | None = None, **options):
    extra = {} if dsa is None else {"graphopt.dsa": dsa}
    return torch.compile(model, backend="graphopt", options={**AOT, **extra, **options})


def run(f, model, *inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients."""
    model.zero_grad()
    y = f(*inputs)
    y.square().mean().backward()
    return y.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(got, want, tolerance: float = 0.0, skip: str = "") -> None:
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=tolerance)
    assert set(got[1]) - set(want[1]) == set()
    for name, g in want[1].items():
        if not skip or skip not in name:
            torch.testing.assert_close(got[1][name], g, rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def slid(f) -> list[tuple[str, str]]:
    return [(s.fqn, s.status) for s in graphopt.report(f).sites if s.kind == "video_attention"]


def zero_offsets(model: nn.Module, window=WINDOW, select: str = "blocks.*.attn", **config) -> nn.Module:
    """The model as the option makes it, in eager mode."""
    twin = copy.deepcopy(model)
    graphopt.dsa.convert(twin, graphopt.dsa.DSAConfig(window, offsets="zero", **config), select=select)
    return twin


def test_c13_off_by_default() -> None:
    """(iv) Without the option no attention is rewritten: outputs and gradients are bit-equal, the nodes are the same."""
    model, x = tiny_video.TinyVideo(2), tiny_video.latent()
    want = run(torch.compile(model, backend="aot_eager"), model, x)
    f = compiled(model)
    assert_equal(run(f, model, x), want)
    assert slid(f) == []
    seen = graphopt.inspect(model, x, device="cpu")
    attention = lambda which: [n.args for n in seen.graph(which).graph.nodes if n.target is F.scaled_dot_product_attention]
    assert str(attention("before")) == str(attention("after"))
    assert len(attention("after")) == 2
    assert not any("attention" in p for p in seen.passes)


class Mixed(nn.Module):
    """A self-attention over the video, and one of each kind that must be left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv3d(3, 16, (1, 2, 2), (1, 2, 2))
        self.attn, self.cross = tiny_video.Attention(16, 2), tiny_video.Cross(16, 2)
        self.masked, self.text = tiny_video.Attention(16, 2), tiny_video.Attention(16, 2)
        self.causal = tiny_video.Attention(16, 2)
        self.causal.attend = lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, latent: Tensor, words: Tensor, mask: Tensor) -> Tensor:
        x = self.patch(latent).flatten(2).transpose(1, 2)
        x = x + self.attn(x)
        x = x + self.cross(x, words)
        x = x + self.masked(x, None, mask)
        return x + self.causal(x) + self.text(words).mean()


def test_c13_others_are_left_alone() -> None:
    """(v) Cross, masked, causal and text-only attention stay as they are when the option is on."""
    model = Mixed()
    inputs = (tiny_video.latent(), torch.randn(2, 6, 16), torch.rand(2, 1, 60, 60) > 0.3)
    f = compiled(model, {"window": WINDOW})
    got = run(f, model, *inputs)
    assert slid(f) == [("attn", "rewritten")]
    reasons = {r.fqn: r.reason.split(":")[0] for r in graphopt.report(f).rejects}
    assert {k: reasons[k] for k in ("cross", "masked", "causal", "text")} == {
        "cross": "cross", "masked": "masked", "causal": "causal", "text": "text"}
    twin = zero_offsets(model, select="attn")
    assert_equal(got, run(twin, twin, *inputs), 1e-7)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_written_out_attention_slides_like_sdpa(spelling: str) -> None:
    attend, scale = SPELLINGS[spelling]
    model = tiny_video.TinyVideo(1, kind=attention_as(attend))
    f = compiled(model, {"window": WINDOW})
    got = run(f, model, x := tiny_video.latent())
    assert slid(f) == [("blocks.0.attn", "rewritten")]

    def call(q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, k, v, scale=scale)

    plain = tiny_video.TinyVideo(1, kind=attention_as(call))
    plain.load_state_dict(model.state_dict())
    twin = zero_offsets(plain)
    assert_equal(got, run(twin, twin, x), 1e-6)


@pytest.mark.parametrize(("text", "checkpointing"), [("first", False), ("last", True)])
def test_text_joins_and_may_be_hidden(text: str, checkpointing: bool) -> None:
    model = tiny_video.TinyVideo(2, text=text)
    model.checkpointing = checkpointing
    seen = torch.ones(2, 1, 1, 66, dtype=torch.bool)
    seen[0, ..., (3 if text == "first" else 63) : (6 if text == "first" else 66)] = False
    inputs = (tiny_video.latent(), torch.randn(2, 6, 16), seen)
    f = compiled(model, {"window": WINDOW})
    got = run(f, model, *inputs)
    assert [s for _, s in slid(f)] == ["rewritten"] * 2
    twin = zero_offsets(model)
    assert_equal(got, run(twin, twin, *inputs))
    if not checkpointing:  # hidden words have no influence, others have
        other = inputs[1].clone()
        other[0, 3:] += 1
        torch.testing.assert_close(f(inputs[0], other, seen)[0], got[0][0])
        other[0, 0] += 1
        assert (f(inputs[0], other, seen)[0] - got[0][0]).abs().max() > 1e-4


def test_a_mask_over_video_tokens_is_never_silent() -> None:
    """A sample that hides video tokens becomes NaN in a graph, the others do not; eagerly it is an error."""
    model = tiny_video.TinyVideo(1, text="last")
    seen = torch.ones(2, 1, 1, 66, dtype=torch.bool)
    seen[1, ..., 5] = False
    inputs = (tiny_video.latent(), torch.randn(2, 6, 16), seen)
    y = compiled(model, {"window": WINDOW})(*inputs)
    assert y[0].isfinite().all()
    assert y[1].isnan().any()
    with pytest.raises(ConfigError, match="hides video tokens"):
        zero_offsets(model)(*inputs)


def test_select_and_keep_dense() -> None:
    model, x = tiny_video.TinyVideo(3), tiny_video.latent()
    f = compiled(model, {"window": WINDOW, "select": "blocks.*.attn", "keep_dense": (0, -1)})
    f(x)
    assert slid(f) == [("blocks.1.attn", "rewritten")]


def test_a_selection_that_selects_nothing_is_told() -> None:
    model, x = tiny_video.TinyVideo(1), tiny_video.latent()
    f = compiled(model, {"window": WINDOW, "select": "layers.*"})
    f(x)
    assert slid(f) == []
    assert any("selects no attention" in n and "layers.*" in n for n in graphopt.report(f).graphs[0].notes)


def test_a_window_over_the_grid_changes_nothing() -> None:
    model, x = tiny_video.TinyVideo(2), tiny_video.latent()
    want = run(torch.compile(model, backend="aot_eager"), model, x)
    f = compiled(model, {"window": (3, 7, 7)})
    assert_equal(run(f, model, x), want)
    assert [s for _, s in slid(f)] == ["declined"] * 2


def test_a_block_alone_needs_the_grid() -> None:
    block, x = tiny_video.TinyVideo(1).blocks[0], torch.randn(2, 60, 16)
    with pytest.raises(Exception, match="never guessed") as caught:
        compiled(block, {"window": WINDOW})(x)
    assert isinstance(unwrap(caught.value), ConfigError)
    with pytest.raises(Exception, match="does not fit a sequence of 60") as caught:
        compiled(block, {"window": WINDOW, "grid": (3, 4, 6)})(x)
    assert isinstance(unwrap(caught.value), ConfigError)
    f = compiled(block, {"window": WINDOW, "grid": (3, 4, 5)})
    with graphopt.dsa.video_grid(3, 4, 5):
        twin = zero_offsets(block, select="attn")
        assert_equal(run(f, block, x), run(twin, twin, x))


@pytest.mark.parametrize(("option", "match"), [
    ({"windows": (3, 3, 3)}, "did you mean 'window'"), ({"window": (3, 3)}, "three whole numbers"),
    ({"window": (3, 0, 3)}, "at least 1"), ({"boundary": "wrap"}, "inside"), ("3x7x7", "give a dict"),
    ({"grid": "guess"}, "three whole numbers"),
])
def test_bad_options(option, match: str) -> None:
    with pytest.raises(Exception, match=match) as caught:
        compiled(tiny_video.TinyVideo(1), option)(tiny_video.latent())
    assert isinstance(unwrap(caught.value), ConfigError)


def test_a_wrong_grid_beside_a_visible_one() -> None:
    with pytest.raises(Exception, match=r"is not the graph's, \(3, 4, 5\)"):
        compiled(tiny_video.TinyVideo(1), {"grid": (3, 5, 4), "window": WINDOW})(tiny_video.latent())


def test_keep_dense_in_a_graph_of_one_layer() -> None:
    with pytest.raises(Exception, match="this graph holds one"):
        compiled(tiny_video.TinyVideo(1), {"window": WINDOW, "keep_dense": (0,)})(tiny_video.latent())


def test_keep_dense_beyond_the_layers() -> None:
    with pytest.raises(Exception, match=r"keep_dense names 3, and 3 layers are selected") as caught:
        compiled(tiny_video.TinyVideo(3), {"window": WINDOW, "keep_dense": (0, 3)})(tiny_video.latent())
    assert "use positions from -3 to 2" in str(caught.value)


@pytest.mark.nightly
@pytest.mark.parametrize("text", [None, "first"])
def test_one_graph_for_all_grids(text: str | None) -> None:
    """With dynamic shapes the grid's sizes are read from the latent inside the graph."""
    from torch._dynamo.utils import counters

    model = tiny_video.TinyVideo(1, text=text)
    twin = zero_offsets(model, window=(3, 3, 3))
    f = torch.compile(model, backend="graphopt", dynamic=True, fullgraph=True,
                      options={**AOT, "graphopt.dsa": {"window": (3, 3, 3)}})
    counters.clear()
    for grid in ((4, 4, 5), (5, 6, 7), (4, 6, 8)):
        inputs = [tiny_video.latent(2, *grid)] + ([torch.randn(2, 6, 16)] if text else [])
        assert_equal(run(f, model, *inputs), run(twin, twin, *inputs), 1e-7)
    assert counters["stats"]["unique_graphs"] == 1


class Broken(tiny_video.Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        torch._dynamo.graph_break()
        return super().attend(q, k, v, mask)


def test_attention_behind_a_graph_break_is_refused() -> None:
    model = tiny_video.TinyVideo(1, kind=Broken)
    graphopt.dsa.convert(model, graphopt.dsa.DSAConfig(WINDOW), select="blocks.*.attn")
    model(tiny_video.latent())  # eagerly it slides
    with pytest.raises(Exception, match="a graph break lies between") as caught:
        compiled(model)(tiny_video.latent())
    assert isinstance(unwrap(caught.value), ConfigError)
    assert "Broken" in str(unwrap(caught.value))


def test_another_backend_cannot_run_it_densely() -> None:
    model = tiny_video.TinyVideo(1)
    graphopt.dsa.convert(model, graphopt.dsa.DSAConfig(WINDOW), select="blocks.*.attn")
    with pytest.raises(ConfigError, match="compiled without the pass"):
        torch.compile(model, backend="aot_eager")(tiny_video.latent())


def test_autocast_computes_in_low_precision_as_attention_does() -> None:
    model, x = tiny_video.TinyVideo(1), tiny_video.latent()
    handle = graphopt.dsa.convert(model, graphopt.dsa.DSAConfig(WINDOW), select="blocks.*.attn")
    for p in handle.parameters():
        nn.init.normal_(p, std=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = model(x), compiled(model)(x)
    assert torch.equal(want, got)
    assert (want - model(x)).abs().max() > 0
