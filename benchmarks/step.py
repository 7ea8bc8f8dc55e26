"""One training step of a Wan-shaped model (diffusers' class), side by side: eager, Inductor with and without its
mix-order reduction, graphopt.

    python benchmarks/step.py [--layers 4] [--grids 1x21x30x52,2x9x30x52] [--out FOLDER]

A row: forward_ms (no_grad), step_ms (forward + backward), peak_gib of a step, grad_norm over all parameters, and
grad_gap: the largest relative L2 distance of one parameter's gradient from eager's in the same dtype.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from _results import copy_tb_per_s, save
from triton.testing import do_bench

SYSTEMS = ("eager", "inductor", "inductor_no_mix_order", "graphopt")
CONFIG = dict(num_attention_heads=12, attention_head_dim=128, in_channels=16, out_channels=16, ffn_dim=8960,
              freq_dim=256, text_dim=4096, rope_max_seq_len=1024)


def build(layers: int) -> torch.nn.Module:
    """Wan 1.3B's widths in bf16, tables and norms in fp32 as diffusers keeps them."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = WanTransformer3DModel(num_layers=layers, **CONFIG).to(torch.bfloat16)
    for name, p in model.named_parameters():
        if "scale_shift" in name or "norm" in name:
            p.data = p.data.float()
    return model


def inputs(B: int, T: int, H: int, W: int) -> dict:
    """Random latents on a T x H x W token grid."""
    torch.manual_seed(1)
    new = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    return dict(hidden_states=new(B, 16, T, 2 * H, 2 * W), timestep=torch.randint(0, 1000, (B,), device="cuda"),
                encoder_hidden_states=new(B, 512, 4096), return_dict=False)


def compiled(model: torch.nn.Module, system: str):
    torch._dynamo.reset()
    if system == "eager":
        return model
    if system == "graphopt":
        return torch.compile(model, backend="graphopt")
    return torch.compile(model, options={"triton.mix_order_reduction": system == "inductor"})


def step(f, kw: dict) -> None:
    f(**kw)[0].float().square().mean().backward()


def measure(model: torch.nn.Module, system: str, kw: dict, reference: dict | None) -> tuple[dict, dict]:
    f = compiled(model, system)
    clear = lambda: [setattr(p, "grad", None) for p in model.parameters()]
    clear()
    start = time.perf_counter()
    step(f, kw)
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - start
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([g.float().norm() for g in grads.values()]).norm().item()
    gap = 0.0
    if reference:
        gap = max(((grads[n].float() - g.float()).norm() / g.float().norm().clamp_min(1e-12)).item()
                  for n, g in reference.items())
    clear()
    torch.cuda.reset_peak_memory_stats()
    step(f, kw)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30
    clear()
    with torch.no_grad():
        forward = do_bench(lambda: f(**kw), 200, 1000, return_mode="median")
    whole = do_bench(lambda: step(f, kw), 200, 2500, return_mode="median")
    row = dict(forward_ms=forward, step_ms=whole, peak_gib=peak, grad_norm=norm, grad_gap=gap, compile_s=compile_s)
    if system == "graphopt":
        import graphopt

        report = graphopt.report(f)
        print(report, flush=True)
        row |= {f"{k}_{w}": report.graphs and report.count(k, w) for k in ("modulate", "gate")
                for w in ("matched", "rewritten")}
    return row, grads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--grids", default="1x21x30x52,2x9x30x52")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ceilings = {"copy_tb_per_s": copy_tb_per_s()}
    model = build(args.layers)
    for grid in args.grids.split(","):
        B, T, H, W = map(int, grid.split("x"))
        kw, reference = inputs(B, T, H, W), None
        for system in args.systems.split(","):
            try:
                row, grads = measure(model, system, kw, reference)
            except Exception as error:  # stock Inductor may raise here: that is a result
                row, grads = dict(error=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"), None
            if system == "eager":
                reference = grads
            row = dict(model="wan-1.3b", grid=f"{T}x{H}x{W}", batch=B, layers=args.layers, system=system, **row)
            print({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            save("step", [row], ("model", "grid", "batch", "layers", "system"), ceilings, args.out)
            del grads
        del reference
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
