"""The README's picture: one block of Wan before and after, from `graphopt.inspect` itself (no GPU, no weights).

    python benchmarks/report_rewrite.py [--out docs/img/rewrite.svg]
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from _results import ROOT
from torch import fx

import graphopt

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")
GREY = "0.55"


@dataclass
class Box:
    """One line of a column: its text, the operator it belongs to (its name in the graph after), None for the rest."""

    text: str
    owner: str | None


def wan() -> graphopt.Inspection:
    """Two blocks at the width of Wan 1.3B, 32,760 tokens, on meta."""
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel(num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=2,
                                      in_channels=16, out_channels=16).to(torch.bfloat16)
        new = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16)
        kw = dict(hidden_states=new(1, 16, 21, 60, 104), timestep=torch.empty(1),
                  encoder_hidden_states=new(1, 512, 4096))
    return graphopt.inspect(model, **kw, return_dict=False, device="meta", options={"graphopt.select": "all"})


def place(node: fx.Node) -> tuple[str, str]:
    """(block, what in it): ("0", "attn1")."""
    names = [str(v[0]) for v in (node.meta.get("nn_module_stack") or {}).values()]
    found = [n.split("['blocks'].")[1] for n in names if "['blocks']." in n]
    if not found:
        return "", ""
    block, _, rest = found[-1].partition(".")
    return block, rest.split(".")[0]


def column(gm: fx.GraphModule, owners: dict[str, str], heads: set[str]) -> list[Box]:
    """The operators of block 0 in order, and those of its neighbour that its last one takes; modules as one line."""
    lines: list[tuple[str, str | None, str]] = []
    for node in gm.graph.nodes:
        block, what = place(node)
        owner = owners.get(node.name)
        if node.op in ("placeholder", "output") or (block != "0" and owner not in heads):
            continue
        name = str(getattr(node.target, "__name__", node.target)).split("_triton_")[0].removesuffix(".default")
        module = what if what in ("attn1", "attn2", "ffn") and owner is None else ""
        if name == "getitem" or (owner is None and not module and what.startswith("norm")):
            continue
        lines.append((module, owner, name))
    boxes = []
    for (module, _), run in itertools.groupby(lines, key=lambda x: (x[0], x[1] if not x[0] else None)):
        group = list(run)
        if module:
            boxes.append(Box(f"{module}  ({len(group)} operators)", None))
        else:
            boxes += [Box(name, owner) for _, owner, name in group]
    return boxes


def picture(seen: graphopt.Inspection, path: Path) -> Path:
    """Both columns, the operators of a chain in the colour of the one that replaces them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyBboxPatch, Polygon

    owners: dict[str, str] = {}
    for change in (c for name in seen.passes for graph in seen.changes(name) for c in graph):
        if change.rule != "around them" and change.after:
            head = next(r.name for r in change.after if "getitem" not in r.text)
            owners |= {r.name: head for r in (*change.before, *change.after)}
    before, after = seen.graph("before"), seen.graph("after")
    names = {n.name for n in after.graph.nodes if place(n)[0] == "0"}
    heads = {owners[n] for n in owners if n in names and owners[n] == n}
    crossing = {owners[n.name] for n in before.graph.nodes if place(n)[0] == "0" and n.name in owners}
    heads |= crossing
    left, right = column(before, owners, heads), column(after, owners, heads)
    colour = {h: COLOURS[i % len(COLOURS)] for i, h in enumerate(dict.fromkeys(b.owner for b in right if b.owner))}
    height = len(left)
    figure, axes = plt.subplots(figsize=(9, 0.2 * height + 0.5))
    spots: dict[str, list[float]] = {}

    def draw(x: float, y: float, box: Box) -> None:
        shade = colour.get(box.owner or "", GREY)
        axes.add_patch(FancyBboxPatch((x, y - 0.4), 3.6, 0.8, boxstyle="round,pad=0,rounding_size=0.15", ec=shade,
                                      fc=shade if box.owner else "0.93", lw=0.8))
        axes.text(x + 1.8, y, box.text, ha="center", va="center", fontsize=8, family="monospace",
                  color="white" if box.owner else "0.25")

    for i, box in enumerate(left):
        draw(0.0, -i, box)
        spots.setdefault(box.owner or box.text, []).append(-i)
    for box in right:  # at the height of what it stands for
        ys = spots[box.owner or box.text]
        y = sum(ys) / len(ys)
        draw(6.2, y, box)
        if box.owner:
            corners = [(3.6, max(ys) + 0.4), (6.2, y + 0.4), (6.2, y - 0.4), (3.6, min(ys) - 0.4)]
            axes.add_patch(Polygon(corners, closed=True, fc=colour[box.owner], alpha=0.18, lw=0))
    axes.text(1.8, 0.9, "one block of Wan, as captured", ha="center", fontsize=10)
    axes.text(8.0, 0.9, "after graphopt", ha="center", fontsize=10)
    axes.set_xlim(-0.2, 10.0)
    axes.set_ylim(-height + 0.3, 1.6)
    axes.axis("off")
    figure.tight_layout(pad=0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    return path


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=ROOT.parent / "docs" / "img" / "rewrite.svg")
    print(picture(wan(), p.parse_args().out))


if __name__ == "__main__":
    main()
