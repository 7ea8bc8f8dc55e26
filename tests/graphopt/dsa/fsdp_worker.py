"""Run by test_wrapped.py under torchrun, gloo on CPU (NCCL where there are GPUs): converted models under FSDP2 and DDP, against one process.

    torchrun --nproc-per-node 2 fsdp_worker.py FOLDER [WAY ..]

Each way trains two steps on this rank's half of the batch; what is written is the largest relative L2 distance of a
gradient of the second step from that of one process on the whole batch, over all parameters and over the heads'.  (The
bias of keys has no effect, so its gradient is rounding: distances are relative to a thousandth of the largest at least.)
Wan, HunyuanVideo and CogVideoX train one step under FSDP2, blocks compiled one by one: on GPUs through Inductor, in bf16
with fp32 weights, against one process in fp32.  FOLDER/dsa_fsdp.json has a row for each way.
"""

from __future__ import annotations

import copy
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

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))
import tiny_video
import video_models
from _results import machine, save

import graphopt

AOT = {"graphopt.compiler": "aot_eager"}
TINY = ("checkpointed", "per block", "ddp", "mixed", "bf16")
MODELS = ("wan", "hunyuan", "cogvideox")


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


def trained_model(name: str, rank: int, device: torch.device) -> tuple[dict, dict, float]:
    """Gradients of a model of diffusers, sharded, and of one process; what counts as zero."""
    base, inputs, _ = video_models.converted(getattr(video_models, name))
    base.to(device)
    if "guidance" in inputs:
        inputs["guidance"].fill_(6016)  # bf16 has no 6,000
    half = {k: v[rank : rank + 1].to(device) for k, v in inputs.items()}
    model = copy.deepcopy(base)
    on_gpu = device.type == "cuda"
    more = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if on_gpu else {}
    for blocks in ("blocks", "transformer_blocks", "single_transformer_blocks"):
        for block in getattr(model, blocks, ()):
            block.compile(backend="graphopt", options={} if on_gpu else AOT)
            fully_shard(block, **more)
    fully_shard(model, **more)
    grads = []
    for m, x in ((model, half), (base, {k: v.to(device) for k, v in inputs.items()})):
        m(**x, return_dict=False)[0].float().square().mean().backward()
        grads.append({n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                      for n, p in m.named_parameters() if p.grad is not None})
    return grads[0], grads[1], (1e-2 if on_gpu else 1e-3) * max(float(g.norm()) for g in grads[1].values())


def report(way: str, got: dict, want: dict, floor: float) -> None:
    """A row of the result file."""
    assert set(got) == set(want), set(got) ^ set(want)
    gaps = {n: float((got[n] - g).norm() / max(float(g.norm()), floor)) for n, g in want.items()}
    row = {"way": way, "all": max(gaps.values()), "heads": max(g for n, g in gaps.items() if ".dsa." in n),
           "worst": max(gaps, key=gaps.__getitem__), "ranks": dist.get_world_size()}
    if dist.get_rank() == 0:
        print(row, flush=True)
        where = f"{machine()}x{dist.get_world_size()}"
        save("dsa_fsdp", [row], ("way",), {}, Path(sys.argv[1]), where)


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
    for way in sys.argv[2:] or (*TINY, *MODELS):
        torch._dynamo.reset()
        if way in MODELS:
            report(way, *trained_model(way, rank, device))
            continue
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
        report(way, {n: got[i] for i, n in enumerate(names)}, {n: want[i] for i, n in enumerate(names)}, floor)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
