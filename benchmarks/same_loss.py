"""The same training run twice, eager and with graphopt: 300 optimizer steps on the same data in the same order.

    python benchmarks/same_loss.py [--dtype float32,bfloat16] [--steps 300] [--plot docs/img] [--out FOLDER]

On a CPU a tiny Wan (diffusers' class) on images and videos of several sizes; on a GPU 4 layers of Wan 1.3B's widths.
Rectified flow and AdamW in fp32; bfloat16 is autocast over fp32 weights.  Every sample is a colour with noise, and its
text names the colour, so that there is something to learn.

A row: losses (per step), final (mean loss over 8 held-out batches after the last step), and, beside eager: final_gap
(graphopt) or rounding_gap (eager_again), the relative distance of its final loss from eager's; curve_gap, the largest
along the curve smoothed over 20 steps; bar.
`eager_again` is eager once more with the sample order of every batch turned round: what rounding alone does to a run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path

import torch
from _results import ROOT, machine, save

BAR = {"float32": 1e-4, "bfloat16": 5e-3}
TINY = dict(num_attention_heads=2, attention_head_dim=24, ffn_dim=96, num_layers=2, in_channels=4, out_channels=4,
            text_dim=16, freq_dim=32)
WIDE = dict(num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=4, in_channels=16, out_channels=16,
            text_dim=4096, freq_dim=256)
# B, T, H, W of the latents of a step, in turn
SHAPES = {"cpu": [(4, 1, 8, 8), (2, 3, 8, 8), (4, 1, 8, 12), (2, 5, 8, 12)], "cuda": [(2, 1, 44, 36)]}


def batch(kind: str, seed: int, turned: bool = False) -> dict[str, torch.Tensor]:
    """Latents, noise, t and text of one step; `turned` puts the samples in the opposite order."""
    size = TINY if kind == "cpu" else WIDE
    g = torch.Generator().manual_seed(seed)
    b, *grid = SHAPES[kind][seed % len(SHAPES[kind])]
    channels, width = size["in_channels"], size["text_dim"]
    colour = torch.randn(b, channels, 1, 1, 1, generator=g)
    latent = colour + 0.3 * torch.randn(b, channels, *grid, generator=g)
    text = colour.view(b, 1, channels).repeat(1, 32, width // channels)
    found = {"latent": latent, "noise": torch.randn(latent.shape, generator=g),
             "t": torch.sigmoid(torch.randn(b, generator=g)), "text": text}
    return {k: (v.flip(0) if turned else v).to(kind) for k, v in found.items()}


def loss_of(model: torch.nn.Module, s: dict[str, torch.Tensor], bf16: bool) -> torch.Tensor:
    """Rectified flow."""
    mix = s["t"].view(-1, 1, 1, 1, 1)
    x = (1 - mix) * s["latent"] + mix * s["noise"]
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        flow = model(hidden_states=x, timestep=s["t"] * 1000, encoder_hidden_states=s["text"], return_dict=False)[0]
    return (flow.float() - (s["noise"] - s["latent"])).square().mean()


def train(kind: str, dtype: str, system: str, steps: int, lr: float) -> dict:
    """One run; returns its row."""
    from diffusers import WanTransformer3DModel

    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device(kind):
        model = WanTransformer3DModel(**(TINY if kind == "cpu" else WIDE))
    if system == "graphopt":
        options = {"graphopt.select": "all"} if kind == "cpu" else {}
        model.compile(backend="graphopt", dynamic=kind == "cpu", options=options)
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    bf16, turned = dtype == "bfloat16", system == "eager_again"
    losses, start = [], time.perf_counter()
    for i in range(steps):
        loss = loss_of(model, batch(kind, i, turned), bf16)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach())
        if i % 50 == 0:
            seconds = time.perf_counter() - start
            print(f"{dtype} {system} step {i} loss {losses[-1].item():.5f} {seconds:.1f} s", flush=True)
    # with gradients: without them these would be other graphs, and another compile
    final = [loss_of(model, batch(kind, 10**6 + i), bf16).item() for i in range(8)]
    row = {"model": "wan tiny" if kind == "cpu" else "wan 1.3b x 4", "dtype": dtype, "system": system, "steps": steps,
           "lr": lr, "losses": [round(x, 7) for x in torch.stack(losses).tolist()], "final": sum(final) / len(final)}
    if system == "graphopt":
        import graphopt

        report = graphopt.report(model)
        row |= {what: report.count(what, "rewritten") for what in ("modulate", "gate")}
    return row


def smooth(losses: list[float]) -> torch.Tensor:
    """Means over 20 steps."""
    return torch.tensor(losses, dtype=torch.float64).unfold(0, min(20, len(losses)), 1).mean(-1)


def compare(rows: list[dict]) -> None:
    """Add each row's distance from the eager row of its dtype."""
    eager = rows[0]
    for row in rows[-1:] if len(rows) > 1 else ():
        gap = abs(row["final"] - eager["final"]) / eager["final"]
        row["final_gap" if row["system"] == "graphopt" else "rounding_gap"] = gap
        row["curve_gap"] = float((smooth(row["losses"]) / smooth(eager["losses"]) - 1).abs().max())
        row["bar"] = BAR[row["dtype"]]
        print(f"{row['dtype']} {row['system']}: final {row['final']:.6f}, eager {eager['final']:.6f}, "
              f"gap {gap:.2e} (bar {row['bar']:.0e}), along the curve {row['curve_gap']:.2e}", flush=True)


def plot(rows: list[dict], folder: Path, where: str) -> Path:
    """All curves of a machine, eager under graphopt, and the distance between them below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    dtypes = list(dict.fromkeys(r["dtype"] for r in rows))
    figure, axes = plt.subplots(
        2, len(dtypes), figsize=(6 * len(dtypes), 6), squeeze=False, sharex=True, height_ratios=(2, 1))
    for column, dtype in enumerate(dtypes):
        of = {r["system"]: r for r in rows if r["dtype"] == dtype}
        top, below = axes[:, column]
        for system, style in (("eager", dict(color="0.6", lw=4)), ("graphopt", dict(color="tab:blue", lw=1))):
            curve = smooth(of[system]["losses"])
            top.plot(range(10, 10 + len(curve)), curve, label=system, **style)
        for system in ("eager_again", "graphopt"):
            gap = (smooth(of[system]["losses"]) / smooth(of["eager"]["losses"]) - 1).abs()
            label = {"eager_again": "eager, samples of a batch turned round"}.get(system, system)
            below.semilogy(range(10, 10 + len(gap)), gap.clamp_min(1e-9), label=label)
        below.axhline(BAR[dtype], color="tab:red", lw=0.8, label=f"bar for the final loss, {BAR[dtype]:.0e}")
        top.set_title(f"{rows[0]['model']}, {dtype}, {where}")
        top.set_ylabel("loss, mean over 20 steps")
        below.set_ylabel("relative distance from eager")
        below.set_xlabel("optimizer step")
        top.legend()
        below.legend(fontsize=8)
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"same_loss_{where}.png"
    figure.savefig(path, dpi=110)
    return path


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dtype", default="float32,bfloat16")
    p.add_argument("--systems", default="eager,graphopt,eager_again")
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--plot", type=Path)
    p.add_argument("--out", type=Path)
    p.add_argument("--machine", help="with --plot: plot the stored rows of this machine, run nothing")
    o = p.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.allow_tf32 = False  # convolutions too are fp32 in fp32
    with contextlib.suppress(KeyboardInterrupt):
        for dtype in o.dtype.split(",") if not o.machine else ():
            mine: list[dict] = []
            for system in o.systems.split(","):
                mine.append(train(kind, dtype, system, o.steps, o.lr))
                compare(mine)
                print(save("same_loss", mine, ("model", "dtype", "system"), {}, o.out), flush=True)
    if o.plot:
        stored = (o.out or ROOT / "results" / (o.machine or machine())) / "same_loss.json"
        print(plot(json.loads(stored.read_text())["rows"], o.plot, o.machine or machine()))


if __name__ == "__main__":
    main()
