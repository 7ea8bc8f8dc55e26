"""`Checkpoints`: a training job's checkpoints, whole or absent, checked against the job before anything is loaded.

A checkpoint is a folder `step-00001200`: torch.distributed.checkpoint's files, and `state.json` with the trainer's own
state, what the job was, and the size of every file.  It is written under another name and renamed when complete, so a
job killed at any moment leaves the last one as it was.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from graphopt.errors import CheckpointError, ConfigError
from graphopt.loading import agreement
from graphopt.loading.loader import PlanLoader
from graphopt.loading.sampler import PlanBatchSampler
from graphopt.streaming import checkpoint as streamed
from graphopt.streaming.dcp import alone
from graphopt.streaming.optimizer import HostAdamW

log = logging.getLogger(__name__)
VERSION = 1
_NAME = "step-{:08d}"


class Checkpoints:
    """Checkpoints of one job in one folder, shared by all its processes.

        checkpoints = graphopt.Checkpoints("run/checkpoints", about={"seed": seed})
        step = checkpoints.restore(model, opt, loader)             # 0 at the first start
        ...
        checkpoints.save(step, model, opt, loader)                 # after `step` optimizer steps

    Args:
        folder: where they are; made by the first save.
        about: JSON facts that must be equal when the job resumes, beside the plan and the number of processes.
        keep: complete checkpoints that stay; older ones are removed after a new one is complete.
        frozen: also save parameters that are not trained (LoRA over a base that is elsewhere needs only its adapters).

    Models may be plain, compiled in place, under FSDP2 or DDP (names stay those of the plain model), or streamed (with
    HostAdamW).  Every process calls `save` and `restore`.  Random state is not saved: draw from generators that depend
    on the epoch and the sample.

    `state` is what `save` was given and `restore` read.
    """

    def __init__(
        self, folder: str | Path, *, about: Mapping[str, Any] | None = None, keep: int = 2, frozen: bool = True
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"keep is {keep!r}", remedy="keep at least one checkpoint")
        self.folder, self.about, self.keep = Path(folder), json.loads(json.dumps(dict(about or {}))), keep
        self.options = StateDictOptions(ignore_frozen_params=not frozen)
        self.state: dict[str, Any] = {}

    def newest(self) -> Path | None:
        """The checkpoint of the largest step, complete by its name (its content is not looked at)."""
        return max(self.folder.glob("step-" + "[0-9]" * 8), default=None, key=lambda p: p.name)

    def save(
        self, step: int, model: torch.nn.Module, opt: torch.optim.Optimizer,
        loader: PlanLoader | PlanBatchSampler | None = None, state: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write the checkpoint of `step` optimizer steps; `state` is the trainer's own, JSON.

        Raises CheckpointError if it cannot be written whole (disk full, read-only): the ones before it stay.
        """
        target, part = self.folder / _NAME.format(step), self.folder / f".part-{step}"
        own: dict[str, Any] = {"version": VERSION, "step": step, "about": self._about(loader), "state": state or {},
                               "loader": None if loader is None else loader.state_dict(step)}
        json.dumps(own)  # what cannot be JSON raises before anything is written
        first, together = _first(), dist.is_available() and dist.is_initialized()
        try:
            if first:
                self.folder.mkdir(parents=True, exist_ok=True)
                for left in (*self.folder.glob(".part-*"), *self.folder.glob(".old-*")):
                    shutil.rmtree(left)
            _together()
            if isinstance(opt, HostAdamW):
                streamed.save_checkpoint(model, opt, part, frozen=not self.options.ignore_frozen_params)
            else:
                weights, moments = get_state_dict(model, opt, options=self.options)
                with alone():
                    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=part, no_dist=not together)
            if first:
                files = {p.name: p.stat().st_size for p in part.iterdir()}
                _write(part / "state.json", json.dumps({**own, "files": files}))
                if target.exists():  # an earlier life of the job was here already
                    target.rename(self.folder / f".old-{step}")
                part.rename(target)
                _sync_folder(self.folder)
                self._forget()
        except BaseException as e:
            if first:
                shutil.rmtree(part, ignore_errors=True)
            # torch wraps whatever happened on any rank, Ctrl-C too, into one exception that is no Exception
            causes = [x for x, _ in e.failures.values()] if isinstance(e, dcp.api.CheckpointException) else [e]
            for cause in causes:
                if isinstance(cause, KeyboardInterrupt):
                    raise KeyboardInterrupt from None
            if causes == [e] and not isinstance(e, OSError):
                raise
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: {causes[0]}", where=str(self.folder),
                remedy=f"free space or give another folder; the last complete one is {_last(self.newest())}",
            ) from e
        _together()
        return target

    def _forget(self) -> None:
        """Remove what is older than the newest `keep`; renamed first, so that none is ever half there."""
        old = sorted(self.folder.glob("step-" + "[0-9]" * 8))[: -self.keep]
        for path in old:
            path.rename(self.folder / f".old-{path.name}")
        for left in self.folder.glob(".old-*"):
            shutil.rmtree(left)

    def restore(
        self, model: torch.nn.Module, opt: torch.optim.Optimizer, loader: PlanLoader | PlanBatchSampler | None = None,
        *, resume: bool = True, replan: bool = False,
    ) -> int:
        """Load the newest checkpoint into model, optimizer and loader; the steps it had done, 0 at a first start.

        resume: False is a first start: a folder that holds checkpoints is then refused, so that none is overwritten.
        replan: accept another number of processes (the loader plans what is left of the epoch again).

        Raises CheckpointError, with nothing changed, on every process: files cut short or missing, another model,
        plan or number of processes, other `about` facts.
        """
        found: list[dict[str, Any]] = []
        path = self.newest()

        def check() -> dict[str, Any]:
            if path is not None and not resume:
                raise CheckpointError(
                    f"the folder holds a run of {int(path.name[5:])} steps", where=str(self.folder),
                    remedy="resume it (--resume), or give another folder",
                )
            if path is not None:
                found.append(self._checked(path, model, self._about(loader), replan))
            here = agreement.world()
            return {"checkpoint": None if path is None else path.name, "rank": here[0] if here else 0}

        agreement.agree(check)
        if path is None:
            log.info("no checkpoint in %s: starting at step 0", self.folder)
            return 0
        own = found[0]
        if loader is not None:
            loader.load_state_dict(own["loader"])
        if isinstance(opt, HostAdamW):
            streamed.load_checkpoint(model, opt, path, frozen=not self.options.ignore_frozen_params)
        else:
            weights, moments = get_state_dict(model, opt, options=self.options)
            together = dist.is_available() and dist.is_initialized()
            with alone():
                dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path, no_dist=not together)
            set_state_dict(
                model, opt, model_state_dict=weights, optim_state_dict=moments,
                options=StateDictOptions(strict=not self.options.ignore_frozen_params),
            )
        self.state = own["state"]
        return own["step"]

    def _about(self, loader: PlanLoader | PlanBatchSampler | None) -> dict[str, Any]:
        """What must be equal, in the order in which differences are told."""
        if loader is None:
            return self.about
        return {"number of processes": loader.position.ranks, "plan": loader.position.base.hash, **self.about}

    def _checked(self, path: Path, model: torch.nn.Module, about: dict[str, Any], replan: bool) -> dict[str, Any]:
        """`state.json` of a checkpoint that is whole, of this job and of this model."""
        older = [p for p in sorted(self.folder.glob("step-" + "[0-9]" * 8)) if p != path]
        back = f"remove it to go on from {older[-1].name}" if older else "remove it and start again"
        try:
            own = json.loads((path / "state.json").read_text())
            files, version, _ = own["files"], own["version"], (own["about"], own["loader"], own["step"], own["state"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise CheckpointError(f"state.json cannot be read: {type(e).__name__}: {e}", where=str(path),
                                  remedy=back) from e
        if version != VERSION:
            raise CheckpointError(f"it is of version {version}, this graphopt reads {VERSION}", where=str(path),
                                  remedy="resume with the graphopt it was written with")
        for name, size in files.items():
            there = (path / name).stat().st_size if (path / name).exists() else None
            if there != size:
                what = "is missing" if there is None else f"has {there} of {size} bytes"
                raise CheckpointError(f"the checkpoint is cut short: {name} {what}", where=str(path), remedy=back)
        was = own["about"]
        for key in [*about, *(k for k in was if k not in about)]:
            if replan and key == "number of processes":
                continue
            if was.get(key) != about.get(key):
                again = "give replan=True (--replan) to plan what is left again, or "
                raise CheckpointError(
                    f"the run was started with another {key}: {was.get(key)!r}, now {about.get(key)!r}",
                    where=str(path),
                    remedy=(again if key == "number of processes" else "") + f"give the same {key}, or another folder",
                )
        self._same_model(path, model)
        return own

    def _same_model(self, path: Path, model: torch.nn.Module) -> None:
        """Names and shapes of the checkpoint's tensors are those of the model."""
        try:
            metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        except Exception as e:  # a pickle of another torch may raise anything
            raise CheckpointError(f"its index cannot be read: {type(e).__name__}: {e}", where=str(path),
                                  remedy="resume with the torch it was written with") from e
        frozen = {_plain(n) for n, p in model.named_parameters() if not p.requires_grad}
        skip = frozen if self.options.ignore_frozen_params else set()
        there = {k.removeprefix("model."): tuple(v.size) for k, v in metadata.items()
                 if k.startswith("model.") and hasattr(v, "size") and k.removeprefix("model.") not in skip}
        here = {_plain(k): tuple(v.shape) for k, v in model.state_dict().items()
                if isinstance(v, torch.Tensor) and _plain(k) not in skip}
        differs = sorted(k for k in {*there, *here} if there.get(k) != here.get(k))
        if differs:
            name = differs[0]
            raise CheckpointError(
                f"the run trains another model: {len(differs)} of {len(there)} tensors differ, the first is {name}: "
                f"{there.get(name, 'absent')} in the checkpoint, {here.get(name, 'absent')} in the model",
                where=str(path), remedy="build the model as the run did (size, LoRA rank, dsa), or give another folder",
            )


def _plain(name: str) -> str:
    """A parameter's name without the wrappers of DDP and torch.compile."""
    return name.removeprefix("module.").replace("_orig_mod.", "")


def _first() -> bool:
    here = agreement.world()
    return here is None or here[0] == 0


def _together() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def _last(path: Path | None) -> str:
    return "none" if path is None else path.name


def _write(path: Path, text: str) -> None:
    with path.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
