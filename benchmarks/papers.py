"""Rows of the two papers' tables, measured here: what a fused norm saves, and the longest sequence at equal memory.

    python benchmarks/papers.py [norm] [longest] [--systems graphopt,inductor_no_mix_order] [--out FOLDER]

norm: layer norm + modulate (fp32 factors, bf16 rows) at N = 64,000: eager against graphopt, forward and backward in
microseconds, and the bytes the forward leaves for the backward (storages saved, the module's inputs apart).
longest: a Wan-1.3B-shaped model of four layers.  The budget is eager's peak at the paper's 48,000 tokens (the nearest
grid of 30 x 52); then the longest grid whose peak stays in it, for eager, Inductor (mix-order off) and graphopt.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from _results import copy_tb_per_s, save

H, W = 30, 52
KEYS = {"norm": ("figure", "system", "shape", "direction"), "longest": ("figure", "system")}


def modulated(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """As Wan's block writes it."""
    return (F.layer_norm(x.float(), (x.shape[-1],), None, None, 1e-6) * (1 + scale) + shift).type_as(x)


def microseconds(f: Callable[[], object]) -> float:
    """Median on the device; the host runs ahead of it."""
    from triton.testing import do_bench

    return 1000 * do_bench(f, 50, 300, return_mode="median")


def saved_bytes(f: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> int:
    """Bytes of distinct storages a forward saves for its backward, without those of its inputs."""
    own = {t.untyped_storage().data_ptr() for t in inputs}
    storages: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = f()
    storages.pop(out.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def norm() -> Iterator[dict]:
    """Times and saved bytes of both, per width."""
    for D in (1536, 3072, 5120):
        new = lambda *shape: torch.randn(*shape, device="cuda")
        x = new(1, 64000, D).bfloat16().requires_grad_()
        scale, shift = (0.3 * new(1, 1, D)).requires_grad_(), (0.3 * new(1, 1, D)).requires_grad_()
        dy = new(1, 64000, D).bfloat16()
        torch._dynamo.reset()
        systems = {"eager": modulated, "graphopt": torch.compile(modulated, backend="graphopt",
                                                                 options={"graphopt.select": "all"})}
        for system, f in systems.items():
            y = f(x, scale, shift)
            backward = lambda y=y: torch.autograd.grad(y, (x, scale, shift), dy, retain_graph=True)
            with torch.no_grad():
                yield dict(figure="norm", system=system, shape=[1, 64000, D], direction="forward",
                           us=microseconds(lambda f=f: f(x, scale, shift)))
            yield dict(figure="norm", system=system, shape=[1, 64000, D], direction="backward",
                       us=microseconds(backward), saved_bytes=saved_bytes(lambda f=f: f(x, scale, shift), [x]))
            del y, backward


def peak(f: Callable, model: torch.nn.Module, T: int) -> float | None:
    """GiB allocated at the peak of a step with T latent frames; None if it does not fit."""
    from step_models import Size, inputs

    for p in model.parameters():
        p.grad = None
    gc.collect()
    torch.cuda.empty_cache()
    kw = inputs("wan-1.3b", Size(1, T, H, W, 512))
    torch.cuda.reset_peak_memory_stats()
    try:
        f(**kw)[0].float().square().mean().backward()
    except torch.cuda.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated() / 2**30


def longest(systems: tuple[str, ...] = ("graphopt", "inductor_no_mix_order"), most: int = 96) -> Iterator[dict]:
    """The most frames whose peak stays in eager's: a line through what was tried names the next.

    A row after every try: a run that is cut off keeps the most that was seen to fit (`exact`: and one more did not).
    """
    from step_models import build

    model = build("wan-1.3b")
    frames = round(48000 / (H * W))
    budget = peak(model, model, frames)
    assert budget is not None
    row = dict(figure="longest", system="eager", shape=[frames, H, W], tokens=frames * H * W, peak_gib=budget)
    yield row | {"budget_gib": budget}
    for system in systems:
        torch._dynamo.reset()
        options = {"triton.mix_order_reduction": False}
        f = (torch.compile(model, backend="graphopt", dynamic=True) if system == "graphopt"
             else torch.compile(model, options=options, dynamic=True))
        tried = {T: peak(f, model, T) for T in (frames - 1, frames)}  # the first compiles
        fits = lambda T, tried=tried: tried[T] is not None and tried[T] <= budget
        while True:
            low = max((T for T in tried if fits(T)), default=0)
            high = min((T for T in tried if not fits(T)), default=most)
            print(f"{system}: {low} frames fit {budget:.2f} GiB, {high} do not; {tried}", flush=True)
            if low:
                yield dict(figure="longest", system=system, shape=[low, H, W], tokens=low * H * W,
                           peak_gib=tried[low], budget_gib=budget, exact=high - low <= 1)
            if high - low <= 1 or not low:
                break
            a, b = sorted(T for T in tried if tried[T] is not None)[-2:]
            slope = max((tried[b] - tried[a]) / (b - a), 1e-3)
            T = min(max(b + int((budget - tried[b]) // slope), low + 1), high - 1)
            tried[T] = peak(f, model, T)


def main() -> None:
    """Run the parts named (all by default) and save their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["norm", "longest", []], default=[])
    parser.add_argument("--systems", default="graphopt,inductor_no_mix_order", help="of longest, beside eager")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    parts = args.parts or ["norm", "longest"]
    ceilings = {"copy_tb_per_s": copy_tb_per_s()} if "norm" in parts else {}  # nothing is timed for the other
    for part in parts:
        for row in norm() if part == "norm" else longest(tuple(args.systems.split(","))):
            print(row, flush=True)
            save("papers", [row], KEYS[part], ceilings, args.out)


if __name__ == "__main__":
    main()
