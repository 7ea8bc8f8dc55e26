"""Which attention is self-attention over a whole video: eight models of diffusers against a table read off their sources,
and small programs for every spelling and every near miss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_video
import torch
import torch.nn.functional as F
import zoo
from tiny_video import SPELLINGS, attention_as
from torch import Tensor, nn

import graphopt
from graphopt.passes import match_global_attention

KINDS = json.loads((Path(zoo.__file__).parent / "attention_kinds.json").read_text())
MODELS = [n for n in KINDS if n != "about"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.nightly) if n == "allegro" else n for n in MODELS])
def test_every_attention_is_classified_as_in_the_source(name: str) -> None:
    table = KINDS[name]
    expected = {r["owner"].format(i): r for r in table["rows"] for i in range(table["blocks"])}
    expected |= {r["owner"]: r for r in table.get("once", [])}
    model, inputs = zoo.ZOO[name].build()
    plan = graphopt.dsa.plan(model, config=graphopt.dsa.DSAConfig((1, 3, 3)), **inputs)
    assert sorted(r.owner for r in plan.rows) == sorted(expected)
    for row in plan.rows:
        want = expected[row.owner]
        got = {k: getattr(row, k) for k in want if k != "owner"}
        got["grid"] = None if row.grid is None else list(row.grid)
        assert got == {k: v for k, v in want.items() if k != "owner"}, row.owner
        assert (row.reason is None) == (row.kind in ("video", "joint")), row


def sites(f, *args: Tensor, dynamic: bool | None = None) -> list[match_global_attention.Site]:
    """What is found in the graphs of a callable."""
    found: list[match_global_attention.Site] = []

    def backend(gm, inputs):
        found.extend(match_global_attention.find(gm))
        return gm.forward

    torch.compile(f, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    return found


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_written_out_softmax(spelling: str) -> None:
    attend, scale = SPELLINGS[spelling]
    model = tiny_video.TinyVideo(1, kind=attention_as(attend))
    site, = sites(model, tiny_video.latent())
    assert (site.kind, site.grid, site.reason, site.attention.spelling) == ("video", (3, 4, 5), None, "written out")
    assert site.attention.scale == pytest.approx(scale)


class Program(nn.Module):
    """One attention of a program over q, k, v made from video tokens [B, N, 16] and words [B, L, 16]."""

    def __init__(self, program) -> None:
        super().__init__()
        self.patch, self.q = nn.Conv3d(3, 16, (1, 2, 2), (1, 2, 2)), nn.Linear(16, 16)
        self.program = program

    def forward(self, latent: Tensor, words: Tensor, order: Tensor) -> Tensor:
        x = self.patch(latent).flatten(2).transpose(1, 2)
        return x.sum() + self.program(self, x, words, order).sum()

    def heads(self, x: Tensor) -> Tensor:
        return self.q(x).unflatten(-1, (2, 8)).transpose(1, 2)


sdpa = F.scaled_dot_product_attention


def own(m, x):
    return m.heads(x)


PROGRAMS = {
    "self": (lambda m, x, w, o: sdpa(m.heads(x), m.heads(x), m.heads(x)), "video"),
    "cross": (lambda m, x, w, o: sdpa(m.heads(x), m.heads(w), m.heads(w)), "cross"),
    "cross of equal length": (lambda m, x, w, o: sdpa(m.heads(x), m.heads(w.repeat_interleave(10, 1)), m.heads(
        w.repeat_interleave(10, 1))), "unknown"),
    "causal": (lambda m, x, w, o: sdpa(m.heads(x), m.heads(x), m.heads(x), is_causal=True), "causal"),
    "masked": (lambda m, x, w, o: sdpa(m.heads(x), m.heads(x), m.heads(x), attn_mask=torch.ones(60, 60).tril().bool()),
               "masked"),
    "text": (lambda m, x, w, o: sdpa(m.heads(w), m.heads(w), m.heads(w)), "text"),
    "joint": (lambda m, x, w, o: (lambda y: sdpa(y, y, y))(m.heads(torch.cat([x, w], 1))), "joint"),
    "joint, first": (lambda m, x, w, o: (lambda y: sdpa(y, y, y))(torch.cat([m.heads(w), m.heads(x)], 2)), "joint"),
    "key mask": (lambda m, x, w, o: (lambda y: sdpa(y, y, y, attn_mask=torch.ones(2, 1, 1, 66).bool()))(
        m.heads(torch.cat([x, w], 1))), "joint"),
    "bias over a joint sequence": (lambda m, x, w, o: (lambda y: sdpa(y, y, y, attn_mask=torch.zeros(66, 66)))(
        m.heads(torch.cat([x, w], 1))), "masked"),
    "frames": (lambda m, x, w, o: (lambda y: sdpa(y, y, y))(m.heads(x.reshape(6, 20, 16))), "spatial"),
    "time": (lambda m, x, w, o: (lambda y: sdpa(y, y, y))(m.heads(x.view(2, 3, 20, 16).transpose(1, 2).reshape(40, 3, 16))),
             "temporal"),
    "shuffled": (lambda m, x, w, o: (lambda y: sdpa(y, y, y))(m.heads(x[:, o])), "unknown"),
    "flipped": (lambda m, x, w, o: (lambda y: sdpa(y, y, y))(m.heads(x.flip(1))), "unknown"),
    "rolled": (lambda m, x, w, o: (lambda y: sdpa(y, y, y))(m.heads(x.roll(5, 1))), "unknown"),
    "part of the video": (lambda m, x, w, o: (lambda y: sdpa(y, y, y))(m.heads(x[:, :40])), "unknown"),
    "halves put together": (lambda m, x, w, o: (lambda y: sdpa(y, y, y))(
        m.heads(torch.cat([x[:, :20] * 2, x[:, 20:]], 1))), "video"),
    "halves swapped": (lambda m, x, w, o: (lambda y: sdpa(y, y, y))(m.heads(torch.cat([x[:, 30:], x[:, :30]], 1))),
                       "unknown"),
    "height before time": (lambda m, x, w, o: (lambda y: sdpa(y, y, y))(
        m.heads(x.view(2, 3, 4, 5, 16).transpose(1, 2).reshape(2, 60, 16))), "video"),
    "no attention": (lambda m, x, w, o: m.heads(x).softmax(-1), None),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    program, kind = PROGRAMS[name]
    found = sites(Program(program), tiny_video.latent(), torch.randn(2, 6, 16), torch.randperm(60))
    assert [s.kind for s in found] == ([] if kind is None else [kind])
    for site in found:
        assert (site.reason is None) == (kind in ("video", "joint"))
        if kind == "joint":
            assert (site.grid, site.text, site.text_first) == ((3, 4, 5), 6, "first" in name)
            assert site.text_mask == ("mask" in name)
        if name == "height before time":  # the grid is that of the order the tokens are in
            assert site.grid == (4, 3, 5)


def whole(m, x, w, o):
    return sdpa(m.heads(x), m.heads(x), m.heads(x))


@pytest.mark.parametrize(("program", "batch", "frames", "kind"), [
    (whole, 2, 1, "video"), (whole, 1, 1, "video"),
    (lambda m, x, w, o: (lambda y: sdpa(y, y, y))(m.heads(torch.cat([x, w], 1))), 2, 1, "joint"),
    (lambda m, x, w, o: (lambda y: sdpa(y, y, y))(m.heads(torch.cat([w, x], 1))), 2, 1, "joint"),
    (lambda m, x, w, o: sdpa(m.heads(x), m.heads(x), m.heads(x), is_causal=True), 2, 1, "causal"),
    (lambda m, x, w, o: whole(m, x.view(2, 4, 5, 16).transpose(1, 2).reshape(2, 20, 16), w, o), 2, 1, "spatial"),
    (lambda m, x, w, o: whole(m, x.reshape(6, 20, 16), w, o), 2, 3, "spatial"),
    (lambda m, x, w, o: whole(m, x.reshape(3, 20, 16), w, o), 1, 3, "spatial"),
])
def test_an_image_among_videos(program, batch: int, frames: int, kind: str) -> None:
    """One frame is a whole video of grid (1, H, W); frames that are sequences of their own are not."""
    site, = sites(Program(program), tiny_video.latent(batch, frames), torch.randn(batch, 6, 16), torch.randperm(60))
    assert site.kind == kind
    if kind in ("video", "joint"):
        assert site.grid == (1, 4, 5)
        assert site.reason is None
        assert not site.text if kind == "video" else site.text == 6


def test_frames_of_one_channel_are_no_image() -> None:
    """A dimension of one that is not the time axis: the frames stand in the batch."""
    program = Program(lambda m, x, w, o: whole(m, x.reshape(6, 20, 16), w, o))
    program.patch = nn.Conv3d(1, 16, (1, 2, 2), (1, 2, 2))
    site, = sites(program, tiny_video.latent(2, channels=1), torch.randn(2, 6, 16), torch.randperm(60))
    assert site.kind == "spatial"


def test_dropout_is_a_reason() -> None:
    program = lambda m, x, w, o: sdpa(m.heads(x), m.heads(x), m.heads(x), dropout_p=0.1)
    site, = sites(Program(program), tiny_video.latent(), torch.randn(2, 6, 16), torch.randperm(60))
    assert site.kind == "video"
    assert "dropout" in site.reason


def test_a_grid_of_symbols() -> None:
    """With dynamic shapes the grid is expressions of the latent's sizes, whose product is the number of tokens."""
    site, = sites(tiny_video.TinyVideo(1), tiny_video.latent(2, 3, 6, 7), dynamic=True)
    T, H, W = site.grid
    assert not isinstance(W, int)
    assert site.kind == "video"
    assert bool(site.tokens == T * H * W)


def test_inside_a_checkpoint() -> None:
    model = tiny_video.TinyVideo(2, text="last")
    model.checkpointing = True
    found = sites(model, tiny_video.latent(), torch.randn(2, 6, 16))
    assert [(s.kind, s.grid, s.text) for s in found] == [("joint", (3, 4, 5), 6)] * 2
    assert found[0].graph is not found[1].graph


def test_a_block_alone_shows_no_grid() -> None:
    block = tiny_video.TinyVideo(1, text="last").blocks[0]
    site, = sites(block, torch.randn(2, 60, 16), torch.randn(2, 6, 16))
    assert (site.kind, site.grid, site.text, site.parts) == ("joint", None, None, (60, 6))
