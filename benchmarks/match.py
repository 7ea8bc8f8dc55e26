"""Time of matching, rewriting and linting the graph of a deep Wan transformer, on one core.

    python benchmarks/match.py [--blocks 40,80] [--out FOLDER]

The graph is captured once from a model with Wan's structure and tiny widths (the node count depends on the depth only).
Medians in milliseconds; `copy_ms` is the copy of the graph that the backend keeps as its way back.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from _results import save

from graphopt.codegen.operators import operator
from graphopt.passes import catalogue, pipeline, rewrite


def capture(blocks: int) -> torch.fx.GraphModule:
    """The Dynamo graph of a Wan transformer with so many blocks."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
                                  text_dim=16, freq_dim=32, ffn_dim=32, num_layers=blocks, rope_max_seq_len=32)
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch.compile(model, backend=backend)(
        hidden_states=torch.randn(2, 4, 2, 8, 8), timestep=torch.tensor([500, 20]),
        encoder_hidden_states=torch.randn(2, 7, 16), return_dict=False)
    torch._dynamo.reset()
    return graphs[0]


def measure(gm: torch.fx.GraphModule, repeats: int) -> dict[str, float]:
    """Medians over fresh copies of the graph."""
    times: dict[str, list[float]] = {"copy_ms": [], "match_ms": [], "rewrite_ms": []}
    sites = 0
    for _ in range(repeats):
        start = time.perf_counter()
        twin = pipeline.copy(gm)
        copied = time.perf_counter()
        found = rewrite.find(twin, catalogue.RULES)
        matched = time.perf_counter()
        # lints and recompiles, too
        rewrite.apply(twin, found.matches, lambda m: operator(m.replacement.fusion, "reference"))
        done = time.perf_counter()
        for name, seconds in zip(times, (copied - start, matched - copied, done - matched)):
            times[name].append(1e3 * seconds)
        sites = sum(len(m.rule.sites(m)) for m in found.matches)
    return {name: statistics.median(ms) for name, ms in times.items()} | {"sites": sites}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", default="10,20,40,80")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for blocks in map(int, args.blocks.split(",")):
        gm = capture(blocks)
        row = dict(model="wan", blocks=blocks, nodes=len(gm.graph.nodes), **measure(gm, args.repeats))
        row["total_ms"] = row["match_ms"] + row["rewrite_ms"]
        print(row, flush=True)
        rows.append(row)
    save("match", rows, ("model", "blocks"), {}, args.out)


if __name__ == "__main__":
    main()
