"""Compiles kernels in a process of its own, so that a compiler that crashes or hangs takes nothing with it.

Started by compiler.py as a script; imports Triton and nothing of ours.  Reads one JSON request per line from standard
input, answers with one JSON line: the resources of the kernel, or the compiler's error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any


def compiled(request: dict[str, Any]) -> Any:
    """Triton's compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    spec = importlib.util.spec_from_file_location("graphopt_kernel", request["file"])
    if spec is None or spec.loader is None:
        raise ImportError(request["file"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    attrs = {(i,): [["tt.divisibility", 16]] for i in request["aligned"]}
    fn = getattr(module, request["function"])
    source = ASTSource(fn=fn, signature=request["signature"], constexprs={}, attrs=attrs)
    return triton.compile(source, target=GPUTarget(*request["target"]), options={"num_warps": request["warps"]})


def resources(kernel: Any) -> dict[str, int]:
    """Registers per thread, spilled bytes (NVIDIA) or registers (AMD) per thread, shared memory in bytes."""
    found = {"shared": int(kernel.metadata.shared)}
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        most = {name: max([int(n) for n in re.findall(rf"\.{name}:\s+(\d+)", text)] or [0])
                for name in ("vgpr_count", "vgpr_spill_count")}
        return found | {"registers": most["vgpr_count"], "spills": most["vgpr_spill_count"]}
    import triton

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(kernel.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    usage = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return found | {"registers": usage["REG"], "spills": usage["STACK"] + usage["LOCAL"]}


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a compiler prints is no answer
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = resources(compiled(json.loads(line)))
        except Exception as error:  # whatever a compiler throws is the same to the user
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
