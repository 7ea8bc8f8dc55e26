"""The operators on a GPU: plan the rows, launch the generated kernels, add up the partial sums.

Everything here is traced by `triton_op`, so Inductor sees the kernel launches and the few tensor ops around them.
Activations and factors are read through their own strides (layout.py), so nothing is copied.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from graphopt.codegen import layout, store, tuned
from graphopt.codegen.configure import Configuration, one_pass
from graphopt.codegen.emit import emit
from graphopt.codegen.emit_backward import row_means
from graphopt.codegen.emit_sums import Tile, emit_sums, tile
from graphopt.codegen.form import split_outputs
from graphopt.codegen.layout import Plan
from graphopt.codegen.spec import KernelSpec, numbered

# programs of a persistent kernel when there is no GPU to ask (the interpreter)
INTERPRETER_SMS = 3


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors the device has."""
    if device.type != "cuda":
        return INTERPRETER_SMS
    return _cuda_multiprocessors(device.index or 0)


@cache
def _cuda_multiprocessors(index: int) -> int:
    if not torch.cuda.is_available():  # tracing for a GPU that is not here
        return 132
    return torch.cuda.get_device_properties(index).multi_processor_count


@cache
def kernel_of(spec: KernelSpec) -> tuple[Any, Configuration]:
    """The compiled-on-first-use kernel of a spec, and its configuration."""
    config = tuned.configuration(spec)
    kernel = getattr(store.load(spec.function, emit(spec, config)), spec.function)
    _specs[id(kernel)] = kernel, spec
    return kernel, config


# what was generated in this process, by the identity of the function (which is kept alive here)
_specs: dict[int, tuple[Any, KernelSpec]] = {}


def spec_of(kernel: Any) -> KernelSpec | None:
    """The spec a kernel was generated from; None for a kernel of somebody else."""
    found = _specs.get(id(kernel))
    return None if found is None else found[1]


@cache
def sum_kernel(name: str, D: int, width: int, results: tuple[tuple[str, int, torch.dtype], ...], shape: Tile) -> Any:
    """The second stage of a backward, for the factors that share one grid."""
    return getattr(store.load(name, emit_sums(name, D, width, results, shape)), name)


def two_pass_forced() -> bool:
    """GRAPHOPT_REDUCTION=two_pass: a separate pass over columns for the sums, for comparison with the one-pass form."""
    return os.environ.get("GRAPHOPT_REDUCTION") == "two_pass"


def kernel_name(tensors: dict[str, Any], norm: str, branch_norm: str) -> str:
    """Name of a kernel by the parts it has: branch_norm_gate_norm_affine_modulate."""
    parts = ["branch_norm"] if branch_norm != "none" else []
    parts += ["gate"] if "gate" in tensors else ["residual"] if "branch" in tensors else []
    parts += (["norm"] if norm != "none" else []) + (["affine"] if "weight" in tensors else [])
    modulates = sum(t.rstrip("0123456789") == "scale" for t in tensors)
    return "_".join(parts + (["modulate"] if modulates == 1 else ["modulates"] if modulates else []))


def target_of(device: torch.device) -> str:
    """The GPU a kernel is for; sm90 when there is none (the interpreter, tracing)."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "sm90"
    return local_target(device.index or 0)


@cache
def local_target(index: int) -> str:
    """A GPU of this machine, such as "sm90" or "gfx942"."""
    properties = torch.cuda.get_device_properties(index)
    arch = getattr(properties, "gcnArchName", "")
    if torch.version.hip and arch:
        return str(arch).split(":")[0]
    return f"sm{properties.major}{properties.minor}"


def place_of(device: torch.device) -> dict[str, str]:
    """`target`, and `gpu`, the name of a GPU of this machine ("" for any other device)."""
    here = device.type == "cuda" and torch.cuda.is_available()
    return {"target": target_of(device), "gpu": _gpu_name(device.index or 0) if here else ""}


@cache
def _gpu_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def _spec(plan: Plan, direction: str, tensors: dict[str, torch.dtype], D: Any, norm: str, **rest: Any) -> KernelSpec:
    kept = tuple((n, code) for n, code in plan.layouts.items() if n in tensors)
    name = kernel_name(tensors, norm, rest["branch_norm"])
    return KernelSpec(
        name, direction, norm, D=int(D), dtypes=tuple(tensors.items()), layouts=kept,  # type: ignore[arg-type]
        group_dims=len(plan.groups), row_dims=len(plan.rows), permuted=plan.permuted, **rest,
    )


def _named(modulation: Sequence[Tensor], outputs: str) -> list[dict[str, Tensor]]:
    """The factors of every output under the names kernels give them."""
    each = split_outputs(modulation, outputs)
    return [{numbered(part, i): f for part, f in factors.items()} for i, factors in enumerate(each)]


def prepare_forward(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, gate_table: Tensor | None, branch_weight: Tensor | None,
    branch_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None, modulation: Sequence[Tensor], outputs: str,
    norm: str, eps: float, offset: float, branch_norm: str, branch_eps: float, activation: str, h_dtype: torch.dtype,
    y_dtype: torch.dtype, rounding: str,
) -> tuple[KernelSpec, Plan, dict[str, Tensor]]:
    """Spec, plan and operands of the forward kernel."""
    activations = _present(x=x, branch=branch)
    factors = _present(gate=gate, gate_table=gate_table, branch_weight=branch_weight, branch_bias=branch_bias)
    each = _named(modulation, outputs) if norm != "none" else []
    if norm != "none":
        factors |= _present(weight=weight, bias=bias)
    for own in each:
        factors |= own
    plan, given = layout.plan(x, activations, factors), activations | factors
    dtypes = {n: t.dtype for n, t in given.items()}
    dtypes |= {"h": h_dtype} if branch is not None else {}
    dtypes |= {numbered("y", i): y_dtype for i in range(len(each))}
    spec = _spec(
        plan, "forward", dtypes, x.shape[-1], norm, eps=eps, offset=offset, branch_norm=branch_norm,
        branch_eps=branch_eps, activation=activation, rounding=rounding, **place_of(x.device),
    )
    return spec, plan, given


def prepare_backward(
    dh: Tensor | None, dy: Sequence[Tensor | None], h: Tensor, branch: Tensor | None, gate: Tensor | None,
    gate_table: Tensor | None, branch_weight: Tensor | None, branch_bias: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, modulation: Sequence[Tensor], outputs: str, norm: str, offset: float, branch_norm: str,
    activation: str, x_dtype: torch.dtype,
) -> tuple[KernelSpec, Plan, dict[str, Tensor]]:
    """Spec, plan and operands of the one-pass backward kernel."""
    arrived = [i for i, g in enumerate(dy) if g is not None] if norm != "none" else []
    activations = {numbered("dy", i): dy[i] for i in arrived} | _present(dh=dh, h=h if arrived else None, branch=branch)
    factors = _present(gate=gate, gate_table=gate_table, branch_weight=branch_weight, branch_bias=branch_bias)
    if arrived:
        factors |= _present(weight=weight, bias=bias)
    for i, own in enumerate(_named(modulation, outputs)):
        factors |= own if i in arrived else {}
    given: dict[str, Tensor] = activations | factors  # type: ignore[assignment]
    plan = layout.plan(h, activations, factors)  # type: ignore[arg-type]
    dtypes = {n: t.dtype for n, t in given.items()}
    dtypes |= {"dx": x_dtype} if norm != "none" else {}
    dtypes |= {"dbranch": branch.dtype} if branch is not None else {}
    group = frozenset(plan.lead[:plan.grouped])
    for n, f in factors.items():
        if layout.per_token(f, h, group):
            dtypes[f"d{n}"] = f.dtype if layout.varies(f, h) == frozenset(plan.lead) else torch.float32
    spec = _spec(
        plan, "backward", dtypes, h.shape[-1], norm if arrived else "none", eps=0.0, offset=offset,
        branch_norm=branch_norm if branch is not None else "none", activation=activation, **place_of(h.device),
    )
    return spec, plan, given


def backward_parts(spec: KernelSpec) -> list[KernelSpec]:
    """The kernels a backward is made of: one, or rows and columns where the sums do not fit beside a row."""
    if spec.sums and (two_pass_forced() or not one_pass(spec)):
        return [replace(spec, part="rows"), replace(spec, part="columns")]
    return [spec]


def _present(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {n: t for n, t in tensors.items() if t is not None}


def _strides(spec: KernelSpec, plan: Plan) -> list[Any]:
    """The values of the size and stride arguments of a kernel."""
    return [*plan.groups[1:], *plan.rows[1:]] + [plan.strides[key] for key in spec.stride_arguments]


def forward(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, gate_table: Tensor | None, branch_weight: Tensor | None,
    branch_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None, modulation: Sequence[Tensor], outputs: str,
    norm: str, eps: float, offset: float, branch_norm: str, branch_eps: float, activation: str, h_dtype: torch.dtype,
    y_dtype: torch.dtype, rounding: str,
) -> list[Tensor]:
    """`reference.forward` in one kernel."""
    spec, plan, given = prepare_forward(
        x, branch, gate, gate_table, branch_weight, branch_bias, weight, bias, modulation, outputs, norm, eps, offset,
        branch_norm, branch_eps, activation, h_dtype, y_dtype, rounding,
    )
    rows = math.prod(x.shape[:-1])
    results = {t: torch.empty(x.shape, dtype=spec.dtype(t), device=x.device) for t in spec.rows_out}
    results |= {t: torch.empty((rows,), dtype=torch.float32, device=x.device) for t in spec.statistics}
    if rows != 0:
        kernel, config = kernel_of(spec)
        args = [given[t] for t in (*spec.rows_in, *spec.factors)]
        args += [results[t] for t in (*spec.rows_out, *spec.statistics)]
        sizes, grid = [plan.N], plan.G * plan.N
        if config.rows > 1:
            P = (plan.N + config.rows - 1) // config.rows
            sizes, grid = [plan.N, P], plan.G * P
        torch.library.wrap_triton(kernel)[(grid,)](*args, *sizes, *_strides(spec, plan), num_warps=config.warps)
    names = ("h", "mean", "rstd", "branch_mean", "branch_rstd", *(numbered("y", i) for i in spec.outputs))
    return [results[n] if n in results else x.new_empty(0) for n in names]


def backward(
    dh: Tensor | None, dy: Sequence[Tensor | None], h: Tensor, branch: Tensor | None, gate: Tensor | None,
    gate_table: Tensor | None, branch_weight: Tensor | None, branch_bias: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, modulation: Sequence[Tensor], mean: Tensor, rstd: Tensor, branch_mean: Tensor,
    branch_rstd: Tensor, outputs: str, norm: str, offset: float, branch_norm: str, activation: str,
    x_dtype: torch.dtype,
) -> list[Tensor]:
    """`reference.backward` in one pass over the rows and a small second stage (two passes for very wide rows)."""
    factors = _present(gate=gate, gate_table=gate_table, branch_weight=branch_weight, branch_bias=branch_bias,
                       weight=weight, bias=bias)
    for own in _named(modulation, outputs):
        factors |= own
    rows = math.prod(h.shape[:-1])
    arrived = dh is not None or any(g is not None for g in dy)
    grads: dict[str, Tensor] = {}
    if rows != 0 and arrived:
        spec, plan, given = prepare_backward(
            dh, dy, h, branch, gate, gate_table, branch_weight, branch_bias, weight, bias, modulation, outputs, norm,
            offset, branch_norm, activation, x_dtype,
        )
        statistics = {"mean": mean, "rstd": rstd, "branch_mean": branch_mean, "branch_rstd": branch_rstd}
        grads = _run(spec, plan, given, statistics, h, factors)
    wanted: dict[str, tuple[Any, torch.dtype] | None] = {
        "dx": None if norm == "none" else (h.shape, x_dtype),
        "dbranch": None if branch is None else (branch.shape, branch.dtype),
    }
    names = ("gate", "gate_table", "branch_weight", "branch_bias", "weight", "bias")
    for n in (*names, *(f for f in factors if f not in names)):
        wanted[f"d{n}"] = (factors[n].shape, factors[n].dtype) if n in factors else None
    result = []
    for n, kind in wanted.items():
        if kind is None:
            result.append(h.new_empty(0))
        elif n in grads:
            result.append(grads[n])
        else:
            result.append(torch.zeros(kind[0], dtype=kind[1], device=h.device))
    return result


def _run(
    spec: KernelSpec, plan: Plan, given: dict[str, Tensor], statistics: dict[str, Tensor], h: Tensor,
    factors: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Launch the kernels of a backward; gradients by name."""
    D, device = spec.D, h.device
    whole = {n: torch.empty(h.shape, dtype=spec.dtype(n), device=device) for n in ("dx", "dbranch") if spec.has(n)}
    tokens = {}
    for f in factors:
        if spec.has(f"d{f}"):
            shape = factors[f].shape if layout.varies(factors[f], h) == frozenset(plan.lead) else h.shape
            tokens[f"d{f}"] = torch.empty(shape, dtype=spec.dtype(f"d{f}"), device=device)
    outs = whole | tokens
    specs = backward_parts(spec)
    two = len(specs) == 2
    means = {n: torch.empty((math.prod(h.shape[:-1]),), dtype=torch.float32, device=device)
             for n in (row_means(spec) if two else ())}
    partial, P = None, 1
    for s in specs:
        kernel, config = kernel_of(s)
        fill = multiprocessors(device) * config.programs_per_sm
        grid: tuple[Any, ...]
        if s.part == "columns":
            tiles = (D + config.blocks[0] - 1) // config.blocks[0]
            P = torch.sym_max(1, torch.sym_min(fill // tiles // plan.G, (plan.N + 63) // 64))
            grid = (plan.G * P, tiles)
        else:  # as many programs as fill the GPU, but never fewer than four rows for one
            P = torch.sym_max(1, torch.sym_min(fill // plan.G, (plan.N + 3) // 4))
            grid = (plan.G * P,)
        args = [given[t] for t in (*s.rows_in, *s.factors)]
        args += [outs[t] for t in s.rows_out] + [statistics[t] for t in s.statistics]
        args += [means[n] for n in means]
        if s.sums:
            partial = torch.empty((plan.G * P, len(s.sums) * D), dtype=torch.float32, device=device)
            args.append(partial)
        torch.library.wrap_triton(kernel)[grid](*args, plan.N, P, *_strides(s, plan), num_warps=config.warps)
    grads = dict(whole)
    for n, t in tokens.items():
        f = factors[n[1:]]
        grads[n] = t if t.shape == f.shape and t.dtype == f.dtype else t.sum_to_size(f.shape).to(f.dtype)
    if partial is not None:
        grads |= _second_stage(spec, plan, partial, P, h, factors)
    return grads


def _second_stage(
    spec: KernelSpec, plan: Plan, partial: Tensor, P: Any, h: Tensor, factors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of the factors that are the same for a group, or for all: partial sums added in a fixed order."""
    D, width = spec.D, len(spec.sums) * spec.D
    group = plan.lead[:plan.grouped]
    launches: dict[int, list[tuple[str, int]]] = {}  # leading group dimensions kept -> (factor, first column)
    split: list[tuple[str, int]] = []
    for k, head in enumerate(spec.sums):
        for f in spec.members(head):
            if spec.per_token(f):
                continue
            v = layout.varies(factors[f], h)
            if v == frozenset(group[:len(v)]):
                launches.setdefault(len(v), []).append((f, k * D))
            else:  # varies in a later dimension of the group but not in an earlier one
                split.append((f, k * D))
    grads: dict[str, Tensor] = {}

    def add_up(kept: int, wanted: list[tuple[str, int]], outs: list[Tensor]) -> None:
        G = math.prod(h.shape[i] for i in group[:kept])
        each = math.prod(h.shape[i] for i in group[kept:]) * P
        results = tuple((f"d{f}", first, out.dtype) for (f, first), out in zip(wanted, outs))
        shape = tile(D, each)
        kernel = sum_kernel(f"{spec.name}_sums", D, width, results, shape)
        tiles = (D + shape.columns - 1) // shape.columns
        torch.library.wrap_triton(kernel)[(tiles * len(outs) * G,)](partial, *outs, each, num_warps=shape.warps)

    for kept, wanted in launches.items():
        outs = [torch.empty(factors[f].shape, dtype=factors[f].dtype, device=h.device) for f, _ in wanted]
        add_up(kept, wanted, outs)
        grads |= {f"d{f}": out for (f, _), out in zip(wanted, outs)}
    if split:
        outs = [torch.empty((plan.G, D), dtype=torch.float32, device=h.device) for _ in split]
        add_up(len(group), split, outs)
        for (f, _), out in zip(split, outs):
            full = [h.shape[i] if i in group else 1 for i in range(h.dim() - 1)]
            grads[f"d{f}"] = out.reshape(*full, D).sum_to_size(factors[f].shape).to(factors[f].dtype)
    return grads
