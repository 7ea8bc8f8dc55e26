"""Run by test_wrapped.py under torchrun, gloo on CPU (NCCL where there are GPUs): a converted model under FSDP2 and DDP, against one process.

    torchrun --nproc-per-node 2 fsdp_worker.py OUT.json

Each way trains two steps on this rank's half of the batch; what is written is the largest relative L2 distance of a
gradient of the second step from that of one process on the whole batch, over all parameters and over the heads'.  (The
bias of keys has no effect, so its gradient is rounding: distances are relative to a thousandth of the largest at least.)
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))
import tiny_video

import graphopt

AOT = {"graphopt.compiler": "aot_eager"}


def steps(model: Any, latents: list[torch.Tensor], parameters: list[nn.Parameter]) -> dict[str, torch.Tensor]:
    """Two steps of SGD; the gradients of the second, whole."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for x in latents:
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        last = {i: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone() for i, p in enumerate(parameters)}
        optimizer.step()
    return last


def build(dtype: torch.dtype, **sizes: int) -> tuple[nn.Module, graphopt.dsa.Handle]:
    torch.manual_seed(0)
    model = tiny_video.TinyVideo(2, **sizes).to(dtype)
    handle = graphopt.dsa.convert(model, graphopt.dsa.DSAConfig((1, 3, 3)), select="blocks.*.attn")
    for p in handle.parameters():
        nn.init.normal_(p, std=0.1)
    return model, handle


def wrapped(model: Any, way: str) -> Any:
    """FSDP2 around each block and the model, or DDP.

    "mixed": computing in bf16, all weights fp32.  "bf16": the model in bf16, its heads fp32 and sharded apart, because
    FSDP2 wants one dtype per group.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    more = {"mp_policy": policy} if way == "mixed" else {}
    model.checkpointing = way == "checkpointed"
    if way == "bf16":
        for head in graphopt.dsa.handle_of(model).layers.values():
            fully_shard(head)
    for block in model.blocks:
        if way != "checkpointed":
            block.compile(backend="graphopt", options=AOT)
        if way != "ddp":
            fully_shard(block, **more)
    return DistributedDataParallel(model) if way == "ddp" else fully_shard(model, **more)


def main() -> None:
    gpu = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False  # the patch embedding is a convolution
    torch.manual_seed(1)
    latents = [tiny_video.latent(4, *grid).to(device) for grid in ((3, 4, 5), (3, 5, 4))]
    found: dict[str, dict[str, float]] = {}
    for way in ("checkpointed", "per block", "ddp", "mixed", "bf16"):
        torch._dynamo.reset()
        low = way in ("mixed", "bf16")
        dtype = torch.bfloat16 if way == "bf16" else torch.float32
        base, _ = build(dtype, **({"width": 128, "heads": 2} if low else {}))  # heads of 64: kernels, on a GPU
        base.to(device)
        names = [n for n, _ in base.named_parameters()]
        model = wrapped(copy.deepcopy(base), way)
        halves = [x[2 * rank : 2 * rank + 2].to(dtype) for x in latents]
        base.float()
        want = steps(base, latents, list(base.parameters()))
        floor = (1e-2 if low else 1e-3) * max(float(g.norm()) for g in want.values())
        got = steps(model, halves, list(model.parameters()))
        gaps = {n: float((got[i] - want[i]).norm() / max(float(want[i].norm()), floor)) for i, n in enumerate(names)}
        found[way] = {"all": max(gaps.values()), "heads": max(g for n, g in gaps.items() if ".dsa." in n)}
        if rank == 0:
            print(way, found[way], flush=True)
            Path(sys.argv[1]).write_text(json.dumps({"device": torch.cuda.get_device_name() if gpu else "cpu", **found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
