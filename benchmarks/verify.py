"""`graphopt.verify` on a Wan-1.3B-shaped transformer of four layers: every site passes, what it costs, a planted fault.

    python benchmarks/verify.py [--layers 4] [--grid 21,30,52] [--tiny] [--out FOLDER]

`extra_gib` is the peak during verification above what was allocated before it.  Its bound is one site in fp64
(`site_fp64_gib`: values, saved values and gradients of the largest site, in fp64 and twice in the model's dtype) plus
one set of activations (`activations_gib`: what an eager training forward leaves allocated).
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from _results import save

import graphopt
from graphopt.passes import catalogue, norm_modulate, ops_view, verify

GIB = 1 << 30


def build(layers: int, tiny: bool, device: str) -> torch.nn.Module:
    from diffusers import WanTransformer3DModel

    from graphopt._factories import to_bf16

    sizes: dict[str, Any] = dict(num_attention_heads=12, attention_head_dim=128, in_channels=16, out_channels=16,
                                 text_dim=4096, freq_dim=256, ffn_dim=8960)
    if tiny:
        sizes = dict(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
                     freq_dim=32, ffn_dim=32, rope_max_seq_len=64)
    torch.manual_seed(0)
    with torch.device(device):
        model = WanTransformer3DModel(**sizes, num_layers=layers)
    for p in model.parameters():
        if (p == 0).all():
            torch.nn.init.normal_(p, std=0.02)
    return to_bf16(model).train()


def inputs(grid: tuple[int, ...], tiny: bool, device: str) -> dict[str, Any]:
    t, h, w = grid
    channels, text, words = (4, 16, 7) if tiny else (16, 4096, 512)
    make = lambda *shape: torch.randn(*shape, device=device, dtype=torch.bfloat16)
    return dict(hidden_states=make(1, channels, t, 2 * h, 2 * w), timestep=torch.tensor([500], device=device),
                encoder_hidden_states=make(1, words, text), return_dict=False)


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def activations(model: torch.nn.Module, kwargs: dict[str, Any]) -> int:
    """Bytes an eager training forward leaves allocated."""
    before = allocated()
    out = model(**kwargs)[0]
    size = allocated() - before
    del out
    return size


def site_bytes(placed: dict[Any, list[Any]]) -> int:
    """The largest site: values and gradients of its chain and inputs, in fp64 and twice as they are."""
    worst = 0
    for p in (p for ps in placed.values() for p in ps):
        tensors = [v for n in (*p.chain, *p.leaves) if (v := ops_view.value(n)) is not None]
        worst = max(worst, sum(2 * v.numel() * (8 + 2 * v.dtype.itemsize) for v in tensors))
    return worst


class Watch:
    """Peak memory and time of each call of `verify.check`."""

    def __init__(self) -> None:
        self.extra, self.site, self.seconds, self.checked = 0, 0, 0.0, 0
        self.real = verify.check

    def __call__(self, gm: Any, values: Any, placed: Any, stands_for: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before, start = allocated(), time.perf_counter()
        found = self.real(gm, values, placed, stands_for)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.extra = max(self.extra, torch.cuda.max_memory_allocated() - before)
        self.seconds += time.perf_counter() - start
        self.site = max(self.site, site_bytes(placed))
        self.checked += len(found)
        return found


def swapped(match: Any) -> Any:
    """The planted fault: scale and shift change places."""
    made = norm_modulate.replace(match)
    for a, b in (("scale", "shift"), ("scale.0", "shift.0")):
        if a in made.inputs and b in made.inputs:
            made.inputs[a], made.inputs[b] = made.inputs[b], made.inputs[a]
            made.views = {b: match.views("scale"), a: match.views("shift")}
    return made


def first_step(model: torch.nn.Module, kwargs: dict[str, Any], **options: Any) -> tuple[Any, float]:
    torch._dynamo.reset()
    step = torch.compile(model, backend="graphopt", options={f"graphopt.{k}": v for k, v in options.items()})
    start = time.perf_counter()
    step(**kwargs)[0].float().mean().backward()
    model.zero_grad()
    return step, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--grid", default="21,30,52")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compiler", default="aot_eager")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    grid = tuple(map(int, args.grid.split(",")))
    model, kwargs = build(args.layers, args.tiny, device), inputs(grid, args.tiny, device)
    row: dict[str, Any] = dict(model="wan-1.3b", layers=args.layers, grid=list(grid), compiler=args.compiler)
    model(**kwargs)[0].float().mean().backward()
    model.zero_grad()
    row["activations_gib"] = activations(model, kwargs) / GIB
    options = dict(select="all", compiler=args.compiler)
    _, row["plain_first_step_s"] = first_step(model, kwargs, **options)
    watch = Watch()
    verify.check = watch
    step, row["first_step_s"] = first_step(model, kwargs, verify=True, **options)
    report = graphopt.report(step)
    found = [c for g in report.graphs for p in g.passes for c in p.verified]
    worst = max(found, key=lambda c: c.error / c.limit)
    row |= dict(
        kernels=sum(k.direction == "forward" for k in report.kernels), modulate=report.count("modulate", "rewritten"),
        gate=report.count("gate", "rewritten"), checked=len(found), passed=sum(c.ok for c in found),
        worst_of_limit=worst.error / worst.limit, worst=str(worst), extra_gib=watch.extra / GIB,
        site_fp64_gib=watch.site / GIB, verify_s=watch.seconds,
    )
    row["within_bound"] = row["extra_gib"] <= row["site_fp64_gib"] + row["activations_gib"]
    print(report, flush=True)
    print(row, flush=True)

    wrong_rule = dataclasses.replace(norm_modulate.RULE, replace=swapped)
    catalogue.RULES = tuple(wrong_rule if r is norm_modulate.RULE else r for r in catalogue.RULES)
    broken, _ = first_step(model, kwargs, verify=True, **options)
    caught = [s for s in graphopt.report(broken).declined if "failed verification" in (s.reason or "")]
    wrong = [s for s in graphopt.report(broken).sites if s.rule == "norm_modulate" and s.status == "rewritten"]
    reason = caught[0].reason if caught else None
    row |= dict(planted=len(caught) + len(wrong), caught=len(caught), planted_reason=reason)
    print({k: row[k] for k in ("planted", "caught", "planted_reason")}, flush=True)
    raised = "nothing"
    try:
        first_step(model, kwargs, verify=True, on_error="raise", **options)
    except Exception as error:
        from graphopt.errors import unwrap

        raised = type(unwrap(error)).__name__
    row["on_error_raise"] = raised
    print("on_error=raise:", raised, flush=True)
    if not args.tiny:
        save("verify", [row], ("model", "layers", "grid"), {}, args.out)


if __name__ == "__main__":
    main()
