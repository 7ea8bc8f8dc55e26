"""A resident model on the GPU as the reference of a streamed one, and both of them made ready."""

from __future__ import annotations

import copy

import torch
from resident import OPTIONS, Recompute, checkpointed, differing, layers, train
from tiny_dit import TinyDiT, inputs
from torch.utils import _pytree as pytree
from zoo import ZOO, liven

import graphopt
from graphopt.codegen.adamw import Hyper, Piece
from graphopt.streaming.link import CudaLink
from graphopt.streaming.resident import kernel_of

ADAM = dict(lr=1e-2, weight_decay=0.1)


def on_gpu(values):
    return pytree.tree_map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, values)


class Reference:
    """AdamW of a resident model: on the host for its layers' own weights, on the device for all others."""

    def __init__(self, model, ema=None, resident=()) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        uses: dict[int, int] = {}
        for layer in layers(model):
            for p in layer.parameters():
                uses[id(p)] = uses.get(id(p), 0) + 1
        outside = {id(p) for n, m in model.named_modules() if not any(n.startswith(f + ".") or n == f for f, x in model.named_modules() if x in layers(model))
                   for p in m._parameters.values() if p is not None}
        stay = {id(p) for name in resident for p in model.get_submodule(name).parameters()}
        mine = [p for p in trained if uses.get(id(p)) == 1 and id(p) not in outside | stay]
        self.pairs = [(p, torch.nn.Parameter(p.detach().cpu())) for p in mine]
        self.rest = [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in trained if not any(p is q for q in mine)]
        self.opt = torch.optim.AdamW([q for _, q in self.pairs], **ADAM)
        self.steps = 0
        self.average = {id(p): p.detach().cpu().clone() for p in trained} if ema else None
        self.ema = ema

    def step(self) -> None:
        self.steps += 1
        for p, q in self.pairs:
            q.grad = None if p.grad is None else p.grad.cpu()
        self.opt.step()
        flat = lambda t: t.detach().view(-1)
        hyper = Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1, self.steps)
        pieces = [Piece(flat(p), None, flat(p.grad.contiguous()), flat(m), flat(v), hyper) for p, m, v in self.rest if p.grad is not None]
        if pieces:
            kernel_of(pieces[0].weight.device)(pieces)
        for p, q in self.pairs:
            p.data.copy_(q)
            if self.average:
                self.average[id(p)].lerp_(q.detach(), 1 - self.ema)

    def zero_grad(self) -> None:
        for p, *_ in (*self.pairs, *self.rest):
            p.grad = None


def streamed(model, slots=2, update="deferred", slow=40, resident=(), graphs="off", **kwargs):
    resident = resident if isinstance(resident, (int, str)) else list(resident)
    graphopt.stream(model, "cuda", slots=slots, resident=resident, graphs=graphs, link=CudaLink(torch.device("cuda"), slow=slow))
    opt = graphopt.HostAdamW(model.parameters(), **ADAM, update=update, kernel="torch", **kwargs)
    return opt, torch.compile(model, backend="graphopt", options=OPTIONS)


def same(a, b) -> None:
    host = lambda m: {k: v.cpu() for k, v in m.state_dict().items()}
    assert differing(host(a), host(b)) == {}


def pair(change=lambda m: m, checkpoint=True, random=False, **settings):
    """The resident model on the GPU, ready to train, and its twin on the host."""
    model = TinyDiT(**{"layers": 7, "D": 32, **settings}).train()
    twin = change(copy.deepcopy(model))
    model = change(model).cuda()
    if checkpoint:
        for layer in layers(model):
            checkpointed(layer, random)
    return model, twin, on_gpu(inputs())


def checkpointed_on_gpu(layer) -> None:
    """As `checkpointed`, drawing the same random numbers of the GPU again."""
    forward = layer.forward

    def run(x, temb, rope):
        state = torch.cuda.get_rng_state()
        calls = []

        def again(*flat):
            now = torch.cuda.get_rng_state()
            if calls:
                torch.cuda.set_rng_state(state)
            out = forward(*flat)
            if calls:
                torch.cuda.set_rng_state(now)
            calls.append(1)
            return out

        again.parameters = list(layer.parameters())
        return Recompute.apply(again, torch.zeros((), requires_grad=True), False, x, temb, rope)

    layer.forward = run


def trains_as_resident(name, **settings):
    """Check five steps of a tiny diffusers model against the resident one, bit by bit; give the streamed one."""
    model, x = ZOO[name].build()
    liven(model)
    other, x = copy.deepcopy(model.train()), on_gpu(x)
    model.cuda()
    for layer in layers(model):
        checkpointed(layer)
    want = train(model, Reference(model), x)
    opt, step = streamed(other, **settings)
    assert train(step, opt, x) == want
    same(other, model)
    return other


def wide(n):
    model, x = ZOO["wan"].build()
    torch.manual_seed(0)
    model = type(model)(**{**{k: v for k, v in model.config.items() if not k.startswith("_")}, "num_layers": n,
                           "attention_head_dim": 32, "ffn_dim": 512})
    liven(model)
    return model.train(), on_gpu(x)
