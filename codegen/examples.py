"""Kernels by name, without a model: what `graphopt kernels` shows and compiles, and what golden files pin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphopt.codegen import readiness, tuned
from graphopt.codegen.compiler import Unit, gpu_target, unit_of
from graphopt.codegen.emit import emit
from graphopt.codegen.emit_sums import emit_sums, tile
from graphopt.codegen.form import FUSIONS, OPERANDS, OUTPUT_PARTS, ROUNDING_POINTS, decode_outputs
from graphopt.codegen.spec import MAX_D, KernelSpec
from graphopt.errors import CodegenError

# a factor against x [2, 4096, D]: one row per sample, one for all, one per token
LAYOUTS = {"group": (2, 1), "vector": (), "token": (2, 4096)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NORMS = ("layer_norm", "rms_norm")
OUTPUTS = {"none": "", "norm": "plain", "modulate": "scale+shift", "modulates": "scale+shift scale+shift"}


def example(
    fusion: str, D: int, *, dtype: str = "bf16", factors: str = "fp32", layout: str = "group", norm: str | None = None,
    outputs: str | None = None, tables: bool = False, rounding: str = "", target: str = "sm90",
) -> list[KernelSpec]:
    """Specs of the kernels of a fusion (form.FUSIONS), forward first.

    CodegenError for a name, width, dtype, layout, norm, output, rounding or target that does not exist, with what does.
    """
    given_parts = {part for word in (outputs or "plain").split() for part in word.split("+")}
    points = [item.partition("=") for item in rounding.split()]
    for what, given, known in (
        ("kernel", (fusion,), FUSIONS), ("dtype", (dtype, factors), DTYPES), ("layout", (layout,), LAYOUTS),
        ("norm", (norm or NORMS[0],), NORMS), ("part of an output", given_parts, ("plain", *OUTPUT_PARTS)),
        ("rounding point", [p for p, _, _ in points], ROUNDING_POINTS),
        ("dtype of a rounding point", [d for _, _, d in points], ("bfloat16", "float16", "float32")),
    ):
        for name in given:
            if name not in known:
                raise CodegenError(f"unknown {what} {name!r}", remedy=f"known are {', '.join(known)}")
    gpu_target(target)
    if not 1 <= D <= MAX_D:
        raise CodegenError(f"no kernel for D = {D}: supported are 1 to {MAX_D}")
    f = FUSIONS[fusion]
    branch_normed = f.front == "branch_norm_gate"
    kind = norm or ("rms_norm" if branch_normed else "layer_norm")

    def new(*shape: int) -> Tensor:
        return torch.empty(*shape, D, dtype=DTYPES[factors], device="meta")

    def activation() -> Tensor:
        return torch.empty(2, 4096, D, dtype=DTYPES[dtype], device="meta")

    words = OUTPUTS[f.back] if outputs is None or not f.norm else outputs
    if tables:
        words = words.replace("scale", "scale+scale_table").replace("shift", "shift+shift_table")
    values: dict[str, Tensor | None] = dict.fromkeys(OPERANDS) | {"x": activation()}
    if f.front != "none":
        values["branch"] = activation()
    if f.gate:
        values |= {"gate": new(*LAYOUTS[layout]), "gate_table": new() if tables else None}
    values |= {"branch_weight": new() if branch_normed else None, "weight": new() if f.affine else None}
    values["bias"] = new() if f.affine and kind == "layer_norm" else None
    for i, parts in enumerate(decode_outputs(words)):
        for part in parts:
            values[part if i == 0 else f"{part}.{i}"] = new(*(() if part.endswith("table") else LAYOUTS[layout]))
    attributes: dict[str, Any] = dict(
        outputs=words, norm=kind if f.norm else "none", eps=1e-6, offset=1.0,
        branch_norm="rms_norm" if branch_normed else "none", branch_eps=1e-6,
        activation="tanh" if branch_normed else "identity", h_dtype=DTYPES[dtype], y_dtype=DTYPES[dtype],
        rounding=rounding,
    )
    return readiness.specs(values, attributes, True, target)


def units(specs: list[KernelSpec]) -> list[Unit]:
    """The generated kernels of a site, and the second stage where its backward has one."""
    found = []
    for spec in specs:
        config = tuned.configuration(spec)
        found.append(unit_of(spec, config, emit(spec, config)))
    for spec in specs:
        if spec.sums:
            results = tuple((f"d{f}", k * spec.D, spec.dtype(f)) for k, f in enumerate(spec.sums))
            name = f"{spec.name}_sums"
            shape = tile(spec.D, 132)
            source = emit_sums(name, spec.D, len(spec.sums) * spec.D, results, shape)
            pointers = (("PARTIAL", torch.float32), *((t.upper(), dtype) for t, _, dtype in results))
            found.append(Unit(name, spec.D, source, pointers, (), shape.warps))
    return found
