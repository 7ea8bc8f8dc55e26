"""Random programs (tests/models/programs.py), rewritten, against eager in fp64: outputs, written inputs and every gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import contract
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from programs import annotate, build
from torch import Tensor, fx

from graphopt import _compat, backend, reporting
from graphopt.config import Config

CI, NIGHTLY = 200, 2000
EVERYTHING = Config(select="all", on_error="raise")


class Fp64(fx.Interpreter):
    """A program in fp64: nothing is rounded, and what was copied by a cast still is a copy (it may be written to)."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_method" and n.target in ("float", "to", "type_as"):
            (x, *_), _ = self.fetch_args_kwargs_from_env(n)
            return x if n.meta["example_value"].dtype == n.args[0].meta["example_value"].dtype else x.clone()
        with contract.Wide():
            return super().run_node(n)


def train(gm: Callable[..., Any], inputs: list[Tensor], wide: bool = False) -> tuple[list[Tensor], list[Tensor | None]]:
    """(outputs and the inputs as they are afterwards, gradients of the inputs)."""
    leaves = [(x.double() if wide else x.clone()).requires_grad_() for x in inputs]
    given_ = [x.clone() for x in leaves]  # a leaf cannot be written in place
    out = Fp64(gm).run(*given_) if wide else gm(*given_)
    generator = torch.Generator().manual_seed(5)
    loss = sum(
        (o.double() * torch.randn(o.shape, dtype=torch.float64, generator=generator)).sum()
        for o in (*out, *given_) if o.requires_grad
    )
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [o.detach() for o in (*out, *given_)], list(grads)


def functional(gm: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """The graph through AOTAutograd, which takes in-place writes out."""
    return _compat.named_backend("aot_eager")(gm, [x.clone().requires_grad_().clone() for x in inputs])


def close(got: Tensor, eager: Tensor, true: Tensor, dtype: torch.dtype) -> str | None:
    """None, or how far off: at most twice eager's error, and a few ulp of the narrowest dtype in the program."""
    size = true.norm().item() + 1e-6
    ours, theirs = ((t.double() - true).norm().item() / size for t in (got, eager))
    limit = 2 * theirs + (1e-5 if dtype != torch.bfloat16 and dtype != torch.float16 else 4 * torch.finfo(dtype).eps)
    return None if ours <= limit else f"error {ours:.2e}, eager {theirs:.2e}, limit {limit:.2e}"


def form(t: Tensor) -> tuple[Any, ...]:
    """Dtype, shape, and strides where they mean something."""
    return t.dtype, t.shape, [s for s, size in zip(t.stride(), t.shape) if size > 1]


def narrowest(gm: fx.GraphModule) -> torch.dtype:
    """The dtype with the fewest digits that a program uses."""
    seen = {v.dtype for n in gm.graph.nodes if isinstance(v := n.meta.get("example_value"), Tensor) and v.is_floating_point()}
    return max(seen, key=lambda d: torch.finfo(d).eps)


def check(gm: fx.GraphModule, inputs: list[Tensor], tally: Counter) -> None:
    """Assert that rewriting one program changes nothing."""
    try:
        want, want_grads = train(gm, inputs)
        annotate(gm, inputs)
    except RuntimeError:  # a value needed for backward was written in place
        tally["refused by eager"] += 1
        return
    try:
        true, true_grads = train(gm, inputs, wide=True)
    except RuntimeError as error:  # likewise, where type promotion no longer makes a copy
        if "modified by an inplace operation" not in str(error):
            raise
        tally["refused in fp64"] += 1
        return
    record = reporting.GraphRecord("0/0", [])
    twin = backend.rewrite(gm, EVERYTHING, record)
    tally["programs"] += 1
    tally["rewritten"] += bool(record.sites)
    tally.update(k.operator for p in record.passes for k in p.kernels if k.direction == "forward")
    tally.update(s.kind for s in record.sites)
    every_tenth = tally["programs"] % 10 == 0
    tally["through aot_eager"] += every_tenth
    got, got_grads = train(functional(twin, inputs) if every_tenth else twin, inputs)
    dtype = narrowest(gm)
    for i, (g, w, t) in enumerate(zip(got, want, true, strict=True)):
        assert form(g) == form(w), f"output {i}"
        assert close(g, w, t, dtype) is None, f"output {i}: {close(g, w, t, dtype)}"
    for i, (g, w, t) in enumerate(zip(got_grads, want_grads, true_grads, strict=True)):
        assert (g is None) == (w is None), f"gradient {i}"
        if g is not None:
            assert (g.dtype, g.shape) == (w.dtype, w.shape), f"gradient {i}"
            assert close(g, w, t, dtype) is None, f"gradient {i}: {close(g, w, t, dtype)}"


def run_many(programs: int, phases: tuple[Phase, ...], derandomize: bool = False) -> Counter:
    """Draw and check programs; what was in them."""
    tally: Counter = Counter()

    @settings(max_examples=programs, deadline=None, derandomize=derandomize, database=None, phases=phases,
              suppress_health_check=list(HealthCheck), print_blob=True)
    @given(st.data())
    def each(data) -> None:
        gm, inputs, steps = build(lambda n: data.draw(st.integers(0, n - 1)))
        try:
            check(gm, inputs, tally)
        except Exception:
            print("steps:", *steps)
            print(gm.graph)
            raise

    each()
    return tally


def assert_worth_it(tally: Counter, unseen: int = 0) -> None:
    """The programs must reach every operator, or they test nothing; a short run may leave out `unseen` rare ones."""
    assert tally["rewritten"] >= 0.6 * tally["programs"], tally
    assert tally["refused by eager"] <= 0.3 * tally["programs"], tally
    assert tally["refused in fp64"] <= 0.02 * tally["programs"], tally
    rare = {"norm_modulates", "gate_norm_modulates", "residual_norm_modulate", "branch_norm_gate",
            "branch_norm_gate_norm", "branch_norm_gate_norm_modulate"}
    common = ("norm_modulate", "gate_norm_modulate", "gate_norm", "gate_residual")
    assert min(tally[o] for o in common) >= 8, tally
    assert sum(tally[o] == 0 for o in rare) <= unseen, tally


def test_programs() -> None:
    assert_worth_it(run_many(CI, (Phase.generate,), derandomize=True), unseen=1)


@pytest.mark.nightly
def test_many_programs() -> None:
    assert_worth_it(run_many(NIGHTLY, (Phase.generate, Phase.shrink)))
