"""The largest clip at 1080p that trains on one GPU: resident, streamed, streamed with sliding attention.

    python benchmarks/papers_clips.py [--system resident|resident_checkpointed|streamed|streamed_dsa] [--cap 64]

The model is Wan's block at the width of 105 B parameters (62 layers of 10,240 with 80 heads and an FFN of 40,960), two
of its layers.  One more costs a streamed model its input, beside some twenty tensors of that size of the layer that is
computed.  The wider a model, the fewer tokens fill a GPU and the shorter is a dense step at the limit: about 50 s here,
by the arithmetic of --dry; three minutes with two layers of Wan 1.3B's width, a quarter of an hour with all 30.
A clip of 1088 x 1920 has T x 68 x 120 tokens and 4 T - 3 frames.
resident: bf16 weights, fp32 masters and moments on the GPU, torch's fused AdamW; checkpointed: blocks recomputed.
streamed: graphopt.stream and HostAdamW; dsa: self-attention over 3 x 7 x 7 tokens at learned offsets.  All compiled by
graphopt, T dynamic, with indices of 64 bits from the start (Inductor takes them where a tensor has more than 2^31
elements, and would compile again there).

One T after another is tried (forward, backward, update): T and 2 T small, whose peaks foretell the limit (T twice: the
first compiles), then from there until one fits and the next runs out of memory, or --seconds are over.  A row per T:
fits, step_s, peak_gib (allocated), reserved_gib, host_gib, loss, cap_gib.  --cap: the memory that torch may take, where
less than the whole GPU is to be filled (the peaks are those of this process, so other processes may run beside it; the
seconds then are theirs too).  Several systems may compile beside each other and measure in turn: --ready FILE is made
when this one has compiled, --after FILE,.. is waited for then.  --warm: compile and end, without an optimizer's state.
--dry: how long each step would take by its arithmetic, nothing is run.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
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
from graphopt.streaming import attach

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


def compiled(model: torch.nn.Module, **options: str) -> Callable[..., Any]:
    """By graphopt; where there is no GPU (to try this script), captured and run in eager mode."""
    return torch.compile(model, backend="graphopt", options=options if GPU else {"graphopt.compiler": "aot_eager"})


def indices_of_64_bits() -> None:
    """Let Inductor's kernels index with 64 bits at any size: one graph then serves every T."""
    from torch._inductor.codegen import simd

    assert hasattr(simd.SIMDScheduling, "can_use_32bit_indexing")
    simd.SIMDScheduling.can_use_32bit_indexing = staticmethod(lambda numel, buffers: False)


def estimate(width: str, layers: int, T: int, system: str) -> float:
    """Seconds of a step by its arithmetic: matrix products at 600 TFLOP/s, dense attention at 550."""
    shape = stream_step.WIDTHS[width]
    D, N = shape["num_attention_heads"] * shape["attention_head_dim"], T * H * W
    passes = 3 if system == "resident" else 4  # a backward is two; recomputed layers run their forward again
    linear = passes * 2 * N * layers * (6 * D * D + 2 * D * shape["ffn_dim"]) / 600e12
    attention = 0.0 if system == "streamed_dsa" else (passes + 0.5) * 4 * N * N * D * layers / 550e12
    return linear + attention


def resident(model: torch.nn.Module, warm: bool) -> tuple[Callable[..., Any], Callable[[], None], Callable[[], None]]:
    """The compiled model, an update of fp32 masters, and what forgets gradients."""
    whole = compiled(model, **{"graphopt.regions": "auto"} if len(model.blocks) > 4 else {})  # as a streamed one is
    if warm:
        return whole, lambda: None, lambda: model.zero_grad(set_to_none=True)
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

    return whole, step, lambda: model.zero_grad(set_to_none=True)


def streamed(model: torch.nn.Module, warm: bool) -> tuple[Callable[..., Any], Callable[[], None], Callable[[], None]]:
    """The same of a streamed model; an update ends with its flush, so that its time counts."""
    graphopt.stream(model, "cuda" if GPU else "cpu", slots=2, resident=0, graphs="off")
    if GPU:
        torch.cuda.empty_cache()
    if warm:
        nothing = stream_step.Nothing(model, attach.engine_of(model))
        return compiled(model), nothing.step, nothing.zero_grad
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
    """One whole step of a clip of T latent frames: does it fit, its seconds and peaks.

    A step that compiled has no seconds; one that failed otherwise than by its memory says so under `error`.
    """
    forward, update, forget = parts
    forget_cache()
    kw = stream_step.inputs((T, H, W) if GPU else (T, 4, 6), text)
    torch._dynamo.maybe_mark_dynamic(kw["hidden_states"], 2)
    graphs = lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    before, begun, found = graphs(), time.perf_counter(), {}
    try:
        loss = forward(**kw)[0].float().square().mean()
        loss.backward()
        update()
        found = {"fits": True, "loss": loss.item()}
    except torch.OutOfMemoryError as error:
        found = {"fits": False, "error": str(error)[:120]}
    except Exception as error:  # a kernel that cannot take this size, say
        found = {"fits": False, "error": f"{type(error).__name__}: {error}"[:300]}
        if not any(text in str(error) for text in ("out of memory", "ALLOC_FAILED")):
            found["other"] = True
    seconds = time.perf_counter() - begun
    if graphs() > before:
        print(f"T = {T}: compiled, {seconds:.1f} s", flush=True)
    peak, reserved = (f() / 2**30 if GPU else float(T)
                      for f in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved))
    loss = kw = None
    if not found.get("other"):  # after an error of the device nothing can be asked of it
        try:
            forget()
        except Exception as error:
            print(f"gradients of T = {T} are not given back: {error}", flush=True)
    return dict(found, step_s=None if graphs() > before else seconds, peak_gib=peak, reserved_gib=reserved,
                host_gib=status("VmHWM"))


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


def foretold(found: dict[int, dict[str, Any]], T: int) -> float:
    """Seconds of a step, from a T + b T^2 through the two largest that were timed; of one: all of it quadratic."""
    timed = sorted((t, r["step_s"]) for t, r in found.items() if r["fits"] and r["step_s"] is not None)[-2:]
    if not timed:
        return 0.0
    (t, x), (u, y) = timed[0], timed[-1]
    b = y / u**2 if t == u else max(0.0, (y / u - x / t) / (u - t))
    return max(y / u - b * u, 0.0) * T + b * T**2


def search(
    run: Callable[[int], dict[str, Any]], first: int, capacity: float, seconds: float, most: int = 128
) -> Iterator[tuple[int, dict[str, Any]]]:
    """T and its row until the limit stands between two neighbours, or no time is left for the next."""
    end, found = time.monotonic() + seconds, {}
    for T in (first, 2 * first):
        found[T] = run(T)
        yield T, found[T]
        if not found[T]["fits"]:
            break
    while not any(r.get("other") for r in found.values()):
        low = max((t for t, r in found.items() if r["fits"]), default=0)
        high = min((t for t, r in found.items() if not r["fits"]), default=most)
        if high - low <= 1 or not low:
            return
        T = min(max(guess(found, capacity), low + 1), high - 1)
        slow = foretold(found, T)
        if time.monotonic() + slow > end:
            print(f"T = {T} would take {slow:.0f} s: the limit is above {low} and below {high}", flush=True)
            return
        found[T] = run(T)
        yield T, found[T]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--system", choices=SYSTEMS, help="default: the paper's three, each in a process of its own")
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--width", choices=sorted(stream_step.WIDTHS), default="105b")
    p.add_argument("--groups", type=int, help="offsets per token; default: one for as few heads as 16 allow")
    p.add_argument("--seconds", type=float, default=220, help="no step is begun that would end after them")
    p.add_argument("--cap", type=float, help="GiB that may be filled; default: the whole GPU")
    p.add_argument("--first", type=int, help="the first T, tried with 2 T; default: 4 (streamed), 2 (resident)")
    p.add_argument("--ready", type=Path)
    p.add_argument("--after", default="")
    p.add_argument("--warm", action="store_true")
    p.add_argument("--dry", action="store_true")
    p.add_argument("--no-cudnn", action="store_true", help="attention by torch's other kernels, were cuDNN's to fail")
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    if a.system is None:
        line = [sys.executable, __file__, *sys.argv[1:], "--system"]
        sys.exit(max(subprocess.run([*line, s]).returncode for s in ("resident", "streamed_dsa", "streamed")))
    if a.dry:
        for T in (4, 8, 16, 24, 32, 48, 64, 96):
            print(f"T = {T}: {T * H * W:,} tokens, {estimate(a.width, a.layers, T, a.system):.1f} s")
        return
    indices_of_64_bits()
    torch.backends.cuda.enable_cudnn_sdp(not a.no_cudnn)
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
        groups = a.groups or max(n for n in range(1, 17) if heads % n == 0)
        config = graphopt.dsa.DSAConfig(window=(3, 7, 7), groups=groups)
        graphopt.dsa.convert(model, config, select="blocks.*.attn1")
    if a.system == "resident_checkpointed":
        model.enable_gradient_checkpointing()
    parts = (streamed if a.system.startswith("streamed") else resident)(model, a.warm)
    held = torch.cuda.memory_allocated() / 2**30
    print(f"[{time.monotonic() - begun:.0f} s] {a.system}: {params:.2f} B parameters; {held:.1f} GiB before the first "
          f"step, {status('VmRSS'):.1f} of the host; {capacity:.1f} GiB may be filled", flush=True)
    run = lambda T: probe(parts, T, text)
    start = a.first or (4 if a.system.startswith("streamed") else 2)  # 3 is a case of its own: the whole of the window
    print(f"[{time.monotonic() - begun:.0f} s] first step, T = {start}: {run(start)}", flush=True)
    forget_cache()
    if a.ready:
        a.ready.touch()
    if a.warm:
        return
    wait_for([Path(f) for f in a.after.split(",") if f], begun + a.seconds - time.monotonic())
    for T, row in search(run, start, capacity, a.seconds - (time.monotonic() - begun)):
        row = dict(figure="clip", system=a.system, shape=[T, H, W], layers=a.layers, width=a.width,
                   params_b=round(params, 3), tokens=T * H * W, frames=4 * T - 3,
                   cap_gib=a.cap, cudnn=not a.no_cudnn,
                   **(dict(groups=groups) if a.system == "streamed_dsa" else {}), **row)
        print(f"[{time.monotonic() - begun:.0f} s]", row, flush=True)
        save("papers", [row], KEYS, {"memory_gib": whole} if GPU else {}, a.out)


if __name__ == "__main__":
    main()
