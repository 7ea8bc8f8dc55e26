"""Built-in models at their real sizes, each as a layer's cost times a count plus the rest.

The traced expressions are kept in data/costs.json, so that planning for a built-in model needs neither torch nor
minutes; `python -m graphopt.schedule.models [NAME ...]` traces them again.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from graphopt.errors import ConfigError
from graphopt.schedule.builtin import BUILTIN, Latent, Shape
from graphopt.schedule.costmodel import write_json
from graphopt.schedule.symbolic import SymbolicCost

FILE = Path(__file__).parent / "data" / "costs.json"

VIDEO_DIMS = {
    "B": ("hidden_states", 0),
    "T": ("hidden_states", 2),
    "H": ("hidden_states", 3),
    "W": ("hidden_states", 4),
    "L": ("encoder_hidden_states", 1),
}


# the built-in models whose costs are traced
TRACED = ("wan-1.3b", "wan-14b")


@dataclass(frozen=True)
class ModelCost:
    """A model's traced cost in B, T, H, W (token grid) and L, bf16.

    Args:
        rest: everything outside the layers. layer: one layer. layers: how many. width: channels of a token.
    """

    name: str
    rest: SymbolicCost
    layer: SymbolicCost
    layers: int
    width: int

    @property
    def total(self) -> SymbolicCost:
        """The whole model."""
        return self.rest + self.layer * self.layers


def model_cost(name: str) -> ModelCost:
    """The stored cost of a built-in model."""
    stored = json.loads(FILE.read_text())["models"] if FILE.exists() else {}
    if name not in stored:
        raise ConfigError(
            f"there is no built-in model {name!r}",
            remedy=f"built in: {', '.join(sorted(stored))}; for your own, use trace_cost and analytic_fit",
        )
    m = stored[name]
    return ModelCost(name, SymbolicCost.of(m["rest"]), SymbolicCost.of(m["layer"]), m["layers"], m["width"])


def trace_builtin(name: str) -> ModelCost:
    """Trace a built-in model at its real width with one and with two layers; their difference is a layer."""
    import torch

    from graphopt.schedule.cost import trace_cost

    b = BUILTIN[name]
    costs = []
    for layers in (1, 2):
        with torch.device("meta"):
            model = b.build(num_layers=layers).to(torch.bfloat16)
        model = model.to_empty(device="cpu").requires_grad_(True)  # memory that is never touched costs nothing
        made = b.inputs(b, Shape(2, 9, 64, 96, 7), Latent(b.config["in_channels"], 3, 8, 12))
        inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in made.items()}
        costs.append(trace_cost(model, inputs, VIDEO_DIMS))
    layer = costs[1] - costs[0]
    tokens = {d: f"{p}*{d}" for d, p in zip("THW", b.patch) if p > 1}
    return ModelCost(name, (costs[0] - layer).subs(**tokens), layer.subs(**tokens), b.layers, b.width)


def main(names: list[str]) -> None:
    """Trace and store."""
    import diffusers
    import torch

    stored = json.loads(FILE.read_text()) if FILE.exists() else {"models": {}}
    for name in names or TRACED:
        cost = trace_builtin(name)
        stored["models"][name] = {
            "rest": cost.rest.to_json(),
            "layer": cost.layer.to_json(),
            "layers": cost.layers,
            "width": cost.width,
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
        }
        write_json(FILE, stored)
        print(name, cost.total, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
