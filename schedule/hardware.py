"""A traced model and a hardware description in, a cost model out, with nothing measured.

time = linear FLOPs / e1 + attention FLOPs / e2 + bytes / e3, with the e's from data/hardware.json.  The result says
that it is a guess (`source = "symbolic"`), and a fit of measured runs should replace it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sympy

from graphopt.errors import ConfigError, PlanInfeasible
from graphopt.schedule.costmodel import CostFit, MemoryModel
from graphopt.schedule.fitting import _power_law
from graphopt.schedule.models import ModelCost
from graphopt.schedule.shapes import ShapeTable
from graphopt.schedule.symbolic import symbol

FILE = Path(__file__).parent / "data" / "hardware.json"


@dataclass(frozen=True)
class Hardware:
    """What a GPU sustains.

    Args:
        matmul_flops, attention_flops: bf16 FLOP/s of large matrix products and of fused attention, forward and
            backward together.
        bandwidth: bytes/s of a device copy, read and written.
        memory: bytes of device memory.
        fused_traffic: share of the unfused bytes that a compiler's fusions leave.
        launch_s: host seconds per traced op, eager and compiled: what a step of tiny shapes lasts.
        origin: "measured" or "data sheet", with the place.
    """

    name: str
    matmul_flops: float
    attention_flops: float
    bandwidth: float
    memory: float
    fused_traffic: float
    launch_s: dict[str, float]
    origin: str


def hardware(name: str) -> Hardware:
    """A description by name."""
    known = json.loads(FILE.read_text())
    if name not in known:
        raise ConfigError(f"there is no description of GPU {name!r}", remedy=f"described: {', '.join(sorted(known))}")
    return Hardware(name, **known[name])


def analytic_fit(
    model: ModelCost,
    gpu: Hardware,
    *,
    remat: str = "full",
    compiled: bool = True,
    data_parallel: int = 1,
    sharded: bool = False,
    fixed_s: float = 0.0,
    step_overhead_s: float = 0.0,
) -> CostFit:
    """A cost model without measurement.

    Args:
        model: traced cost in B, T, H, W (token grid) and L.
        remat: "full" (each layer's forward runs twice, only layer boundaries are kept) or "none".
        compiled: Inductor (or graphopt) fuses elementwise work; eager moves every byte and launches every op.
        data_parallel: ranks that share the optimizer state (12 bytes per parameter over this many; bf16 weights and
            gradients whole on each rank, as FSDP2 keeps them between microbatches).
        sharded: parameters and gradients are spread over the ranks as well and gathered a layer at a time (ZeRO-3).
        fixed_s, step_overhead_s: seconds per microbatch and per step beside the model's work.

    Returns:
        A `symbolic` cost model with a memory model in bytes; `.p` and `.m_comp` from a power law through 1k to 100k
        tokens.
    """
    if remat not in ("full", "none"):
        raise ConfigError(f"unknown remat {remat!r}", remedy='use "full" or "none"')
    again = model.layer * model.layers if remat == "full" else None
    total = model.total
    # The forward share of attention is 2 of its 7 products.
    forward_attention = sympy.Rational(2, 7)
    attention = total.attention_flops + (again.attention_flops * forward_attention if again else 0)
    flops = total.flops + (again.flops_forward if again else 0)
    # A third of the traffic is the forward's.
    traffic = total.traffic + (again.traffic / 3 if again else 0)
    if compiled:
        traffic = traffic * sympy.Float(gpu.fused_traffic)
    launches = float(total.launches + (again.launches / 3 if again else 0))
    terms = [sympy.expand(flops - attention), sympy.expand(attention), sympy.expand(traffic)]
    coefficients = {
        "a": fixed_s,
        "theta_0": 1 / gpu.matmul_flops,
        "theta_1": 1 / gpu.attention_flops,
        "theta_2": 1 / gpu.bandwidth,
    }
    memory = _memory(model, remat, data_parallel, sharded)
    key = {
        "model": model.name, "gpu": gpu.name, "gpu_figures": gpu.origin, "remat": remat, "compiled": compiled,
        "sharded": sharded,
    }  # fmt: skip
    draft = CostFit(
        "symbolic",
        coefficients,
        [str(t) for t in terms],
        source="symbolic",
        floor_s=launches * gpu.launch_s["compiled" if compiled else "eager"],
        memory=memory,
        key=key,
        step_overhead_s=step_overhead_s,
    )
    tokens = np.unique(np.geomspace(1000, 100_000, 16).astype(np.int64))
    fixed, each = draft.affine(ShapeTable.of_tokens(tokens, 512))
    _, _, p = _power_law(np.ones(len(tokens)), tokens.astype(float), fixed + each)
    return CostFit(**{**draft.__dict__, "p": p, "m_comp": float(tokens[-1]) ** p})


def _memory(model: ModelCost, remat: str, data_parallel: int, sharded: bool) -> MemoryModel:
    """m0 + m1 * B * S + m2 * B * L: state, kept activations, and one layer in flight."""
    parameters = float(model.total.parameter_bytes) / 2
    m0 = parameters * (2 + 2 + 12 / data_parallel)
    if sharded:  # two layers are whole at a time: the one at work and the one being gathered
        m0 = parameters * 16 / data_parallel + 2 * 2 * float(model.layer.parameter_bytes)
    if remat == "full":
        kept = model.rest.saved_bytes + model.layer.saved_bytes
        boundary = 2 * model.width * model.layers
    else:
        kept, boundary = model.total.saved_bytes, 0
    b, t, h, w, caption = (symbol(x) for x in "BTHWL")
    poly = sympy.Poly(sympy.expand(kept), b, t, h, w, caption)
    m1 = float(poly.coeff_monomial(b * t * h * w)) + boundary
    m2 = float(poly.coeff_monomial(b * caption))
    if m1 <= 0:
        raise PlanInfeasible(
            "the traced cost keeps nothing per token", where=model.name, remedy="trace with gradients on"
        )
    # The layer in flight frees what it saved while gradients appear: about eight tensors of a token's width live
    # beside it.
    return MemoryModel(m0, m1 + 8 * 2 * model.width, m2)
