"""`graphopt.check` names what torch kept from the backend: skipped frames, graph breaks, limits, frames never traced."""

from __future__ import annotations

import json

import pytest
import torch
from blocks import Block, Stack, adaln, compiled
from torch import nn

import graphopt


def operands(S: int = 6, D: int = 8):
    return torch.randn(2, S, D), torch.randn(2, D)


def broken(x, t):
    y = adaln(x, t[:, None], t[:, None])
    torch._dynamo.graph_break()
    return y + 1


def looped(x, t):
    for _ in range(2):
        x = adaln(x, t[:, None], t[:, None])
        torch._dynamo.graph_break()
    return x


def line_of(f, text: str) -> str:
    """`file:line` of the line of f that contains `text`."""
    import inspect

    lines, first = inspect.getsourcelines(f)
    return f"{f.__code__.co_filename}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def test_a_graph_break_and_its_place() -> None:
    f = compiled(broken)
    f(*operands())
    report = graphopt.check(f, {"modulate": 1})
    (lost,) = report.missed
    assert (lost.kind, lost.where) == ("graph break", line_of(broken, "graph_break()"))
    assert "User-inserted graph break" in lost.reason
    assert lost.where in str(report)
    assert json.loads(report.to_json())["missed"][0]["kind"] == "graph break"
    with pytest.raises(graphopt.CheckFailed) as caught:
        graphopt.check(f, {"gate": 1})
    assert lost.where in str(caught.value)


def test_a_break_inside_a_module_is_the_modules() -> None:
    f, other = compiled(Block(8, torch._dynamo.graph_break)), torch.compile(Stack(8), backend="graphopt")
    f(*operands())
    other(*operands())
    assert [m.kind for m in graphopt.check(f, {"modulate": 2, "gate": 2}).missed] == ["graph break"]


def test_a_skipped_frame() -> None:
    """A break in a loop: torch runs the frame eagerly and compiles only what it calls."""
    f = compiled(looped)
    f(*operands())
    report = graphopt.check(f, {"modulate": 1})  # adaln itself, once for both calls
    (lost,) = report.missed
    assert lost.kind == "skipped"
    assert lost.frame.startswith("looped (")
    assert lost.where == line_of(looped, "graph_break()")


def test_a_skipped_frame_with_nothing_left() -> None:
    def alone(x, t):
        for _ in range(2):
            torch._dynamo.graph_break()
        return x

    f = compiled(alone)
    f(*operands())
    with pytest.raises(graphopt.CheckFailed, match="never called the backend") as caught:
        graphopt.check(f)
    assert f"skipped: alone ({alone.__code__.co_filename}" in str(caught.value)
    assert line_of(alone, "graph_break()") in str(caught.value)


@torch._dynamo.config.patch(recompile_limit=2)
def test_the_recompile_limit() -> None:
    block = Block(8)
    f = compiled(block)
    torch._dynamo.utils.counters.clear()
    for dtype in (torch.float32, torch.float64):
        block.to(dtype)(*(v.to(dtype) for v in operands()))
        f(*(v.to(dtype) for v in operands()))
    assert graphopt.check(f).missed == []
    block.to(torch.bfloat16)
    f(*(v.bfloat16() for v in operands()))
    report = graphopt.check(f, {"modulate": 4})
    assert len(report.graphs) == 2
    (lost,) = report.missed
    assert lost.kind == "limit"
    assert lost.frame.startswith("forward (")
    assert "compiled 2 times" in lost.reason


def test_switched_off() -> None:
    f = compiled(broken)
    with torch.compiler.set_stance("force_eager"):
        f(*operands())
        with pytest.raises(graphopt.CheckFailed, match="set_stance"):
            graphopt.check(f)


def test_a_generator_and_an_empty_frame() -> None:
    def pieces(x, t):
        yield adaln(x, t[:, None], t[:, None])

    def nothing(x, t):
        return x

    for f, kind, words in ((pieces, "not traced", "does not trace generators"), (nothing, "empty", "no tensor operation")):
        c = compiled(f)
        result = c(*operands())
        if f is pieces:
            list(result)
        with pytest.raises(graphopt.CheckFailed, match=words) as caught:
            graphopt.check(c)
        assert f"{kind}: {f.__name__} (" in str(caught.value)


def test_called_under_a_transform_of_torch_func() -> None:
    """torch runs a compiled function eagerly there; the result is right, and the check says what to do."""
    block = Block(8)

    def loss(x, t):
        return block(x, t).square().mean()

    f = compiled(loss)
    x, t = operands()
    assert torch.equal(torch.func.grad(f)(x, t), torch.func.grad(loss)(x, t))
    with pytest.raises(graphopt.CheckFailed, match=r"Ensure that torch\.func\.grad is also wrapped"):
        graphopt.check(f)


def test_not_run_yet() -> None:
    class Unused(nn.Module):
        def forward(self, x):
            return x + 1

    with pytest.raises(graphopt.CheckFailed, match="it has not run yet"):
        graphopt.check(compiled(Unused()))
