"""The largest clip at 1080p that trains on one GPU: resident, streamed, streamed with sliding attention.

    python benchmarks/papers_clips.py --system resident|resident_checkpointed|streamed|streamed_dsa [--cap 64]

The model is Wan's block at the width of 105 B parameters (62 layers of 10,240 with 80 heads and an FFN of 40,960); as
many of its layers as a dense step can be waited for.  A clip of 1088 x 1920 has T x 68 x 120 tokens and 4 T - 3 frames.
resident: bf16 weights, fp32 masters and moments on the GPU, torch's fused AdamW; checkpointed: blocks recomputed.
streamed: graphopt.stream and HostAdamW; dsa: self-attention over 3 x 7 x 7 tokens at learned offsets.  All compiled by
graphopt, T dynamic.

One T after another is tried (forward, backward, update): two small ones, whose peaks foretell the limit (once before,
to compile), then from there until T fits and T + 1 runs out of memory, or --seconds are over.  A row per T: fits,
step_s, peak_gib, host_gib, cap_gib.  --cap: the memory that torch may take, where less than the whole GPU is to be
filled (the peaks are those of this process, so other processes may run beside it; the seconds then are theirs too).
Several systems may compile beside each other and measure in turn: --ready FILE is made when this one has compiled,
--after FILE,.. is waited for then.  --warm: compile and end.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # sizes change: no holes between them

import stream_step
import torch
from _results import save
from _turns import wait_for

import graphopt

WIDTHS = {"105b": dict(num_attention_heads=80, attention_head_dim=128, ffn_dim=40960, text_dim=4096, freq_dim=256)}
stream_step.WIDTHS |= WIDTHS
H, W = 68, 120
SYSTEMS = ("resident", "resident_checkpointed", "streamed", "streamed_dsa")
KEYS = ("figure", "system", "shape", "layers", "width", "cap_gib")
GPU = torch.cuda.is_available()
Step = Callable[[dict[str, Any]], None]


def status(key: str) -> float:
    """GiB, from what the kernel says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith(key)).split()[1]) / 2**20


def compiled(model: torch.nn.Module) -> Callable[..., Any]:
    """By graphopt; where there is no GPU (to try this script), captured and run in eager mode."""
    return torch.compile(model, backend="graphopt", options={} if GPU else {"graphopt.compiler": "aot_eager"})


def resident(model: torch.nn.Module) -> tuple[Callable[..., Any], Callable[[], None], Callable[[], None]]:
    """The compiled model, an update of fp32 masters, and what forgets gradients."""
    pairs = [(p, p.detach().float().clone().requires_grad_()) for p in model.parameters()]
    updates = [torch.optim.AdamW([master], lr=1e-5, fused=GPU) for _, master in pairs]  # one by one: one fp32 gradient
    for update, (_, master) in zip(updates, pairs):  # the moments exist before the first clip
        master.grad = torch.zeros_like(master)
        update.step()
        master.grad = None

    def step() -> None:
        for update, (p, master) in zip(updates, pairs):
            if p.grad is not None:
                master.grad, p.grad = p.grad.float(), None
                update.step()
                master.grad = None
                p.data.copy_(master.detach())

    return compiled(model), step, lambda: model.zero_grad(set_to_none=True)


def streamed(model: torch.nn.Module) -> tuple[Callable[..., Any], Callable[[], None], Callable[[], None]]:
    """The same of a streamed model; an update ends with its flush, so that its time counts."""
    graphopt.stream(model, "cuda" if GPU else "cpu", slots=2, resident=0, graphs="off")
    if GPU:
        torch.cuda.empty_cache()
    optimizer = graphopt.HostAdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.step()
        optimizer.flush()
        optimizer.zero_grad()

    return compiled(model), step, optimizer.zero_grad


def forget_cache() -> None:
    """Memory of the allocator that nothing lives in goes back to the device."""
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def probe(parts: tuple, T: int, text: int) -> dict[str, Any]:
    """One whole step of a clip of T latent frames: does it fit, its seconds and peaks."""
    forward, update, forget = parts
    forget_cache()
    kw = stream_step.inputs((T, H, W) if GPU else (T, 4, 6), text)
    torch._dynamo.maybe_mark_dynamic(kw["hidden_states"], 2)
    begun, fits = time.perf_counter(), True
    try:
        loss = forward(**kw)[0].float().square().mean()
        loss.backward()
        update()
        if GPU:
            torch.cuda.synchronize()
    except torch.OutOfMemoryError as error:
        fits = False
        print(str(error)[:200], flush=True)
    seconds = time.perf_counter() - begun
    peak = torch.cuda.max_memory_allocated() / 2**30 if GPU else float(T)
    loss = kw = None
    forget()
    return dict(fits=fits, step_s=seconds, peak_gib=peak, host_gib=status("VmHWM"))


def guess(found: dict[int, dict[str, Any]], capacity: float) -> int:
    """T that fills the memory, from the line through the two largest that fit; above the only one that does.

    Far from what was measured it stays 2 % below: a step that fits tells more than one that does not.
    """
    fitting = sorted((t, r["peak_gib"]) for t, r in found.items() if r["fits"])[-2:]
    if len(fitting) == 1:
        return fitting[0][0] + 1
    (a, p), (b, q) = fitting
    at = lambda room: b + int((room - q) * (b - a) / max(q - p, 1e-9))
    return at(capacity) if at(capacity) <= b + 2 else max(at(0.98 * capacity), b + 1)


def search(
    run: Callable[[int], dict[str, Any]], first: int, capacity: float, seconds: float, most: int = 128
) -> Iterator[tuple[int, dict[str, Any]]]:
    """T and its row until the limit stands between two neighbours, or no time is left for the next."""
    end, found, slow = time.monotonic() + seconds, {}, 0.0
    for T in (first, first + 2):
        found[T] = run(T)
        yield T, found[T]
    while True:
        low = max((t for t, r in found.items() if r["fits"]), default=0)
        high = min((t for t, r in found.items() if not r["fits"]), default=most)
        if high - low <= 1 or not low:
            return
        T = min(max(guess(found, capacity), low + 1), high - 1)
        slow = found[low]["step_s"] * (T / low) ** 2
        if time.monotonic() + slow > end:
            print(f"T = {T} would take {slow:.0f} s: the limit is above {low} and below {high}", flush=True)
            return
        found[T] = run(T)
        yield T, found[T]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--system", choices=SYSTEMS, required=True)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--width", choices=sorted(stream_step.WIDTHS), default="105b")
    p.add_argument("--groups", type=int, help="offsets per token; default: one per head, up to 40")
    p.add_argument("--seconds", type=float, default=220, help="no step is begun that would end after them")
    p.add_argument("--cap", type=float, help="GiB that may be filled; default: the whole GPU")
    p.add_argument("--first", type=int, help="the first T; default: 4 (streamed), 2 (resident)")
    p.add_argument("--ready", type=Path)
    p.add_argument("--after", default="")
    p.add_argument("--warm", action="store_true")
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    text = stream_step.WIDTHS[a.width]["text_dim"]
    begun = time.monotonic()
    whole = torch.cuda.mem_get_info()[1] / 2**30 if GPU else 16.0
    capacity = a.cap or whole - 1.5  # the context takes some of it
    if a.cap and GPU:
        torch.cuda.set_per_process_memory_fraction(a.cap / whole)
    model = stream_step.build(a.width, a.layers)
    params = sum(q.numel() for q in model.parameters()) / 1e9
    if a.system == "streamed_dsa":
        heads = stream_step.WIDTHS[a.width]["num_attention_heads"]
        config = graphopt.dsa.DSAConfig(window=(3, 7, 7), groups=a.groups or min(40, heads))
        graphopt.dsa.convert(model, config, select="blocks.*.attn1")
    if a.system == "resident_checkpointed":
        model.enable_gradient_checkpointing()
    parts = (streamed if a.system.startswith("streamed") else resident)(model)
    held = torch.cuda.memory_allocated() / 2**30
    print(f"[{time.monotonic() - begun:.0f} s] {a.system}: {params:.2f} B parameters; {held:.1f} GiB before the first "
          f"step, {status('VmRSS'):.1f} of the host; {capacity:.1f} GiB may be filled", flush=True)
    run = lambda T: probe(parts, T, text)
    start = a.first or (4 if a.system.startswith("streamed") else 2)  # 3 is a case of its own: the whole of the window
    for T in (start, start + 2):
        print(f"[{time.monotonic() - begun:.0f} s] compiled at T = {T}: {run(T)}", flush=True)
    forget_cache()
    if a.ready:
        a.ready.touch()
    if a.warm:
        return
    wait_for([Path(f) for f in a.after.split(",") if f], begun + a.seconds - time.monotonic())
    for T, row in search(run, start, capacity, a.seconds - (time.monotonic() - begun)):
        row = dict(figure="clip", system=a.system, shape=[T, H, W], layers=a.layers, width=a.width,
                   params_b=round(params, 3), tokens=T * H * W, frames=4 * T - 3,
                   cap_gib=a.cap, **row)
        print(f"[{time.monotonic() - begun:.0f} s]", row, flush=True)
        save("papers", [row], KEYS, {"memory_gib": whole} if GPU else {}, a.out)


if __name__ == "__main__":
    main()
