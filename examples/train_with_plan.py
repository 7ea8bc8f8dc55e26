"""Train a small video transformer from a plan, on one process or many, and resume exactly after a kill.

    python examples/train_with_plan.py --out run
    torchrun --nproc-per-node=2 examples/train_with_plan.py --out run            # FSDP2; kill it and start it again

On GPUs where there is one for each process.  The data are synthetic: sample `row` is noise seeded by its number.  Each
rank writes (epoch, step, k, rows) of every microbatch to run/rank-N.jsonl; run/latest holds the checkpoint of the last
step.
"""

import argparse
import json
import os
import shutil
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import graphopt
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.dataset import Samples

ROWS, WIDTH = 120, 64
TOKENS = np.random.default_rng(0).choice([16, 64, 240], ROWS, p=[0.4, 0.4, 0.2])


class Clips(torch.utils.data.Dataset):
    """Latents [tokens, WIDTH] and their conditioning [3, WIDTH]."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(row)
        return torch.randn(int(TOKENS[row]), WIDTH, generator=g), torch.randn(3, WIDTH, generator=g)


class Block(torch.nn.Module):
    """Attention and MLP behind one adaptive norm each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attention = torch.nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        wide = 4 * WIDTH
        self.mlp = torch.nn.Sequential(torch.nn.Linear(WIDTH, wide), torch.nn.GELU(), torch.nn.Linear(wide, WIDTH))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """x [B, S, WIDTH], c [B, 3, WIDTH]."""
        scale, shift, gate = c.chunk(3, dim=1)
        h = self.norm(x) * (1 + scale) + shift
        x = x + gate * self.attention(h, h, h, need_weights=False)[0]
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)


class Model(torch.nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """x [B, S, WIDTH], c [B, 3, WIDTH]."""
        for block in self.blocks:
            x = block(x, c)
        return x


def save(folder: Path, model: torch.nn.Module, opt: torch.optim.Optimizer, plan_state: dict, first: bool) -> None:
    """Write a checkpoint beside the last one, then rename it into place."""
    weights, state = get_state_dict(model, opt)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "next", no_dist=not dist.is_initialized())
    if first:
        (folder / "next" / "plan.json").write_text(json.dumps(plan_state))
        old = folder / "old"
        shutil.rmtree(old, ignore_errors=True)
        if (folder / "latest").exists():
            (folder / "latest").rename(old)
        (folder / "next").rename(folder / "latest")
    if dist.is_initialized():
        dist.barrier()


def restore(folder: Path, model: torch.nn.Module, opt: torch.optim.Optimizer, loader: graphopt.PlanLoader) -> None:
    """Load the last checkpoint, if there is one."""
    found = next((folder / n for n in ("latest", "old") if (folder / n / "plan.json").exists()), None)
    if found is None:
        return
    weights, state = get_state_dict(model, opt)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=found, no_dist=not dist.is_initialized())
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)
    loader.load_state_dict(json.loads((found / "plan.json").read_text()))


def main() -> None:
    """Train."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--backend", default="", help="graphopt, inductor, ...; not compiled by default")
    p.add_argument("--die-at", type=int, default=-1, help="the last rank dies in the middle of this step")
    p.add_argument("--timeout", type=float, default=45, help="seconds a collective waits for the other ranks")
    o = p.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if ranks > 1:
        # Without torchrun nobody tells a rank that another one died: the next collective waits this long.
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=o.timeout))
    rank = dist.get_rank() if ranks > 1 else 0
    torch.use_deterministic_algorithms(True, warn_only=True)  # the same weights after a resume, to the last bit
    first, folder = rank == 0, o.out
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = Model().to(device)
    for block in model.blocks:
        if o.backend:
            block.compile(backend=o.backend, dynamic=True)
        if ranks > 1:
            fully_shard(block)
    if ranks > 1:
        fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # Planned here from given costs; `graphopt fit` and `graphopt plan` make a measured one.
    cost = CostFit.two_term(1e-3, 1e-5, 1e-8)
    plan = graphopt.plan_batches(Samples.of_tokens(TOKENS), cost, ranks=ranks, m_mem=512, tau=4)
    loader = graphopt.PlanLoader(Clips(), plan, num_workers=2, device=device)
    restore(folder, model, opt, loader)
    with open(folder / f"rank-{rank}.jsonl", "a", buffering=1) as log:
        while loader.epoch < o.epochs:
            for (x, c), mb in loader:
                with graphopt.accumulate(model, mb):
                    loss = (model(x, c) - x).square().mean(-1).sum() * mb.loss_scale
                    loss.backward()
                log.write(json.dumps([mb.epoch, mb.step, mb.k, list(mb.samples)]) + "\n")
                if mb.step == o.die_at and rank == ranks - 1:
                    os._exit(17)
                if mb.last:
                    opt.step()
                    opt.zero_grad()
                    save(folder, model, opt, loader.state_dict(mb.step + 1), first)
    total = sum((q.full_tensor() if hasattr(q, "full_tensor") else q).double().sum().item() for q in model.parameters())
    if first:
        print(f"sum of all weights {total!r}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
