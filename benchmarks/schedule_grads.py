"""Unequal numbers of microbatches over ranks, against one process; memory of the two FSDP2 modes:

    torchrun --nproc-per-node=2 benchmarks/schedule_grads.py --machine h200

Gradients: a small Wan (diffusers' class), blocks compiled by graphopt, FSDP2 and DDP, ranks running 1 and 3 (then 2 and
5) microbatches a step, in fp32 and in bf16 mixed precision; every rank also runs all microbatches alone, the model
compiled and wrapped the same way over that one rank (`error`), and not wrapped (`error_unwrapped`: a sharded module may
get other kernels, which round otherwise).  Memory: peak of a step of three microbatches at 1.3B widths, parameters kept
over the step ("step") or gathered for each microbatch ("microbatch").

Writes rows of check `grads` and `memory` to benchmarks/results/<machine>/schedule.json.  Exit code 1 if a gradient is
off by more than 1e-6 (fp32).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.fx.experimental._config

ROOT = Path(__file__).resolve().parent.parent
BEGIN = time.perf_counter()
sys.path[:0] = [str(ROOT / "benchmarks")]

import _results  # noqa: E402
from schedule_shape import start  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402

import graphopt  # noqa: E402
import schedule  # noqa: E402
from graphopt.loading.microbatch import MicrobatchInfo  # noqa: E402
from graphopt.schedule.bench import Shape  # noqa: E402


def build(device: torch.device, layers: int, width: int, text_dim: int, system: str) -> torch.nn.Module:
    """Wan in fp32, the same on every rank."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    with torch.device(device):
        model = WanTransformer3DModel(
            num_attention_heads=width // 64, attention_head_dim=64, ffn_dim=4 * width, num_layers=layers,
            in_channels=16, out_channels=16, text_dim=text_dim,
        )  # fmt: skip
    if system != "eager":
        compiler = {"graphopt": "inductor", "rewritten": "eager"}.get(system, system)
        options = {"graphopt.select": "all", "graphopt.compiler": compiler}
        for block in model.blocks:
            block.compile(backend="graphopt", dynamic=True, options=options)
    return model


def microbatches(counts: list[int], step: int, batches: list[int]) -> list[list[MicrobatchInfo]]:
    """Each rank's microbatches of a step, all of different sizes."""
    shapes = [
        [Shape(batches[(r + k + step) % len(batches)], 1 + (r + k) % 3, 2 + k % 3, 3 + (r + step) % 2, 16)
         for k in range(n)]
        for r, n in enumerate(counts)
    ]  # fmt: skip
    total = sum(s.B * s.S for row in shapes for s in row)
    return [
        [MicrobatchInfo(0, step, step, k, len(row), len(counts) / total, s, s.B * s.S, (r, k), "step", 0.0, None)
         for k, s in enumerate(row)]
        for r, row in enumerate(shapes)
    ]  # fmt: skip


def loss_sum(model: torch.nn.Module, mb: MicrobatchInfo, device: torch.device, dtype: torch.dtype, text_dim: int):
    """The loss of a microbatch; its inputs follow from its number."""
    s, (r, k) = mb.shape, mb.samples
    g = torch.Generator().manual_seed(1000 * mb.step + 10 * r + k)
    x = torch.randn(s.B, 16, s.T, 2 * s.H, 2 * s.W, generator=g).to(device, dtype)
    text = torch.randn(s.B, s.L, text_dim, generator=g).to(device, dtype)
    out = model(x, timestep=torch.full((s.B,), 500, device=device), encoder_hidden_states=text, return_dict=False)[0]
    return out.float().square().mean((1, 2, 3, 4)).sum() * s.S


def whole(p: torch.Tensor | None) -> torch.Tensor:
    assert p is not None
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def gradients(device: torch.device, o: argparse.Namespace) -> list[dict]:
    """Every case's largest relative error over parameters and steps."""
    rows = []
    cases = [c for c in (c.split(":") for c in o.cases.split()) if c[1] in o.precisions.split(",")]
    for precision in dict.fromkeys(p for _, p, _ in cases):
        torch._dynamo.reset()
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        make = lambda: build(device, o.depth, o.small, o.text_dim, o.system)
        for wrap in dict.fromkeys(w for w, p, _ in cases if p == precision):
            model, references = wrapped(make(), wrap, dtype), {"unwrapped": make().to(dtype)}
            if wrap == "fsdp2":
                mesh = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("apart", "one"))
                references = {"": wrapped(make(), wrap, dtype, mesh["one"]), **references}
            for pair in (c for w, p, c in cases if (w, p) == (wrap, precision)):
                a, b = (int(x) for x in pair.split(","))
                counts = [(a, b)[r % 2] for r in range(dist.get_world_size())]
                row = {"check": "grads", "data": f"{a} and {b} microbatches", "ranks": len(counts),
                       "mode": f"{wrap} {precision}", "system": o.system, "simulated": False}  # fmt: skip
                for name, worst in compare(model, references, counts, dtype, device, o).items():
                    row |= {f"error_{name}".rstrip("_"): worst[0], f"parameter_{name}".rstrip("_"): worst[1]}
                # Under DDP the model itself is not changed.
                rows.append({"error": row.get("error_unwrapped"), "parameter": row.get("parameter_unwrapped"), **row})
                keep(rows[-1], o)
    return rows


def keep(row: dict, o: argparse.Namespace) -> None:
    """Print and save a row as soon as it is there: a run that is cut off keeps what it had."""
    if dist.get_rank() == 0:
        schedule.save([row], o.machine, folder=o.out)
        print(f"[{time.perf_counter() - BEGIN:.0f} s]", row, flush=True)


def wrapped(model: torch.nn.Module, wrap: str, dtype: torch.dtype, mesh: DeviceMesh | None = None) -> torch.nn.Module:
    """In DDP, or sharded by FSDP2 (over all ranks, or a mesh), computing in dtype and reducing in fp32."""
    if wrap == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    mixed = {} if dtype == torch.float32 else {"param_dtype": dtype, "reduce_dtype": torch.float32}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(**mixed))
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**mixed))


def compare(model: torch.nn.Module, references: dict[str, torch.nn.Module], counts: list[int], dtype: torch.dtype,
            device: torch.device, o: argparse.Namespace) -> dict[str, tuple[float, str]]:
    """Per reference, which runs all microbatches alone: the largest relative error over parameters and steps, and its
    parameter."""
    rank, worst = dist.get_rank(), dict.fromkeys(references, (0.0, ""))
    for step in range(o.steps):
        todo = microbatches(counts, step, o.batches)
        for mb in todo[rank]:
            with graphopt.accumulate(model, mb):
                (loss_sum(model, mb, device, dtype, o.text_dim) * mb.loss_scale).backward()
        found = {n.removeprefix("module."): whole(p.grad).float() for n, p in model.named_parameters()}
        for name, alone in references.items():
            sums: dict[str, torch.Tensor] = {}
            for mb in (mb for row in todo for mb in row):
                (loss_sum(alone, mb, device, dtype, o.text_dim) * mb.loss_scale / len(counts)).backward()
                for n, p in alone.named_parameters():
                    sums[n] = sums.get(n, 0) + whole(p.grad).float()
                alone.zero_grad()
            for n, expected in sums.items():
                error = ((found[n] - expected).norm() / expected.norm()).item()
                if not error <= worst[name][0]:  # NaN too
                    worst[name] = error, n
        model.zero_grad()
    return worst


def memory(device: torch.device, o: argparse.Namespace) -> list[dict]:
    """Peak of a step of three microbatches, per mode."""
    ranks, rows = dist.get_world_size(), []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for sync in ("step", "microbatch"):
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        model = build(device, o.layers, 1536, 4096, "eager")
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        s = Shape(1, 3, 30, 52, 512)
        for step in range(2):
            torch.cuda.reset_peak_memory_stats()
            for k in range(3):
                mb = MicrobatchInfo(0, step, step, k, 3, 1 / (3 * s.S), s, s.S, (0, k), sync, 0.0, None)
                with graphopt.accumulate(model, mb):
                    (loss_sum(model, mb, device, torch.bfloat16, 4096) * mb.loss_scale).backward()
            opt.step()
            opt.zero_grad()
        rows.append({"check": "memory", "data": f"{s.S} tokens, K = 3", "ranks": ranks, "mode": f"sync {sync}",
                     "layers": o.layers, "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
                     "simulated": False})  # fmt: skip
        keep(rows[-1], o)
        del model, opt
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--machine", help="name of the results' folder, e.g. h200x2; made from the device by default")
    p.add_argument("--system", default="graphopt", choices=["graphopt", "aot_eager", "rewritten", "eager"],
                   help="with Inductor, with aot_eager, graphopt's graph as it is, not compiled")  # fmt: skip
    p.add_argument("--cases", default="fsdp2:fp32:1,3 fsdp2:fp32:2,5 ddp:fp32:1,3 ddp:fp32:2,5 fsdp2:bf16:1,3 "
                   "fsdp2:bf16:2,5", help="wrapper:precision:microbatches of even and odd ranks")  # fmt: skip
    p.add_argument("--precisions", default="fp32,bf16", help="of these cases")
    p.add_argument("--quick", action="store_true", help="one block, one step")
    p.add_argument("--batches", default="1,2", help="B of the microbatches, each a graph or two")
    p.add_argument("--small", type=int, default=256, help="width of the model of the gradient check")
    p.add_argument("--text-dim", type=int, default=256)
    p.add_argument("--layers", type=int, default=12, help="of the memory check")
    p.add_argument("--checks", default="grads,memory", help="memory: on GPUs only")
    p.add_argument("--out", type=Path)
    o = p.parse_args()
    o.depth, o.steps = (1, 1) if o.quick else (2, 2)
    o.batches = [int(b) for b in o.batches.split(",")]
    torch.fx.experimental._config.use_duck_shape = False
    torch._dynamo.config.specialize_float = True  # eps as a symbol makes torch compile everything twice
    # The same products on every rank and alone: differences are then of adding up in another order.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    device = start()
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    o.machine = o.machine or _results.machine() + (f"x{ranks}" if device.type == "cuda" and ranks > 1 else "")
    rows = gradients(device, o) if "grads" in o.checks else []
    worst = max((r["error"] for r in rows if r["mode"].endswith("fp32")), default=0.0)
    if first and rows:
        print(f"worst fp32 error {worst:.2e}", flush=True)
    if device.type == "cuda" and "memory" in o.checks:
        memory(device, o)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    code = int(not worst <= 1e-6)
    if device.type == "cpu":
        os._exit(code)  # all is written; torch's threads sometimes abort the process when the interpreter ends
    sys.exit(code)


if __name__ == "__main__":
    main()
