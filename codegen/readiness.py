"""Can the kernels of a site be used on a target?  Asked before the graph is changed, so that one site can fall back.

Two answers: a reason in words when a dtype has no kernel, and CodegenError when a kernel should
exist and does not compile.  Compiling needs no GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from graphopt.codegen import compiler, kernels, tuned
from graphopt.codegen.compiler import Resources
from graphopt.codegen.emit import emit
from graphopt.codegen.form import OPERANDS, decode_outputs
from graphopt.codegen.spec import MAX_D, KernelSpec
from graphopt.errors import CodegenError

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def local_target() -> str:
    """The GPU of this process, such as "sm90" or "gfx942"."""
    return kernels.local_target(torch.cuda.current_device())


def check(values: dict[str, Tensor | None], attributes: dict[str, Any], target: str, training: bool) -> str | None:
    """Why a site has no kernel, or None once all its kernels compile for the target.

    `values` are the (fake) operands by name, the factors of further outputs as `scale.1`.  Raises CodegenError when a
    kernel does not compile, and for a width that none has.
    """
    x = values["x"]
    if x is None:
        raise ValueError("a site without an activation")
    for name, v in values.items():
        if v is not None and v.dtype not in KERNEL_DTYPES:
            return f"{name} is {str(v.dtype).removeprefix('torch.')}: no kernel"
    D = x.shape[-1]
    if not isinstance(D, int):
        return "the width is not known at compile time: no kernel"
    if not 1 <= D <= MAX_D:
        raise CodegenError(f"no kernel for D = {D}: supported are 1 to {MAX_D}", remedy="leave this site to Inductor")
    for spec in specs(values, attributes, training, target):
        compile_for(spec, target)
    return None


def specs(
    values: dict[str, Tensor | None], attributes: dict[str, Any], training: bool, target: str = "sm90"
) -> list[KernelSpec]:
    """The kernels a site launches: the forward, and the backward with all gradients arriving, contiguous."""
    x = values["x"]
    if x is None:
        raise ValueError("a site without an activation")
    single = {n: values.get(n) for n in OPERANDS}
    a = dict(attributes)
    modulation = [
        f for i, parts in enumerate(decode_outputs(a["outputs"])) for part in parts
        if (f := values[part if i == 0 else f"{part}.{i}"]) is not None
    ]
    out = [kernels.prepare_forward(**single, modulation=modulation, **a)[0]]  # type: ignore[arg-type]
    if training:
        branch = single["branch"]

        def like(dtype: torch.dtype) -> Tensor:
            return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)

        # the backward reads what the forward saved: h where there is a branch, x where there is none
        saved = x if branch is None else like(a["h_dtype"])
        added_only = branch is not None and single["gate"] is None and a["branch_norm"] == "none"
        dys = [like(a["y_dtype"]) for _ in decode_outputs(a["outputs"])] if a["norm"] != "none" else []
        x_dtype = torch.promote_types(x.dtype, branch.dtype) if branch is not None and added_only else x.dtype
        rest = {n: t for n, t in single.items() if n != "x"} | ({"branch": None} if added_only else {})
        kept = {n: a[n] for n in ("outputs", "norm", "offset", "branch_norm", "activation")}
        backward = kernels.prepare_backward(
            like(a["h_dtype"]) if branch is not None else None, dys, saved, **rest,  # type: ignore[arg-type]
            modulation=modulation, **kept, x_dtype=x_dtype,
        )[0]
        out += kernels.backward_parts(backward)
    return [replace(s, target=target, gpu=s.gpu if s.target == target else "") for s in out]


def compile_for(spec: KernelSpec, target: str) -> Resources:
    """Compile one kernel; CodegenError with the compiler's text if that fails."""
    found = outcome(spec, target)
    if isinstance(found, CodegenError):
        raise CodegenError(found.what, where=found.where, remedy=found.remedy)
    return found


@cache
def outcome(spec: KernelSpec, target: str) -> Resources | CodegenError:
    """What compiling one kernel gave.  A failure is kept too: 80 equal sites wait for a hanging compiler once."""
    config = tuned.configuration(spec)
    try:
        return compiler.shared().compile(compiler.unit_of(spec, config, emit(spec, config)), target)
    except CodegenError as error:
        return error
