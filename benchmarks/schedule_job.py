"""The training job that benchmarks/schedule_step.py measures: a Wan-shaped DiT under FSDP2, a microbatch of it, and a
clock."""

from __future__ import annotations

import gc
import itertools
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.fx.experimental._config
import torch.utils.checkpoint

import graphopt
from graphopt.loading.microbatch import MicrobatchInfo
from graphopt.schedule.bench import Shape

CAPTION = 512
SYSTEMS = {  # options of the backend; None: not compiled
    "eager": None,
    "inductor": {"graphopt.rules": []},  # no rewriting; Inductor with the settings that make its gradients right
    "graphopt": {},
    "graphopt_all": {"graphopt.select": "all"},
    "aot_eager": {"graphopt.select": "all", "graphopt.compiler": "aot_eager"},  # for CPUs
}


class Recomputed(torch.nn.Module):
    """A block that is recomputed in the backward, inside of what FSDP2 shards.

    The model's own checkpointing is outside of it: FSDP2's hooks then run in the forward and not in the recomputation
    (before torch 2.13 not even the cast of the inputs, a CheckpointError), and torch compiles both apart.
    """

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.block, *args, use_reentrant=False, **kwargs)


class Job:
    """The model, its optimizer, and what a microbatch runs.

    Args:
        device: this rank's. system: a key of SYSTEMS. layers, width, text_dim: of the model (heads of 128).
        checkpoint: recompute each block in the backward.
    """

    def __init__(self, device: torch.device, *, system: str, layers: int, width: int, text_dim: int,
                 checkpoint: bool = False) -> None:
        from diffusers import WanTransformer3DModel
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch.fx.experimental._config.use_duck_shape = False  # a square image is no shape of its own
        torch._dynamo.config.specialize_float = True  # eps as a symbol makes torch compile everything twice
        torch.manual_seed(0)
        with torch.device(device):
            model = WanTransformer3DModel(
                num_attention_heads=width // 128, attention_head_dim=128, ffn_dim=int(width * 35 / 6),
                num_layers=layers, in_channels=16, out_channels=16, text_dim=text_dim,
            )  # fmt: skip
        options = SYSTEMS[system]
        for block in model.blocks if options is not None else ():
            block.compile(backend="graphopt", dynamic=True, options=options)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = fully_shard(Recomputed(block) if checkpoint else block, mp_policy=policy)
        self.model, self.device, self.text_dim = fully_shard(model, mp_policy=policy), device, text_dim
        self.opt = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")

    def loss(self, s: Shape) -> torch.Tensor:
        """Sum over tokens of the mean squared output; latents and captions are noise."""
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
        """The same without any collective (but for a gather at the first call): a microbatch in the middle of a step
        that never ends."""
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
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Wait for the device and for the other ranks."""
        self.sync()
        dist.barrier()
        self.sync()

    def mark(self) -> torch.cuda.Event | float:
        """A point in time on the device; the host does not wait."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: list) -> np.ndarray:
        """Seconds between marks, float64 [marks - 1]; waits for the last of them, and not for what is queued behind."""
        if self.device.type != "cuda":
            return np.diff(marks)
        marks[-1].synchronize()
        return np.array([a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)])

    def step_of(self, shapes: list[Shape], number: int) -> None:
        """An optimizer step of the given microbatches on every rank."""
        for k, s in enumerate(shapes):
            self.microbatch(MicrobatchInfo(0, number, number, k, len(shapes), 1.0, s, s.B * s.S, (0,), "step", 0.0,
                                           None, iteration=-1))  # fmt: skip


def every_rank(values: np.ndarray | list[float], device: torch.device) -> np.ndarray:
    """float64 [ranks, n]."""
    here = torch.as_tensor(np.asarray(values, np.float64), device=device)
    found = [torch.empty_like(here) for _ in range(dist.get_world_size())]
    dist.all_gather(found, here)
    return torch.stack(found).cpu().numpy()
