"""Configurations measured on one GPU model, where they beat the closed form of configure.py.

Two tables, GPU name -> key -> Configuration: the one shipped with the package (`data/configurations.json`) and the
user's, `tuned.json` in the cache folder, which `graphopt bench adaln --tune` writes and which wins.  A GPU in neither
uses the closed form.  The key leaves the number of rows out: it names a kernel, a width, dtypes and memory layout.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from graphopt.codegen import store
from graphopt.codegen.configure import Configuration, closed_form
from graphopt.codegen.spec import KernelSpec

log = logging.getLogger(__name__)
SHIPPED = Path("data") / "configurations.json"


def user_file() -> Path:
    """Where the user's own table lies."""
    return store.cache_folder().parent / "tuned.json"


def user_text() -> str:
    """The user's own table as text; "" where there is none, or none that can be read (with a warning)."""
    try:
        return user_file().read_text()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        log.warning("graphopt: %s cannot be read: %s", user_file(), error)
        return ""


def key(spec: KernelSpec) -> str:
    """What a configuration is for: `gate_norm_modulate_backward layer_norm D=3072 in=2,2,2,2 out=2,2 token=0`."""

    def size(names: tuple[str, ...]) -> str:
        return ",".join(str(spec.dtype(n).itemsize) for n in names)

    token = sum(spec.per_token(f) for f in spec.factors)
    return f"{spec.function} {spec.norm} D={spec.D} in={size(spec.rows_in)} out={size(spec.rows_out)} token={token}"


@cache
def tables() -> dict[str, dict[str, Configuration]]:
    """GPU name -> key -> configuration; the user's entries replace the shipped ones.

    A user's table that cannot be read is passed over with one warning.
    """
    found = _parsed((files("graphopt.codegen") / str(SHIPPED)).read_text())
    if text := user_text():
        try:
            for gpu, entries in _parsed(text).items():
                found.setdefault(gpu, {}).update(entries)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("graphopt: %s is passed over (%s: %s); `graphopt bench adaln --tune` writes it again",
                        user_file(), type(error).__name__, error)
    return found


def _parsed(text: str) -> dict[str, dict[str, Configuration]]:
    names = {f.name for f in fields(Configuration)}
    out: dict[str, dict[str, Configuration]] = {}
    for gpu, entries in json.loads(text).items():
        for k, entry in entries.items():
            if set(entry) - names:
                raise KeyError(f"unknown settings {sorted(set(entry) - names)} of {k!r}")
        out[gpu] = {k: Configuration(**{**e, "blocks": tuple(e["blocks"])}) for k, e in entries.items()}
    return out


def configuration(spec: KernelSpec) -> Configuration:
    """The configuration of a kernel: measured on its GPU, or in closed form."""
    measured = tables().get(spec.gpu, {}).get(key(spec.without_addends)) if spec.gpu else None
    if measured is None:
        return closed_form(spec)
    if spec.without_addends == spec:
        return measured
    return closed_form(spec, measured.programs_per_sm)  # addends keep the grid


def write(gpu: str, entries: dict[str, Configuration], path: Path | None = None) -> Path:
    """Replace these entries of a GPU in a table (the user's); others stay.  Returns the file."""
    path = path or user_file()
    old: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    mine = {**old.get(gpu, {}), **{k: asdict(c) for k, c in entries.items()}}
    lines = [f'  {json.dumps(k)}: {json.dumps(e)}' for k, e in sorted(mine.items())]
    other = [f" {json.dumps(g)}: {json.dumps(e)}" for g, e in old.items() if g != gpu]
    body = f" {json.dumps(gpu)}: {{" + ("\n" + ",\n".join(lines) + "\n }" if lines else "}")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text("{\n" + ",\n".join([*other, body]) + "\n}\n")
    os.replace(part, path)
    tables.cache_clear()
    return path


def about(gpu: str) -> str:
    """One line for `graphopt doctor`: what a GPU's configurations come from."""
    known = tables().get(gpu)
    if known is None:
        return "no measured configurations for this GPU: closed form (`graphopt bench adaln --tune` measures them)"
    if not known:
        return "measured: the closed form is the best of its neighbours for every kernel tried"
    return f"{len(known)} measured configurations; closed form for every other kernel"
