"""3D deformable sliding attention: `graphopt.dsa.video_attention`, an attention whose cost is linear in the tokens.

Each video token attends to a kt x kh x kw window of the latent grid, moved by a learned offset per token and head and
sampled by trilinear interpolation.  Opt-in: nothing here runs unless it is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphopt.dsa.attention import explain, video_attention

_HOME = {"explain": "graphopt.dsa.attention", "video_attention": "graphopt.dsa.attention"}
__all__ = ["explain", "video_attention"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'graphopt.dsa' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
