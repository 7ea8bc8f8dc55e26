"""State dicts with stock names, shapes and dtypes: of the streamed model, and of HostAdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from graphopt.codegen.adamw import join, split
from graphopt.errors import StreamError
from graphopt.streaming import handles
from graphopt.streaming.engine import Engine
from graphopt.streaming.store import Entry

if TYPE_CHECKING:
    from graphopt.streaming.optimizer import HostAdamW


# keys of a parameter group of torch.optim.AdamW that HostAdamW has not
TORCHS = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")


def flush(engine: Engine) -> None:
    """Let queued updates finish."""
    optimizer = engine.optimizer() if engine.optimizer else None
    if optimizer is not None:
        optimizer.flush()


def hook(model: torch.nn.Module, engine: Engine) -> None:
    """Make `state_dict` and `load_state_dict` of a streamed model (and of its parts) read and write the host store."""
    owners: dict[torch.nn.Module, dict[str, Entry]] = {}
    for entry in engine.store.entries:
        for module, name in entry.sites:
            owners.setdefault(module, {})[name] = entry

    def read(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        engine.check_whole()
        flush(engine)
        for name, entry in owners[module].items():
            if prefix + name in state:
                state[prefix + name] = entry.alone()

    given: dict[torch.nn.Module, set[str]] = {}  # names that the state being loaded holds

    def before(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        flush(engine)
        given[module] = {name for name in owners[module] if prefix + name in state}
        for name, entry in owners[module].items():
            module._parameters[name] = torch.nn.Parameter(entry.layer.weight(entry), requires_grad=False)
            if prefix + name in state:
                _check_idle(entry)
                entry.layer.missing.discard(entry.name)

    def after(module: torch.nn.Module, _: Any) -> None:
        for name, entry in owners[module].items():
            value = module._parameters[name]
            if value is entry.handle:
                continue
            if value is not None and value.data_ptr() != entry.layer.weight(entry).data_ptr():  # assign=True
                with torch.no_grad():
                    entry.layer.weight(entry).copy_(value)
            module._parameters[name] = entry.handle
            if name in given[module]:  # strict=False leaves the others' masters as they are
                reset_master(engine, entry)
                engine.store.replaced(entry.layer)

    for module in owners:
        module.register_state_dict_post_hook(read)
        module.register_load_state_dict_pre_hook(before)
        module.register_load_state_dict_post_hook(after)


def _check_idle(entry: Entry) -> None:
    engine = entry.layer.engine
    engine.link.join(entry.layer.reading)


def reset_master(engine: Engine, entry: Entry) -> None:
    """The weights were replaced: the fp32 master is the weight itself."""
    optimizer = engine.optimizer() if engine.optimizer else None
    if optimizer is None or entry.layer not in optimizer.states or not entry.trained:
        return
    state = optimizer.states[entry.layer]
    if state.residual is not None and entry.dtype == torch.bfloat16:
        state.of(state.residual, entry).zero_()
    if state.average is not None and state.steps[entry] == 0:
        state.of(state.average, entry).copy_(flattened(entry.layer.weight(entry)))


def count(steps: int) -> torch.Tensor:
    """A number of steps as torch.optim keeps it, whatever torch's default dtype and device are."""
    return torch.tensor(float(steps), dtype=torch.float32, device="cpu")


def flattened(t: torch.Tensor) -> torch.Tensor:
    """All elements in memory order, without a copy; parameters are dense."""
    return t.as_strided((t.numel(),), (1,))


def optimizer_state(optimizer: HostAdamW) -> dict[str, Any]:
    """See HostAdamW.state_dict."""
    optimizer.check_whole()
    optimizer.flush()
    state: dict[int, dict[str, Any]] = {}
    groups, n = [], 0
    for group in optimizer.param_groups:
        packed = {k: v for k, v in group.items() if k != "params"}
        packed["params"] = list(range(n, n + len(group["params"])))
        groups.append(packed)
        for p in group["params"]:
            found = _state_of(optimizer, p)
            if found is not None:
                state[n] = found
            n += 1
    return {"state": state, "param_groups": groups}


def _state_of(optimizer: HostAdamW, p: torch.nn.Parameter) -> dict[str, Any] | None:
    entry = handles.entry_of(p)
    if entry is None:
        if p not in optimizer.resident.of:
            return None
        s = optimizer.resident.of[p]
        out = {"step": count(s["step"]), "exp_avg": s["exp_avg"], "exp_avg_sq": s["exp_avg_sq"]}
        if "residual" in s:
            out["master"] = join(p.detach(), s["residual"])
        if "ema" in s:
            out["ema"] = s["ema"]
        return out
    if not entry.trained or optimizer.states[entry.layer].steps[entry] == 0:
        return None
    s2 = optimizer.states[entry.layer]

    def shaped(flat: torch.Tensor) -> torch.Tensor:
        return s2.of(flat, entry).as_strided(entry.shape, entry.stride)

    out = {"step": count(s2.steps[entry]), "exp_avg": shaped(s2.exp_avg),
           "exp_avg_sq": shaped(s2.exp_avg_sq)}
    if entry.dtype == torch.bfloat16:
        assert s2.residual is not None
        flat = join(flattened(entry.layer.weight(entry)), s2.of(s2.residual, entry))
        out["master"] = flat.as_strided(entry.shape, entry.stride)
    if s2.average is not None:
        out["ema"] = shaped(s2.average)
    return out


def average_of(optimizer: HostAdamW, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """See HostAdamW.ema_state_dict."""
    if optimizer.ema is None:
        raise StreamError("no moving average is kept", remedy="make the optimizer with HostAdamW(..., ema=0.999)")
    optimizer.flush()
    mine = {id(p) for g in optimizer.param_groups for p in g["params"]}
    found = {}
    for name, p in model.named_parameters():
        if id(p) not in mine or not p.requires_grad:
            continue
        entry = handles.entry_of(p)
        if entry is None:
            found[name] = optimizer.resident.get(p)["ema"]
        else:
            s = optimizer.states[entry.layer]
            assert s.average is not None
            found[name] = s.of(s.average, entry).as_strided(entry.shape, entry.stride)
    return found


def load_optimizer_state(optimizer: HostAdamW, state_dict: dict[str, Any]) -> None:
    """See HostAdamW.load_state_dict.  Everything is checked before anything is changed."""
    groups, state = state_dict["param_groups"], state_dict["state"]
    sizes = [len(g["params"]) for g in optimizer.param_groups]
    if [len(g["params"]) for g in groups] != sizes:
        raise StreamError(
            f"the state has groups of {[len(g['params']) for g in groups]} parameters, this optimizer {sizes}",
            remedy="make the optimizer with the same groups")
    for g in groups:
        for flag, plain in (("amsgrad", False), ("maximize", False), ("decoupled_weight_decay", True)):
            if bool(g.get(flag, plain)) != plain:
                raise StreamError(f"the state was made with {flag}={g[flag]}, which HostAdamW does not do",
                                  remedy="go on with the optimizer of torch that made it")
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    ids = [i for g in groups for i in g["params"]]
    for i, p in zip(ids, parameters):
        for name in ("exp_avg", "exp_avg_sq"):
            if i in state and tuple(state[i][name].shape) != tuple(p.shape):
                raise StreamError(f"{name} has shape {tuple(state[i][name].shape)}, the parameter {tuple(p.shape)}",
                                  where=handles.describe(p), remedy="load the state of the same model")
    optimizer.flush()
    optimizer.abandon()
    for mine, theirs in zip(optimizer.param_groups, groups):
        # also what schedulers keep there; what torch.optim.AdamW alone knows was refused, or changes no values
        mine.update({k: v for k, v in theirs.items() if k not in ("params", *TORCHS)})
    with torch.no_grad():
        for i, p in zip(ids, parameters):
            _load_one(optimizer, p, state.get(i))


def _load_one(optimizer: HostAdamW, p: torch.nn.Parameter, given: dict[str, Any] | None) -> None:
    entry = handles.entry_of(p)
    if entry is None:
        optimizer.resident.of.pop(p, None)
        if given is None:
            return
        s = optimizer.resident.get(p)
        s["step"] = int(given["step"])
        for name in ("exp_avg", "exp_avg_sq", "ema"):
            if name in given and name in s:
                s[name].copy_(given[name])
        if "master" in given and p.dtype == torch.bfloat16:
            optimizer.resident.load_master(p, given["master"])
        return
    if not entry.trained:
        return
    _check_idle(entry)
    s2 = optimizer.states[entry.layer]
    s2.steps[entry] = 0 if given is None else int(given["step"])
    flats: dict[str, torch.Tensor | None] = {"exp_avg": s2.exp_avg, "exp_avg_sq": s2.exp_avg_sq, "ema": s2.average}
    for name, flat in flats.items():
        if flat is None:
            continue
        part = s2.of(flat, entry).as_strided(entry.shape, entry.stride)
        if given is not None and name in given:
            part.copy_(given[name])
        elif name == "ema":
            part.copy_(entry.layer.weight(entry))
        else:
            part.zero_()
    if given is not None and "master" in given:
        whole = torch.empty_strided(entry.shape, entry.stride, dtype=torch.float32, device="cpu")
        whole.copy_(given["master"])
        if entry.dtype == torch.bfloat16:
            assert s2.residual is not None
            high, rest = split(flattened(whole))
            flattened(entry.layer.weight(entry)).copy_(high)
            s2.of(s2.residual, entry).copy_(rest)
        else:
            entry.layer.weight(entry).copy_(whole)
        optimizer.store.replaced(entry.layer)
    else:
        reset_master(entry.layer.engine, entry)
