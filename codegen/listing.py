"""The files of generated kernels: by spec, and their text by name.  What reports point to."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from graphopt.codegen import store, tuned
from graphopt.codegen.emit import emit
from graphopt.codegen.spec import KernelSpec

_files: dict[str, Path] = {}


@cache
def kernel_file(spec: KernelSpec) -> Path:
    """The file of the kernel's source in the kernel cache, written if it is not there."""
    path = store.write(spec.function, emit(spec, tuned.configuration(spec)))
    _files[path.name] = path
    return path


def source_of(name: str) -> str | None:
    """The text of a kernel by the name of its file; None when it is not in the cache (any more)."""
    path = _files.get(name, store.cache_folder() / name)
    try:
        return path.read_text()
    except OSError:
        return None
