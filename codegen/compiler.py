"""Compile a kernel for a target without a GPU, in a worker process with a time limit.

The worker stays alive for the next kernel; one that crashed or hung is replaced.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from graphopt.codegen import store
from graphopt.codegen.configure import Configuration, shared_limit
from graphopt.codegen.spec import KernelSpec
from graphopt.errors import CodegenError

# seconds one kernel may take; most take 0.2 to 2
LIMIT_S = 120.0
WORKER = Path(__file__).parent / "compile_worker.py"
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
REMEDY = "report it with the output of `graphopt kernels compile`; the site can stay with Inductor"


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers and spills per thread, shared memory in bytes per program."""

    registers: int
    spills: int
    shared: int

    def __str__(self) -> str:
        return f"{self.registers} registers, {self.spills} spills, {self.shared} B shared"


def gpu_target(target: str) -> tuple[str, int | str, int]:
    """Triton's description of a target: backend, architecture, warp size.  CodegenError for one it does not know."""
    if (found := re.fullmatch(r"sm_?(\d+)", target)) and int(found[1]) >= 75:
        return "cuda", int(found[1]), 32
    if re.fullmatch(r"gfx[0-9a-f]+", target):
        return "hip", target, 64 if target.startswith("gfx9") else 32
    raise CodegenError(f"unknown target {target!r}", remedy="use sm80, sm90, sm100 or gfx942")


@dataclass(frozen=True)
class Unit:
    """One kernel as the compiler needs it: name, width, source, arguments that are tensors and strides, warps."""

    function: str
    D: int
    source: str
    pointers: tuple[tuple[str, torch.dtype], ...]
    strides: tuple[str, ...]
    warps: int

    def request(self, target: str) -> dict[str, Any]:
        """What the worker needs to know.  Tensors and strides are multiples of 16 as a rule, counts are not."""
        arguments = re.search(r"def \w+\((.*)\):", self.source)
        if arguments is None:
            raise CodegenError(f"the source of {self.function} has no function")
        names, dtypes = arguments[1].split(", "), dict(self.pointers)
        return {
            "file": str(store.write(self.function, self.source)), "function": self.function,
            "signature": {n: f"*{KINDS[dtypes[n]]}" if n in dtypes else "i32" for n in names},
            "aligned": [i for i, n in enumerate(names) if n in dtypes or n in self.strides],
            "target": gpu_target(target), "warps": self.warps,
        }


def unit_of(spec: KernelSpec, config: Configuration, source: str) -> Unit:
    """A generated kernel as the compiler needs it; statistics and partial sums are fp32."""
    extra = (*spec.statistics, "mean_w", "mean_wx", "partial")
    pointers = [(n.upper(), torch.float32) for n in extra] + [(n.upper(), dtype) for n, dtype in spec.dtypes]
    strides = tuple(f"{t}_{index}" for t, index in spec.stride_arguments)
    return Unit(spec.function, spec.D, source, tuple(pointers), strides, config.warps)


class Compiler:
    """One worker process; `compile` may be called from any thread."""

    def __init__(self, limit_s: float | None = None) -> None:
        self.limit_s = limit_s
        self.lock = threading.Lock()
        self.worker: subprocess.Popen[bytes] | None = None

    def compile(self, unit: Unit, target: str) -> Resources:
        """Compile one kernel.  CodegenError when the compiler refuses, crashes or takes too long."""
        answer = self._ask(unit.request(target), f"{unit.function} (D = {unit.D}) for {target}")
        if "error" in answer:
            raise CodegenError(
                f"the kernel {unit.function} (D = {unit.D}) does not compile for {target}: {answer['error']}",
                where=f"{unit.function}, {unit.warps} warps", remedy=REMEDY,
            )
        found, limit = Resources(**answer), shared_limit(target)
        if found.shared > limit:  # a compiler does not refuse this, a launch does
            raise CodegenError(
                f"the kernel {unit.function} (D = {unit.D}) needs {found.shared} bytes of shared memory; {target} has "
                f"{limit}", where=f"{unit.function}, {unit.warps} warps", remedy=REMEDY,
            )
        return found

    def stop(self) -> None:
        """End the worker; the next kernel gets a new one."""
        if self.worker is not None:
            self.worker.kill()
            self.worker.wait()
            for pipe in (self.worker.stdin, self.worker.stdout):
                if pipe is not None:
                    pipe.close()
        self.worker = None

    def _start(self) -> subprocess.Popen[bytes]:
        if self.worker is None or self.worker.poll() is not None:
            env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
            self.worker = subprocess.Popen(
                [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, env=env,
            )
        return self.worker

    def _ask(self, question: dict[str, Any], what: str) -> dict[str, Any]:
        limit_s = LIMIT_S if self.limit_s is None else self.limit_s
        with self.lock:
            worker = self._start()
            if worker.stdin is None or worker.stdout is None:
                raise CodegenError("the compiler's process has no pipes")
            try:
                worker.stdin.write(json.dumps(question).encode() + b"\n")
                worker.stdin.flush()
                ready, _, _ = select.select([worker.stdout], [], [], limit_s)
                line = worker.stdout.readline() if ready else b""
            except BrokenPipeError:
                ready, line = [worker.stdout], b""
            if line:
                return dict(json.loads(line))
            code = worker.wait() if ready else None
            self.stop()
            if code is None:
                raise CodegenError(f"compiling {what} took more than {limit_s:g} s", remedy=REMEDY)
            raise CodegenError(f"the compiler crashed on {what} (exit code {code})", remedy=REMEDY)


_shared = Compiler()


@cache
def compiled(unit: Unit, target: str) -> Resources:
    """What a kernel takes, compiled once per process.  CodegenError when it does not compile."""
    return shared().compile(unit, target)


def shared() -> Compiler:
    """The compiler of this process."""
    return _shared


def _forget() -> None:
    """A forked child must not talk to its parent's worker."""
    global _shared
    _shared = Compiler()


atexit.register(lambda: _shared.stop())
os.register_at_fork(after_in_child=_forget)
