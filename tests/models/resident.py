"""The resident side of streaming tests: the same model trained by torch alone, layers checkpointed so that gradients of
shared inputs are added in the same order."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

OPTIONS = {"graphopt.compiler": "eager", "graphopt.rules": []}


class Recompute(torch.autograd.Function):
    """Reentrant checkpointing by `autograd.grad`; torch's own copies non-contiguous gradients on the way, which changes
    the order of later sums."""

    @staticmethod
    def forward(ctx, function, spark, random, *flat):
        ctx.function, ctx.flat = function, flat
        ctx.state = torch.get_rng_state() if random else None
        return function(*flat)

    @staticmethod
    def backward(ctx, *grads):
        flat = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in ctx.flat]
        with torch.enable_grad(), torch.random.fork_rng():
            if ctx.state is not None:
                torch.set_rng_state(ctx.state)
            out = ctx.function(*flat)
        out = out if isinstance(out, tuple) else (out,)
        pairs = [(o, g) for o, g in zip(out, grads) if g is not None and o.requires_grad]
        inputs = [x for x in flat if isinstance(x, torch.Tensor) and x.requires_grad]
        params = [p for p in ctx.function.parameters if p.requires_grad]
        found = torch.autograd.grad([o for o, _ in pairs], inputs + params, [g for _, g in pairs], allow_unused=True)
        for p, g in zip(params, found[len(inputs):]):
            if g is not None:
                p.grad = g.clone() if p.grad is None else p.grad + g
        given = dict(zip(map(id, inputs), found))
        return (None, None, None, *(given.get(id(x)) for x in flat))


def checkpointed(layer, random=False):
    """Make a layer recompute itself in the backward, all its tensors as separate inputs."""
    forward = layer.forward

    def run(*args, **kwargs):
        flat, spec = pytree.tree_flatten((args, kwargs))

        def again(*flat):
            a, k = pytree.tree_unflatten(list(flat), spec)
            return forward(*a, **k)

        if not torch.is_grad_enabled():
            return again(*flat)
        again.parameters = list(layer.parameters())
        return Recompute.apply(again, torch.zeros((), requires_grad=True), random, *flat)

    layer.forward = run


def layers(model):
    """All members of the model's lists of two and more layers."""
    found = []
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) >= 2 and all(list(m.parameters()) for m in module):
            if not any(module is m for f in found for m in f.modules()):
                found += list(module)
    return found


def jitter(inputs, seed):
    """Other values for floating inputs; shapes and everything else stay."""
    g = torch.Generator().manual_seed(seed)

    def other(x):
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 1:
            return x + torch.randn(x.shape, generator=g).to(x) * 0.1
        return x

    return pytree.tree_map(other, inputs)


def loss_of(model, inputs):
    out = model(**inputs, return_dict=False)[0] if isinstance(inputs, dict) else model(*inputs)
    return out.float().square().mean()


def train(model, opt, inputs, steps=5, clip=None, micro=1, scheduler=None, start=0, clip_with=None, loss=loss_of):
    """Losses of some steps; `micro` backward passes each."""
    losses = []
    for i in range(start, start + steps):
        for j in range(micro):
            value = loss(model, jitter(inputs, 100 * i + j)) / micro
            value.backward()
            losses.append(value.item())
        if clip is not None:
            losses.append(float(clip_with(clip)))
        opt.step()
        opt.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return losses


def differing(a, b):
    """Names whose tensors are not equal bit by bit, with the largest difference."""
    assert list(a) == list(b)
    assert all(a[k].shape == b[k].shape and a[k].dtype == b[k].dtype for k in a)
    return {k: (a[k].float() - b[k].float()).abs().max().item() for k in a if not torch.equal(a[k], b[k])}
