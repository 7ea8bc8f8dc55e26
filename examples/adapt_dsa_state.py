"""What a seed of examples/adapt_dsa.py needs to go on after an interruption, in one file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch


class State:
    """`data` lives in FOLDER/seedN.pt: the results so far, the dense weights, and a training under way.

    result     what seedN.json holds
    dense      weights after pre-training, once it is over
    done       arms that are finished
    training   of the part ("pretrain" or an arm) that is not: part, step, model, optimizer, rng
    """

    def __init__(self, folder: Path, seed: int, setup: Any, device: str) -> None:
        self.path, self.device = folder / f"seed{seed}.pt", device
        mine = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(setup).items()}
        self.data: dict[str, Any] = {"result": {"seed": seed, "setup": mine, "pretrain": [], "arms": {}}, "done": []}
        if self.path.exists():
            self.data = torch.load(self.path, map_location=device, weights_only=True)
            theirs = self.data["result"]["setup"]
            if theirs != mine:
                differ = sorted(k for k in mine if theirs.get(k) != mine[k])
                raise SystemExit(f"{self.path} was made with other {', '.join(differ)}: use another --out or remove it")

    def save(self) -> None:
        """Write the file; a run that is killed meanwhile finds the last one."""
        part = self.path.with_suffix(".pt.part")
        torch.save(self.data, part)
        part.replace(self.path)

    def write_json(self) -> None:
        """The results so far, for people and `join`."""
        path = self.path.with_suffix(".json")
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.data["result"]))
        part.replace(path)

    def keep(self, part: str, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Remember a training before its step `step`."""
        self.data["training"] = {"part": part, "step": step, "model": model.state_dict(),
                                 "optimizer": optimizer.state_dict(), "rng": self.rng()}
        self.save()

    def restore(self, part: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int | None:
        """Put a training that was under way into model, optimizer and generators.  Its step, None if there is none."""
        found = self.data.get("training")
        if found is None or found["part"] != part:
            return None
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        self.set_rng(found["rng"])
        return int(found["step"])

    def finish(self, **changes: Any) -> None:
        """A part is over."""
        self.data.pop("training", None)
        self.data.update(changes)
        self.save()

    def rng(self) -> list[torch.Tensor]:
        """The state of the generators."""
        return [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if self.device == "cuda" else [])

    def set_rng(self, states: list[torch.Tensor]) -> None:
        """Put them back."""
        torch.set_rng_state(states[0].cpu())
        if self.device == "cuda":
            torch.cuda.set_rng_state(states[1].cpu())


class Untouched:
    """`with Untouched(state, model, optimizer):` weights, moments and generators are afterwards as they were before.

    In place: a CUDA graph captured inside goes on with them.
    """

    def __init__(self, state: State, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.state = state
        self.tensors = [*model.parameters(), *model.buffers(),
                        *(t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))]

    def __enter__(self) -> None:
        self.rng, self.copies = self.state.rng(), [t.detach().clone() for t in self.tensors]

    def __exit__(self, *error: object) -> None:
        with torch.no_grad():
            for t, copy in zip(self.tensors, self.copies):
                t.copy_(copy)
        self.state.set_rng(self.rng)
