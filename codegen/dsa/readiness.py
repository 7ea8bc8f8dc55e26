"""Do the kernels of a window compile for a target?  Asked offline; no GPU is needed."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from graphopt.codegen.compiler import gpu_target
from graphopt.codegen.dsa import engines, kernels
from graphopt.codegen.dsa.spec import ROWS, Spec, Triple
from graphopt.errors import CodegenError

# pointers that are not of the inputs' dtype
FP32 = ("OFFSETS", "LSE", "DELTA", "DLSE", "DOFFSETS", "S", "P")
WORDS = ("TAPS", "WORDS", "BASES", "REACH", "BOXES")
SIZES = ("T", "H", "W", "BT", "BH", "BW", "CT", "CH", "CW", "N", "L")
# bytes of shared memory a program may use
SHARED_LIMIT = {"sm80": 163 << 10, "sm90": 227 << 10, "sm100": 227 << 10, "gfx942": 64 << 10}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def kernels_of(engine: str, spec: Spec, target: str = "sm90", share: int = 1) -> list[tuple[Any, dict[str, Any], int]]:
    """(kernel, constants, stages) of every launch an engine makes in training."""
    from graphopt.codegen.dsa import lattice, scores, window, window_kernels

    KT, KH, KW = spec.window
    size = {"KT": KT, "KH": KH, "KW": KW, "D": spec.head_dim, "DP": spec.padded_dim}
    half = {"HALF": spec.dtype == torch.float16}
    block = {"M": ROWS, "ALONG": 16}
    sums = (lattice.row_sums, {"D": spec.head_dim, "DP": spec.padded_dim, "BQ": 16, "HAS_DLSE": True}, 2)
    if engine == "window":
        plain = {**size, **block, "MOVED": False}
        return [sums, (window_kernels.window_forward, {**plain, "BN": 64}, window.stages(target.startswith("gfx"))),
                (window_kernels.window_backward_query, {**plain, "BN": 32}, 2),
                (window_kernels.window_backward_key, {**plain, "BN": 32, "SHARE": share}, 2)]
    module = kernels.fused(spec.window, spec.padded_dim != spec.head_dim, True)
    narrow = {"KT": KT, "KH": KH, "KW": KW}
    wide = {**size, **block, **half, "BN": 32, "WIDE": False}
    out = [
        sums, (lattice.tile_reach, {**narrow, "M": ROWS}, 2),
        (module.expand, {"BQ": 8, **half}, 2), (lattice.spread, {**wide, "HIGH": True}, 3),
        (lattice.query_boxes, {**narrow, "BLOCK": 512, "WIDE": False}, 2),
        (lattice.gather, {**wide, "SHARE": share}, 3)]
    if engine == "fused":
        forward = module.forward if spec.dtype == torch.float16 else module.forward_fixed
        return [*out, (forward, {**size, **half}, 3), (module.taps, {**size, **half}, 2)]
    soften = {**narrow, **half, "WP": 1 << (KW - 1).bit_length(), "BQ": 16}
    score = {k: v for k, v in wide.items() if k != "HALF"}
    return [*out, (lattice.spread, {**wide, "HIGH": False}, 3), (scores.score, score, 2),
            (scores.soften, {**soften, "BACKWARD": False, "WITH_OFFSETS": False}, 2),
            (scores.soften, {**soften, "BACKWARD": True, "WITH_OFFSETS": True}, 2)]


def compile_kernel(kernel: Any, constants: dict[str, Any], stages: int, dtype: torch.dtype, target: str,
                   whole: bool = False) -> Any:
    """Triton's compiled kernel.  `whole`: offsets are integers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.isupper() and name not in SIZES:
            word = name in WORDS or (whole and name == "OFFSETS")
            signature[name] = "*" + ("i32" if word else "fp32" if name in FP32 else NAMES[dtype])
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif name.startswith("scale"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name[-2:] in ("_b", "_h", "_n") and not name.startswith("o_"):
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": 4, "num_stages": stages}
    return triton.compile(source, target=GPUTarget(*gpu_target(target)), options=options)


@cache
def check(window: Triple, head_dim: int, dtype: torch.dtype, target: str, offsets: str = "shift") -> str:
    """Compile everything a call needs on a target and return its engine.  CodegenError where something fails."""
    grid: Triple = (2 * window[0], 2 * window[1], 2 * window[2])  # any that is larger than the window
    engine = engines.choose(head_dim, dtype, "cuda", target, grid, window, offsets).engine
    if engine == "reference":
        return engine
    for kernel, constants, stages in kernels_of(engine, Spec(window, head_dim, dtype), target):
        name = getattr(kernel, "__name__", str(kernel))
        try:
            shared = compile_kernel(kernel, constants, stages, dtype, target, whole=engine == "window").metadata.shared
            if shared > SHARED_LIMIT.get(target, shared):
                raise MemoryError(f"{shared} bytes of shared memory, {SHARED_LIMIT[target]} exist")
        except Exception as error:  # whatever a compiler throws is the same to the user
            raise CodegenError(
                f"the kernel {name} of the window {window} does not compile for {target}: {type(error).__name__}: "
                f"{' '.join(str(error).split())[:400]}", where=f"{name}, {constants}",
                remedy="report it; the layer can stay dense") from error
    return engine
