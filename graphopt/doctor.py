"""`graphopt doctor`: what this machine and this torch are, and what would not work: text for a bug report."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from graphopt import _compat, _contracts, config
from graphopt.codegen import operators, store, tuned
from graphopt.errors import GraphoptError
from graphopt.inspecting.text import gib

GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line: a section, a name, a value; `problem` says what to do where something is wrong."""

    section: str
    name: str
    value: str
    problem: str | None = None


def examine() -> list[Finding]:
    """Everything, in the order it is printed."""
    return [*_versions(), *_devices(), *_interfaces(), *_kernels(), *_caches(), *_memory(), *_settings()]


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "graphopt", _version("graphopt") or "not installed")
    yield Finding("versions", "python", f"{platform.python_version()} on {platform.platform()}")
    build = (torch.version.cuda and f"CUDA {torch.version.cuda}") or (torch.version.hip and f"ROCm {torch.version.hip}")
    yield Finding("versions", "torch", f"{torch.__version__} ({build or 'CPU build'})")
    for name, why in (("triton", "GPU kernels need it: pip install triton"),
                      ("diffusers", "built-in models and the demo need it: pip install diffusers")):
        found = _version(name)
        yield Finding("versions", name, found or f"not installed ({why})")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[Finding]:
    yield Finding("devices", "CPU", f"{os.cpu_count()} CPUs, torch uses {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        why = "" if torch.backends.cuda.is_built() else ": this torch is built without CUDA"
        yield Finding("devices", "GPU", f"none{why} (sites run plain torch; inspect and plan work)")
        return
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        old = p.major < 8 and not torch.version.hip
        yield Finding("devices", f"cuda:{i}", f"{p.name}, sm{p.major}{p.minor}, {p.total_memory / GIB:.1f} GiB, "
                      f"{p.multi_processor_count} multiprocessors",
                      "kernels are written for sm80 and later: sites are left to Inductor" if old else None)
        yield Finding("devices", f"cuda:{i} configurations", tuned.about(p.name))


def _interfaces() -> Iterator[Finding]:
    for name, wrong in _contracts.broken().items():
        problem = None if wrong is None else f"{wrong}; report it, with this text"
        yield Finding("torch's interfaces", name, "holds" if wrong is None else "broken", problem)
    if _compat.mix_order_is_wrong():
        yield Finding("torch's interfaces", "mix-order reduction", "this torch has it and it returns wrong gradients "
                      "(pytorch#193061); graphopt switches it off for what it compiles, torch.compile alone does not")
    else:
        yield Finding("torch's interfaces", "mix-order reduction", "not in this torch")


def _kernels() -> Iterator[Finding]:
    if not operators.has_triton():
        yield Finding("kernels", "compiler", "no Triton: every site runs plain torch")
        return
    from graphopt.codegen import compiler, examples, readiness

    target = readiness.local_target() if torch.cuda.is_available() else "sm90"
    unit = examples.units(examples.example("norm_modulate", 1536))[0]
    try:
        found = compiler.shared().compile(unit, target)
        yield Finding("kernels", f"{unit.function} for {target}", str(found))
    except (GraphoptError, OSError) as error:
        problem = " ".join(str(error).split())[:300]
        yield Finding("kernels", f"{unit.function} for {target}", "does not compile", problem)


def _caches() -> Iterator[Finding]:
    triton = os.environ.get("TRITON_CACHE_DIR") or str(Path.home() / ".triton" / "cache")
    for name, folder, variable in (("kernels", str(store.cache_folder()), "GRAPHOPT_CACHE_DIR"),
                                   ("Inductor", _compat.inductor_cache_folder(), "TORCHINDUCTOR_CACHE_DIR"),
                                   ("Triton", triton, "TRITON_CACHE_DIR")):
        there = _first_existing(Path(folder))
        free = shutil.disk_usage(there).free
        problem = None
        if not os.access(there, os.W_OK):
            problem = f"it cannot be written: set {variable} to a folder that can"
        elif free < GIB:
            problem = "less than 1 GiB is free"
        yield Finding("caches", name, f"{folder} ({free / GIB:.0f} GiB free)", problem)


def _first_existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _memory() -> Iterator[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_limit()
    note = f", this process's control group may use {limit / GIB:.1f} GiB" if limit and limit < total else ""
    yield Finding("memory", "host", f"{total / GIB:.1f} GiB{note}")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else gib(soft)
    yield Finding("memory", "pinned memory", f"lock limit {locked} (CUDA's pinned allocations may pass it; some hosts "
                  "cap them elsewhere)")
    if torch.cuda.is_available():
        yield _pin()


def _pin(size: int = 256 << 20) -> Finding:
    try:
        torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return Finding("memory", "pinning 256 MiB", "fails", f"{error}; streaming falls back to pageable memory")
    return Finding("memory", "pinning 256 MiB", "works")


def _cgroup_limit() -> int | None:
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def _settings() -> Iterator[Finding]:
    for name in ("GRAPHOPT_DISABLE", "GRAPHOPT_STRICT", "GRAPHOPT_CACHE_DIR", "TORCH_LOGS", "TORCH_TRACE",
                 "TORCH_COMPILE_DISABLE", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_INTERPRET"):
        if name not in os.environ:
            continue
        problem = None
        if name == "TORCH_COMPILE_DISABLE" and os.environ[name] == "1":
            problem = "torch.compile does nothing"
        if name == "TRITON_INTERPRET" and os.environ[name] == "1":
            problem = "kernels run interpreted, on the CPU"
        yield Finding("settings", name, os.environ[name], problem)
    try:
        parsed, _ = config.parse(None, {})
    except GraphoptError as error:
        yield Finding("settings", "defaults", "invalid", " ".join(str(error).split()))
        return
    changed = {k: v for k, v in asdict(parsed).items() if v != getattr(config.Config(), k)}
    yield Finding("settings", "defaults", ", ".join(f"{k}={v!r}" for k, v in changed.items()) or "as built in")


def text(found: list[Finding]) -> str:
    """The findings, problems marked and repeated at the end."""
    lines, section = [], ""
    for f in found:
        if f.section != section:
            section = f.section
            lines.append(section)
        lines.append(f"  {'!!' if f.problem else '  '} {f.name}: {f.value}")
        lines += [f"       {f.problem}"] if f.problem else []
    bad = [f for f in found if f.problem]
    lines.append("" if not bad else f"\n{len(bad)} problem{'s' * (len(bad) != 1)}: " + ", ".join(f.name for f in bad))
    return "\n".join(lines).rstrip() if bad else "\n".join([*lines, "no problem found"])


def to_json(found: list[Finding]) -> str:
    """The findings as JSON."""
    return json.dumps({"version": 1, "findings": [asdict(f) for f in found]}, indent=1)
