"""The private or moving APIs of torch that work on tensors as they are; the rest stands in _compat.py.

Each has a contract test in tests/contracts.  Known to hold on torch 2.11 and 2.13.
"""

from __future__ import annotations

from typing import Any

import torch


def foreach_copy(into: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensor by tensor, in as few kernels as the devices and dtypes allow."""
    torch._foreach_copy_(into, sources)


def foreach_norm(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The fp32 L2 norm of each tensor, in as few kernels as the devices and dtypes allow."""
    return list(torch._foreach_norm(tensors, 2, dtype=torch.float32))


def without_torch_function() -> Any:
    """A context in which `__torch_function__` of tensor subclasses is not called."""
    return torch._C.DisableTorchFunctionSubclass()


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Does torch.func hold this tensor in a wrapper of its own (a batch, a level of grad)?"""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)
