"""Results of examples/adapt_dsa.py: one file for all seeds, a table, pictures."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

SPEEDS = (0, 1, 2, 3)


def join(folder: Path, command: list[str]) -> None:
    """adapt_dsa.json from the files of the seeds, in the form of benchmarks/results."""
    rows = [json.loads(p.read_text()) for p in sorted(folder.glob("seed*.json"))]
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=Path(__file__).parent, capture_output=True,
                          text=True, check=False)
    commit = os.environ.get("GRAPHOPT_COMMIT") or done.stdout.strip() or "unknown"
    machine = rows[0]["device"].split()[-1].lower()
    found = {"name": "adapt_dsa", "machine": machine, "commit": commit, "torch": torch.__version__, "triton": _triton(),
             "command": " ".join(["python examples/adapt_dsa.py", *command]),
             "date": datetime.date.today().isoformat(), "rows": rows}
    (folder / "adapt_dsa.json").write_text(json.dumps(found, indent=1) + "\n")


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def _rows(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "adapt_dsa.json").read_text())["rows"]


def _arms(seeds: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(arm for s in seeds for arm in s["arms"]))


def alone(setup: dict[str, Any]) -> float:
    """Error of the best linear estimate of a colour (uniform in -1 .. 1) from the noisy pixels of its token."""
    level = setup["noisy"]
    noise, colour = (level / (1 - level)) ** 2 / 4, 1 / 3
    return colour * noise / (colour + noise)


def table(folder: Path) -> str:
    """Final held-out errors, mean and range over seeds."""
    seeds = _rows(folder)
    lines = [f"{'arm':<26}" + "".join(f"speed {v}".rjust(24) for v in SPEEDS)]
    rows = {"pre-trained": [s["pretrain"][-1]["error"] for s in seeds]}
    for arm in _arms(seeds):
        curves = [s["arms"][arm]["curve"] for s in seeds if s["arms"].get(arm)]
        steps = min(c[-1]["step"] for c in curves)  # a run may have been cut off
        own = [s["arms"][arm]["pretrain"][-1]["error"] for s in seeds if "pretrain" in s["arms"].get(arm, {})]
        rows |= {f"pre-trained, for {arm}": own} if own else {}  # the arm is of another run
        name = arm if steps == seeds[0]["setup"]["adapt"] else f"{arm}, {steps} steps only"
        rows[name] = [p["error"] for c in curves for p in c if p["step"] == steps]
    for arm, errors in rows.items():
        cells = []
        for v in SPEEDS:
            x = [e[str(v)] for e in errors]
            cells.append(f"{sum(x) / len(x):.4f} ({min(x):.4f}..{max(x):.4f})".rjust(24) if x else "-".rjust(24))
        lines.append(f"{arm:<26}" + "".join(cells))
    return "\n".join(lines)


def plot(folder: Path) -> None:
    """curves.png and offsets.png from the results in a folder."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    seeds = _rows(folder)
    fig, axes = plt.subplots(1, len(SPEEDS), figsize=(3.2 * len(SPEEDS), 3), sharey=True, layout="constrained")
    for ax, v in zip(axes, SPEEDS):
        for arm in _arms(seeds):
            curves = [s["arms"][arm]["curve"] for s in seeds if s["arms"].get(arm)]
            curves = [c[: min(map(len, curves))] for c in curves]  # a run may have been cut off
            steps = [p["step"] for p in curves[0]]
            values = torch.tensor([[p["error"][str(v)] for p in c] for c in curves])
            line, = ax.plot(steps, values.mean(0), label=arm, lw=1.5, ls="--" if arm.startswith("dsa-") else "-")
            ax.fill_between(steps, values.amin(0), values.amax(0), alpha=0.15, color=line.get_color(), lw=0)
        ax.axhline(alone(seeds[0]["setup"]), color="grey", ls=":", lw=1, label="best from the frame alone (linear)")
        ax.set_title(f"{v} tokens per frame", fontsize=9)
        ax.set_xlabel("steps after conversion", fontsize=8)
        ax.set_yscale("log")
        ax.tick_params(labelsize=7)
    axes[0].set_ylabel("error on objects", fontsize=8)
    axes[0].legend(fontsize=7)
    fig.savefig(folder / "curves.png", dpi=110)
    if (folder / "offsets.pt").exists():
        saved = torch.load(folder / "offsets.pt")
        (T, H, W), fields = saved["grid"], saved["offsets"].float()
        frames = [T // 2 - 1, T // 2, T // 2 + 1]
        # the heads whose offsets on these videos are longest
        best = fields[..., 1:].norm(dim=-1).mean((0, -1)).flatten().topk(2).indices.tolist()
        rows = [(video, *divmod(index, fields.shape[2])) for index in best for video in (0, 1)]
        fig, axes = plt.subplots(len(rows), len(frames), figsize=(2.6 * len(frames), 2.7 * len(rows)), squeeze=False,
                                 layout="constrained")
        for line, (video, layer, head) in zip(axes, rows):
            field = fields[video, layer, head].view(T, H, W, 3)
            vy, vx = saved["velocity"][video].tolist()
            for ax, t in zip(line, frames):
                picture = saved["video"][video, :, t].float().permute(1, 2, 0) / 2 + 0.5
                ax.imshow(picture, extent=(-0.5, W - 0.5, H - 0.5, -0.5), interpolation="nearest")
                ax.quiver(range(W), range(H), field[t, ..., 2], field[t, ..., 1], angles="xy", scale_units="xy",
                          scale=1, color="yellow", width=0.006)
                ax.quiver(W / 2, H / 2, vx, vy, angles="xy", scale_units="xy", scale=1, color="white", width=0.012)
                ax.set_title(f"layer {layer} head {head} frame {t}", fontsize=7)
                ax.set_axis_off()
        fig.suptitle("yellow: learned offsets; white: motion to the next frame", fontsize=8)
        fig.savefig(folder / "offsets.png", dpi=100)
