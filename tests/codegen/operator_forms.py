"""The forms an operator call can have, for tests: random operands, the call, and the same in ordinary torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graphopt.codegen import operators
from graphopt.codegen.form import FUSIONS, OPERANDS, Y, decode_outputs, split_outputs

D = 7
EPS, BRANCH_EPS = 1e-6, 1e-5


@dataclass(frozen=True)
class Form:
    """One form: the fusion, its outputs and norms, and what the factors look like."""

    fusion: str
    outputs: str = ""
    norm: str = "layer_norm"
    branch_norm: str = "none"
    activation: str = "identity"
    affine: bool = False
    layout: tuple[int, ...] = (2, 1, D)
    gate_table: bool = False
    offset: float = 1.0

    def __str__(self) -> str:
        words = [self.fusion, self.outputs.replace(" ", ","), self.norm, self.branch_norm, self.activation,
                 "x".join(map(str, self.layout))]
        return "-".join(w for w in words if w and w not in ("none", "identity")) + ("-affine" if self.affine else "")


def plain(fusion: str) -> Form:
    """The ordinary form of a fusion."""
    f = FUSIONS[fusion]
    outputs = {"none": "", "norm": "plain", "modulate": "scale+shift", "modulates": "scale+shift scale+shift"}[f.back]
    f5 = f.front == "branch_norm_gate"
    norm = "none" if f.back == "none" else "rms_norm" if f5 else "layer_norm"
    return Form(fusion, outputs, norm, "rms_norm" if f5 else "none", "tanh" if f5 else "identity", f.back == "norm")


FORMS = [
    *(plain(name) for name in FUSIONS),
    # every norm, with and without weight, modulated or not
    *(replace(plain("norm_modulate"), norm=n, affine=a, outputs=o)
      for n in ("layer_norm", "rms_norm") for a in (False, True) for o in ("scale+shift", "scale", "shift")),
    *(replace(plain("gate_norm"), norm=n, affine=a) for n in ("layer_norm", "rms_norm") for a in (False, True)),
    # factor layouts: [D], stride-0 rows, [B, 1, D], [B, S, D], and sequence first ([S, B, D] against [1, B, D])
    *(replace(plain(name), layout=layout) for name in ("norm_modulate", "gate_norm_modulate", "gate_residual")
      for layout in ((D,), (1, 1, D), (2, 6, D), (1, 6, D))),
    # one norm, several readers
    replace(plain("norm_modulates"), outputs="scale scale+shift plain", affine=True),
    replace(plain("gate_norm_modulates"), outputs="scale+shift plain scale", norm="rms_norm"),
    # gates through tanh, gates on a normed branch
    *(replace(plain(name), activation="tanh") for name in ("gate_norm_modulate", "gate_norm", "gate_residual")),
    *(replace(plain("branch_norm_gate"), branch_norm=n, affine=a, activation=act)
      for n in ("layer_norm", "rms_norm") for a in (False, True) for act in ("identity", "tanh")),
    replace(plain("branch_norm_gate_norm_modulate"), outputs="scale", affine=True),
    # table + embedding
    replace(plain("norm_modulate"), outputs="scale+scale_table+shift+shift_table", layout=(2, 6, D)),
    replace(plain("gate_norm_modulate"), outputs="scale+scale_table+shift+shift_table", layout=(2, 6, D), gate_table=True),
    replace(plain("gate_residual"), layout=(2, 6, D), gate_table=True, activation="tanh"),
    replace(plain("norm_modulate"), offset=0.0),
]


def sized(form: Form, shape: tuple[int, ...]) -> Form:
    """The form for x of another shape [B, S, D]: its factors' sizes follow."""
    B, S, width = shape
    return replace(form, layout=tuple({D: width, 2: B, 6: S}.get(size, size) for size in form.layout))


def operands(form: Form, dtype: torch.dtype = torch.float64, factors: torch.dtype | None = None,
             shape: tuple[int, ...] = (2, 6, D), device: str = "cpu") -> dict[str, Any]:
    """Random operands by name, `modulation` as a list; None for what the form has not."""
    f = FUSIONS[form.fusion]

    def new(*size: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*size, dtype=torch.float64, device=device).to(kind).requires_grad_()

    width, kind = shape[-1], factors or dtype
    t: dict[str, Any] = dict.fromkeys(OPERANDS) | {"x": new(*shape)}
    layout = (*form.layout[:-1], width)
    if f.front != "none":
        t["branch"] = new(*shape)
    if f.gate:
        t["gate"] = new(*layout, kind=kind)
        t["gate_table"] = new(width, kind=kind) if form.gate_table else None
    for name, there in (("", f.norm), ("branch_", form.branch_norm != "none")):
        if there and form.affine:
            t[name + "weight"] = new(width, kind=kind)
            norm = form.branch_norm if name else form.norm
            t[name + "bias"] = new(width, kind=kind) if norm == "layer_norm" else None
    t["modulation"] = [
        new(*((width,) if part.endswith("table") else layout), kind=kind)
        for parts in decode_outputs(form.outputs) for part in parts
    ]
    return t


def attributes(form: Form, dtype: torch.dtype = torch.float64, rounding: str = "") -> tuple[Any, ...]:
    """The arguments after the tensors."""
    return (form.outputs, form.norm, EPS, form.offset, form.branch_norm, BRANCH_EPS, form.activation, dtype, dtype,
            rounding)


def leaves(t: dict[str, Any]) -> list[Tensor]:
    """All tensors of a form, in order."""
    return [v for n, v in t.items() if n != "modulation" and v is not None] + list(t["modulation"])


def with_leaves(t: dict[str, Any], values: list[Tensor]) -> dict[str, Any]:
    """The same form with other tensors (the inverse of `leaves`)."""
    each = iter(values)
    single = {n: None if v is None else next(each) for n, v in t.items() if n != "modulation"}
    return single | {"modulation": list(each)}


def results(form: Form, returned: list[Tensor]) -> list[Tensor]:
    """h (where there is one) and the y_i of what an operator returned."""
    return ([] if FUSIONS[form.fusion].front == "none" else [returned[0]]) + list(returned[Y:])


def call(form: Form, t: dict[str, Any], *rest: Any, engine: str = "reference") -> list[Tensor]:
    """The operator's h and y_i."""
    op = operators.operator(form.fusion, engine)
    return results(form, op(*(t[n] for n in OPERANDS), t["modulation"], *rest))


def _norm(t: Tensor, kind: str, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if kind == "layer_norm":
        if weight is not None and weight.dtype != t.dtype:  # a GPU norms in one dtype: models then norm in fp32
            wide = [None if v is None else v.float() for v in (t, weight, bias)]
            return F.layer_norm(wide[0], t.shape[-1:], *wide[1:], eps).type_as(t)
        return F.layer_norm(t, t.shape[-1:], weight, bias, eps)
    n = F.rms_norm(t, t.shape[-1:], None, eps)
    return n if weight is None else n * weight


def chain(form: Form, t: dict[str, Any]) -> list[Tensor]:
    """The same in ordinary torch, rounding after every op as eager does."""
    add = lambda factor, table: factor if table is None else factor + table
    h, out = t["x"], []
    if t["branch"] is not None:
        b = t["branch"]
        if form.branch_norm != "none":
            b = _norm(b, form.branch_norm, t["branch_weight"], t["branch_bias"], BRANCH_EPS)
        if t["gate"] is not None:
            g = add(t["gate"], t["gate_table"])
            b = b * (torch.tanh(g) if form.activation == "tanh" else g)
        h = (h + b).to(h.dtype)  # as models with fp32 factors do: `(x.float() + b * g).type_as(x)`
        out = [h]
    if form.norm == "none":
        return out
    n = _norm(h, form.norm, t["weight"], t["bias"], EPS)
    for parts in split_outputs(t["modulation"], form.outputs):
        y = n
        if "scale" in parts:
            y = y * (form.offset + add(parts["scale"], parts.get("scale_table")))
        if "shift" in parts:
            y = y + add(parts["shift"], parts.get("shift_table"))
        out.append(y)
    return out
