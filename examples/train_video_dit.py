"""Train a video diffusion transformer (diffusers' Wan) on mixed images and video with graphopt.

    python examples/train_video_dit.py --out run --make-data 64               # tiny, on a CPU or one GPU
    torchrun --nproc-per-node 2 examples/train_video_dit.py --out run --data DIR --size 1.3b      # FSDP2
    accelerate launch examples/train_video_dit.py --out run --data DIR        # wrapped by accelerate's prepare
DIR: manifest.parquet (columns frames, height, width in pixels, file), safetensors files with `latent` [C, T, H, W] and
`text` [L, D].  OUT gets metrics.jsonl, tensorboard/, checkpoints/ (for --resume) and transformer/ (as diffusers reads).
"""

import argparse
import os
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphopt

SIZES = {  # what differs from Wan 14B
    "tiny": dict(num_attention_heads=2, attention_head_dim=24, ffn_dim=96, num_layers=2, in_channels=4, out_channels=4,
                 text_dim=16, freq_dim=32),
    "1.3b": dict(num_attention_heads=12, ffn_dim=8960, num_layers=30, in_channels=16, text_dim=4096),
}  # fmt: skip
CLIPS = {"tiny": [(1, 64, 64), (1, 64, 96), (9, 64, 64), (17, 64, 96)],  # frames, height, width of --make-data
         "1.3b": [(1, 480, 832), (1, 832, 480), (17, 480, 832), (49, 480, 832)]}  # fmt: skip


class Clips(torch.utils.data.Dataset):
    """Row of the manifest -> {"latent": [C, T, H, W], "text": [L, D]}."""

    def __init__(self, manifest: Path) -> None:
        self.files = [str(manifest.parent / f) for f in pq.read_table(manifest, columns=["file"])["file"].to_pylist()]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return load_file(self.files[row])


def make_data(folder: Path, rows: int, size: str) -> None:
    """Write synthetic samples (a colour with noise, and a text that names the colour), and at last their manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    channels, width, table = SIZES[size]["in_channels"], SIZES[size]["text_dim"], []
    for i in range(rows):
        g, (frames, height, wide) = torch.Generator().manual_seed(i), CLIPS[size][i % 4]
        colour = torch.randn(channels, 1, 1, 1, generator=g)
        latent = colour + 0.3 * torch.randn(channels, (frames - 1) // 4 + 1, height // 8, wide // 8, generator=g)
        text = colour.flatten().repeat(width // channels).expand(32, width).contiguous()
        save_file({"latent": latent, "text": text}, folder / f"{i:06}.safetensors")
        table.append({"frames": frames, "height": height, "width": wide, "file": f"{i:06}.safetensors"})
    pq.write_table(pa.Table.from_pylist(table), folder / "manifest.part")
    os.replace(folder / "manifest.part", folder / "manifest.parquet")


def build(o: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """The model with its options, compiled in place (parameters keep diffusers' names), not yet wrapped."""
    torch.manual_seed(o.seed)
    found = o.pretrained and WanTransformer3DModel.from_pretrained(o.pretrained, subfolder="transformer").train()
    model = found or WanTransformer3DModel(**SIZES[o.size] | ({"num_layers": o.layers} if o.layers else {}))
    if o.lora:
        from peft import LoraConfig
        model.requires_grad_(False)
        model.add_adapter(LoraConfig(r=o.lora, lora_alpha=o.lora, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    if o.dsa:
        graphopt.dsa.convert(model, graphopt.dsa.DSAConfig(window=tuple(o.dsa)), select="blocks.*.attn1")
    if o.checkpointing:
        model.enable_gradient_checkpointing()
    model = graphopt.stream(model.bfloat16() if o.bf16 else model, device=device) if o.stream else model.to(device)
    if o.backend != "eager":
        ours = {"graphopt.compiler": o.compiler, "graphopt.select": "profitable" if device.type == "cuda" else "all",
                "graphopt.regions": "auto" if o.regions else "off"}
        model.compile(backend=o.backend, dynamic=True, options=ours if o.backend == "graphopt" else None)
    return model


def flow_loss(model: torch.nn.Module, batch: dict, mb: graphopt.MicrobatchInfo, o: argparse.Namespace) -> torch.Tensor:
    """Rectified flow: predict noise - latent at (1 - t) latent + t noise; summed over tokens, mean within a token.

    Noise and t depend on seed, epoch and sample alone, so neither a resume nor the number of ranks changes them.
    """
    latent, text = batch["latent"], batch["text"]
    draws = mb.generators(o.seed, latent.device)
    noise = torch.stack([torch.randn(latent.shape[1:], generator=g, device=latent.device) for g in draws])
    t = torch.sigmoid(torch.stack([torch.randn((), generator=g, device=latent.device) for g in draws]))
    mix, dtype = t.view(-1, 1, 1, 1, 1), torch.bfloat16 if o.stream and o.bf16 else torch.float32
    inputs = dict(hidden_states=((1 - mix) * latent + mix * noise).to(dtype), encoder_hidden_states=text.to(dtype))
    flow = model(**inputs, timestep=t * 1000, return_dict=False)[0]
    return (flow.float() - (noise - latent)).square().sum() * mb.shape.S / latent[0].numel()


def arguments() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("--out", type=Path, required=True, help="folder of the run")
    add("--data", type=Path, help="folder with manifest.parquet; default: OUT/data")
    add("--make-data", type=int, metavar="N", help="write N synthetic samples there first")
    add("--size", choices=SIZES, default="tiny", help="of a new model")
    add("--layers", type=int, help="fewer of them than that size has, to try things")
    add("--pretrained", help="start from a diffusers checkpoint (folder or hub id)")
    add("--plan", type=Path, help="made by `graphopt plan`; default: planned here from a guessed cost, by the next two")
    add("--tokens", type=int, default=32760, help="most latent tokens of a microbatch (memory)")
    add("--tau", type=float, default=1.3, help="a rank's step, in units of the costliest sample (global batch)")
    add("--steps", type=int, default=100)
    add("--save-every", type=int, default=50, help="steps between checkpoints; 0: one, at the end")
    add("--lr", type=float, default=1e-4)
    add("--seed", type=int, default=0)
    add("--bf16", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    add("--backend", choices=["graphopt", "inductor", "eager"], default="graphopt")
    add("--compiler", choices=["inductor", "aot_eager", "eager"], default="inductor")
    add("--regions", action="store_true", help="compile one of N equal layers, for all of them: minutes less of many")
    add("--lora", type=int, metavar="RANK", help="train adapters only")
    add("--dsa", type=int, nargs=3, metavar=("T", "H", "W"), help="window of deformable sliding attention")
    add("--stream", action="store_true", help="weights and AdamW in host memory, one process")
    add("--checkpointing", action="store_true", help="compute each block again in the backward")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--replan", action="store_true", help="resume on another number of processes")
    return p.parse_args()


def main() -> None:
    """Train."""
    o, accelerator = arguments(), None
    rank, local, world = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # set by `accelerate launch`
        from accelerate import Accelerator
        accelerator = Accelerator(mixed_precision="bf16" if o.bf16 else "no", cpu=device.type == "cpu")
    elif world > 1:
        dist.init_process_group(device_id=device if device.type == "cuda" else None)
    manifest, plan = (o.data or o.out / "data") / "manifest.parquet", o.plan or o.out / "plan"
    about = {k: getattr(o, k) for k in ("size", "pretrained", "seed", "stream", "lora", "dsa")}
    saved = graphopt.Checkpoints(o.out / "checkpoints", about=about, frozen=not o.lora)
    if rank == 0 and o.make_data and not manifest.exists():
        make_data(manifest.parent, o.make_data, o.size)
    if rank == 0 and not o.plan and saved.newest() is None:
        cost = graphopt.CostFit.two_term(1e-3, 1e-5, 1e-9)
        graphopt.plan_batches(manifest, cost, ranks=world, m_mem=o.tokens, tau=o.tau, out=plan, overwrite=True)
    if world > 1:
        dist.barrier()
    samples = graphopt.read_samples(manifest)
    loader = graphopt.PlanLoader(Clips(manifest), plan, manifest=samples, device=device, num_workers=2)
    bare, sharded = build(o, device), world > 1 and not accelerator
    for module in (*bare.blocks, bare) if sharded else ():
        fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16 if o.bf16 else None, torch.float32))
    amp = torch.autocast(device.type, torch.bfloat16, enabled=o.bf16 and not o.stream and not sharded)
    trained = [p for p in bare.parameters() if p.requires_grad]
    adamw = (graphopt.HostAdamW if o.stream else torch.optim.AdamW)(trained, lr=o.lr)
    model, opt, backward = bare, adamw, torch.Tensor.backward
    if accelerator:  # prepare() takes a closed list of compilers, so build() has compiled before
        (model, opt), backward = accelerator.prepare(bare, adamw), accelerator.backward
    step = saved.restore(bare, adamw, loader, resume=o.resume, replan=o.replan)
    log, loss, begin = graphopt.MetricsLog(o.out, step, total=o.steps, enabled=rank == 0), 0.0, time.time()
    while step < o.steps:
        for batch, mb in loader:
            with graphopt.accumulate(model, mb):
                with amp:
                    part = flow_loss(model, batch, mb, o) * mb.loss_scale
                backward(part)
            loss += part.detach()  # its mean over ranks is the mean over all tokens of the step
            if not mb.last:
                continue
            norm = adamw.clip_grad_norm_(1.0) if o.stream else torch.nn.utils.clip_grad_norm_(trained, 1.0)
            norm = norm.full_tensor() if sharded else norm
            opt.step()
            opt.zero_grad()
            if world > 1:
                dist.all_reduce(loss.div_(world))
            log.write(step, loss=loss.item(), grad_norm=norm.item(), seconds=time.time() - begin)
            step, loss, begin = mb.step + 1, 0.0, time.time()
            if step == o.steps or (o.save_every and step % o.save_every == 0):
                saved.save(step, bare, adamw, loader)
            if step == o.steps:
                break
    log.close()
    graphopt.save_weights(bare, o.out / "transformer")
    if log.steps and o.backend == "graphopt":
        print(graphopt.report(bare))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except graphopt.GraphoptError as e:
        sys.exit(f"{type(e).__name__}: {e}")
    except KeyboardInterrupt:
        sys.exit(130)  # --resume goes on from the newest checkpoint
