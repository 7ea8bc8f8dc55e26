"""Generated source on disk: one module per text, named by its content.

Triton reads a kernel's source from its file, and people read it there too.  A file that is missing, cut short or
changed is written again; a folder that cannot be written is replaced by a temporary one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

from graphopt.errors import CodegenError

log = logging.getLogger(__name__)


def digest_of(folder: Path, names: Iterable[str], more: str = "") -> str:
    """Twelve hex digits over files, and more text, that decide what an operator computes."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
    digest.update(more.encode())
    return digest.hexdigest()[:12]


def cache_folder() -> Path:
    """Where generated kernels live: GRAPHOPT_CACHE_DIR, or `graphopt` under the user's cache folder."""
    if os.environ.get("GRAPHOPT_CACHE_DIR"):
        return Path(os.environ["GRAPHOPT_CACHE_DIR"]) / "kernels"
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "graphopt" / "kernels"


@cache
def temporary_folder() -> Path:
    """A folder of this process, where the cache folder cannot be written."""
    return Path(tempfile.mkdtemp(prefix="graphopt-kernels-"))


def write(name: str, source: str) -> Path:
    """The file that holds `source`, written if it is not there exactly so already.

    CodegenError when neither the cache folder nor a temporary one can be written.
    """
    file = f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:12]}.py"
    folder = cache_folder()
    try:
        return _write(folder, file, source)
    except OSError as error:
        log.warning("graphopt: kernel cache %s cannot be used (%s); a temporary folder is", folder, error)
    try:
        return _write(temporary_folder(), file, source)
    except OSError as error:
        raise CodegenError(
            f"the source of {name} can be written neither to {folder} nor to a temporary folder: {error}",
            remedy="free some space, or set GRAPHOPT_CACHE_DIR to a folder that can be written",
        ) from error


def _write(folder: Path, file: str, source: str) -> Path:
    path = folder / file
    try:
        if path.read_bytes() == source.encode():
            return path
        log.info("graphopt: kernel cache file %s was corrupt and is rebuilt", path)
    except FileNotFoundError:
        pass
    folder.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=f"{file}.", dir=folder)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(source.encode())
        os.replace(part, path)  # whole or not at all, also with several processes
    except BaseException:
        Path(part).unlink(missing_ok=True)  # a full disk, or Ctrl-C, keeps no half-written file
        raise
    return path


def load(name: str, source: str) -> ModuleType:
    """Import `source` from its file."""
    path = write(name, source)
    module_name = f"graphopt_kernels.{path.stem}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import the generated kernel {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module
