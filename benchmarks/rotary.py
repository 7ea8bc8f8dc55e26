"""RMS norm and rotary embedding of queries (passes/norm_rotate.py, head_norm_rotate.py) against Inductor and eager.

    python benchmarks/rotary.py [--shapes 1x32760x12x128,...] [--out FOLDER]      a norm over all heads (Wan)
    python benchmarks/rotary.py --per-head [--cases hunyuan-single,...] [--tune]  a norm per head (rotary_heads.py)

A shape is B x N x heads x channels per head, bf16, fp32 tables and weight (bf16 weights per head).  Microseconds
forward and backward, medians of CUDA-graph replays; `roofline` is the floor (2 or 3 activations and both tables, over
the measured copy bandwidth) over graphopt's time; `error` is the largest relative L2 distance of results and gradients
from fp64.
`--tune` tries other warps, programs and rings than the closed form's; `--warm` only compiles.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import rotary_heads
import torch
import torch._functorch.config
from _results import copy_tb_per_s, save
from _timing import replayed

from graphopt.codegen import rotary_operators

SHAPES = "1x32760x12x128,2x14040x12x128,1x32760x40x128"


def wan(x, weight, cos, sin):
    """As the model writes it."""
    n = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-6).unflatten(2, (-1, cos.shape[-1]))
    even, odd = n.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(n)
    out[..., 0::2] = even * c - odd * s
    out[..., 1::2] = even * s + odd * c
    return out.type_as(n)


def ours(x, weight, cos, sin):
    """The operator."""
    heads = x.shape[-1] // cos.shape[-1]
    return rotary_operators.operator("triton")(x, weight, cos, sin, heads, 1e-6, x.dtype)[0]


def measure(shape: tuple[int, ...], bandwidth: float) -> list[dict]:
    """The rows of one shape, forward and backward."""
    B, N, heads, d = shape
    new = lambda *sizes: torch.randn(*sizes, device="cuda")
    x = new(B, N, heads * d).bfloat16().requires_grad_()
    weight = (1 + 0.1 * new(heads * d)).requires_grad_()
    angle = new(1, N, 1, d // 2).repeat_interleave(2, -1)
    tables, cotangent = (angle.cos(), angle.sin()), new(B, N, heads, d).bfloat16()
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    y = wan(*wide, *(t.double() for t in tables))
    want = [y, *torch.autograd.grad(y, wide, cotangent.double())]
    us: dict[str, tuple[float, float]] = {}
    error = 0.0
    for system, f in (("graphopt", torch.compile(ours, dynamic=False)), ("eager", wan), ("inductor", torch.compile(
            wan, dynamic=False, options={"triton.mix_order_reduction": False}))):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = f(x, weight, *tables)

        def backward(y=y):
            return torch.autograd.grad(y, (x, weight), cotangent, retain_graph=True)

        torch.cuda.synchronize()
        if system == "graphopt":
            error = max(((a.double() - b).norm() / b.norm()).item() for a, b in zip([y, *backward()], want))
        us[system] = replayed(lambda f=f: f(x, weight, *tables), stream), replayed(backward, stream)
    rows = []
    for i, direction in enumerate(("forward", "backward")):
        floor = ((2 + i) * x.nbytes + 2 * tables[0].nbytes) / bandwidth / 1e6
        rows.append(dict(direction=direction, shape=list(shape), us={s: t[i] for s, t in us.items()}, error=error,
                         roofline=floor / us["graphopt"][i]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--per-head", action="store_true")
    parser.add_argument("--cases", default=rotary_heads.DEFAULT, help="with --per-head")
    parser.add_argument("--tune", action="store_true", help="with --per-head")
    parser.add_argument("--tune-only", action="store_true", help="with --per-head")
    parser.add_argument("--warm", action="store_true", help="with --per-head")
    args = parser.parse_args()
    torch._functorch.config.donated_buffer = False
    if args.per_head:
        rotary_heads.run(args.cases.split(","), not args.tune_only, args.tune or args.tune_only, args.warm, args.out)
        return
    bandwidth = copy_tb_per_s()
    for text in args.shapes.split(","):
        rows = measure(tuple(map(int, text.split("x"))), bandwidth)
        for row in rows:
            times = "  ".join(f"{s} {t:.1f}" for s, t in row["us"].items())
            print(f"{text} {row['direction']:8s} {row['roofline']:.3f} error {row['error']:.1e}  {times}", flush=True)
        save("rotary", rows, ("direction", "shape", "form"), {"copy_tb_per_s": bandwidth}, args.out)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
