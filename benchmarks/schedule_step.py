"""Policies in a real training loop, predicted beside measured, on any number of ranks:

    torchrun --nproc-per-node=N benchmarks/schedule_step.py --machine h200

A Wan-shaped DiT (diffusers' class, 1.3B widths, a few layers), FSDP2, mixed precision, blocks compiled by graphopt, on
data C (data A capped at 32,760 tokens; `--cap 97200 --checkpoint` for data A).  On the spot: shape benchmark, fit,
plans of every policy with the same global batch, some steps of each.  Per policy: tokens/s, spread of step times and
loads, the mean busy time over ranks (their microbatches again, collectives off) over the wall time of the slowest, mean
error of the predicted step times, graphs compiled.  The plan of each policy is also simulated, here and for
`--plan-ranks`.

Writes rows of check `step` to benchmarks/results/<machine>/schedule.json.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.fx.experimental._config

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

import schedule_data as data  # noqa: E402
from schedule_shape import compile_first, start  # noqa: E402

import graphopt  # noqa: E402
import schedule  # noqa: E402
from graphopt.loading.microbatch import MicrobatchInfo  # noqa: E402
from graphopt.schedule.bench import Shape  # noqa: E402
from graphopt.schedule.costmodel import CostFit  # noqa: E402
from graphopt.schedule.dataset import Samples  # noqa: E402
from graphopt.schedule.planner import plan_batches  # noqa: E402
from graphopt.schedule.simulate import cv, simulate  # noqa: E402

CAPTION = 512
ROWS = 40_000


class Rows(torch.utils.data.Dataset):
    """Row numbers; latents are made on the device."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> int:
        return row


class Job:
    """The model, its optimizer, and what a microbatch runs."""

    def __init__(self, o: argparse.Namespace, device: torch.device) -> None:
        from diffusers import WanTransformer3DModel
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch.fx.experimental._config.use_duck_shape = False  # a square image is no shape of its own
        torch.manual_seed(0)
        with torch.device(device):
            model = WanTransformer3DModel(
                num_attention_heads=o.width // 128, attention_head_dim=128, ffn_dim=int(o.width * 35 / 6),
                num_layers=o.layers, in_channels=16, out_channels=16, text_dim=o.text_dim,
            )  # fmt: skip
        if o.checkpoint:
            model.enable_gradient_checkpointing()
        for block in model.blocks if o.system != "eager" else ():
            options = {"graphopt.select": "all"} if o.system == "graphopt_all" else {}
            block.compile(backend="inductor" if o.system == "inductor" else "graphopt", dynamic=True,
                          **({"options": options} if options else {}))  # fmt: skip
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        self.model, self.device, self.text_dim = fully_shard(model, mp_policy=policy), device, o.text_dim
        self.opt = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")

    def loss(self, s: Shape) -> torch.Tensor:
        """Sum over tokens of the mean squared output."""
        new = lambda *size: torch.randn(*size, device=self.device, dtype=torch.bfloat16)
        x, text = new(s.B, 16, s.T, 2 * s.H, 2 * s.W), new(s.B, s.L or CAPTION, self.text_dim)
        t = torch.full((s.B,), 500, device=self.device)
        out = self.model(x, timestep=t, encoder_hidden_states=text, return_dict=False)[0]
        return out.float().square().mean() * s.B * s.S

    def microbatch(self, mb: MicrobatchInfo) -> None:
        """Forward and backward of one planned microbatch, and the optimizer after the last."""
        with graphopt.accumulate(self.model, mb):
            (self.loss(mb.shape) * mb.loss_scale).backward()
        if mb.last:
            self.opt.step()
            self.opt.zero_grad(set_to_none=True)

    def alone(self, s: Shape) -> None:
        """The same without any collective: a microbatch in the middle of a step that never ends."""
        self.model.set_requires_gradient_sync(False)
        self.model.set_reshard_after_forward(False)
        self.model.set_reshard_after_backward(False)
        (self.loss(s) / (s.B * s.S)).backward()

    def clear(self) -> None:
        """Free gradients and whole parameters."""
        for m in self.model.modules():
            if isinstance(m, torch.distributed.fsdp.FSDPModule):
                m.reshard()
        self.model.zero_grad(set_to_none=True)
        gc.collect()

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def largest(values: list[float], device: torch.device) -> np.ndarray:
    """Elementwise maximum over ranks."""
    t = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t.cpu().numpy()


def mean(value: float, device: torch.device) -> float:
    t = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(t)
    return float(t.item()) / dist.get_world_size()


def samples_of(o: argparse.Namespace) -> Samples:
    """Data C (or A), its grids divided by `--shrink` for tests on a CPU."""
    s = data.data_a(ROWS, o.seed, o.cap)
    if o.shrink == 1:
        return s
    table = s.shapes
    h, w = (np.maximum(1, x // o.shrink) for x in (table.h, table.w))
    small = np.stack([table.t, h, w, table.caption], 1)
    rows, index = np.unique(small, axis=0, return_inverse=True)
    return Samples.of_shapes(index.reshape(-1)[s.shape_id], type(table).of(rows), s.where)


def fit_here(job: Job, samples: Samples, o: argparse.Namespace, m_mem: int) -> CostFit:
    """Shape benchmark over the data's own shapes, collectives off, and the overhead of a step."""
    order = np.argsort(samples.shapes.tokens, kind="stable")
    picked = order[np.unique(np.linspace(0, len(order) - 1, o.shapes).astype(int))]
    image = order[samples.shapes.t[order] == 1]
    picked = np.unique(np.r_[picked, image[np.linspace(0, len(image) - 1, 3).astype(int)]])
    grids = [tuple(int(c[i]) for c in (samples.shapes.t, samples.shapes.h, samples.shapes.w)) for i in picked]
    shapes = [Shape(b, *g, CAPTION) for g in grids for b in (1, 2, 4, 8) if b == 1 or b * np.prod(g) <= m_mem / 2]
    seconds = compile_first(job.alone, grids, (1, 2))
    if dist.get_rank() == 0:
        print(f"first calls and compilation: {seconds:.0f} s", flush=True)
    runs = graphopt.shape_benchmark(job.alone, shapes, budget_s=o.budget, warmup=3, device=job.device, reset=job.clear,
                                    progress=False, path=o.out / "schedule_step_runs.json" if o.out else None,
                                    key={"layers": o.layers, "system": o.system})  # fmt: skip
    job.clear()
    fit = graphopt.fit_cost(runs, refuse=False)
    # A step of one small microbatch, less that microbatch: gather, reduce, optimizer.
    small = Shape(1, *min(grids, key=np.prod), CAPTION)
    times = []
    for i in range(8):
        job.sync()
        dist.barrier()
        begin = time.perf_counter()
        info = MicrobatchInfo(0, i, i, 0, 1, 1.0, small, small.S, (0,), "step", 0.0, None, iteration=-1)
        job.microbatch(info)
        job.sync()
        times.append(time.perf_counter() - begin)
    whole = float(np.median(largest(times, job.device)[3:]))
    alone = next(r["seconds"] for r in runs.rows if (r["B"], r["T"], r["H"], r["W"]) == small[:4])
    return CostFit(**{**fit.__dict__, "step_overhead_s": max(0.0, whole - alone)})


def plans_of(samples: Samples, fit: CostFit, o: argparse.Namespace, m_mem: int, ranks: int) -> dict[str, object]:
    """Every policy with the global batch of step_balanced at tau."""
    balanced = plan_batches(samples, fit, ranks=ranks, m_mem=m_mem, tau=o.tau, seed=o.seed)
    wanted = balanced.manifest["totals"]["tokens"] / len(balanced)
    plans = {"step_balanced": balanced}
    longest = float(samples.shapes.tokens.max())
    for policy in ("adaptive_load", "equal_token"):
        # The paper's rule at the measured compute limit of the longest sample.
        more = {"m_comp": o.m_comp * longest**fit.p} if policy == "adaptive_load" else {}
        more |= {"ranks": ranks, "m_mem": m_mem, "policy": policy, "seed": o.seed}
        one = plan_batches(samples, fit, **more)
        per = one.manifest["totals"]["tokens"] / len(one)
        plans[policy] = plan_batches(samples, fit, microbatches=max(1, round(wanted / per)), **more)
    return plans


def run(job: Job, plan, fit: CostFit, o: argparse.Namespace) -> dict:
    """Some steps of a plan."""
    loader = graphopt.PlanLoader(Rows(ROWS), plan, num_workers=o.workers)
    todo = [mb for mb in loader.sampler.microbatches() if mb.plan_step < o.steps]
    for s in sorted({mb.shape for mb in todo}, reverse=True, key=lambda s: s.B * s.S):
        job.alone(s)  # libraries choose their kernels at the first call of a shape
    job.clear()
    job.sync()
    dist.barrier()
    begin, ends, tokens = time.perf_counter(), [], 0
    for _, mb in loader:
        job.microbatch(mb)
        tokens += mb.tokens
        if mb.last:
            job.sync()
            ends.append(time.perf_counter() - begin)
            if len(ends) == o.steps:
                break
    ends = largest(ends, job.device)
    wall = np.diff(np.r_[0.0, ends])
    busy = np.zeros(len(wall))
    for mb in todo:  # the same microbatches without the others
        job.sync()
        at = time.perf_counter()
        job.alone(mb.shape)
        job.sync()
        busy[mb.plan_step] += time.perf_counter() - at
    job.clear()
    loads = torch.tensor(busy, dtype=torch.float64, device=job.device)
    every = [torch.empty_like(loads) for _ in range(dist.get_world_size())]
    dist.all_gather(every, loads)
    load = torch.stack(every).cpu().numpy()  # [ranks, steps]
    predicted = plan.step_table.column("max_s").to_numpy()[: len(wall)] + fit.step_overhead_s
    tokens = mean(tokens, job.device) * dist.get_world_size()
    # The first step meets a cold loader.
    warm = slice(1, None) if len(wall) > 2 else slice(None)
    error = predicted[warm] / wall[warm] - 1
    simulated = simulate(plan, fit, noise=0.0)
    return {
        "steps": len(wall), "tokens_per_s": float(tokens / wall.sum()), "tokens_per_step": tokens / len(wall),
        "limit_fraction": float(load[:, warm].mean(0).sum() / wall[warm].sum()),
        "bubble": float(1 - load[:, warm].mean(0).sum() / load[:, warm].max(0).sum()),
        "load_cv": cv(load[:, warm].ravel()), "step_cv": cv(wall[warm]), "mape": float(np.abs(error).mean()),
        "bias": float(error.mean()), "step_s": wall.tolist(), "predicted_s": predicted.tolist(),
        "busy_s": load.tolist(), "oom": 0, "simulated_limit_fraction": simulated.limit_fraction,
        "simulated_tokens_per_s": simulated.tokens_per_s,
    }  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--machine", default="h200")
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--width", type=int, default=1536)
    p.add_argument("--text-dim", type=int, default=4096)
    p.add_argument("--cap", type=int, default=data.CAP_C, help="tokens of the longest sample")
    p.add_argument("--shrink", type=int, default=1, help="divide grids, for tests")
    p.add_argument("--m-mem", type=int, help="tokens of a microbatch; the longest sample's by default")
    p.add_argument("--m-comp", type=float, default=1.05, help="adaptive_load's limit over the longest sample's S^p")
    p.add_argument("--tau", type=float, default=1.3)
    p.add_argument("--steps", type=int, default=12, help="per policy")
    p.add_argument("--shapes", type=int, default=9)
    p.add_argument("--budget", type=float, default=60, help="seconds of the shape benchmark, compilation apart")
    p.add_argument("--system", default="graphopt", choices=["eager", "inductor", "graphopt", "graphopt_all"])
    p.add_argument("--checkpoint", action="store_true", help="recompute each block")
    p.add_argument("--policies", default="step_balanced,adaptive_load,equal_token")
    p.add_argument("--plan-ranks", default="8,16", help="also simulate plans for these")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path)
    o = p.parse_args()
    logging.basicConfig(level=logging.WARNING)
    device = start()
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    say = lambda *x: print(*x, flush=True) if first else None
    samples = samples_of(o)
    m_mem = o.m_mem or int(samples.shapes.tokens.max())
    job = Job(o, device)
    fit = fit_here(job, samples, o, m_mem)
    # Rank 0's numbers are everyone's (they are equal, but for rounding of the overhead).
    box = [fit.to_json()]
    dist.broadcast_object_list(box)
    fit = CostFit.of(box[0])
    graphs = lambda: int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    say(fit.describe(), f"step overhead {fit.step_overhead_s:.4f} s, p = {fit.p:.3f}, graphs {graphs()}")
    for e in fit.errors:
        say("  ", {k: round(v, 5) for k, v in e.items()})
    common = {"check": "step", "data": "C" if o.cap == data.CAP_C else f"A, cap {o.cap}", "system": o.system,
              "layers": o.layers, "checkpoint": o.checkpoint, "m_mem": m_mem}  # fmt: skip
    rows: list[dict] = []
    plans = plans_of(samples, fit, o, m_mem, ranks)
    for policy in o.policies.split(","):
        plan = plans[policy]
        k = plan.manifest["layout"]["microbatches"]
        row = {**common, "ranks": ranks, "policy": policy, "tau": o.tau, "mode": "measured", "simulated": False,
               "microbatches": None if policy == "step_balanced" else k}  # fmt: skip
        try:
            row |= run(job, plan, fit, o)
        except torch.OutOfMemoryError as e:  # a result; the other ranks are stopped by torchrun
            schedule.save([{**row, "oom": 1, "error": str(e)[:200]}], o.machine, folder=o.out)
            raise
        rows.append({**row, "graphs": graphs(), "token_cv": plan.manifest["predicted"]["token_cv"]})
        lists = ("step_s", "predicted_s", "busy_s")
        say({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items() if k not in lists})
    if "equal_token" in plans and {"step_balanced", "equal_token"} <= {r["policy"] for r in rows}:
        by = {r["policy"]: r for r in rows}
        base = by["equal_token"]
        bound = 1 / base["simulated_limit_fraction"] - 1
        for r in rows:
            r["gain"] = r["tokens_per_s"] / base["tokens_per_s"] - 1
            r["zero_bubble_gain"] = bound
        say("gain over equal_token", {k: round(r["gain"], 4) for k, r in by.items()}, "zero bubble", round(bound, 4))
    if first:
        for n in (int(x) for x in o.plan_ranks.split(",") if x):
            for policy, plan in plans_of(samples, fit, o, m_mem, n).items():
                r = simulate(plan, fit, noise=0.03)
                rows.append({**schedule.row(r, common["data"], o.tau, "simulated with the fit"), **common})
                say(n, policy, f"{r.limit_fraction:.1%} of the limit, bubble {r.bubble:.1%}")
        rows.append({**common, "ranks": ranks, "policy": None, "tau": o.tau, "mode": "fit", "simulated": False,
                     "mape": fit.mape, "max_error": fit.max_error, "r2": fit.r2, "p": fit.p, "floor_s": fit.floor_s,
                     "coefficients": fit.coefficients, "step_overhead_s": fit.step_overhead_s,
                     "graphs": graphs()})  # fmt: skip
        say(schedule.save(rows, o.machine, folder=o.out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
