"""The file of a kernel's generated source, by its spec: what reports point to."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from graphopt.codegen import emit, store
from graphopt.codegen.spec import KernelSpec, configure


@cache
def kernel_file(spec: KernelSpec) -> Path:
    """The file of the kernel's source in the kernel cache, written if it is not there."""
    return store.write(f"{spec.name}_{spec.direction}", emit.emit(spec, configure(spec)))
