"""Handles: what stands in a streamed model where a weight was, and where its gradient would be.

A handle is the model's own Parameter object, on the compute device, viewing a pool of NaN that all handles share:
Dynamo traces it with its true shape and strides, optimizers and `named_parameters()` see it, and the weights are bound
at run time.  An empty storage instead of the pool would end the process when it is read, and a tensor subclass that
raises cannot be traced through functions such as `F.rms_norm` (docs/streaming.md).  The gradient of a handle is a
tensor that raises on every use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from graphopt import _compat_tensors
from graphopt.errors import StreamError

if TYPE_CHECKING:
    from graphopt.streaming.store import Entry

# what may be asked of a gradient handle without touching its memory
_METADATA = frozenset({
    "shape", "size", "dtype", "device", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim", "dim", "numel",
    "nelement", "stride", "layout", "is_floating_point", "is_complex", "is_cuda", "is_cpu", "is_meta", "is_sparse",
    "is_quantized", "element_size", "itemsize", "nbytes", "untyped_storage", "names", "_backward_hooks",
    "is_contiguous", "storage_offset", "requires_grad_", "is_nested", "is_sparse_csr", "_version", "__hash__",
    "is_mkldnn", "is_xpu", "is_mps", "is_inference", "_is_view", "is_conj", "is_neg", "_is_zerotensor", "_base",
    "is_sparse_csc", "is_coalesced", "is_mtia",
})

_ENTRY = "_graphopt_entry"
_MEMBER = "_graphopt_member"  # of a layer that runs like streamed ones and stays on the device


def _asked(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def _plain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    with _compat_tensors.without_torch_function():
        return func(*args, **(kwargs or {}))


class GradHandle(torch.Tensor):
    """Says that a streamed weight has a gradient, which is in host memory (`p.grad is not None`)."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _asked(func)
        if torch.compiler.is_compiling() or name in _METADATA:
            return _plain(func, args, kwargs)
        remedies = {
            "_foreach_norm": "call opt.clip_grad_norm_(...) or opt.grad_norm() of HostAdamW",
            "linalg_vector_norm": "call opt.clip_grad_norm_(...) or opt.grad_norm() of HostAdamW",
            "_amp_foreach_non_finite_check_and_unscale_": "train in bf16, which needs no GradScaler",
            "zero_": "call opt.zero_grad() with set_to_none=True",
            "_foreach_zero_": "call opt.zero_grad() with set_to_none=True",
        }
        raise StreamError(
            f"{name} was called on the gradient of a streamed weight, which is in host memory",
            remedy=remedies.get(name, "read it with HostAdamW.gradient(parameter)"),
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"GradHandle(shape={tuple(self.shape)}, dtype={self.dtype})"


class Pool:
    """NaN on the device, as large as the largest streamed parameter of each dtype."""

    def __init__(self, entries: Iterable[Entry], device: torch.device) -> None:
        size: dict[torch.dtype, int] = {}
        for e in entries:
            size[e.dtype] = max(size.get(e.dtype, 0), e.numel)
        self._flat = {d: torch.full((n,), float("nan") if d.is_floating_point else 0, dtype=d, device=device)
                      for d, n in size.items()}

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return sum(t.nbytes for t in self._flat.values())

    def view(self, entry: Entry) -> torch.Tensor:
        """A tensor with an entry's shape, strides and dtype."""
        return self._flat[entry.dtype][:entry.numel].as_strided(entry.shape, entry.stride)


def make(parameter: torch.nn.Parameter, entry: Entry, pool: Pool) -> torch.nn.Parameter:
    """Turn a Parameter into a handle; it stays the same object unless torch cannot move it (meta tensors)."""
    if parameter.is_meta:
        handle = torch.nn.Parameter(pool.view(entry), requires_grad=parameter.requires_grad)
    else:
        handle = parameter
        handle.data = pool.view(entry)
    handle.__dict__[_ENTRY] = entry
    entry.written = handle._version
    return handle


def entry_of(tensor: object) -> Entry | None:
    """What a handle stands for; None for anything else."""
    return tensor.__dict__.get(_ENTRY) if isinstance(tensor, torch.nn.Parameter) else None


def join_layer(parameter: torch.nn.Parameter, entry: Entry) -> None:
    """Note that an ordinary parameter belongs to a resident layer."""
    parameter.__dict__[_MEMBER] = entry
    entry.handle = parameter


def member_of(tensor: object) -> Entry | None:
    """What a handle, or a parameter of a resident layer, stands for; None for anything else."""
    found = entry_of(tensor)
    return found if found is not None or not isinstance(tensor, torch.nn.Parameter) else tensor.__dict__.get(_MEMBER)


def gradient_of(handle: torch.nn.Parameter) -> torch.Tensor:
    """A new gradient handle for a streamed weight; it takes no memory to speak of."""
    return handle.detach().as_subclass(GradHandle)


def check_untouched(entry: Entry) -> None:
    """Raise StreamError if somebody wrote to a handle (the values went to the shared pool, not into the store), or
    wants to see a gradient that autograd never hands out."""
    if entry.handle._backward_hooks or entry.handle._post_accumulate_grad_hooks:
        raise StreamError(f"{entry.fqn} has a hook on its gradient, which would never run", where=entry.fqn,
                          remedy="read gradients with HostAdamW.gradient(parameter), or stream without this layer")
    if not entry.layer.resident and entry.handle._version != entry.written:
        raise StreamError(f"{entry.fqn} was written to after graphopt.stream, and has not got the values",
                          where=entry.fqn, remedy="set weights before graphopt.stream, or by load_state_dict(...)")


def describe(handle: object) -> str | None:
    """The name of a streamed weight in its model."""
    entry = entry_of(handle)
    return None if entry is None else entry.fqn
