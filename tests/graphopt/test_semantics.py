"""What surrounds a model in training must not change what is rewritten: breaks, checkpoints, autocast, modes, transforms.

Each test: outputs and every gradient against eager in fp64, and the number of sites rewritten.
"""

from __future__ import annotations

import functools

import pytest
import torch
from blocks import Block, Stack, adaln, assert_close_to_fp64, compiled, in_fp64, step
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import graphopt

D = 32


def operands(B: int = 2, S: int = 24):
    return torch.randn(B, S, D), torch.randn(B, D)


def counts(f) -> tuple[int, int]:
    """(modulates, gates) rewritten, over all graphs."""
    report = graphopt.report(f)
    return report.count("modulate", "rewritten"), report.count("gate", "rewritten")


def directions(f) -> tuple[int, int]:
    """(forward, backward) kernels."""
    all_of_them = [k.direction for k in graphopt.report(f).kernels]
    return all_of_them.count("forward"), all_of_them.count("backward")


def assert_exact(f, module: nn.Module, *inputs: torch.Tensor, eager=None) -> None:
    """`f` trains `module` as well as eager does; `eager(module, ..)` where the call is not the module's own."""
    plain = module if eager is None else lambda *xs: eager(module, *xs)
    got, want = step(f, module.parameters(), *inputs), step(plain, module.parameters(), *inputs)
    assert_close_to_fp64(got, want, in_fp64(module, *inputs, f=eager))


# -- graphs ------------------------------------------------------------------------------------------


def test_fullgraph_fuses_across_blocks() -> None:
    stack = Stack(D)
    f = compiled(stack, fullgraph=True)
    assert_exact(f, stack, *operands())
    assert counts(f) == (4, 4)
    assert directions(f) == (5, 5)  # F1, three F2 (one across the two blocks), F3
    assert [(s.kind, s.fqn) for s in graphopt.report(f).sites] == [
        (kind, f"blocks.{i}") for i in range(2) for kind in ("modulate", "gate") * 2]


def test_graph_break_between_the_halves() -> None:
    block = Block(D, torch._dynamo.graph_break)
    f = compiled(block)
    assert_exact(f, block, *operands())
    assert counts(f) == (2, 2)
    assert [[s.kind for s in g.sites] for g in graphopt.report(f).graphs] == [["modulate", "gate"]] * 2
    assert directions(f) == (4, 4)  # nothing spans the break


class BrokenBranch(nn.Module):
    """A break between the branch and the gate: residual, gate and branch arrive as placeholders."""

    def __init__(self) -> None:
        super().__init__()
        self.ad, self.f = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, t):
        s, b, g = self.ad(t)[:, None].chunk(3, -1)
        branch = self.f(adaln(x, s, b))
        torch._dynamo.graph_break()
        return adaln(x + g * branch, s, b)


def test_residual_gate_and_branch_as_placeholders() -> None:
    module = BrokenBranch()
    f = compiled(module)
    assert_exact(f, module, *operands())
    assert counts(f) == (2, 1)
    assert [g.sites[0].kind for g in graphopt.report(f).graphs] == ["modulate", "gate"]
    assert {k.operator for p in graphopt.report(f).graphs[1].passes for k in p.kernels} == {"gate_norm_modulate"}


def test_dynamic_shapes() -> None:
    stack = Stack(D)
    f = compiled(stack, dynamic=True, fullgraph=True)
    for B, S in ((2, 24), (3, 17), (5, 100)):
        assert_exact(f, stack, *operands(B, S))
    assert len(graphopt.report(f).graphs) == 1
    assert counts(f) == (4, 4)


@pytest.mark.nightly
def test_branches_of_cond() -> None:
    block = Block(D)

    def either(module, x, t):
        return torch.cond(t.sum() > 0, module, lambda x, t: module(x, -t), (x, t))

    f = compiled(lambda x, t: either(block, x, t), fullgraph=True)
    assert_exact(f, block, *operands(), eager=either)
    assert counts(f) == (4, 4)


def test_nested_compile_region() -> None:
    stack = Stack(D, call=torch.compiler.nested_compile_region(lambda block, x, t: block(x, t)))
    f = compiled(stack, fullgraph=True)
    assert_exact(f, stack, *operands())
    assert counts(f) == (2, 2)  # the region is one graph for both blocks


# -- activation checkpointing ------------------------------------------------------------------------


def keep_matmuls(ctx, op, *args, **kwargs):
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("selective", [False, True])
def test_checkpoint_inside(selective: bool) -> None:
    """The bodies of the checkpoints are graphs of their own: rewritten, and nothing is fused across their borders."""
    options = {"context_fn": functools.partial(create_selective_checkpoint_contexts, keep_matmuls)} if selective else {}
    stack = Stack(D, call=lambda block, *xs: checkpoint(block, *xs, use_reentrant=False, **options))
    f = compiled(stack, fullgraph=True)
    assert_exact(f, stack, *operands())
    assert counts(f) == (4, 4)
    assert directions(f) == (6, 6)
    assert [s.fqn for s in graphopt.report(f).sites] == ["blocks.0"] * 4 + ["blocks.1"] * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around(reentrant: bool) -> None:
    stack = Stack(D)
    f = compiled(stack)
    assert_exact(lambda *xs: checkpoint(f, *xs, use_reentrant=reentrant), stack, *operands())
    # a reentrant checkpoint runs its first forward without gradients: a graph of its own
    assert counts(f) == ((8, 8) if reentrant else (4, 4))


def test_recomputing_saves_no_activation_of_a_site() -> None:
    """With a checkpoint round each block, what lives from forward to backward is the blocks' inputs."""
    saved = {}
    for name, call in (("kept", None), ("recomputed", lambda b, *xs: checkpoint(b, *xs, use_reentrant=False))):
        stack = Stack(D, call=call)
        f = compiled(stack)
        sizes: list[int] = []
        x, t = operands()
        with torch.autograd.graph.saved_tensors_hooks(lambda v: sizes.append(v.numel() * (v.dim() == 3)) or v, lambda v: v):
            out = f(x.requires_grad_(), t)
        out.sum().backward()
        saved[name] = sum(n for n in sizes if n >= x.numel())
        assert counts(f) == (4, 4)
    assert saved["recomputed"] <= 3 * 2 * 24 * D < saved["kept"]


# -- dtypes and modes --------------------------------------------------------------------------------


def autocast(module, x, t):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return module(x, t)


def test_inside_autocast() -> None:
    """The region is in the graph; linears are bf16, norms fp32."""
    block = Block(D)
    f = compiled(lambda x, t: autocast(block, x, t), fullgraph=True)
    x, t = operands()
    got, want = (step(g, block.parameters(), x, t) for g in (f, lambda x, t: autocast(block, x, t)))
    assert_close_to_fp64(got, want, in_fp64(block, x, t))
    assert counts(f) == (2, 2)


def test_around_autocast() -> None:
    """No trace of it is in the graph but the dtypes."""
    block = Block(D)
    f = compiled(block, fullgraph=True)
    x, t = operands()
    got = step(lambda x, t: autocast(f, x, t), block.parameters(), x, t)
    want = step(lambda x, t: autocast(block, x, t), block.parameters(), x, t)
    assert_close_to_fp64(got, want, in_fp64(block, x, t))
    assert counts(f) == (2, 2)
    assert {s.dtype for s in graphopt.report(f).sites} == {"float32"}


def test_a_site_across_the_border_of_autocast_is_left() -> None:
    class Crossing(Block):
        def forward(self, x, t):
            n = torch.nn.functional.layer_norm(x, (D,))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = n * (1 + t[:, None]) + t[:, None]
            return super().forward(y, t)

    module = Crossing(D)
    f = compiled(module, fullgraph=True)
    assert_exact(f, module, *operands())
    assert counts(f) == (2, 2)
    assert [r.reason for r in graphopt.report(f).rejects] == ["crosses an autocast or grad-mode border"]


def test_no_grad_inference_and_training_of_one_callable() -> None:
    block = Block(D)
    f = compiled(block)
    x, t = operands()
    truth = block.double()(x.double(), t.double()).detach()
    block.float()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got, want = f(x, t), block(x, t)
        assert not got.requires_grad
        assert got.is_inference() == want.is_inference()
        assert (got.double() - truth).norm() <= max(1e-5 * truth.norm(), 1.25 * (want.double() - truth).norm())
    assert directions(f) == (6, 0)
    assert_exact(f, block, x, t)
    assert directions(f) == (9, 3)
    assert [len(g.sites) for g in graphopt.report(f).graphs] == [4, 4, 4]


def test_no_grad_inside() -> None:
    """A site under no_grad has no backward; a gain made under no_grad passes no gradient to the scale."""

    def partly(module, x, t):
        with torch.no_grad():
            y = adaln(x, t[:, None], t[:, None])
        s = t[:, None]
        with torch.no_grad():
            gain = 1 + s  # rewritten as `scale=s`, its gradient would come back
        z = torch.nn.functional.layer_norm(x, (D,)) * gain + s
        return module(x, t) + y + z

    block = Block(D)
    f = compiled(lambda x, t: partly(block, x, t), fullgraph=True)
    assert_exact(f, block, *operands(), eager=partly)
    assert counts(f) == (4, 2)
    assert directions(f) == (5, 4)
    assert graphopt.report(f).rejects == []  # the gain is taken as it is, without looking through its `1 +`


def test_frozen_parameters() -> None:
    """Only the branch is trained: the gradients are eager's, None included."""
    block = Block(D)
    block.ad.requires_grad_(False)
    f = compiled(block)
    x, t = operands()
    grads = []
    for g in (block, f):
        block.zero_grad()
        g(x, t).square().mean().backward()
        grads.append([p.grad for p in block.parameters()])
    assert [g is None for g in grads[0]] == [g is None for g in grads[1]] == [True] * 2 + [False] * 4
    torch.testing.assert_close(grads[1][2:], grads[0][2:], rtol=1e-5, atol=1e-7)
    assert counts(f) == (2, 2)


# -- torch.func --------------------------------------------------------------------------------------


def loss(module, x, t):
    return module(x, t).square().mean()


TRANSFORMED = {
    "grad": lambda module, x, t: torch.func.grad(functools.partial(loss, module), (0, 1))(x, t),
    "vmap": lambda module, x, t: (torch.func.vmap(module)(x[None], t[None]),),
    "jvp": lambda module, x, t: torch.func.jvp(module, (x, t), (x.cos(), t.cos())),
    "vjp": lambda module, x, t: torch.func.vjp(module, x, t)[1](x.cos()),
    "hvp": lambda module, x, t: torch.func.jvp(
        lambda a: torch.func.grad(functools.partial(loss, module))(a, t), (x,), (x.cos(),)),
}


@pytest.mark.parametrize("name", [
    pytest.param(n, marks=[pytest.mark.nightly] if n in ("vjp", "hvp") else []) for n in TRANSFORMED])
def test_transforms_inside(name: str) -> None:
    """A fused operator has no rule under a transform: its sites keep their ops, the others are rewritten."""
    block = Block(D)

    def both(module, x, t):
        return *TRANSFORMED[name](module, x, t), module(x, t)

    f = compiled(lambda x, t: both(block, x, t), fullgraph=True)
    x, t = operands()
    got, want = f(x, t), both(block, x, t)
    true = both(block.double(), x.double(), t.double())
    assert_close_to_fp64(list(got), list(want), list(true))
    assert counts(f) == (2, 2)  # those of the plain call
    left = {r.reason.split(",")[0] for r in graphopt.report(f).rejects}
    assert left == {{"hvp": "under torch.func.grad", "vjp": "under torch.func.grad",
                     "jvp": "under forward-mode AD"}.get(name, f"under torch.func.{name}")}


@pytest.mark.parametrize("name", ["grad", "vmap"])
def test_transforms_around(name: str) -> None:
    """torch runs a compiled callable eagerly under a transform (test_frames: `check` says so)."""
    block = Block(D)
    f = compiled(block)
    x, t = operands()
    for got, want in zip(TRANSFORMED[name](f, x, t), TRANSFORMED[name](block, x, t), strict=True):
        assert torch.equal(got, want)


def test_functional_call() -> None:
    """Parameters given from outside, to a module compiled in place and to a function that calls one."""
    block, other = Block(D), Block(D)
    given = dict(other.named_parameters())
    f = compiled(lambda p, x, t: torch.func.functional_call(block, p, (x, t)), fullgraph=True)
    assert_exact(lambda x, t: f(given, x, t), other, *operands())
    assert counts(f) == (2, 2)
    torch._dynamo.reset()
    block.compile(backend="graphopt", options={"graphopt.select": "all", "graphopt.compiler": "aot_eager"})
    assert_exact(lambda x, t: torch.func.functional_call(block, given, (x, t)), other, *operands())
    assert counts(block) == (2, 2)


def test_forward_mode_ad_around() -> None:
    """A tangent must not be lost: under `dual_level` no site is rewritten, and a graph with fused operators raises."""
    from torch.autograd import forward_ad

    block = Block(D)
    x, t = operands()

    def tangent(g):
        with torch.no_grad(), forward_ad.dual_level():
            return forward_ad.unpack_dual(g(forward_ad.make_dual(x, x.cos()), t)).tangent

    f = compiled(block)
    torch.testing.assert_close(tangent(f), tangent(block), rtol=1e-5, atol=1e-5)
    assert counts(f) == (0, 0)
    f = compiled(block)
    with torch.no_grad():
        f(x, t)
    with pytest.raises(graphopt.errors.GraphoptError, match="fused operators would drop the tangents"):
        tangent(f)


def test_double_backward_says_so() -> None:
    block = Block(D)
    f = compiled(block)
    x, t = operands()
    x.requires_grad_()
    (grad,) = torch.autograd.grad(f(x, t).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(grad.sum(), x)


def test_an_autograd_function() -> None:
    """Both bodies of a user's autograd.Function are graphs: its forward is rewritten, its own backward is kept."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, s):
            return adaln(x, s, s)

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad, None

    f = compiled(lambda x, t: Doubled.apply(x, t[:, None]) * 3, fullgraph=True)
    x, t = operands()
    got = f(x.requires_grad_(), t)
    torch.testing.assert_close(got, 3 * adaln(x, t[:, None], t[:, None]), rtol=1e-5, atol=1e-5)
    got.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 6.0))
    assert counts(f) == ((0, 0) if torch.__version__.startswith("2.11.") else (1, 0))  # 2.11 does not show its body
