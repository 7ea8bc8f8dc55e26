"""Can the kernels of a site be used on a target?  Asked before the graph is changed, so that one site can fall back.

Two answers: a reason in words when the layout or a dtype has no kernel yet, and CodegenError when a kernel should
exist and does not compile.  Compiling needs no GPU.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
from torch import Tensor

from graphopt.codegen import emit, kernels
from graphopt.codegen.spec import MAX_D, Configuration, KernelSpec, configure
from graphopt.errors import CodegenError

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# rows one modulation vector must serve: below, partial sums cost more than the pass itself
MIN_ROWS = 16


@cache
def local_target() -> str:
    """The GPU of this process, such as "sm90" or "gfx942"."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    arch = getattr(properties, "gcnArchName", "")
    if torch.version.hip and arch:
        return arch.split(":")[0]
    return f"sm{properties.major}{properties.minor}"


def gpu_target(target: str) -> Any:
    """Triton's description of a target.  CodegenError for one it does not know."""
    from triton.backends.compiler import GPUTarget

    if found := re.fullmatch(r"sm_?(\d+)", target):
        return GPUTarget("cuda", int(found[1]), 32)
    if re.fullmatch(r"gfx[0-9a-f]+", target):
        return GPUTarget("hip", target, 64 if target.startswith("gfx9") else 32)
    raise CodegenError(f"unknown target {target!r}", remedy="use sm80, sm90, sm100 or gfx942")


def check(values: dict[str, Tensor | None], attributes: dict[str, Any], target: str, training: bool) -> str | None:
    """Why a site has no kernel, or None once all its kernels compile for the target.

    `values` are the (fake) operands by name.  Raises CodegenError when one does not compile.
    """
    x = values["x"]
    if x is None:
        raise ValueError("a site without an activation")
    if attributes["rounding"]:
        return "kernels round once: numerics='eager' has none yet"
    for name, v in values.items():
        if v is not None and v.dtype not in KERNEL_DTYPES:
            return f"{name} is {str(v.dtype).removeprefix('torch.')}: no kernel"
    if x.shape[-1] > MAX_D:
        return f"D = {x.shape[-1]} is over {MAX_D}: no kernel yet"
    factors = {n: values[n] for n in ("gate", "scale", "shift", "weight", "bias") if values.get(n) is not None}
    try:
        prefix = kernels.groups_prefix(x, list(factors.values()))  # type: ignore[arg-type]
    except ValueError as error:
        return f"layout: {error}"
    rows: Any = 1
    for size in x.shape[prefix:-1]:
        rows = rows * size
    if isinstance(rows, int) and rows < MIN_ROWS:
        return f"one modulation vector serves {rows} rows (per-token modulation): no kernel yet"
    for spec in specs(values, attributes, training):
        compile_for(spec, target)
    return None


def specs(values: dict[str, Tensor | None], attributes: dict[str, Any], training: bool) -> list[KernelSpec]:
    """The kernels a site launches: the forward, and the backward for each set of cotangents that can arrive."""
    v, a = values, attributes
    x = v["x"]
    if x is None:
        raise ValueError("a site without an activation")
    parts = (v["branch"], v["gate"], v["scale"], v["shift"], v["weight"], v["bias"])
    out = [kernels.forward_spec(x, *parts, a["norm"], a["eps"], a["offset"], a["h_dtype"], a["y_dtype"])]
    if training:
        dh = a["h_dtype"] if v["branch"] is not None else None
        dy = a["y_dtype"] if a["norm"] != "none" else None
        # the backward reads what the forward saved: h where there is a gate, x where there is none
        saved = x if v["branch"] is None else torch.empty((1, int(x.shape[-1])), dtype=a["h_dtype"], device="meta")
        out.append(kernels.backward_spec(dh, dy, saved, *parts, a["norm"], a["offset"], x.dtype))
    return out


@cache
def compile_for(spec: KernelSpec, target: str) -> None:
    """Compile one kernel; CodegenError with the compiler's text if that fails."""
    config = configure(spec)
    source = emit.emit(spec, config)
    try:
        compile_source(spec, config, source, target)
    except CodegenError:
        raise
    except Exception as error:  # whatever a compiler throws is the same to the user
        raise CodegenError(
            f"the kernel {spec.name}_{spec.direction} (D = {spec.D}) does not compile for {target}: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",
            where=f"{spec.name}_{spec.direction}, {config}",
            remedy="report it with the output of `TORCH_LOGS=+graphopt`; the site can stay with Inductor",
        ) from error


def compile_source(spec: KernelSpec, config: Configuration, source: str, target: str) -> Any:
    """Triton's compiled kernel for a target, without a GPU."""
    import triton
    from triton.compiler import ASTSource

    from graphopt.codegen import store

    name = f"{spec.name}_{spec.direction}"
    fn = getattr(store.load(name, source), name)
    pointers = dict(spec.dtypes)
    signature, attrs = {}, {}
    for i, arg in enumerate(fn.arg_names):
        if arg in ("N", "P") or arg.endswith("_stride"):
            signature[arg] = "i32"
            continue
        dtype = torch.float32 if arg in ("MEAN", "RSTD", "PARTIAL") else pointers[arg.lower()]
        signature[arg] = "*" + {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
        attrs[(i,)] = [["tt.divisibility", 16]]
    ast = ASTSource(fn=fn, signature=signature, constexprs={}, attrs=attrs)
    return triton.compile(ast, target=gpu_target(target), options={"num_warps": config.warps})
