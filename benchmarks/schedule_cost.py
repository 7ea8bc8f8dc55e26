"""Symbolic FLOPs and saved bytes of six small diffusers models against counting runs: `python
benchmarks/schedule_cost.py`.

The runs share nothing with the trace: FlopCounterMode over an eager forward and backward, with the CPU attention
formula that torch lacks registered from its definition, and saved_tensors_hooks that collect distinct storages.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "models"), str(ROOT / "benchmarks")]

R = torch.randn


@dataclass(frozen=True)
class Case:
    """A model of the zoo with its dimensions, five sizes, and inputs made for a size."""

    dims: dict
    sizes: list[dict[str, int]]
    inputs: Callable[..., dict]


def video(sizes: str) -> list[dict[str, int]]:
    """Sizes written B.T.H.W.L."""
    return [dict(zip("BTHWL", map(int, s.split(".")))) for s in sizes.split()]


def ids(n: int) -> torch.Tensor:
    out = torch.zeros(n, 3)
    out[:, -1] = torch.arange(n)
    return out


BTHWL = {
    "B": ("hidden_states", 0),
    "T": ("hidden_states", 2),
    "H": ("hidden_states", 3),
    "W": ("hidden_states", 4),
    "L": ("encoder_hidden_states", 1),
}
VIDEO = "2.2.8.8.7 1.1.4.6.3 3.5.10.4.9 2.1.16.6.11 1.6.8.12.5"
CASES: dict[str, Case] = {
    "wan": Case(
        BTHWL,
        video(VIDEO),
        lambda B, T, H, W, L: {
            "hidden_states": R(B, 4, T, H, W),
            "timestep": torch.arange(B) * 10,
            "encoder_hidden_states": R(B, L, 16),
        },
    ),
    "hunyuan_video": Case(
        {**BTHWL, "L": [("encoder_hidden_states", 1), ("encoder_attention_mask", 1)]},
        video("2.2.8.8.6 2.4.4.6.3 3.6.12.4.9 2.2.16.6.11 4.4.8.12.5"),
        lambda B, T, H, W, L: {
            "hidden_states": R(B, 4, T, H, W),
            "timestep": torch.arange(B) * 10,
            "encoder_hidden_states": R(B, L, 16),
            "encoder_attention_mask": torch.ones(B, L),
            "pooled_projections": R(B, 8),
            "guidance": torch.full((B,), 6000.0),
        },
    ),
    "sd3": Case(
        {
            "B": ("hidden_states", 0),
            "H": ("hidden_states", 2),
            "W": ("hidden_states", 3),
            "L": ("encoder_hidden_states", 1),
        },
        [dict(zip("BHWL", s)) for s in (
            (2, 8, 8, 6), (1, 4, 6, 3), (3, 10, 4, 9), (2, 16, 12, 11), (5, 8, 14, 2), (5, 8, 14, 1))],  # L = 1: a view
        lambda B, H, W, L: {
            "hidden_states": R(B, 4, H, W),
            "encoder_hidden_states": R(B, L, 32),
            "pooled_projections": R(B, 16),
            "timestep": torch.arange(B) * 10,
        },
    ),
    "flux": Case(
        {
            "B": ("hidden_states", 0),
            "S": [("hidden_states", 1), ("img_ids", 0)],
            "L": [("encoder_hidden_states", 1), ("txt_ids", 0)],
        },
        [dict(zip("BSL", s)) for s in ((2, 16, 6), (1, 9, 3), (3, 25, 9), (2, 64, 11), (5, 4, 2))],
        lambda B, S, L: {
            "hidden_states": R(B, S, 4),
            "encoder_hidden_states": R(B, L, 32),
            "pooled_projections": R(B, 32),
            "timestep": torch.rand(B),
            "img_ids": ids(S),
            "txt_ids": ids(L),
            "guidance": torch.full((B,), 3.5),
        },
    ),
    "pixart": Case(
        {
            "B": ("hidden_states", 0),
            "H": ("hidden_states", 2),
            "W": ("hidden_states", 3),
            "L": [("encoder_hidden_states", 1), ("encoder_attention_mask", 1)],
        },
        [dict(zip("BHWL", s)) for s in ((2, 8, 8, 6), (1, 4, 6, 3), (3, 10, 4, 9), (2, 16, 12, 11), (5, 8, 14, 2))],
        lambda B, H, W, L: {
            "hidden_states": R(B, 4, H, W),
            "encoder_hidden_states": R(B, L, 16),
            "timestep": torch.arange(B) * 10,
            "encoder_attention_mask": torch.ones(B, L),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "sana": Case(
        {
            "B": ("hidden_states", 0),
            "H": ("hidden_states", 2),
            "W": ("hidden_states", 3),
            "L": ("encoder_hidden_states", 1),
        },
        [dict(zip("BHWL", s)) for s in ((2, 8, 8, 6), (1, 4, 6, 3), (3, 10, 4, 9), (2, 16, 12, 11), (5, 8, 14, 2))],
        lambda B, H, W, L: {
            "hidden_states": R(B, 4, H, W),
            "encoder_hidden_states": R(B, L, 16),
            "timestep": torch.arange(B) * 10,
        },
    ),
}


def attention(q: tuple, k: tuple, v: tuple) -> int:
    """Two products: [B, H, S, D] x [B, H, D, L] and [B, H, S, L] x [B, H, L, Dv], two operations per multiply-add."""
    b, h, s, d = q
    return 2 * b * h * s * k[2] * (d + v[3])


def attention_backward(q: tuple, k: tuple, v: tuple) -> int:
    """Five products: scores again, dV, dP, dQ, dK."""
    b, h, s, d = q
    return 2 * b * h * s * k[2] * (3 * d + 2 * v[3])


def counted(model: torch.nn.Module, inputs: dict) -> tuple[int, int, int]:
    """(forward FLOPs, backward FLOPs, saved bytes) of one eager run."""
    aten = torch.ops.aten
    mapping = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *a, out_shape=None, **kw: attention(
            tuple(q), tuple(k), tuple(v)
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *a, out_shape=None, **kw: (
            attention_backward(tuple(q), tuple(k), tuple(v))
        ),
    }
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    known |= {
        t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)
    }
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        s = t.untyped_storage()
        if s.data_ptr() not in known:
            storages[s.data_ptr()] = s  # kept alive, so that no address is used twice
        return t

    with (
        FlopCounterMode(display=False, custom_mapping=mapping) as forward,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
    ):
        out = model(**inputs, return_dict=False)[0]
    saved = sum(s.nbytes() for s in storages.values())
    with FlopCounterMode(display=False, custom_mapping=mapping) as backward:
        out.backward(torch.ones_like(out))
    return forward.get_total_flops(), backward.get_total_flops(), saved


def compare(name: str) -> list[dict]:
    """One row per size: symbolic and counted figures."""
    import zoo

    from graphopt.schedule.cost import trace_cost

    case = CASES[name]
    model, _ = zoo.ZOO[name].build()
    start = time.perf_counter()
    torch.manual_seed(0)
    # at size 1 some copies become views and less is saved: those dimensions are traced apart
    singles = ("B", "L") if name == "sd3" else ("B",)
    cost = trace_cost(model, case.inputs(**case.sizes[0]), case.dims, exact_at_one=singles)
    seconds = time.perf_counter() - start
    rows = []
    for size in case.sizes:
        forward, backward, saved = counted(model, case.inputs(**size))
        rows.append(
            {
                "check": "symbolic_cost",
                "model": name,
                "size": size,
                "trace_s": round(seconds, 1),
                "flops_forward": [cost.at("flops_forward", **size), forward],
                "flops_backward": [cost.at("flops_backward", **size), backward],
                "saved_bytes": [cost.at("saved_bytes", **size), saved],
            }
        )
    return rows


if __name__ == "__main__":
    for model_name in sys.argv[1:] or CASES:
        for row in compare(model_name):
            f, b, s = row["flops_forward"], row["flops_backward"], row["saved_bytes"]
            print(
                model_name,
                row["trace_s"],
                row["size"],
                "equal" if f[0] == f[1] and b[0] == b[1] else f"DIFFERENT {f} {b}",
                f"saved {s[0] / s[1] - 1:+.2%}",
                flush=True,
            )
