"""3D deformable sliding attention: `graphopt.dsa.video_attention`, an attention whose cost is linear in the tokens.

Each video token attends to a kt x kh x kw window of the latent grid, moved by a learned offset per token and head and
sampled by trilinear interpolation.  In a model: `plan` lists every attention, `convert` makes chosen ones slide with
learned offsets.  Opt-in: nothing here runs unless it is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphopt.dsa.attention import explain, video_attention
    from graphopt.dsa.calls import distill_loss, parameters, probe, revert, verify
    from graphopt.dsa.converting import convert
    from graphopt.dsa.grid import video_grid
    from graphopt.dsa.handle import Handle, handle_of
    from graphopt.dsa.options import DSAConfig
    from graphopt.dsa.planning import plan

_HOME = {
    "DSAConfig": "graphopt.dsa.options",
    "Handle": "graphopt.dsa.handle",
    "convert": "graphopt.dsa.converting",
    "distill_loss": "graphopt.dsa.calls",
    "explain": "graphopt.dsa.attention",
    "handle_of": "graphopt.dsa.handle",
    "parameters": "graphopt.dsa.calls",
    "plan": "graphopt.dsa.planning",
    "probe": "graphopt.dsa.calls",
    "revert": "graphopt.dsa.calls",
    "verify": "graphopt.dsa.calls",
    "video_attention": "graphopt.dsa.attention",
    "video_grid": "graphopt.dsa.grid",
}
__all__ = [
    "DSAConfig", "Handle", "convert", "distill_loss", "explain", "handle_of", "parameters", "plan", "probe", "revert",
    "verify", "video_attention", "video_grid",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'graphopt.dsa' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
