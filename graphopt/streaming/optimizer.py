"""HostAdamW: AdamW whose state lives in host memory and whose work is done by the CPU while the GPU goes on."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from graphopt import _compat_tensors
from graphopt.codegen import adamw_cpp
from graphopt.codegen.adamw import Hyper, Piece, update_all
from graphopt.errors import ConfigError, StreamError
from graphopt.streaming import handles, memory, numa
from graphopt.streaming.engine import Engine
from graphopt.streaming.gradients import Gradients, Landing
from graphopt.streaming.link import Link
from graphopt.streaming.resident import ResidentState
from graphopt.streaming.store import Entry, HostLayer
from graphopt.streaming.updates import Job, State, Updates

log = logging.getLogger(__name__)
MODES = ("deferred", "priority", "in_backward")


class Clip:
    """The factor of clipping on its way to the host: the launching thread does not wait for it.

    landings: the gradients it is of.
    """

    def __init__(self, coefficient: torch.Tensor, link: Link, landings: Sequence[Landing]) -> None:
        self.coefficient, self._link = coefficient, link
        self._landings = list(landings)
        self._host = torch.zeros((), dtype=torch.float32, device="cpu", pin_memory=coefficient.is_cuda)
        self._host.copy_(coefficient, non_blocking=True)
        self._there = link.mark()

    def read(self) -> float:
        """Its value; blocks until it is there."""
        self._link.join(self._there)
        return float(self._host)

    def forgotten(self, gradients: Gradients) -> bool:
        """Are all of its gradients gone, as after `model.zero_grad()`?"""
        here = {id(x) for x in gradients.landings.values()}
        return bool(self._landings) and not any(
            id(x) in here and any(e.handle.grad is not None for e in x.fresh) for x in self._landings)


class HostAdamW(torch.optim.Optimizer):
    """AdamW for a streamed model: same results as torch.optim.AdamW on fp32 masters.

    params: parameters or parameter groups of a model that went through `graphopt.stream`; resident parameters may be
    among them and use their `.grad`.  lr, betas, eps, weight_decay: as in torch.optim.AdamW, per group.
    update: when the CPU works.  "deferred" (default): `step()` hands the updates to the CPU, which does them in forward
    order under the next forward; clipping by the global norm is exact.  "priority": updates start as gradients land,
    the lowest layer first.  "in_backward": as "priority", and `step()` waits for them.  The last two change weights
    before `step()` is called, and cannot clip.
    accumulate: backward passes per step (needed by the last two; the first takes any number).
    ema: decay of a moving average of the weights, kept in fp32 beside them, or None.
    kernel: "auto" (compiled C++ where a compiler is found), "torch" (bitwise torch.optim.AdamW) or "cpp".
    threads: of the compiled kernel; default: the CPUs near the GPU but for those that launch and copy, which more of
    them take, too.
    Raises ConfigError for bad values, StreamError where the model cannot be updated as asked.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.01, *, update: str = "deferred", accumulate: int = 1, ema: float | None = None,
        kernel: str = "auto", threads: int | None = None,
    ) -> None:
        _check_numbers(dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        _validate(update, accumulate, ema, kernel, threads)
        self.update, self.accumulate, self.ema = update, accumulate, ema
        self._ready = False
        super().__init__(params, dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay))
        streamed = [e for p in self._parameters() if (e := handles.entry_of(p)) is not None]
        engines = {id(e.layer.engine): e.layer.engine for e in streamed}
        if len(engines) != 1:
            raise StreamError(
                f"the parameters belong to {len(engines)} streamed models, one is needed",
                remedy="pass the parameters of one model that went through graphopt.stream, or use torch.optim.AdamW",
            )
        self.engine: Engine = next(iter(engines.values()))
        if self.engine.optimizer is not None and self.engine.optimizer() is not None:
            raise StreamError("this model has a HostAdamW already", remedy="delete it, or give it parameter groups")
        self.store = self.engine.store
        self._entries = [e for e in streamed if e.trained]
        self._mine = frozenset(self._entries)
        layers = {e.layer for e in self._entries}
        self._layers = [x for x in self.store.layers if x in layers]
        memory.require(self._host_bytes(), "optimizer state and gradients")
        self.states = {x: State(x, self.store, ema is not None) for x in self._layers}
        self.resident = ResidentState(ema)
        self.updates = Updates(self.store, self.engine.link, self.states,
                               kernel_of(kernel, self.engine.link, threads), threads)
        self._scale: Clip | None = None
        self._planned: dict[HostLayer, dict[Entry, Hyper]] = {}
        self._snapshot: list[tuple[Any, ...]] | None = None
        self._updated: set[HostLayer] = set()
        self._group_of: dict[int, dict[str, Any]] = {}
        self.engine.gradients.keep_norms = update == "deferred"
        self.engine.optimizer = weakref.ref(self)
        self._ready = True

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _host_bytes(self) -> int:
        per = 8 + (4 if self.ema is not None else 0) + (4 if self.accumulate > 1 else 0)
        return sum(x.elements * per + x.grad_bytes + (2 * x.elements if any(
            e.dtype == torch.bfloat16 for e in x.trained) else 0) for x in self._layers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; after construction only resident parameters can be added."""
        _check_group(param_group)
        super().add_param_group(param_group)
        if self._ready and any(handles.entry_of(p) is not None for p in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise StreamError("streamed parameters cannot be added to a HostAdamW later",
                              remedy="pass all groups when it is made")
        self._group_of = {}

    def _group(self, p: torch.nn.Parameter) -> dict[str, Any]:
        if not self._group_of:
            self._group_of = {id(q): g for g in self.param_groups for q in g["params"]}
        return self._group_of[id(p)]

    def _hyper(self, p: torch.nn.Parameter, step: int, scale: torch.Tensor | None = None) -> Hyper:
        g = self._group(p)
        beta1, beta2 = g["betas"]
        return Hyper(float(g["lr"]), beta1, beta2, g["eps"], g["weight_decay"], step, scale, self.ema)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One optimizer step; streamed layers are updated by the CPU as `update` says."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.store.check()
        self.engine.gradients.settle(self.updates)
        self._late()
        self._check_new()
        self._check_order_of_updates()
        clip = self._clip()
        self._tell_left_out()
        if self.update == "deferred":
            for layer in self._layers:
                landing = self.engine.gradients.landings[layer]
                if landing.fresh:
                    self._submit(layer, clip)
        elif self.update == "in_backward":
            self.updates.drain()
        with torch.no_grad(), self.engine.span(None, "update"):
            self._update_resident(clip)
        self._scale, self._snapshot = None, None
        self._updated.clear()
        self.engine.grow()
        self.engine.prime()
        return loss

    def _update_resident(self, clip: Clip | None) -> None:
        work = []
        for p in self._parameters():
            if handles.entry_of(p) is None and p.grad is not None:
                # an fp32 gradient was clipped where it is
                scale = None if clip is None or p.grad.dtype == torch.float32 else clip.coefficient
                work.append((p, self._hyper(p, self.resident.steps(p) + 1, scale)))
                entry = handles.member_of(p)
                if entry is not None:
                    entry.layer.target += 1
        self.resident.update(work)

    def _submit(self, layer: HostLayer, clip: Clip | None) -> None:
        gradients = self.engine.gradients
        landing = gradients.take(layer)
        steps = self.states[layer].steps
        made: dict[tuple[int, int], Hyper] = {}
        hypers = {}
        for e in landing.fresh:
            if e in self._mine:
                key = id(self._group(e.handle)), steps[e]
                if key not in made:
                    made[key] = self._hyper(e.handle, steps[e] + 1)
                hypers[e] = made[key]
        self.updates.submit(Job(
            layer, hypers, list(landing.events), lambda e: gradients.read(landing, e),
            None if landing.sum is not None else layer.slab, (lambda: None) if clip is None else clip.read))

    def landed(self, layer: HostLayer) -> None:
        """All gradients of one round have landed: called by the runtime."""
        if self.update == "deferred" or layer not in self.states:
            return
        if self._snapshot is None:
            self._snapshot = self._settings()
        landing = self.engine.gradients.landings[layer]
        landing.rounds += 1
        if landing.rounds == self.accumulate:
            self._updated.add(layer)
            self._submit(layer, None)

    def _late(self) -> None:
        """Count rounds whose end nobody saw: a forward was dropped after the last backward of its layer."""
        if self.update == "deferred":
            return
        for layer in self._layers:
            landing = self.engine.gradients.landings[layer]
            if landing.fresh and not landing.rounds:
                self.landed(layer)

    def check_whole(self) -> None:
        """Raise StreamError if weights are of two different steps: called by the runtime before it reads them."""
        if self._updated:
            raise StreamError(
                f"update={self.update!r} has changed weights already, and step() was not called",
                remedy=f"call step() after {self.accumulate} backward passes, or pass accumulate=, or use "
                "update='deferred'",
            )

    def _check_new(self) -> None:
        """Raise StreamError if gradients were used up by the step before, and are not gone."""
        for layer in self._layers:
            landing = self.engine.gradients.landings[layer]
            kept = landing.consumed and layer not in self._updated
            if kept and any(e.handle.grad is not None for e in layer.trained):
                raise StreamError("step() again with the gradients of the step before, which it used up",
                                  where=layer.fqn, remedy="call opt.zero_grad() after opt.step()")

    def _tell_left_out(self) -> None:
        """Warn where no streamed weight will be updated because of `backward(inputs=...)`: it cannot name handles."""
        left_out, self.engine.left_out = self.engine.left_out, False
        if left_out and not self._updated and not any(self.engine.gradients.landings[x].fresh for x in self._layers):
            log.warning("graphopt: no streamed weight has a gradient: the backward was for other tensors only; "
                        "leave `inputs` out of loss.backward() to train streamed weights")

    def abandon(self) -> None:
        """Weights and state are replaced: a step that was half done is over, and so are its gradients."""
        if self._updated:
            self.engine.gradients.clear()
            self._updated.clear()
            self._snapshot = None

    def _settings(self) -> list[tuple[Any, ...]]:
        return [(float(g["lr"]), tuple(g["betas"]), g["eps"], g["weight_decay"]) for g in self.param_groups]

    def _check_order_of_updates(self) -> None:
        if self.update == "deferred":
            return
        if self._snapshot is not None and self._snapshot != self._settings():
            raise StreamError("lr, betas, eps or weight_decay changed between backward and step() with "
                              f"update={self.update!r}, after they were used",
                              remedy="change them after step(), or use update='deferred'")
        landings = self.engine.gradients.landings
        short = [x.fqn for x in self._layers if 0 < landings[x].rounds < self.accumulate]
        if short:
            raise StreamError(f"step() after fewer than accumulate={self.accumulate} backward passes", where=short[0],
                              remedy="run the remaining backward passes first, let go of outputs that will have none, "
                              "or use update='deferred'")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients.  Streamed ones are always set to None."""
        self.engine.gradients.clear()
        self._scale = None  # a step that is left out after clipping
        super().zero_grad(set_to_none)

    def _clip(self) -> Clip | None:
        """The factor for the gradients that are there."""
        if self._scale is not None and self._scale.forgotten(self.engine.gradients):
            self._scale = None
        return self._scale

    def grad_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients together, fp32, 0-d, before any clipping.  Deferred mode only."""
        self._need_deferred("grad_norm")
        self.engine.gradients.settle(self.updates)
        self.updates.drain()
        norms = []
        device = self.engine.link.device
        here = [p for p in self._parameters() if handles.entry_of(p) is None and p.grad is not None]
        resident = dict(zip(map(id, here), _compat_tensors.foreach_norm([p.grad for p in here]) if here else ()))
        for p in self._parameters():
            entry = handles.entry_of(p)
            if id(p) in resident:
                norms.append(resident[id(p)].to(device))
            elif entry is not None and entry.trained:
                landing = self.engine.gradients.landings[entry.layer]
                if entry in landing.fresh:
                    norms.append(self.engine.gradients.norm(landing, entry).to(device))
        if not norms:
            return torch.zeros((), device=device)
        return torch.linalg.vector_norm(torch.stack(norms))

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before, as torch does.

        Streamed gradients are scaled, in fp32, when the update reads them; resident fp32 ones here, in place.
        """
        self._need_deferred("clip_grad_norm_")
        if self._clip() is not None:
            raise StreamError("clip_grad_norm_ was called twice before step()", remedy="call it once per step")
        norm = self.grad_norm()
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0).detach()
        fresh = [x for x in self.engine.gradients.landings.values() if x.fresh]
        self._scale = Clip(coefficient, self.engine.link, fresh)
        with torch.no_grad():
            for p in self._parameters():
                if handles.entry_of(p) is None and p.grad is not None and p.grad.dtype == torch.float32:
                    p.grad.mul_(coefficient.to(p.grad.device))
        return norm

    def _need_deferred(self, what: str) -> None:
        if self.update != "deferred":
            raise StreamError(f"{what} with update={self.update!r}: weights change before all gradients are known",
                              remedy="use update='deferred'")

    def gradient(self, p: torch.nn.Parameter) -> torch.Tensor | None:
        """A copy of a streamed parameter's gradient, in host memory; None if it has none."""
        entry = handles.entry_of(p)
        if entry is None:
            return p.grad
        self.engine.gradients.settle(self.updates)
        landing = self.engine.gradients.landings[entry.layer]
        if entry not in landing.fresh or p.grad is None:
            return None
        self.updates.drain()
        for event in landing.events:
            self.engine.link.join(event)
        flat = self.engine.gradients.read(landing, entry)
        return flat.as_strided(entry.shape, entry.stride).clone()

    def flush(self) -> None:
        """Block until every queued update is done."""
        self.updates.drain()

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's: per parameter `step`, `exp_avg`, `exp_avg_sq` (fp32, shaped like the parameter).

        A bf16 parameter has also `master`, its fp32 value; with ema= there is `ema`.  Tensors are in host memory and,
        as torch's, share memory with the optimizer (`master` is a copy).
        """
        from graphopt.streaming import state

        return state.optimizer_state(self)

    def ema_state_dict(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The moving average by parameter name, fp32, of everything this optimizer trains.  Needs ema=."""
        from graphopt.streaming import state

        return state.average_of(self, model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` (or that of torch.optim.AdamW over fp32 masters) returned."""
        from graphopt.streaming import state

        state.load_optimizer_state(self, state_dict)


def kernel_of(name: str, link: Link, threads: int | None = None) -> Callable[[Sequence[Piece]], None]:
    """The optimizer's kernel: "torch", "cpp", or "auto" (compiled where a compiler is found)."""
    threads = threads or len(numa.pool_cpus(link.device))
    return update_all if name == "torch" else adamw_cpp.load(threads) if name == "cpp" else adamw_cpp.best(threads)


def _check_group(group: dict[str, Any]) -> None:
    """Refuse settings of a parameter group that would be ignored, or that no update can be made with."""
    for name, plain in (("amsgrad", False), ("maximize", False), ("differentiable", False),
                        ("decoupled_weight_decay", True)):
        if bool(group.get(name, plain)) != plain:
            raise ConfigError(f"HostAdamW: a parameter group has {name}={group[name]}, which it does not do",
                              remedy="leave it out, or train with torch.optim.AdamW")
    _check_numbers(group)


def _check_numbers(given: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        value = given.get(name, 0)
        if not (isinstance(value, torch.Tensor) or (isinstance(value, (int, float)) and value >= 0)):
            raise ConfigError(f"HostAdamW: {name} is {value!r}", remedy="use a number of at least 0")
    betas = given.get("betas", (0, 0))
    if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
        raise ConfigError(f"HostAdamW: betas are {betas}", remedy="use two numbers in [0, 1)")


def _validate(update: str, accumulate: int, ema: Any, kernel: str, threads: Any) -> None:
    checks = [
        (update in MODES, f"update is {update!r}", f"use one of {', '.join(map(repr, MODES))}"),
        (isinstance(accumulate, int) and accumulate >= 1, f"accumulate is {accumulate!r}",
         "use a whole number from 1 up"),
        (ema is None or 0 < ema < 1, f"ema is {ema!r}", "use a decay between 0 and 1, or None"),
        (threads is None or (isinstance(threads, int) and threads >= 1), f"threads is {threads!r}",
         "use a whole number from 1 up, or None"),
        (kernel in ("auto", "torch", "cpp"), f"kernel is {kernel!r}", "use 'auto', 'torch' or 'cpp'"),
    ]
    for fine, what, remedy in checks:
        if not fine:
            raise ConfigError(f"HostAdamW: {what}", remedy=remedy)
