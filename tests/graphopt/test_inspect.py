from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import graphopt
from graphopt.codegen import store
from graphopt.errors import ConfigError
from graphopt.inspecting import capture, diff, nodes, text
from graphopt.inspecting.capture import CaptureError
from graphopt.passes import ops_view, pipeline


@pytest.fixture(scope="module")
def wan():
    torch._dynamo.reset()
    model, inputs = zoo.ZOO["wan"].build(torch.bfloat16)
    return graphopt.inspect(model.train(), **inputs, return_dict=False, options={"graphopt.select": "all"})


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, s, b, g):
        y = F.layer_norm(x, (x.shape[-1],)) * (1 + s) + b
        return x + g * self.linear(y)


class Stack(nn.Module):
    def __init__(self, depth: int = 4, broken: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.broken = broken

    def forward(self, x, s, b, g):
        for i, block in enumerate(self.blocks):
            if self.broken and i == 1:
                torch._dynamo.graph_break()
            x = block(x, s, b, g)
        return x


def operands(rows: int = 20):
    return torch.randn(2, rows, 8), *(torch.randn(2, 1, 8, requires_grad=True) for _ in range(3))


def test_counts_and_kernels_without_a_gpu(wan) -> None:
    assert wan.report.count("modulate") == 5
    assert wan.report.count("gate") == 4
    assert wan.report.count("modulate", "rewritten") >= 3
    assert wan.captured.device == "meta"
    assert {k.direction for k in wan.report.kernels} == {"forward", "backward"}
    before, after = wan.graph("before"), wan.graph("after")
    old = {n.name for g in pipeline.nested(before) for n in g.graph.nodes}
    new = {n.name: n for g in pipeline.nested(after) for n in g.graph.nodes}
    for kernel in wan.report.kernels:
        assert kernel.node in new
        assert "triton" in str(new[kernel.node].target), "a GPU would run generated kernels"
        assert kernel.replaced
        assert set(kernel.replaced) <= old
        assert not set(kernel.replaced) & set(new)
        (file,) = kernel.sources
        assert f"def {file.rsplit('_', 1)[0]}(" in (store.cache_folder() / file).read_text()
        assert 0 < kernel.traffic.fused < kernel.traffic.op_by_op


def test_traffic_of_a_chain_worked_out_by_hand() -> None:
    x, s, b, g = operands()
    seen = graphopt.inspect(Block(), x, s, b, g, options={"graphopt.select": "all", "graphopt.rules": ["norm_modulate"]})
    forward, backward = seen.report.kernels
    big, small = x.numel() * 4, s.numel() * 4
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert forward.traffic.fused == 2 * big + 2 * small
    # layer_norm r w; 1 + s r w; product r r w; sum r r w
    assert forward.traffic.op_by_op == 6 * big + 4 * small - 2 * small
    assert backward.traffic.fused == 3 * big + 4 * small


def test_graphs_by_name(wan) -> None:
    assert wan.passes == ["canonicalize", "norm_rotate", "head_norm_rotate", "adaln"]
    assert len(wan.graph("adaln").graph.nodes) == len(wan.graph("after").graph.nodes)
    assert len(wan.graph("before").graph.nodes) > len(wan.graph("after").graph.nodes)
    with pytest.raises(ConfigError, match="did you mean 'before'"):
        wan.graph("befor")
    with pytest.raises(ConfigError, match="there is no graph 3"):
        wan.graph("after", 3)


def test_diff_of_a_pass_and_of_a_rule(wan) -> None:
    whole, one = wan.diff("adaln"), wan.diff("gate_norm")
    assert "layer_norm(" in whole
    assert "graphopt.norm_modulate(" in whole
    assert "gate_norm  x2" in one
    assert "norm_modulate(" not in one
    with pytest.raises(ConfigError, match="did you mean 'gate_norm'"):
        wan.diff("gate_norms")


def test_a_diff_accounts_for_every_node(wan) -> None:
    after = wan.graph("after")
    found = diff.changes(wan.graph("norm_rotate"), after, wan.graphs[0].record.passes[-1])
    gone = [r.name for c in found for r in c.before]
    came = [r.name for c in found for r in c.after]
    old, new = ({r.name for r in nodes.rows(g)} for g in (wan.graph("norm_rotate"), after))
    assert sorted(gone) == sorted(old - new)
    assert sorted(came) == sorted(new - old)


def test_equal_blocks_are_folded() -> None:
    seen = graphopt.inspect(Stack(6), *operands(), options={"graphopt.select": "all"})
    titles = [s.title for s in nodes.sections(nodes.rows(seen.graph("before"))) if s.block]
    assert titles == ["blocks.0..5"]
    assert "blocks.1..5" in str(seen)
    assert len(str(seen).splitlines()) < 40
    assert text.bare("blocks.3.norm.weight of add_12 [1, 5]") == text.bare("blocks.11.norm.weight of add_7 [1, 5]")
    assert text.bare("D = 24 is over 16") != text.bare("D = 25 is over 16")
    assert nodes.joined(["a.3.x", "a.1.x", "a.2.x", "a.7.x", "b"]) == "a.1..3,7.x, b"


def test_blocks_that_a_kernel_reaches_across_are_folded_too() -> None:
    seen = graphopt.inspect(Stack(7), *operands(), options={"graphopt.select": "all"})
    assert any(s.rule == "gate_norm_modulate" for s in seen.report.sites)
    found = list(nodes.sections(nodes.rows(seen.graph("after"))))
    assert len(found) <= 8
    assert max(len(s.same) for s in found) >= 4
    for s in found:
        assert all(len(o.rows) == len(s.rows) for o in s.same)


def test_sections_hold_every_row_once(wan) -> None:
    rows = nodes.rows(wan.graph("after"))
    held = [r.name for s in nodes.sections(rows) for part in (s, *s.same) for r in part.rows]
    assert sorted(held) == sorted(r.name for r in rows)


def test_json_is_versioned_and_stable() -> None:
    def run() -> str:
        torch._dynamo.reset()
        return graphopt.inspect(Stack(2), *operands(), options={"graphopt.select": "all"}).to_json(nodes_too=True)

    def timeless(text: str) -> dict:
        data = json.loads(text)
        for g in data["graphs"]:
            for p in g["passes"]:
                p["milliseconds"] = 0
        return data

    first, second = timeless(run()), timeless(run())
    assert first == second
    assert first["version"] == 1
    assert list(first["graphs"][0]["nodes"]) == ["before", "canonicalize", "norm_rotate", "head_norm_rotate", "adaln"]
    assert first["graphs"][0]["passes"][-1]["sites"][0]["fqn"] == "blocks.0"


def test_dot_draws_equal_blocks_once(wan, tmp_path: Path) -> None:
    folded = wan.to_dot("before", tmp_path / "g.dot")
    assert (tmp_path / "g.dot").read_text() == folded
    assert folded.count("subgraph") < wan.to_dot("before", collapse=False).count("subgraph") + 1
    assert folded.startswith("digraph")
    assert folded.count("{") == folded.count("}")
    names = {line.split('"')[1] for line in folded.splitlines() if "[label=" in line}
    for line in folded.splitlines():
        if "->" in line:
            a, b = (part.strip().strip('";') for part in line.split("->"))
            assert a in names
            assert b in names


def test_a_model_with_weights_stays_as_it_was() -> None:
    model = Stack(2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    seen = graphopt.inspect(model, *operands(), options={"graphopt.select": "all"})
    assert seen.captured.device == "meta"
    assert seen.report.count("gate") == 2
    for k, v in model.state_dict().items():
        assert torch.equal(v, before[k])
        assert v.device.type == "cpu"


def test_why(wan) -> None:
    assert "modulate of bfloat16[2, 32, 24] rewritten by rule norm_modulate" in wan.why("blocks.0.norm1")
    assert "computed in the kernel of the gate of blocks.1" in wan.why("blocks.1.norm2")
    assert "blocks.0.attn1.norm_q: no modulate" in wan.why("blocks.0.attn1.norm_q")
    assert "no norm and no gated addition" in wan.why("condition_embedder.text_embedder")
    with pytest.raises(ConfigError, match=r"did you mean 'blocks\.1\.norm3'"):
        wan.why("block.1.norm3")


def asked(name: str):
    """The inspection of a zoo model, and the owners of its norms and gated additions."""
    model, inputs = zoo.ZOO[name].build()
    seen = graphopt.inspect(model.train(), **inputs, return_dict=False, options={"graphopt.select": "all"})
    owners = set()
    for graph in seen.graphs:
        for sub in pipeline.nested(graph.before):
            owners |= {graphopt.passes.source.fqn(n) for n in sub.graph.nodes
                       if ops_view.canonical(n) in ("layer_norm", "rms_norm")}
    owners |= {m.fqn for m in seen.report.near_misses}
    return seen, owners | {s.fqn for s in seen.report.sites} | {r.fqn for r in seen.report.rejects}


QUICK, ON_CPU = ("sd35", "ltx"), ("mochi", "omnigen")


@pytest.mark.parametrize("name", [
    n if n in QUICK else pytest.param(n, marks=pytest.mark.nightly) for n in zoo.ZOO if n not in ON_CPU])
def test_why_answers_for_every_norm_and_gate(name: str) -> None:
    seen, owners = asked(name)
    assert seen.captured.device == "meta"
    assert owners
    for fqn in owners:
        answer = seen.why(fqn)
        assert fqn in answer
        assert "captured in it" not in answer, fqn


@pytest.mark.parametrize(("name", "reason"), [("mochi", "autocast"), ("omnigen", r"item\(\)")])
def test_the_cpu_is_taken_where_meta_does_not_do(name: str, reason: str) -> None:
    seen, _ = asked(name)
    assert seen.captured.device == "cpu"
    assert re.search(reason, seen.captured.device_reason)
    assert seen.captured.device_reason in str(seen)
    assert "site-packages" not in seen.captured.device_reason  # the place is told without this machine's folders
    expected = zoo.ZOO[name].expected
    assert seen.report.count("modulate", executed=True) == expected.modulate
    assert seen.report.count("gate", executed=True) == expected.gate


def test_several_graphs_say_why() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x, *factors):
            x = self.first(x, *factors)
            torch._dynamo.graph_break()
            return self.second(x, *factors)

    seen = graphopt.inspect(Twice(), *operands(), options={"graphopt.select": "all"})
    assert len(seen.graphs) == 2
    reason, where = seen.graphs[0].ended
    assert "graph_break" in reason
    assert where.startswith(__file__)
    assert seen.graphs[1].ended is None
    assert f"graph break: {reason}" in str(seen)


def test_a_frame_that_torch_skips_is_named() -> None:
    """A break inside a loop: the frame runs uncompiled, and only what it calls is captured, once for all blocks."""
    seen = graphopt.inspect(Stack(3, broken=True), *operands(), options={"graphopt.select": "all"})
    assert len(seen.graphs) == 2, "once more when x starts to require a gradient"
    assert seen.report.count("modulate", executed=True) == 3
    assert "torch runs forward uncompiled" in str(seen)
    assert "test_inspect.py" in str(seen)


def test_a_model_compiled_in_place() -> None:
    """It is inspected like any other, and stays compiled."""
    model = Stack(2)
    model.compile(backend="graphopt", options={"graphopt.compiler": "eager"})
    before = model._compiled_call_impl
    seen = graphopt.inspect(model, *operands(), device="cpu")
    assert seen.report.count("modulate") == seen.report.count("gate") == 2
    assert model._compiled_call_impl is before
    model(*operands())
    assert graphopt.report(model).count("modulate") == 2


def test_a_graph_counts_as_often_as_it_runs(tmp_path: Path) -> None:
    """One forward runs the graph of a block for each block: bytes, kernel calls and times of a step are those of all."""
    pytest.importorskip("triton")
    two, four = (graphopt.inspect(Stack(n, broken=True), *(v.requires_grad_() for v in operands()),
                                   options={"graphopt.select": "all"}) for n in (2, 4))
    last = [text.traffic((k, 1) for p in seen.report.graphs[-1].passes for k in p.kernels)[0] for seen in (two, four)]
    assert [g.calls for g in two.report.graphs] == [2]
    assert [g.calls for g in four.report.graphs] == [4]
    assert last[0] == last[1] > 0
    for seen, runs in ((two, 2), (four, 4)):
        assert text.traffic(text.kernels_run(seen.report))[0] == runs * last[0]
        assert f"memory traffic of these sites: {text.gib(runs * last[0])} a step" in str(seen)
        assert f"1 modulate sites, 1 rewritten, {runs} in one forward" in str(seen)
        seen.to_html(tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text()
        assert f"<b>{runs * len([k for k in seen.report.kernels if k.direction == 'forward'])}</b><span>kernel calls forward" in page


def test_a_result_that_nothing_reads_has_no_kernel() -> None:
    """The last text block of CogVideoX: found, and left to the compiler, which leaves it out."""
    pytest.importorskip("triton")

    def f(x, text, s, b, g):
        text = text + g * text.sin()
        F.layer_norm(text, (2048,)) * (1 + s) + b
        return x + g * x.sin()

    wide = [torch.randn(1, 4096, 2048, device="meta", requires_grad=True) for _ in range(2)]
    factors = [torch.randn(1, 1, 2048, device="meta", requires_grad=True) for _ in range(3)]
    seen = graphopt.inspect(f, *wide, *factors)
    sites = [(s.kind, s.status) for s in seen.report.sites]
    assert sites == [("gate", "declined"), ("modulate", "declined"), ("gate", "rewritten")]
    assert {s.reason for s in seen.report.declined} == {"nothing reads its result: the compiler leaves it out"}


def test_a_model_that_cannot_be_captured() -> None:
    class Refused(nn.Module):
        @torch._dynamo.disable
        def forward(self, x):
            return x * 2

    with pytest.raises(CaptureError, match="disable"):
        graphopt.inspect(Refused(), torch.randn(2))

    class Wrong(nn.Module):
        def forward(self, x):
            return x @ torch.ones(3, 3, device=x.device)

    with pytest.raises(CaptureError) as caught:
        graphopt.inspect(Wrong(), torch.randn(2, 2))
    assert "test_inspect.py" in caught.value.where


def test_options_and_target_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"graphopt\.select"):
        graphopt.inspect(Block(), *operands(), options={"graphopt.selekt": "all"})
    with pytest.raises(ConfigError, match="device is 'cuda'"):
        graphopt.inspect(Block(), *operands(), device="cuda")
    with pytest.raises(graphopt.GraphoptError, match="unknown target"):
        graphopt.inspect(Block(), *operands(), target="h200")
    seen = graphopt.inspect(Block(), *operands(), options={"graphopt.rules": ["gate_residual"]})
    assert seen.report.count("modulate") == 0


def test_a_large_model_only_goes_through_the_motions() -> None:
    """Integers and masks are computed, floats are zeros, so that Python between graphs takes the right branch."""
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Linear(8, 8)

        def forward(self, x, lengths):
            longest = lengths.max() + 1
            y = self.table(x)
            if longest.item() > 5:
                return y * 2
            raise AssertionError("the wrong branch")

    with torch.device("meta"):
        model = Counts()
    seen = graphopt.inspect(model, torch.randn(3, 8), torch.tensor([3, 7]), device="cpu")
    assert not seen.captured.executed
    assert len(seen.graphs) == 2
    assert "zeros" in str(seen)


def test_stand_in_has_the_shapes_of_the_graph() -> None:
    found = []

    def keep(gm, inputs):
        found.append(gm)
        return gm.forward

    x, n = torch.randn(4, 5, requires_grad=True), torch.tensor([1, 2, 3])
    torch.compile(lambda x, n: (x @ x.T, n.cumsum(0)), backend=keep)(x, n)
    floats, integers = capture.stand_in(found[0])(*[x, n])
    assert floats.shape == (4, 4)
    assert not floats.any()
    assert floats.requires_grad
    assert integers.tolist() == [1, 3, 6]


def test_the_page_of_a_real_compile(tmp_path: Path) -> None:
    step = torch.compile(Stack(3), backend="graphopt", options={"graphopt.select": "all", "graphopt.compiler": "eager"})
    step(*operands())
    page = graphopt.report(step).to_html(tmp_path / "report.html", title="a <b> run")
    assert (tmp_path / "report.html").read_text() == page == graphopt.report(step).to_html(title="a <b> run")
    assert page.startswith("<!doctype html>")
    assert "a &lt;b&gt; run" in page
    assert "blocks.1..2" in page
    assert 'id="graph"' not in page, "a report holds no graphs"
    with pytest.raises(ConfigError, match="cannot be written"):
        graphopt.report(step).to_html(tmp_path / "report.html" / "below")


def test_the_page_is_one_file_without_network(wan) -> None:
    page = wan.to_html()
    assert "<script src" not in page
    assert "<link" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    assert page.count("</script>") == 2, "data cannot end the script early"
