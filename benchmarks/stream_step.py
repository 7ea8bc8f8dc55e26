"""Steps of a streamed Wan-shaped model against the same compiled layers resident, in one run.

    python benchmarks/stream_step.py [--layers 30] [--width 1.3b|14b] [--grids 5x30x52,21x30x52] [--slots 3]
                                     [--resident 2,4] [--updates "deferred,priority,serial;priority"]
                                     [--timeline FOLDER]

Measured: H2D, D2H and AdamW alone and together; the step with every layer in a slot and no optimizer (resident
compute); then each update order ("priority@20/8+graphs": with 20 threads, 8 slots and CUDA graphs per class of layers).
"serial": one stream for kernels and copies, the update at the end of the step.  Several numbers of resident layers take
one model each.  Lists of orders, separated by ";", go to the grids of the first model in turn, then to those of the
next; the last one serves all that are left.  Resident compute is measured before and after the orders of a grid, and
rows hold the median of both.
bound_ms: from the rates alone (docs/streaming.md); rho = bound_ms / step_ms.  One row per grid, order and number of
cores, with the rates of its run (adamw_pool: on the CPUs of that order's threads), and with those of the model's own
copies, alone, right after the order: a link that others slowed down shows there.  adamw_ms: of a step, in the
optimizer's loop; adamw_call_ms: with the way back to the interpreter.
--steps: warm-up included: two, or all but one where there are fewer than three, to try something.
--timeline: where to keep a timeline (Chrome trace and page) of two steps of each order.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import statistics
import time
import weakref
from pathlib import Path

import torch
from _results import save
from _stream_rates import Box, bounds, copies, cores, number, rss

import graphopt
from graphopt.schedule.stream_timeline import busy
from graphopt.streaming import attach, numa
from graphopt.streaming import compile as classes
from graphopt.streaming.optimizer import kernel_of
from graphopt.streaming.updates import Updates

WIDTHS = {
    "1.3b": dict(num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, text_dim=4096, freq_dim=256),
    "14b": dict(num_attention_heads=40, attention_head_dim=128, ffn_dim=13824, text_dim=4096, freq_dim=256),
    "tiny": dict(num_attention_heads=2, attention_head_dim=24, ffn_dim=64, text_dim=32, freq_dim=32),
}
KEYS = ("params_b", "tokens", "system", "update", "slots", "resident", "layers", "threads", "graphs", "cores")
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


def parsed(update: str, a: argparse.Namespace) -> tuple[str, int | None, int]:
    """Kind, threads and slots of an order as it is asked for."""
    found = re.fullmatch(r"(\w+)(?:@(\d+))?(?:/(\d+))?(?:\+graphs)?", update)
    if found is None:
        raise SystemExit(f"stream_step: no such order: {update}")
    kind, threads, slots = found.groups()
    return kind, int(threads) if threads else a.threads, int(slots) if slots else 1 if kind == "serial" else a.slots


class Nothing:
    """No optimizer: gradients are dropped."""

    def __init__(self, model, engine) -> None:
        self.model, self.engine = model, engine

    def step(self) -> None: ...

    def zero_grad(self) -> None:
        self.engine.gradients.clear()
        self.model.zero_grad()


class Serial:
    """The update in the step, nothing beside it."""

    def __init__(self, opt) -> None:
        self.opt = opt

    def step(self) -> None:
        if GPU:  # the launches run ahead: without this the first updates would start under the last layers' backward
            torch.cuda.synchronize()
        self.opt.step()
        self.opt.flush()

    def zero_grad(self) -> None:
        self.opt.zero_grad()


def first_step(step, kw: dict, engine, model) -> tuple[float, float]:
    t = time.perf_counter()
    loss = step(**kw)[0].float().square().mean()
    loss.backward()
    if GPU:
        torch.cuda.synchronize()
    engine.gradients.clear()
    model.zero_grad()
    return time.perf_counter() - t, loss.item()


def streamed(a: argparse.Namespace, resident: int, say) -> tuple[torch.nn.Module, object, object]:
    """The model, its runtime, and its step, to be compiled."""
    model = build(a.width, a.layers)
    graphopt.stream(model, "cuda" if GPU else "cpu", slots=a.slots, resident=resident)
    if GPU:
        torch.cuda.empty_cache()
    engine = attach.engine_of(model)
    first = engine.store.layers[0]
    say(f"{sum(q.numel() for q in model.parameters()) / 1e9:.3f} B parameters, {len(engine.store.layers)} layers of "
        f"{first.nbytes / 1e6:.1f} MB, {resident} resident, pinned {first.weights.is_pinned() if GPU else '-'}")
    options = {"graphopt.compiler": a.compiler}
    if a.compiler != "inductor":
        options["graphopt.rules"] = []
    return model, engine, torch.compile(model, backend="graphopt", options=options, dynamic=False)


def optimizer(model: torch.nn.Module, threads: int | None):
    opt = graphopt.HostAdamW(model.parameters(), lr=1e-5, threads=threads)
    for state in opt.states.values():  # a first update would meet untouched pages
        state.exp_avg.zero_(), state.exp_avg_sq.zero_(), state.residual.zero_()
    return opt


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--layers", type=int, default=30)
    p.add_argument("--width", choices=sorted(WIDTHS), default="1.3b")
    p.add_argument("--grids", default="5x30x52")
    p.add_argument("--slots", type=int, default=3)
    p.add_argument("--resident", default="0", help="first layers that stay on the device; several numbers by commas")
    p.add_argument("--updates", default="deferred,priority", help="orders, lists for several grids separated by ;")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--threads", type=int, help="of the optimizer's kernel")
    p.add_argument("--rates-seconds", type=float, default=0.4, help="of each rate of the box; 0: none")
    p.add_argument("--out", type=Path)
    p.add_argument("--timeline", type=Path)
    p.add_argument("--timelines", type=int, default=100, help="of the first orders at each size")
    p.add_argument("--compiler", default="inductor")
    p.add_argument("--no-resident-run", action="store_true", help="skip the resident run: a model larger than the GPU")
    a = p.parse_args()
    if a.steps < 1:
        p.error("--steps: at least one")
    t0 = time.perf_counter()
    say = lambda *x: print(f"[{time.perf_counter() - t0:.1f} s]", *x, flush=True)
    say(f"{cores()} CPUs: {sorted({tuple(sorted(numa.siblings(c))) for c in os.sched_getaffinity(0)})}")
    threads = {parsed(u, a)[1] for x in a.updates.split(";") for u in x.split(",")}
    box = Box(a.rates_seconds, threads, 64 if a.width == "tiny" else 46_000_000)
    say("GB/s: " + " ".join(f"{k} {v:.1f}" for k, v in box.rate.items()), box.rates or "", "pools",
        {k: round(v, 1) for k, v in box.pools.items()})
    lists, at, kept = a.updates.split(";"), 0, []
    for resident in map(int, a.resident.split(",")):
        torch.compiler.reset()  # compiled frames hold the model before
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()
        model, engine, step = streamed(a, resident, say)
        opt = None
        for name in a.grids.split(","):
            updates = lists[min(at, len(lists) - 1)].split(",")
            opt = one_grid(a, box, model, engine, step, opt, resident, name, updates, say)
            kept += classes._shared.values()  # the next model's are the same
            at += 1
        del model, engine, step, opt


def one_grid(a, box: Box, model, engine, step, opt, resident: int, name: str, updates: list[str], say):
    """All orders at one size; returns the optimizer, made at the first."""
    grid = tuple(int(x) for x in name.split("x"))
    kw, tokens = inputs(grid, WIDTHS[a.width]["text_dim"]), grid[0] * grid[1] * grid[2]
    n, warm = (a.steps, min(2, a.steps - 1)) if tokens < 20000 else (max(3, a.steps // 2), 1)
    engine.optimizer = None
    seconds, loss = first_step(step, kw, engine, model)
    say(f"{name}: first step (compile) {seconds:.1f} s, loss {loss:.5f}; {graphopt.last_report().graphs[-1].notes}")
    r = f = float("nan")
    if not a.no_resident_run:
        engine.set_slots(a.layers - resident)
        times, forwards, _ = steps(step, kw, Nothing(model, engine), n, warm)
        r, f = statistics.median(times), statistics.median(forwards)
        say(f"{name}: resident compute (all layers in slots, gradients still copied down) {r:.1f} ms, "
            f"forward {f:.1f}; {[round(t, 1) for t in times]}")
        engine.set_slots(a.slots)
    opt = opt or optimizer(model, a.threads)
    engine.optimizer = weakref.ref(opt)
    if GPU:
        torch.cuda.empty_cache()
    bound = bounds(engine, box.rate, a.slots, r, f)
    say(f"{name}: ms alone: " + " ".join(f"{k} {bound[k]:.1f}" for k in ("adamw", "up", "down")))
    rows = []
    for update in updates:
        kind, threads, slots = parsed(update, a)
        engine.replays.set("on" if update.endswith("+graphs") else "off")
        serial = kind == "serial"
        opt.update = "deferred" if serial else kind
        engine.gradients.keep_norms = opt.update == "deferred"
        engine.set_slots(slots)
        bound = bounds(engine, box.rate, slots, r, f)
        engine.link.overlap(not serial)
        driver = Serial(opt) if serial else opt
        pictured = a.timeline is not None and updates.index(update) < a.timelines
        plan = graphopt.stream_plan(model, tokens, slots=slots, update=opt.update, rates=box.plan(threads))
        try:
            opt.flush()
            opt.updates = Updates(  # a thread of its own, on as many CPUs as this order's team has threads
                opt.store, engine.link, opt.states, kernel_of("auto", engine.link, threads), threads)
            row = order(model, step, kw, engine, driver, opt, a.timeline if pictured else None,
                        f"{tokens}-{resident}-{update.replace('/', '-')}", n, warm, say)
        except Exception as error:  # the other orders are still worth measuring
            say(f"{name} {update} FAILED: {type(error).__name__}: {error}")
            continue
        finally:
            engine.link.overlap(True)
        say(f"{name} {update}: bound {bound[kind]:.1f}, rho {bound[kind] / row['step_ms']:.3f}, "
            f"x{row['step_ms'] / r:.3f} resident; planned {1e3 * plan.step_s:.1f} ms, "
            f"peak {plan.peak_bytes / 2**30:.3f} GiB, host {plan.host_bytes / 2**30:.2f} GiB")
        row |= dict(params_b=round(sum(q.numel() for q in model.parameters()) / 1e9, 3), tokens=tokens,
                    system="serial" if serial else "graphopt", update=opt.update, overlap=not serial, slots=slots,
                    resident=resident, layers=a.layers, width=a.width, resident_ms=number(r),
                    bound_ms=number(bound[kind]), rho=number(bound[kind] / row["step_ms"]),
                    host_gib=engine.store.arena.nbytes / 2**30,
                    plan_host_gib=plan.host_bytes / 2**30, plan_device_gib=plan.device_bytes / 2**30, rss_gib=rss(),
                    plan_ms=None if serial else 1e3 * plan.step_s, plan_peak_gib=plan.peak_bytes / 2**30,
                    graphs="on" if update.endswith("+graphs") else None,
                    threads=threads or len(numa.pool_cpus(engine.link.device)), cores=cores(), steps=n - warm,
                    physical_cores=len({min(numa.siblings(c)) for c in os.sched_getaffinity(0)}),
                    rates_gb_per_s=box.of(threads) or None, **copies(engine))
        after = " ".join(f"{k[:3]} {row[k]:.1f}" for k in row if k.endswith("_after_gb_per_s"))
        say(f"{name} {update}: copies alone, GB/s: {after}")
        save("stream", [row], KEYS, {f"stream_{k}_gb_per_s": v for k, v in box.rate.items()}, a.out)
        rows.append(row)
    if rows and not a.no_resident_run:
        engine.optimizer = None
        engine.replays.set("off")
        engine.set_slots(a.layers - resident)
        after, forward, _ = steps(step, kw, Nothing(model, engine), n, warm)
        engine.set_slots(a.slots)
        r, f = statistics.median(times + after), statistics.median(forwards + forward)
        say(f"{name}: resident compute again {statistics.median(after):.1f} ms; of both {r:.1f}, forward {f:.1f}; "
            f"{[round(t, 1) for t in after]}")
        for row in rows:
            bound = bounds(engine, box.rate, row["slots"], r, f)
            kind = "serial" if row["system"] == "serial" else row["update"]
            row |= dict(resident_ms=r, resident_before_ms=statistics.median(times),
                        resident_after_ms=statistics.median(after), bound_ms=number(bound[kind]),
                        rho=number(bound[kind] / row["step_ms"]), adamw_alone_ms=number(bound["adamw"]))
            say(f"{name} {row['system']} {row['update']} {row['threads']} threads, {resident} resident, "
                f"{row['slots']} slots, graphs {row['graphs']}: {row['step_ms']:.1f} ms, "
                f"rho {row['rho'] or 0:.3f}, x{row['step_ms'] / r:.3f} resident, {row['peak_gib']:.2f} GiB")
        save("stream", rows, KEYS, {}, a.out)
    return opt


def order(
    model, step, kw: dict, engine, driver, opt, timeline: Path | None, label: str, n: int, warm: int, say
) -> dict:
    """Steps in one order of the update: what was measured."""
    steps(step, kw, driver, warm, 0)
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    misses, worked, waited = engine.ring.misses, opt.updates.worked, engine.ring.waited
    spent = lambda: getattr(opt.updates.kernel, "seconds", 0.0)
    inside = spent()
    n -= warm
    times, forward, losses = steps(step, kw, driver, n, 0)
    opt.flush()
    call, loop = 1e3 * (opt.updates.worked - worked) / n, 1e3 * (spent() - inside) / n
    ms = statistics.median(times)
    buffers, pool = engine.replays.nbytes
    peak = (torch.cuda.max_memory_allocated() + pool) / 2**30 if GPU else 0.0  # a pool's memory counts as free
    say(f"{label}: step {ms:.1f} ms ({min(times):.1f}-{max(times):.1f}), forward {statistics.median(forward):.1f}, "
        f"peak {peak:.2f} GiB, AdamW {call:.0f} ms ({loop:.0f} in its loop) and host waits "
        f"{1e3 * (engine.ring.waited - waited) / n:.0f} ms a step, misses {engine.ring.misses - misses}, "
        f"losses {losses[0]:.5f} {losses[-1]:.5f}")
    if timeline is not None:
        timeline.mkdir(parents=True, exist_ok=True)
        steps(step, kw, driver, 1, 0)
        with graphopt.stream_timeline(model) as line:
            steps(step, kw, driver, 2, 0)
        line.save(timeline / f"{label}.json")
        line.save(timeline / f"{label}.html", f"Two steps, {label}")
        bytes_up, elements = sum(x.nbytes for x in engine.store.layers), sum(x.elements for x in engine.store.layers)
        count = len(engine.store.layers)
        ups = sum(s.track == "upload" for s in line.spans)
        busiest = max(s.end for s in line.spans)
        say(f"{label}: two steps and the flush in {1e3 * busiest:.1f} ms; AdamW in the loop "
            f"{2 * 26 * elements / busy(line.spans, 'cpu') / 1e9:.1f} GB/s, uploads "
            f"{ups * bytes_up / count / max(1e-9, busy(line.spans, 'upload')) / 1e9:.1f} GB/s")
        print(line, flush=True)
    reserved = torch.cuda.max_memory_reserved() / 2**30 if GPU else 0.0
    if engine.replays.recorded:
        say(f"{label}: {engine.replays.recorded} graphs, {engine.replays.replayed} replays, inputs "
            f"{buffers / 2**30:.3f} GiB, pool {pool / 2**30:.3f} GiB, reserved {reserved:.2f}")
    return dict(forward_ms=statistics.median(forward), step_ms=ms, peak_gib=peak, reserved_gib=reserved,
                adamw_ms=loop, adamw_call_ms=call,
                graphs_gib=(buffers + pool) / 2**30)


if __name__ == "__main__":
    main()
