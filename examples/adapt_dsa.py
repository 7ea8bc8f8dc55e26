"""A small, honest adaptation run: does a dense video transformer keep its quality when its attention slides?

    python examples/adapt_dsa.py --out results/            three seeds side by side on one GPU, about five minutes
    python examples/adapt_dsa.py --plot results/           curves and the picture of offsets (needs matplotlib)

An interrupted run goes on where it last evaluated when it is started again with the same --out; so does one with more
arms.

A tiny Wan-shaped model learns to denoise (flow matching) synthetic videos: squares of random colours that move together
at 0, 1, 2 or 3 tokens per frame; the text tells the velocity.  Every frame has a noise level of its own (a timestep per
token, as Wan 2.2 has it): colours cannot be guessed, so a noisy frame is cleaned with the help of the same object in
cleaner frames, and attention has to follow the motion.  The window is 3 x 3 x 3 tokens, so without offsets an object
faster than 1 token per frame leaves it between frames.

Dense pre-training; then arms from the same weights, with the same data and number of steps:

    dense              goes on as it is
    window             sliding, offsets fixed at zero
    dsa                sliding, one learned offset per token and head
    tap                sliding, one learned offset per tap (the paper's form)
    dsa-no-distill     dsa without distillation
    dsa-slow-heads     dsa, its heads at a tenth of the model's learning rate (dsa: ten times)

The other sliding arms start with layer-wise distillation (dense attention on a layer's own q, k, v is the teacher)
beside the diffusion loss.  Reported, by speed, on held-out videos: mean squared error of objects in frames at noise
level 0.8 between frames at level 0.2.  The variance of a colour is 0.333; the best linear estimate from the frame alone
has 0.308, from all frames, if it knew the motion, 0.005.  On a GPU a training step is one CUDA graph.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from adapt_dsa_results import SPEEDS, join, plot, table
from adapt_dsa_state import State, Untouched

import graphopt

# arm -> offsets of the converted layers, and what differs in the setting
ARMS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "dsa": ("head", {}), "window": ("zero", {}), "dense": (None, {}), "tap": ("tap", {}),
    "dsa-no-distill": ("head", {"distill": 0}), "dsa-slow-heads": ("head", {"head_lr": 3e-5})}


@dataclass(frozen=True)
class Setup:
    """Sizes: a video is [3, frames, pixels, pixels], a token 1 x 2 x 2 of them."""

    frames: int = 5
    pixels: int = 20
    square: int = 8
    objects: int = 2
    heads: int = 2
    head_dim: int = 64
    layers: int = 4
    window: tuple[int, int, int] = (3, 3, 3)
    batch: int = 32
    pretrain: int = 4000
    adapt_batch: int = 8
    distill: int = 80
    adapt: int = 1000
    every: int = 100
    held_out: int = 24
    lr: float = 2e-3
    adapt_lr: float = 3e-4
    head_lr: float = 3e-3
    background: float = 0.1  # weight of a pixel of the background in the loss
    motion: str = "told"  # the text says the velocity; "seen": it does not
    noisy: float = 0.8  # noise levels of odd and even frames of held-out videos
    clean: float = 0.2


SMOKE = Setup(frames=3, pixels=8, square=4, head_dim=12, layers=2, window=(1, 3, 3), batch=2, pretrain=2,
              adapt_batch=2, distill=1, adapt=2, every=1, held_out=2)


# a size for a CPU: half an hour a seed on one core
SMALL = Setup(frames=3, pixels=24, square=6, objects=3, head_dim=32, layers=3, batch=8, pretrain=2000, distill=30,
              adapt=120, every=40, held_out=16)


def videos(s: Setup, speeds: torch.Tensor, g: torch.Generator | None = None) -> tuple[torch.Tensor, ...]:
    """Videos [n, 3, T, H, W] in -1 .. 1, masks of objects [n, 1, T, H, W], velocities [n, 2] in tokens per frame.

    speeds: [n] tokens per frame.  Colours and positions are those of whole tokens.
    """
    n, device, side, room = len(speeds), speeds.device, s.square // 2, (s.pixels - s.square) // 2

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g, device=device)

    angle = rand(n) * 2 * torch.pi
    velocity = (torch.stack([angle.sin(), angle.cos()], 1) * speeds[:, None]).round()
    time_ = torch.arange(s.frames, device=device)[None, :, None]
    axis = torch.arange(s.pixels // 2, device=device)
    video = torch.zeros(n, 3, s.frames, s.pixels // 2, s.pixels // 2, device=device)
    mask = torch.zeros_like(video[:, :1])
    for _ in range(s.objects):
        colours = rand(n, 3, side * side) * 2 - 1
        # [n, T, 2]; whole in the middle frame, it may enter and leave in the others
        place = (rand(n, 2) * (room + 1)).floor()[:, None] + velocity[:, None] * (time_ - s.frames // 2)
        y, x = ((axis[None, None] - place[..., i : i + 1]).long() for i in (0, 1))
        inside = ((y >= 0) & (y < side))[..., :, None] & ((x >= 0) & (x < side))[..., None, :]
        index = y.clamp(0, side - 1)[..., :, None] * side + x.clamp(0, side - 1)[..., None, :]
        colour = colours.gather(2, index.flatten(1)[:, None].expand(-1, 3, -1)).view_as(video)
        video = torch.where(inside[:, None], colour, video)
        mask = torch.maximum(mask, inside[:, None].float())
    whole = torch.nn.functional.interpolate
    size = (s.frames, s.pixels, s.pixels)
    return whole(video, size), whole(mask, size), velocity


def build(s: Setup) -> torch.nn.Module:
    """A tiny Wan of diffusers."""
    from diffusers import WanTransformer3DModel

    width = s.heads * s.head_dim
    return WanTransformer3DModel(
        num_attention_heads=s.heads, attention_head_dim=s.head_dim, in_channels=3, out_channels=3, text_dim=16,
        freq_dim=64, ffn_dim=2 * width, num_layers=s.layers, rope_max_seq_len=64, patch_size=(1, 2, 2))


def mix(clean: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Videos [n, 3, T, H, W] at noise levels t [n, T]."""
    at = t[:, None, :, None, None]
    return (1 - at) * clean + at * noise


class Run:
    """One seed: held-out data, losses, and training with the same data for every arm."""

    def __init__(self, s: Setup, seed: int, device: str, state: State, eager: bool = False) -> None:
        self.s, self.seed, self.device, self.state = s, seed, device, state
        self.eager = eager  # without CUDA graphs
        torch.manual_seed(seed)
        g = torch.Generator(device).manual_seed(10_000)  # held-out videos are the same for every seed
        self.held_out = []
        for speed in SPEEDS:
            data = videos(s, torch.full((s.held_out,), float(speed), device=device), g)
            self.held_out.append((*data, torch.randn(data[0].shape, generator=g, device=device)))

    def text(self, velocity: torch.Tensor) -> torch.Tensor:
        """[n, 2, 16] one-hot, a word for the velocity along h and one along w, if the text tells them."""
        told = velocity if self.s.motion == "told" else torch.zeros_like(velocity)
        places = torch.arange(16, device=self.device) - max(SPEEDS)
        return torch.stack([told[:, :1] == places, told[:, 1:] == places - 8], 1).float()

    def call(self, f: Callable[..., Any], x: torch.Tensor, t: torch.Tensor, text: torch.Tensor) -> Any:
        """f as the model is called, for videos x at noise levels t [n, frames]."""
        tokens = t.repeat_interleave((self.s.pixels // 2) ** 2, 1) * 1000
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda", cache_enabled=False):
            return f(hidden_states=x, timestep=tokens, encoder_hidden_states=text, return_dict=False)

    def velocity(self, model: torch.nn.Module, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """What the model says noise - video is."""
        return self.call(model, x, t, text)[0].float()

    def loss(self, model: torch.nn.Module, n: int) -> torch.Tensor:
        """The flow-matching loss of a fresh batch of n."""
        clean, mask, motion = videos(self.s, torch.randint(0, len(SPEEDS), (n,), device=self.device).float())
        noise, t = torch.randn_like(clean), torch.rand(n, self.s.frames, device=self.device) * 0.98 + 0.01
        error = (self.velocity(model, mix(clean, noise, t), t, self.text(motion)) - (noise - clean)).square()
        weight = mask + self.s.background * (1 - mask)
        return (error * weight).sum() / (3 * weight.sum())

    def levels(self, n: int) -> torch.Tensor:
        """Noise levels of held-out videos, [n, frames]."""
        odd = torch.arange(self.s.frames, device=self.device) % 2 == 1
        return torch.where(odd, self.s.noisy, self.s.clean).expand(n, -1)

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        """Error of objects in the noisy frames, by speed."""
        out = {}
        for speed, (clean, mask, motion, noise) in zip(SPEEDS, self.held_out):
            t = self.levels(len(clean))
            x = mix(clean, noise, t)
            guess = x - t[:, None, :, None, None] * self.velocity(model, x, t, self.text(motion))
            error = ((guess - clean).square() * mask)[:, :, 1::2]
            out[str(speed)] = float(error.sum() / (mask[:, :, 1::2].sum() * 3))
        return out

    def train(self, part: str, curve: list[dict], model: torch.nn.Module, groups: list[dict], steps: int, seed: int,
              every: int, batch: int, handle: Any = None, distill: int = 0) -> None:
        """Held-out errors go to `curve`, and with each the state is kept; the first `distill` steps also distil."""
        cuda = self.device == "cuda"
        base = [g["lr"] for g in groups]
        for g in groups:  # a graph reads the learning rate from memory
            g["lr"] = torch.tensor(g["lr"], device=self.device) if cuda else g["lr"]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.01, fused=cuda, capturable=cuda)
        torch.manual_seed(seed)
        resumed = self.state.restore(part, model, optimizer)
        start, step = time.perf_counter() - (0 if resumed is None else curve[-1]["seconds"]), None
        for i in range(resumed or 0, steps + 1):
            if i != resumed and (i % every == 0 or i == steps):
                curve.append({"step": i, "error": self.evaluate(model), "seconds": time.perf_counter() - start})
                print(f"seed {self.seed}", part, curve[-1], flush=True)
                self.state.keep(part, i, model, optimizer)
                self.state.write_json()
            if i == steps:
                break
            for group, lr in zip(optimizer.param_groups, base):  # a short warm-up, then a falling line
                now = lr * min(1, (i + 1) / max(1, steps // 20)) * (1 - 0.95 * i / steps)
                if cuda:
                    group["lr"].fill_(now)
                else:
                    group["lr"] = now
            first = i == 0 or (handle is not None and i == distill)
            if step is None or first:
                step = self.stepper(model, optimizer, handle if i < distill else None, batch, first)
            step()

    def stepper(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, handle: Any,
                batch: int, first: bool) -> Callable[[], None]:
        """One training step as a function, on a GPU as a CUDA graph; with a handle, it distils as well.

        first: what runs before the capture counts as training.  It does not when a run goes on later.
        """

        def step() -> None:
            with handle.distilling() if handle is not None else nullcontext():
                loss = self.loss(model, batch)
                if handle is not None:
                    loss = loss + handle.distill_loss()
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        def eager() -> None:
            optimizer.zero_grad()
            step()

        if self.device != "cuda" or self.eager:
            return eager
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with nullcontext() if first else Untouched(self.state, model, optimizer):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    eager()
            torch.cuda.current_stream().wait_stream(side)
            optimizer.zero_grad()
            with torch.cuda.graph(graph):
                step()
        return graph.replay


def pretrained(run: Run, curve: list[dict]) -> torch.nn.Module:
    """A dense model; its held-out errors go to `curve`."""
    s, model = run.s, build(run.s).to(run.device)
    if "dense" in run.state.data:
        model.load_state_dict(run.state.data["dense"])
        return model
    everything = [{"params": list(model.parameters()), "lr": s.lr}]
    run.train("pretrain", curve, model, everything, s.pretrain, 1 + run.seed, max(1, s.pretrain // 5), s.batch)
    run.state.finish(dense=model.state_dict())
    return model


def adapted(run: Run, dense: torch.nn.Module, arm: str, result: dict[str, Any], folder: Path | None) -> None:
    """One arm from the pre-trained weights, into `result`; a field of offsets goes to `folder`."""
    offsets, changes = ARMS[arm]
    s, model, handle = replace(run.s, **changes), copy.deepcopy(dense), None
    groups = [{"params": list(model.parameters()), "lr": s.adapt_lr}]
    torch.manual_seed(run.seed)
    if offsets is not None:
        config = graphopt.dsa.DSAConfig(window=s.window, offsets=offsets)
        handle = graphopt.dsa.convert(model, config, select="blocks.*.attn1")
        if offsets != "zero":
            groups.append({"params": list(handle.parameters()), "lr": s.head_lr, "weight_decay": 0.0})
    if run.state.data.get("training", {}).get("part") != arm:
        result["curve"] = []
    run.train(arm, result["curve"], model, groups, s.adapt, 1000 + run.seed, s.every, s.adapt_batch, handle, s.distill)
    if offsets in ("head", "tap"):
        result["offsets"] = offsets_and_motion(run, model, handle, folder)


def one_seed(s: Setup, seed: int, device: str, out: Path, arms: tuple[str, ...], eager: bool) -> None:
    """Everything of one seed; results and state are written after each evaluation."""
    state = State(out, seed, s, device)
    run, result = Run(s, seed, device, state, eager), state.data["result"]
    result["device"] = _device_name(device)
    dense = pretrained(run, result["pretrain"])
    for arm in (a for a in arms if a not in state.data["done"]):
        print(f"seed {seed} {arm}", flush=True)
        adapted(run, dense, arm, result["arms"].setdefault(arm, {}), out if seed == 0 and arm == "dsa" else None)
        state.finish(done=[*state.data["done"], arm])
        state.write_json()


@torch.no_grad()
def offsets_and_motion(run: Run, model: torch.nn.Module, handle: Any, folder: Path | None) -> dict[str, Any]:
    """How the learned offsets (mean over taps) relate to the motion of objects in noisy frames, per layer and head.

    signed, unsigned: correlation of the offset (h, w) with the velocity, and with its absolute value, over tokens on
    objects (a window of three frames holds the next and the last: a head may look one way whatever the direction).
    length: mean length of (h, w) by speed.  inside, inside_fixed: the share of dense attention in the window with the
    offsets and with none, of the first video of the highest speed.
    """
    s = run.s
    seen: dict[str, torch.Tensor] = {}
    hooks = [h.register_forward_hook(lambda m, a, y: seen.__setitem__(m.fqn, y.mean(3) if y.dim() == 5 else y))
             for h in handle.layers.values()]
    found: dict[str, Any] = {}
    size = s.pixels // 2
    pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for speed, (clean, mask, velocity, noise) in zip(SPEEDS, run.held_out):
        t = run.levels(len(clean))
        run.velocity(model, mix(clean, noise, t), t, run.text(velocity))
        mask = mask.clone()
        mask[:, :, ::2] = 0
        on = torch.nn.functional.max_pool3d(mask, (1, 2, 2)).flatten(1).bool()  # [n, tokens]
        for name, y in seen.items():
            each = y.float().permute(0, 2, 1, 3)[on]  # [tokens on objects, heads, 3]
            moves = velocity[:, None].expand(-1, on.shape[1], -1)[on]
            pairs.setdefault(name, []).append((each, moves))
        if speed == SPEEDS[-1]:
            probe = run.call(handle.probe, mix(clean, noise, t), t, run.text(velocity))
        if folder is not None and speed == SPEEDS[-1]:  # two videos that move in opposite directions
            two = [0, int((velocity @ velocity[0]).argmin())]
            fields = torch.stack([y[two].float() for y in seen.values()], 1)  # [2, layers, heads, tokens, 3]
            torch.save({"offsets": fields.half().cpu(), "video": clean[two].half().cpu(),
                        "velocity": velocity[two].cpu(), "grid": (s.frames, size, size)}, folder / "offsets.pt")
    for hook in hooks:
        hook.remove()
    for name, parts in pairs.items():
        d = torch.cat([each[..., 1:].permute(1, 0, 2).flatten(1) for each, _ in parts], 1)  # [heads, 2 tokens]
        v = torch.cat([moves.flatten() for _, moves in parts])
        found[name] = {
            "signed": correlation(d, v), "unsigned": correlation(d, v.abs()),
            "length": [each[..., 1:].norm(dim=-1).mean(0).tolist() for each, _ in parts],
            "inside": probe.layers[name].inside, "inside_fixed": probe.layers[name].inside_fixed}
    return found


def correlation(x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Of each row of x [rows, n] with y [n]; 0 where one is constant."""
    x, y = x - x.mean(1, keepdim=True), y - y.mean()
    return ((x @ y) / (x.norm(dim=1) * y.norm()).clamp_min(1e-12)).tolist()


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def main(argv: list[str] | None = None) -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("adapt_dsa"))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--seed", type=int, help="run this one seed here")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, a few steps")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--plot", type=Path, help="draw the results of a folder")
    for field in fields(Setup):
        if field.name != "window":
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default))
    args = parser.parse_args(argv)
    if args.plot:
        plot(args.plot)
        print(table(args.plot))
        return
    s = SMOKE if args.smoke else SMALL if args.small else Setup()
    given = {f.name: v for f in fields(Setup) if (v := getattr(args, f.name, None)) is not None}
    s = Setup(**{**asdict(s), **given})
    args.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.seed is not None:
        one_seed(s, args.seed, device, args.out, tuple(args.arms.split(",")), args.eager)
        return
    rest = [a for n, v in given.items() for a in (f"--{n.replace('_', '-')}", str(v))]
    rest += ["--smoke"] * args.smoke + ["--small"] * args.small + ["--eager"] * args.eager
    command = [sys.executable, __file__, "--out", str(args.out), "--arms", args.arms, *rest]
    children = [subprocess.Popen([*command, "--seed", seed]) for seed in args.seeds.split(",")]
    codes = [c.wait() for c in children]
    join(args.out, [f"--out {args.out.name} --arms {args.arms} --seeds {args.seeds}", *rest])
    print(table(args.out))
    if any(codes):
        raise SystemExit(f"a seed failed: exit codes {codes}")


if __name__ == "__main__":
    main()
