"""Run by test_distributed.py under torchrun, gloo on CPU: trains one model in every wrapping, writes what happened.

    torchrun --nproc-per-node 2 distributed_worker.py OUT.json

Each way trains the same two-block model on this rank's half of the batch; the gradients of the second step are compared
with those of one process on the whole batch (largest relative L2 over parameters).
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))
from blocks import ALL, Stack, adaln

import graphopt

D, WIDE = 32, 256  # two wide blocks fill several of the smallest buckets DDP knows (1 MiB)


def whole(p: torch.Tensor) -> torch.Tensor:
    g = p.grad
    assert g is not None
    return g.full_tensor() if isinstance(g, DTensor) else g


def described(*compiled: Any) -> dict[str, Any]:
    reports = [graphopt.check(c) for c in compiled]
    return {
        "modulate": sum(r.count("modulate", "rewritten") for r in reports),
        "gate": sum(r.count("gate", "rewritten") for r in reports),
        "graphs": sum(len(r.graphs) for r in reports),
        "forward_kernels": sum(k.direction == "forward" for r in reports for k in r.kernels),
        "missed": [str(m) for r in reports for m in r.missed],
        "rejects": [r.reason for report in reports for r in report.rejects],
    }


def compile_wrapper(m: nn.Module) -> Any:
    return torch.compile(m, backend="graphopt", options=ALL)


def compile_in_place(m: nn.Module) -> nn.Module:
    m.compile(backend="graphopt", options=ALL)
    return m


def shard(m: Stack, per_block: bool) -> Stack:
    for block in m.blocks if per_block else ():
        fully_shard(block)
    fully_shard(m)
    return m


def ddp_around_compiled(m: Stack) -> tuple[Any, list[Any]]:
    f = compile_wrapper(m)
    return DDP(f), [f]


def ddp_around_compiled_in_place(m: Stack) -> tuple[Any, list[Any]]:
    return DDP(compile_in_place(m)), [m]


def compiled_around_ddp(m: Stack) -> tuple[Any, list[Any]]:
    f = compile_wrapper(DDP(m))
    return f, [f]


def compiled_around_ddp_in_buckets(m: Stack) -> tuple[Any, list[Any]]:
    """Small buckets: torch's DDPOptimizer cuts the graph in pieces."""
    f = compile_wrapper(DDP(m, bucket_cap_mb=1))
    return f, [f]


def fsdp(per_block: bool, compiled: str) -> Callable[[Stack], tuple[Any, list[Any]]]:
    def build(m: Stack) -> tuple[Any, list[Any]]:
        if compiled == "blocks":
            for block in m.blocks:
                compile_in_place(block)
            return shard(m, per_block), list(m.blocks)
        if compiled == "before":
            return shard(compile_in_place(m), per_block), [m]
        f = compile_wrapper(shard(m, per_block))
        return f, [f]

    return build


WAYS = {
    "ddp(compile)": ddp_around_compiled,
    "ddp(in place)": ddp_around_compiled_in_place,
    "compile(ddp)": compiled_around_ddp,
    "compile(ddp), buckets": compiled_around_ddp_in_buckets,
    **{f"fsdp {'per block' if b else 'whole'}, {c}": fsdp(b, c) for b in (True, False) for c in ("blocks", "before", "after")},
}


def sharded_operands() -> dict[str, Any]:
    """A site whose operands stay DTensors: left alone, with the reason, and right."""
    mesh = init_device_mesh("cpu", (2,))
    f = torch.compile(adaln, backend="graphopt", options=ALL)
    torch.manual_seed(1)
    x, s, b = torch.randn(4, 6, D), torch.randn(1, 1, D), torch.randn(1, 1, D)
    spread = [distribute_tensor(v, mesh, [p]) for v, p in zip((x, s, b), (Shard(0), Replicate(), Replicate()))]
    got, want = f(*spread).full_tensor(), adaln(x, s, b)
    return {"gap": ((got - want).norm() / want.norm()).item(), **described(f)}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for name, build in WAYS.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        width = WIDE if name.endswith("buckets") else D
        model, x, t = Stack(width), torch.randn(4, 24, width), torch.randn(4, width)
        alone = copy.deepcopy(model)
        alone(x, t).square().mean().backward()
        x, t = x[2 * rank : 2 * rank + 2], t[2 * rank : 2 * rank + 2]
        f, asked = build(model)
        for _ in range(2):
            model.zero_grad()
            f(x, t).square().mean().backward()
        pairs = [(whole(p), whole(q)) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
        found[name] = {"gap": max(((g - r).norm() / r.norm()).item() for g, r in pairs), **described(*asked)}
    torch._dynamo.reset()
    found["dtensor"] = sharded_operands()
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1))
    dist.barrier()
    dist.destroy_process_group()
    # everything is written; torch's threads sometimes abort the process when the interpreter takes them down
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
