"""A training step of the same Wan-shaped model by others that keep weights and AdamW state on the host.

    python benchmarks/stream_peers.py --system fsdp2|deepspeed [--layers 30] [--grids 5x30x52,21x30x52] [--steps 4]

fsdp2: `fully_shard` with CPUOffloadPolicy on one GPU and torch's fused AdamW on the CPU, eager, per-block
checkpointing.  deepspeed: ZeRO-3 with parameters and optimizer offloaded (CPUAdam where it builds, else torch's AdamW).
Rows go to the file of stream_step.py, which measures graphopt with the same shapes.  A row is saved as soon as it has
two steps beside the first, and again with more.  Without a GPU (to try this script) nothing is offloaded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
from _results import save
from _stream_rates import cores
from stream_step import GPU, KEYS, WIDTHS, inputs


def build(width: str, layers: int) -> torch.nn.Module:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    with torch.device("cuda" if GPU else "cpu"):  # random numbers for 1.4 B parameters take the CPU half a minute
        model = WanTransformer3DModel(num_layers=layers, in_channels=16, out_channels=16, rope_max_seq_len=1024,
                                      **WIDTHS[width])
    model = model.cpu()
    if GPU:
        torch.cuda.empty_cache()
    model.enable_gradient_checkpointing()
    return model.train()


def fsdp2(model: torch.nn.Module):
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl" if GPU else "gloo", rank=0, world_size=1)
    settings = dict(mp_policy=MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, cast_forward_inputs=False))
    if GPU:
        torch.cuda.set_device(0)
        settings["offload_policy"] = CPUOffloadPolicy()
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(kw: dict) -> None:
        model(**kw)[0].float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, "torch fused AdamW"


def deepspeed(model: torch.nn.Module):
    import deepspeed as ds

    settings = dict(
        train_micro_batch_size_per_gpu=1, bf16=dict(enabled=True), gradient_clipping=0.0,
        zero_force_ds_cpu_optimizer=False, zero_optimization=dict(
            stage=3, offload_optimizer=dict(device="cpu", pin_memory=True),
            offload_param=dict(device="cpu", pin_memory=True), overlap_comm=True, contiguous_gradients=True,
            sub_group_size=100_000_000, stage3_param_persistence_threshold=0))
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer, kind = DeepSpeedCPUAdam(model.parameters(), lr=1e-5, adamw_mode=True), "DeepSpeedCPUAdam"
    except Exception as error:
        print(f"no DeepSpeedCPUAdam: {type(error).__name__}: {str(error)[:300]}", flush=True)
        optimizer, kind = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), "torch fused AdamW"
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=settings)

    def step(kw: dict) -> None:
        engine.backward(engine(**kw)[0].float().square().mean())
        engine.step()

    return step, kind


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--system", choices=("fsdp2", "deepspeed"), required=True)
    p.add_argument("--layers", type=int, default=30)
    p.add_argument("--width", choices=sorted(WIDTHS), default="1.3b")
    p.add_argument("--grids", default="5x30x52,21x30x52")
    p.add_argument("--steps", type=int, default=4)
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29517"), ("RANK", "0"), ("WORLD_SIZE", "1"),
                        ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    begun = time.perf_counter()
    model = build(a.width, a.layers)
    params = sum(q.numel() for q in model.parameters()) / 1e9
    step, optimizer = (fsdp2 if a.system == "fsdp2" else deepspeed)(model)
    print(f"[{time.perf_counter() - begun:.1f} s] {a.system} with {optimizer}, {params:.3f} B parameters", flush=True)
    for name in a.grids.split(","):
        grid = tuple(int(x) for x in name.split("x"))
        kw, tokens, times = inputs(grid, WIDTHS[a.width]["text_dim"]), grid[0] * grid[1] * grid[2], []
        count = 1 + (a.steps if tokens < 20000 else max(2, a.steps - 1))
        for i in range(count):
            if i == 1 and GPU:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            step(kw)
            if GPU:
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
            print(f"[{time.perf_counter() - begun:.1f} s] {tokens} tokens, step {i}: {times[-1]:.0f} ms", flush=True)
            if len(times) < min(3, count):
                continue
            row = dict(params_b=round(params, 3), tokens=tokens, system=a.system, update="host",
                       overlap=True, layers=a.layers, width=a.width, step_ms=statistics.median(times[1:]),
                       peak_gib=torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0, optimizer=optimizer,
                       threads=torch.get_num_threads(), cores=cores(), steps=len(times) - 1)
            print(f"[{time.perf_counter() - begun:.1f} s]", row, [round(t) for t in times], flush=True)
            save("stream", [row], KEYS, {}, a.out)


if __name__ == "__main__":
    main()
