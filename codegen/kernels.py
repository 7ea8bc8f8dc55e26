"""The operators on a GPU: lay the tensors out as rows, launch the generated kernels, add up the partial sums.

Everything here is traced by `triton_op`, so Inductor sees the kernel launches and the few tensor ops around them.
Layout: x [.., D] becomes rows [G * N, D]; a factor that broadcasts to it has one row per group g, read through its own
stride (a chunk of a larger buffer is not copied).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from graphopt.codegen import emit, store
from graphopt.codegen.spec import Configuration, KernelSpec, configure

# programs of a persistent kernel when there is no GPU to ask (the interpreter)
INTERPRETER_SMS = 3


def groups_prefix(x: Tensor, factors: list[Tensor]) -> int:
    """How many leading dimensions of x carry different factor rows: [B, 1, D] against [B, S, D] is 1.

    Raises ValueError when a factor varies over a dimension but not over one before it.
    """
    prefix = 0
    for f in factors:
        lead = [1] * (x.dim() - f.dim()) + list(f.shape[:-1])
        varies = [i for i, size in enumerate(lead) if not (isinstance(size, int) and size == 1)]
        if varies:
            prefix = max(prefix, varies[-1] + 1)
    for f in factors:
        lead = [1] * (x.dim() - f.dim()) + list(f.shape[:-1])
        varies = [not (isinstance(size, int) and size == 1) for size in lead[:prefix]]
        whole = [isinstance(size, int) and size == 1 for size in x.shape[:prefix]]
        if any(varies) and not all(v or w for v, w in zip(varies, whole)):
            raise ValueError(f"a factor {list(f.shape)} does not vary over a prefix of {list(x.shape)}")
    return prefix


def _rows_of(f: Tensor, x: Tensor, prefix: int) -> tuple[Tensor, Any]:
    """A factor as (tensor whose row g starts at g * stride, stride); stride 0 when all groups share one row."""
    lead = [1] * (x.dim() - f.dim()) + list(f.shape[:-1])
    f = f if f.dim() == 1 or f.stride(-1) == 1 else f.contiguous()
    if all(isinstance(size, int) and size == 1 for size in lead[:prefix]):
        return f, 0
    if prefix == 1:
        return f, f.stride(f.dim() - x.dim()) if f.dim() == x.dim() else f.stride(0)
    return f.contiguous(), x.shape[-1]


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
    config = configure(spec)
    module = store.load(f"{spec.name}_{spec.direction}", emit.emit(spec, config))
    return getattr(module, f"{spec.name}_{spec.direction}"), config


@cache
def sum_kernel() -> Any:
    """The second stage of the backward."""
    return store.load("sum_partials", emit.SUM_PARTIALS).sum_partials


def kernel_name(gate: bool, norm: str, affine: bool, scale: bool) -> str:
    """Name of a kernel by the parts it has."""
    parts = (["gate"] if gate else []) + (["norm"] if norm != "none" else []) + (["affine"] if affine else [])
    return "_".join(parts + (["modulate"] if scale else []))


def _spec(direction: str, norm: str, offset: float, eps: float, D: int, tensors: dict[str, Any]) -> KernelSpec:
    present = {n: (t if isinstance(t, torch.dtype) else t.dtype) for n, t in tensors.items() if t is not None}
    name = kernel_name("branch" in present, norm, "weight" in present, "scale" in present)
    return KernelSpec(name, direction, norm, offset, eps, int(D), tuple(present.items()))  # type: ignore[arg-type]


def forward_spec(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, scale: Tensor | None, shift: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, norm: str, eps: float, offset: float, h_dtype: torch.dtype,
    y_dtype: torch.dtype,
) -> KernelSpec:
    """The spec of the forward kernel for these tensors."""
    tensors: dict[str, Any] = dict(x=x, branch=branch, gate=gate, scale=scale, shift=shift, weight=weight, bias=bias)
    tensors |= dict(h=h_dtype if branch is not None else None, y=y_dtype if norm != "none" else None)
    return _spec("forward", norm, offset, eps, x.shape[-1], tensors)


def backward_spec(
    dh: Any, dy: Any, h: Tensor, branch: Tensor | None, gate: Tensor | None, scale: Tensor | None,
    shift: Tensor | None, weight: Tensor | None, bias: Tensor | None, norm: str, offset: float, x_dtype: torch.dtype,
) -> KernelSpec:
    """The spec of the backward kernel for these tensors."""
    normed = norm != "none" and dy is not None
    tensors: dict[str, Any] = dict(dy=dy, dh=dh, h=h if normed else None, branch=branch, gate=gate)
    if normed:
        tensors |= dict(scale=scale, shift=shift, weight=weight, bias=bias)
    tensors |= dict(dx=x_dtype if norm != "none" else None, dbranch=branch.dtype if branch is not None else None)
    return _spec("backward", norm if normed else "none", offset, 0.0, h.shape[-1], tensors)


def forward(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, scale: Tensor | None, shift: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, norm: str, eps: float, offset: float, h_dtype: torch.dtype,
    y_dtype: torch.dtype, rounding: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.forward` in one kernel.  Rounds once (numerics="fp32"); rounding points are not emitted yet."""
    if rounding:
        raise ValueError("the kernels round once; rounding points need the reference operator")
    factors = dict(gate=gate, scale=scale, shift=shift, weight=weight, bias=bias)
    given = {n: f for n, f in factors.items() if f is not None}
    prefix = groups_prefix(x, list(given.values()))
    rows, N = math.prod(x.shape[:-1]), math.prod(x.shape[prefix:-1])
    x = x.contiguous()
    branch = None if branch is None else branch.contiguous()
    h = torch.empty(x.shape, dtype=h_dtype, device=x.device) if branch is not None else x.new_empty(0)
    normed = norm != "none"
    y = torch.empty(x.shape, dtype=y_dtype, device=x.device) if normed else x.new_empty(0)
    mean = torch.empty((rows,), dtype=torch.float32, device=x.device) if normed else x.new_empty(0)
    rstd = torch.empty((rows,), dtype=torch.float32, device=x.device) if normed else x.new_empty(0)
    if rows == 0:
        return h, y, mean, rstd
    spec = forward_spec(x, branch, gate, scale, shift, weight, bias, norm, eps, offset, h_dtype, y_dtype)
    kernel, config = kernel_of(spec)
    laid = [_rows_of(given[f], x, prefix) for f in emit.FACTORS if f in given]
    args = [t for t in (x, branch) if t is not None] + [f for f, _ in laid]
    args += ([h] if branch is not None else []) + ([y, mean, rstd] if normed else [])
    torch.library.wrap_triton(kernel)[(rows,)](*args, N, *(stride for _, stride in laid), num_warps=config.warps)
    return h, y, mean, rstd


def backward(
    dh: Tensor | None, dy: Tensor | None, h: Tensor, branch: Tensor | None, gate: Tensor | None, scale: Tensor | None,
    shift: Tensor | None, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, norm: str,
    offset: float, x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`reference.backward` in one pass over the rows and a small second stage."""
    factors = dict(gate=gate, scale=scale, shift=shift, weight=weight, bias=bias)
    given = {n: f for n, f in factors.items() if f is not None}
    rows = math.prod(h.shape[:-1])
    dx = torch.empty(h.shape, dtype=x_dtype, device=h.device) if norm != "none" else h.new_empty(0)
    dbranch = h.new_empty(0) if branch is None else torch.empty(h.shape, dtype=branch.dtype, device=h.device)
    zeros = {n: torch.zeros_like(f) for n, f in given.items()}
    if rows == 0 or (dy is None and dh is None):
        return dx.zero_(), dbranch.zero_(), *_five(zeros, h)
    prefix = groups_prefix(h, list(given.values()))
    G, N, D = math.prod(h.shape[:prefix]), math.prod(h.shape[prefix:-1]), h.shape[-1]
    spec = backward_spec(dh, dy, h, branch, gate, scale, shift, weight, bias, norm, offset, x_dtype)
    kernel, config = kernel_of(spec)
    used = [f for f in emit.FACTORS if f in given and spec.has(f) and f not in ("shift", "bias")]
    if spec.has("bias") and spec.has("scale"):
        used.append("bias")
    laid = [_rows_of(given[f], h, prefix) for f in used]
    # as many programs as fill the GPU, but never fewer than four rows for one
    P = torch.sym_max(1, torch.sym_min(multiprocessors(h.device) * config.programs_per_sm // G, (N + 3) // 4))
    C = len(spec.sums) * D
    partial = torch.empty((G * P, C), dtype=torch.float32, device=h.device)
    by_name = {"dy": dy, "dh": dh, "h": h, "branch": branch}
    args = [by_name[t].contiguous() for t in spec.rows_in] + [f for f, _ in laid]  # type: ignore[union-attr]
    args += [t for n, t in (("dx", dx), ("dbranch", dbranch)) if spec.has(n)]
    args += [mean, rstd] if spec.norm != "none" else []
    torch.library.wrap_triton(kernel)[(G * P,)](
        *args, partial, N, P, *(stride for _, stride in laid), num_warps=config.warps
    )
    sums = torch.empty((G, C), dtype=torch.float32, device=h.device)
    columns = 32
    torch.library.wrap_triton(sum_kernel())[((C + columns - 1) // columns, G)](
        partial, sums, P, C, ROWS=128, COLUMNS=columns, num_warps=4
    )
    grads = dict(zeros)
    for k, n in enumerate(spec.sums):
        part = sums[:, k * D:(k + 1) * D].reshape(*h.shape[:prefix], *([1] * (h.dim() - 1 - prefix)), D)
        grads[n] = part.sum_to_size(given[n].shape).to(given[n].dtype).clone()
    return dx, dbranch, *_five(grads, h)


def _five(grads: dict[str, Tensor], like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dgate, dscale, dshift, dweight, dbias = (
        grads[n] if n in grads else like.new_empty(0) for n in ("gate", "scale", "shift", "weight", "bias")
    )
    return dgate, dscale, dshift, dweight, dbias
