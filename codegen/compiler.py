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
from pathlib import Path
from typing import Any

import torch

from graphopt.codegen import store
from graphopt.codegen.configure import Configuration
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


def gpu_target(target: str) -> tuple[str, int | str, int]:
    """Triton's description of a target: backend, architecture, warp size.  CodegenError for one it does not know."""
    if found := re.fullmatch(r"sm_?(\d+)", target):
        return "cuda", int(found[1]), 32
    if re.fullmatch(r"gfx[0-9a-f]+", target):
        return "hip", target, 64 if target.startswith("gfx9") else 32
    raise CodegenError(f"unknown target {target!r}", remedy="use sm80, sm90, sm100 or gfx942")


def request(spec: KernelSpec, config: Configuration, source: str, target: str) -> dict[str, Any]:
    """What the worker needs to know: file, function, argument types, alignment, target, warps."""
    arguments = re.search(r"def \w+\((.*)\):", source)
    if arguments is None:
        raise CodegenError(f"the source of {spec.function} has no function")
    strides = {f"{t}_{index}" for t, index in spec.stride_arguments}
    integers = {"N", "P", *spec.size_arguments, *strides}
    dtypes = dict(spec.dtypes)
    signature: dict[str, str] = {}
    aligned = []
    for i, name in enumerate(arguments[1].split(", ")):
        if name in integers:
            signature[name] = "i32"
        else:  # statistics and partial sums are fp32
            signature[name] = "*" + KINDS[dtypes.get(name.lower(), torch.float32)]
        if name not in integers or name in strides:  # strides are multiples of 16 as a rule
            aligned.append(i)
    return {
        "file": str(store.write(spec.function, source)), "function": spec.function, "signature": signature,
        "aligned": aligned, "target": gpu_target(target), "warps": config.warps,
    }


def compile_source(spec: KernelSpec, config: Configuration, source: str, target: str) -> Resources:
    """Compile one kernel.  CodegenError when the compiler refuses, crashes or takes more than LIMIT_S seconds."""
    answer = _ask(request(spec, config, source, target), f"{spec.function} (D = {spec.D}) for {target}")
    if "error" in answer:
        raise CodegenError(
            f"the kernel {spec.function} (D = {spec.D}) does not compile for {target}: {answer['error']}",
            where=f"{spec.function}, {config}", remedy=REMEDY,
        )
    return Resources(**answer)


_lock = threading.Lock()
_worker: subprocess.Popen[bytes] | None = None


def _start() -> subprocess.Popen[bytes]:
    global _worker
    if _worker is None or _worker.poll() is not None:
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        _worker = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
        )
    return _worker


def _stop() -> None:
    global _worker
    if _worker is not None:
        _worker.kill()
        _worker.wait()
        for pipe in (_worker.stdin, _worker.stdout):
            if pipe is not None:
                pipe.close()
    _worker = None


def _ask(question: dict[str, Any], what: str) -> dict[str, Any]:
    with _lock:
        worker = _start()
        if worker.stdin is None or worker.stdout is None:
            raise CodegenError("the compiler's process has no pipes")
        try:
            worker.stdin.write(json.dumps(question).encode() + b"\n")
            worker.stdin.flush()
            ready, _, _ = select.select([worker.stdout], [], [], LIMIT_S)
            line = worker.stdout.readline() if ready else b""
        except BrokenPipeError:
            ready, line = [worker.stdout], b""
        if line:
            return dict(json.loads(line))
        code = worker.poll() if not ready else worker.wait()
        _stop()
        if not ready:
            raise CodegenError(f"compiling {what} took more than {LIMIT_S:g} s", remedy=REMEDY)
        raise CodegenError(f"the compiler crashed on {what} (exit code {code})", remedy=REMEDY)


def _forget() -> None:
    """A forked child must not talk to its parent's worker."""
    global _worker, _lock
    _worker, _lock = None, threading.Lock()


atexit.register(_stop)
os.register_at_fork(after_in_child=_forget)
