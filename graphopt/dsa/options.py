"""What a converted layer computes: `DSAConfig`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphopt.codegen.dsa import checks
from graphopt.errors import ConfigError

Triple = tuple[int, int, int]
CHOICES = {
    "offsets": ("head", "tap", "zero"),
    "boundary": ("inside", "border"),
    "text": ("auto", "none", "first", "last"),
}


@dataclass(frozen=True)
class DSAConfig:
    """Sliding attention of the layers `convert` changes.

    window: (kt, kh, kw) tokens; an axis as long as the grid's becomes global.
    offsets: "head": one learned offset per token and group of heads; "tap": one per tap as well (the paper's form,
        plain torch, slow); "zero": a sliding window without parameters.
    groups: offset vectors per token, shared by heads / groups heads each; default: one per head.
    max_offset: bound of an offset in tokens (tanh); default: unbounded (a window always stays inside the grid).
    boundary: "inside", or "border" (taps clamp, plain torch only).
    text: where text tokens stand in a joint sequence: "first", "last", "none"; "auto" sees it in the module's `cat`.
    """

    window: Triple = (3, 7, 7)
    offsets: str = "head"
    groups: int | None = None
    max_offset: float | None = None
    boundary: str = "inside"
    text: str = "auto"

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "window", checks.sizes(self.window, "a window"))
        except ConfigError:
            raise ConfigError(f"window is {self.window!r}", where="DSAConfig",
                              remedy="three whole numbers of tokens, for example window=(3, 7, 7)") from None
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}", where="DSAConfig",
                                  remedy=f"use one of {', '.join(map(repr, allowed))}")
        if self.groups is not None and (type(self.groups) is not int or self.groups < 1):
            raise ConfigError(f"groups is {self.groups!r}", where="DSAConfig", remedy="a divisor of the heads")
        bound = self.max_offset
        if bound is not None and (type(bound) not in (int, float) or not 0 < bound < math.inf):
            raise ConfigError(f"max_offset is {bound!r}", where="DSAConfig",
                              remedy="tokens, above 0; leave it out for no bound")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DSAConfig:
        """The inverse of `to_dict`; ConfigError for unknown keys."""
        unknown = sorted(set(data) - set(cls.__dataclass_fields__))
        if unknown:
            raise ConfigError(f"unknown keys {unknown}", where="DSAConfig",
                              remedy=f"known are {', '.join(cls.__dataclass_fields__)}")
        given: dict[str, Any] = {k: tuple(v) if k == "window" else v for k, v in data.items()}
        return cls(**given)


FILE = "graphopt_dsa.json"


def save(path: str | Path, layers: dict[str, DSAConfig]) -> Path:
    """Write the configuration of every converted layer beside a checkpoint; the file appears whole or not at all."""
    path = Path(path)
    path = path / FILE if path.suffix != ".json" else path
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"version": 1, "layers": {name: c.to_dict() for name, c in layers.items()}}
    part = path.with_suffix(".json.part")
    part.write_text(json.dumps(data, indent=1))
    part.replace(path)
    return path


def load(path: str | Path) -> dict[str, DSAConfig]:
    """What `save` wrote."""
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError("there is no configuration of converted layers", where=str(path),
                          remedy="handle.save(folder) writes it beside a checkpoint") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"it is no JSON: {error}", where=str(path), remedy="save it again") from error
    if not isinstance(data, dict) or data.get("version") != 1:
        raise ConfigError("it is of another version", where=str(path), remedy="save it with this version of graphopt")
    return {name: DSAConfig.from_dict(c) for name, c in data["layers"].items()}
