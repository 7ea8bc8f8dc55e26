"""Planned steps of streamed models of 14, 33 and 105 B parameters on hosts with 1.5 TB: what fits and what binds.

    python benchmarks/stream_hosts.py

Nothing runs: `graphopt.stream_plan` on Wan-shaped models on the meta device, with one GPU of an H200's rates.  Links
and host memory are assumptions but for "Gen5, as measured".  mfu: 6 FLOPs per parameter and token, and attention's,
against 989e12; floor_s: the uploads or the optimizer alone, whatever the tokens.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from _results import save

import graphopt
from graphopt.schedule.stream_plan import Rates

# name -> heads of 128, layers, width of the feed-forward part
MODELS = {"14B": (40, 40, 13824), "33B": (56, 48, 19200), "105B": (80, 75, 27648)}
GEN5 = Rates()
HOSTS = {
    "Gen4, 8 channels DDR4": replace(GEN5, h2d=25e9, d2h=25e9, adamw=130e9, origin="assumed"),
    "Gen5, as measured": GEN5,
    "Gen5, 12 channels DDR5": replace(GEN5, h2d=55e9, d2h=55e9, adamw=350e9, origin="assumed"),
    "Gen6, two sockets": replace(GEN5, h2d=110e9, d2h=110e9, adamw=600e9, origin="assumed"),
    "C2C, LPDDR5X": replace(GEN5, h2d=400e9, d2h=400e9, adamw=400e9, origin="assumed"),
}
PEAK = 989e12


def build(heads: int, layers: int, feed: int) -> torch.nn.Module:
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel(num_layers=layers, num_attention_heads=heads, attention_head_dim=128,
                                      ffn_dim=feed, in_channels=16, out_channels=16, text_dim=4096, freq_dim=256)
    return model.to(torch.bfloat16)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", default="3000,32760,75600")
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    rows = []
    for name, (heads, layers, feed) in MODELS.items():
        model = build(heads, layers, feed)
        params, width = sum(q.numel() for q in model.parameters()), 128 * heads
        for host, rates in HOSTS.items():
            for tokens in map(int, a.tokens.split(",")):
                for update in ("priority", "deferred"):
                    plan = graphopt.stream_plan(model, tokens, update=update, rates=rates, slots=2)
                    flops = 6 * params * tokens + 12 * layers * tokens * tokens * width
                    floor = max(plan.bound.step["upload"], plan.bound.step["optimizer"])
                    rows.append(dict(
                        model=name, params_b=round(params / 1e9, 1), host=host, tokens=tokens, update=update,
                        host_tb=plan.host_bytes / 1e12, device_gb=plan.device_bytes / 1e9, step_s=plan.step_s,
                        bound_s=plan.bound.seconds, binds=plan.bound.binds, floor_s=floor,
                        mfu=flops / plan.step_s / PEAK))
                    print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    save("stream_hosts", rows, ("model", "host", "tokens", "update"), {}, a.out)


if __name__ == "__main__":
    main()
