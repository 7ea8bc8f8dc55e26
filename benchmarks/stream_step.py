"""Steps of a streamed Wan-shaped model against the same compiled layers resident, in one run.

    python benchmarks/stream_step.py [--layers 30] [--width 1.3b|14b] [--grid 5x30x52] [--slots 3]
                                     [--updates deferred,priority]

Measured: H2D, D2H and AdamW alone; the step with every layer in a slot and no optimizer (resident compute); then each
update order.  bound_ms: from the rates alone (docs/streaming.md); rho = bound_ms / step_ms.  Rows: as in product terms
`stream`, one per update order.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from _results import save

import graphopt
from graphopt.streaming import attach

WIDTHS = {
    "1.3b": dict(num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, text_dim=4096, freq_dim=256),
    "14b": dict(num_attention_heads=40, attention_head_dim=128, ffn_dim=13824, text_dim=4096, freq_dim=256),
    "tiny": dict(num_attention_heads=2, attention_head_dim=24, ffn_dim=64, text_dim=32, freq_dim=32),
}
GPU = torch.cuda.is_available()


def build(width: str, layers: int) -> torch.nn.Module:
    """Random weights in bf16, on the device; tables and norms in fp32 as diffusers keeps them."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    with torch.device("cuda" if GPU else "cpu"):
        model = WanTransformer3DModel(num_layers=layers, in_channels=16, out_channels=16, rope_max_seq_len=1024,
                                      **WIDTHS[width]).to(torch.bfloat16)
    for name, p in model.named_parameters():
        if any(k in name for k in ("scale_shift_table", "norm1", "norm2", "norm3")):
            p.data = p.data.float()
    return model.train()


def inputs(grid: tuple[int, int, int], text: int) -> dict:
    """One random sample of that many latent tokens."""
    torch.manual_seed(1)
    T, H, W = grid
    new = lambda *shape: torch.randn(*shape, device="cuda" if GPU else "cpu", dtype=torch.bfloat16)
    return dict(hidden_states=new(1, 16, T, 2 * H, 2 * W), timestep=torch.tensor([500], device=new(1).device),
                encoder_hidden_states=new(1, 512 if text > 100 else 8, text), return_dict=False)


def mark():
    """A point in time on the compute stream."""
    if not GPU:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a, b) -> float:
    """Milliseconds."""
    if not GPU:
        return 1e3 * (b - a)
    b.synchronize()
    return a.elapsed_time(b)


def steps(model, kw: dict, opt, n: int, warm: int) -> tuple[list[float], list[float], list[float]]:
    """Step, forward and backward times of a running loop (the host at most one step ahead), and losses."""
    times, forwards, losses, ends = [], [], [], [mark()]
    for i in range(n):
        start = mark()
        loss = model(**kw)[0].float().square().mean()
        middle = mark()
        loss.backward()
        if opt is not None:
            opt.step()
            opt.zero_grad()
        losses.append(loss.detach())
        ends.append(mark())
        if GPU:
            ends[-2].synchronize()
        if i >= warm:
            times.append((ends[-2], ends[-1]))
            forwards.append((start, middle))
    return [between(*t) for t in times], [between(*t) for t in forwards], [x.item() for x in losses]


def rates(engine, opt) -> dict[str, float]:
    """GB/s of each transfer and of AdamW (26 B per parameter of the split layout), alone, on the real buffers."""
    layers = engine.store.layers
    link, ring = engine.link, engine.ring
    out = {}

    def timed(work, nbytes: int) -> float:
        best = 0.0
        for _ in range(3):
            if GPU:
                torch.cuda.synchronize()
            t = time.perf_counter()
            for event in [work(x) for x in layers]:
                link.join(event)
            best = max(best, nbytes / (time.perf_counter() - t) / 1e9)
        return best

    total = sum(x.nbytes for x in layers)
    out["h2d"] = timed(lambda x: link.upload(ring.slots[0].buffer[:x.nbytes], x.weights, None), total)
    slab = engine.gradients.slabs[0]
    out["d2h"] = timed(lambda x: link.download(engine.store.allocate_slab(x), slab[:x.grad_bytes], None),
                       sum(x.grad_bytes for x in layers))
    if opt is not None:
        from graphopt.codegen.adamw import Hyper

        hyper = Hyper(0.0, 0.9, 0.999, 1e-8, 0.0, 1)

        def adamw(x) -> None:
            state = opt.states[x]
            flat = lambda e: e.gradient(x.slab).as_strided((e.numel,), (1,))
            opt.updates.kernel([state.piece(e, flat(e), hyper) for e in x.trained])

        for x in layers:
            x.slab.zero_()
        out["adamw"] = timed(adamw, 26 * sum(x.elements for x in layers))
        for x in layers:  # as it was
            opt.states[x].exp_avg.zero_()
            opt.states[x].exp_avg_sq.zero_()
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--layers", type=int, default=30)
    p.add_argument("--width", choices=sorted(WIDTHS), default="1.3b")
    p.add_argument("--grid", default="5x30x52")
    p.add_argument("--slots", type=int, default=3)
    p.add_argument("--resident", type=int, default=0, help="first layers that stay on the device")
    p.add_argument("--updates", default="deferred,priority")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--out", type=Path)
    p.add_argument("--compiler", default="inductor")
    a = p.parse_args()
    grid = tuple(int(x) for x in a.grid.split("x"))
    tokens = grid[0] * grid[1] * grid[2]
    say = lambda *x: print(*x, flush=True)
    t0 = time.perf_counter()
    model = build(a.width, a.layers)
    params = sum(q.numel() for q in model.parameters())
    graphopt.stream(model, "cuda" if GPU else "cpu", slots=a.layers, resident=a.resident)
    if GPU:
        torch.cuda.empty_cache()
    engine = attach.engine_of(model)
    first = engine.store.layers[0]
    now = lambda: f"[{time.perf_counter() - t0:.1f} s]"
    say(f"{now()} {params / 1e9:.3f} B parameters, {len(engine.store.layers)} layers of {first.nbytes / 1e6:.1f} MB, "
        f"pinned {first.weights.is_pinned() if GPU else '-'}")
    options = {"graphopt.compiler": a.compiler}
    if a.compiler != "inductor":
        options["graphopt.rules"] = []
    step = torch.compile(model, backend="graphopt", options=options)
    kw = inputs(grid, WIDTHS[a.width]["text_dim"])
    t = time.perf_counter()
    loss = step(**kw)[0].float().square().mean()
    loss.backward()
    if GPU:
        torch.cuda.synchronize()
    say(f"{now()} first step (compile) {time.perf_counter() - t:.1f} s, loss {loss.item():.5f}; "
        f"{graphopt.last_report().graphs[-1].notes}")
    engine.gradients.clear()
    model.zero_grad()

    class Nothing:
        def step(self) -> None: ...
        def zero_grad(self) -> None:
            engine.gradients.clear()
            model.zero_grad()

    resident, forward, losses = steps(step, kw, Nothing(), a.steps, 2)
    r, f = statistics.median(resident), statistics.median(forward)
    say(f"resident compute (all layers in slots, gradients still copied down): {r:.1f} ms, forward {f:.1f}; {resident}")
    opt = graphopt.HostAdamW(model.parameters(), lr=1e-5)
    engine.set_slots(a.slots)
    if GPU:
        torch.cuda.empty_cache()
    rate = rates(engine, opt)
    say(f"{now()} GB/s alone: " + " ".join(f"{k} {v:.1f}" for k, v in rate.items()))
    nb = sum(x.nbytes for x in engine.store.layers)
    up1, up2 = nb / rate["h2d"] / 1e6, (nb - a.slots * first.nbytes) / rate["h2d"] / 1e6
    down = sum(x.grad_bytes for x in engine.store.layers) / rate["d2h"] / 1e6
    adam = 26 * sum(x.elements for x in engine.store.layers) / rate["adamw"] / 1e6
    b = r - f
    bounds = {"deferred": max(f, up1, adam) + max(b, up2, down), "priority": max(r, adam, up1 + up2),
              "in_backward": max(f, up1) + max(b, up2, down, adam)}
    rows: list[dict] = []
    for update in a.updates.split(","):
        opt.update, engine.gradients.keep_norms = update, update == "deferred"
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        misses, uploads = engine.ring.misses, engine.ring.uploads
        worked, waited = opt.updates.worked, engine.ring.waited
        try:
            times, fw, losses = steps(step, kw, opt, a.steps, 2)
        except Exception as error:  # the other orders are still worth measuring
            say(f"{update} FAILED: {type(error).__name__}: {error}")
            continue
        opt.flush()
        ms = statistics.median(times)
        peak = torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0
        busy, stood = opt.updates.worked - worked, engine.ring.waited - waited
        say(f"{now()} {update}: step {ms:.1f} ms ({min(times):.1f}-{max(times):.1f}), "
            f"forward {statistics.median(fw):.1f}, bound {bounds[update]:.1f}, rho {bounds[update] / ms:.3f}, "
            f"x{ms / r:.3f} resident, peak {peak:.2f} GiB, AdamW {1e3 * busy / a.steps:.0f} ms and host waits "
            f"{1e3 * stood / a.steps:.0f} ms a step, misses {engine.ring.misses - misses}, "
            f"uploads {engine.ring.uploads - uploads}, losses {losses[0]:.5f} {losses[-1]:.5f}")
        rows.append(dict(
            params_b=round(params / 1e9, 3), tokens=tokens, system="graphopt", update=update, overlap=True,
            slots=a.slots, resident=a.resident, layers=a.layers, width=a.width,
            forward_ms=statistics.median(fw), step_ms=ms, resident_ms=r,
            bound_ms=bounds[update], rho=bounds[update] / ms, peak_gib=peak,
            host_gib=engine.store.arena.nbytes / 2**30))
    save("stream", rows, ("params_b", "tokens", "system", "update", "slots", "resident", "layers"),
         {f"stream_{k}_gb_per_s": v for k, v in rate.items()}, a.out)


if __name__ == "__main__":
    main()
