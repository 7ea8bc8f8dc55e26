"""Errors of the fused operators at full size against fp64, and whether gradients repeat bit by bit.

    python benchmarks/adaln_errors.py [--shapes 1x32760x1536,...] [--functions F1,F2,F2a,F1r] [--out FOLDER]

A row: relative L2 error of every result and gradient (bf16 ones carry their rounding, about 1.7e-3; factors are fp32),
`repeatable` over three runs.  The reference is the reference operator in fp64, a sample at a time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch._functorch.config
from _results import save
from adaln import compiled, flat
from adaln_functions import FUNCTIONS, operands

SHAPES = "1x75600x5120,2x16384x3072,1x32760x1536,8x4096x1152,1x4096x3072"
NAMES = {"F1": ("x", "scale", "shift"), "F1r": ("x", "scale", "shift"), "F3": ("x", "branch", "gate"),
         "F2": ("x", "branch", "gate", "scale", "shift"), "F2a": ("x", "branch", "gate", "weight", "bias")}


def wanted(code: str, args: list[torch.Tensor], cotangents: list[torch.Tensor], mine: list[torch.Tensor]) -> dict:
    """Squared errors and squares of every tensor, from fp64 on one sample after the other.

    h is rounded to bf16 before its norm, as in the model; its gradient passes the rounding unchanged.
    """
    names, f = NAMES[code], FUNCTIONS[code]
    results = ["h", "y"][-len(cotangents):] if f.operator != "gate_residual" else ["h"]
    sums: dict[str, torch.Tensor] = {}
    errors: dict[str, tuple[float, float]] = {}

    def add(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        e, n = errors.get(name, (0.0, 0.0))
        errors[name] = e + (got.double() - want).square().sum().item(), n + want.square().sum().item()

    B = args[0].shape[0]
    outs, grads = mine[:len(cotangents)], mine[len(cotangents):]
    for b in range(B):
        leaves = [sample(a, b).detach().double().requires_grad_() for a in args]
        values = fp64(code, leaves)
        got = torch.autograd.grad(values, leaves, [c[b:b + 1].double() for c in cotangents])
        for name, value, out in zip(results, values, outs):
            add(name, out[b:b + 1], value.detach())
        for name, leaf, g, grad in zip(names, args, got, grads):
            if leaf.dim() == 3:
                add(f"d{name}", grad[b:b + 1], g)
            else:
                sums[name] = sums.get(name, 0) + g
        del values, got
    for name, total in sums.items():
        add(f"d{name}", grads[names.index(name)], total)
    return {n: (e / max(s, 1e-300)) ** 0.5 for n, (e, s) in errors.items()}


def sample(t: torch.Tensor, b: int) -> torch.Tensor:
    """What belongs to one sample; weights belong to all."""
    return t[b:b + 1] if t.dim() == 3 else t


def fp64(code: str, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """The function in fp64."""
    x, *rest = leaves
    if code in ("F1", "F1r"):
        return [norm(x, code) * (1 + rest[0]) + rest[1]]
    exact = x + rest[0] * rest[1]
    h = exact + (exact.to(torch.float32).bfloat16().double() - exact).detach()
    if code == "F3":
        return [h]
    n = norm(h, code)
    return [h, n * (1 + rest[2]) + rest[3] if code == "F2" else n * rest[2] + rest[3]]


def norm(t: torch.Tensor, code: str) -> torch.Tensor:
    if code != "F1r":
        t = t - t.mean(-1, keepdim=True)
    return t * torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--functions", default="F1,F2,F2a")
    parser.add_argument("--systems", default="graphopt,inductor")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch._functorch.config.donated_buffer = False
    for text in args.shapes.split(","):
        B, N, D = map(int, text.split("x"))
        for code in args.functions.split(","):
            for system in args.systems.split(","):
                torch.manual_seed(0)
                leaves = operands(code, B, N, D, torch.bfloat16)
                f = compiled(code, system, FUNCTIONS[code].made(D))
                runs = []
                for _ in range(3):
                    outs = flat(f(*leaves))
                    if not runs:
                        cotangents = [torch.randn_like(o) for o in outs]
                    runs.append([o.detach() for o in outs] + list(torch.autograd.grad(outs, leaves, cotangents)))
                same = all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))
                mine = runs[0]
                del runs, outs
                found = wanted(code, leaves, cotangents, mine)
                row = dict(kernel=code, shape=[B, N, D], system=system, errors=found, repeatable=same)
                print(f"{code:4s} {text:14s} {system:9s} repeatable {same} "
                      + " ".join(f"{k} {v:.1e}" for k, v in found.items()), flush=True)
                save("adaln_errors", [row], ("kernel", "shape", "system"), {}, args.out)
                del leaves, cotangents, mine
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
