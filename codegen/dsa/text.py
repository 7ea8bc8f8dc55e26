"""Attention of video queries to a short list of text keys, (y, lse) with both differentiable.

    graphopt::text_attention_<hash>          plain torch
    graphopt::text_attention_triton_<hash>   GPU tensors in bf16 or fp16

torch's own attention returns a log-sum-exp without a gradient, and merging two softmaxes needs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphopt.codegen.dsa.reference import chunks, high_precision, spread_heads
from graphopt.codegen.operators import has_triton

ROWS, COLUMNS, SPLITS = 64, 64, 16


def source_hash() -> str:
    """Twelve hex digits over this file and the kernels."""
    folder = Path(__file__).parent
    text = b"".join((folder / name).read_bytes() for name in ("text.py", "text_kernels.py", "lattice.py"))
    return hashlib.sha256(text).hexdigest()[:12]


def reference_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The definition, some queries at a time."""
    high = high_precision(q, k, v)
    kk, vv = (spread_heads(x, q.shape[1]).to(high) for x in (k, v))
    y, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=high, device=q.device)
    for part in chunks(q.shape[2], q.shape[0] * q.shape[1] * k.shape[2]):
        logits = q[:, :, part].to(high) @ kk.transpose(-1, -2) * scale
        lse[:, :, part] = logits.logsumexp(-1)
        y[:, :, part] = (logits.softmax(-1) @ vv).to(y.dtype)
    return y, lse


def backward_in_chunks(
    dy: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, scale: float,
    weights: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), some queries at a time; `weights(q, k, lse)` gives their softmax weights [B, heads, n, L]."""
    high = high_precision(q, k, v)
    B, heads = q.shape[:2]
    kk, vv = (spread_heads(x, heads).to(high) for x in (k, v))
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(kk), torch.zeros_like(vv)
    for part in chunks(q.shape[2], B * heads * k.shape[2]):
        qq, dd = q[:, :, part].to(high), dy[:, :, part].to(high)
        p = weights(qq, kk, lse[:, :, part].to(high))
        delta = (dd * y[:, :, part].to(high)).sum(-1)
        if dlse is not None:
            delta = delta - dlse[:, :, part].to(high)
        ds = p * (dd @ vv.transpose(-1, -2) - delta[..., None]) * scale
        dq[:, :, part] = (ds @ kk).to(dq.dtype)
        dk += ds.transpose(-1, -2) @ qq
        dv += p.transpose(-1, -2) @ dd
    kv = k.shape[1]
    dk, dv = (torch.empty_like(t).copy_(x.view(B, kv, heads // kv, *x.shape[2:]).sum(2)) for x, t in ((dk, k), (dv, v)))
    return dq, dk, dv


def reference_backward(dy: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor,
                       scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)."""
    return backward_in_chunks(dy, dlse, q, k, v, y, lse, scale, lambda qq, kk, norm: (
        qq @ kk.transpose(-1, -2) * scale - norm[..., None]).exp())


def _rest(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def triton_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One kernel."""
    import triton

    from graphopt.codegen.dsa import text_kernels

    B, heads, N, D = q.shape
    DP = max(16, 1 << (D - 1).bit_length())
    y, lse = torch.empty_like(q), torch.empty((B, heads, N), dtype=torch.float32, device=q.device)
    text_kernels.text_forward[(triton.cdiv(N, ROWS), B * heads)](
        q, k, v, y, lse, N, k.shape[2], heads, heads // k.shape[1], *_rest(q), *_rest(k), *_rest(v), *_rest(y), scale,
        D, DP, ROWS, COLUMNS, num_warps=4, num_stages=2)
    return y, lse


def triton_backward(dy: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor,
                    scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Row sums, dq, and dk with dv in two stages."""
    import triton

    from graphopt.codegen.dsa import lattice, text_kernels

    B, heads, N, D = q.shape
    kv, L, DP = k.shape[1], k.shape[2], max(16, 1 << (D - 1).bit_length())
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    delta, dq = torch.empty_like(lse), torch.empty_like(q)
    lattice.row_sums[(triton.cdiv(N, 16), B * heads)](
        dy, y, delta if dlse is None else dlse.contiguous(), delta, N, heads, 0, *_rest(dy), *_rest(y), D, DP, 16,
        dlse is not None, num_warps=4)
    text_kernels.text_backward_query[(triton.cdiv(N, ROWS), B * heads)](
        q, k, v, dy, lse, delta, dq, N, L, heads, heads // kv, *_rest(q), *_rest(k), *_rest(v), *_rest(dy), *_rest(dq),
        scale, D, DP, ROWS, COLUMNS // 2, num_warps=4, num_stages=2)
    span = triton.cdiv(triton.cdiv(N, SPLITS), COLUMNS // 2) * (COLUMNS // 2)
    splits = triton.cdiv(N, span)
    partial = torch.empty((2, splits, B * kv, L, D), dtype=torch.float32, device=q.device)
    text_kernels.text_backward_key[(triton.cdiv(L, ROWS), B * kv, splits)](
        q, k, v, dy, lse, delta, partial[0], partial[1], N, L, heads, span, *_rest(q), *_rest(k), *_rest(v),
        *_rest(dy), scale, heads // kv, D, DP, ROWS, COLUMNS // 2, num_warps=4, num_stages=2)
    dk, dv = (torch.empty_like(t).copy_(x.view(B, kv, L, D)) for x, t in zip(partial.sum(1), (k, v)))
    return dq, dk, dv


def fake_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """y like q; lse [B, heads, N]."""
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=high_precision(q, k, v))


def fake_backward(dy: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor,
                  scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients like their tensors."""
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.scale = inputs[3]


_OPERATORS: dict[str, Any] = {}


def _register(engine: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    name = f"text_attention{'_triton' if engine == 'triton' else ''}_{source_hash()}"
    forward_op = torch.library.custom_op(f"graphopt::{name}", forward, mutates_args=())
    backward_op = torch.library.custom_op(f"graphopt::{name}_backward", backward, mutates_args=())
    forward_op.register_fake(fake_forward)
    backward_op.register_fake(fake_backward)
    handle = getattr(torch.ops.graphopt, f"{name}_backward").default

    def formula(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, y, lse = ctx.saved_tensors
        if dy is None and dlse is None:
            return None, None, None, None
        return (*handle(torch.zeros_like(y) if dy is None else dy, dlse, q, k, v, y, lse, ctx.scale), None)

    forward_op.register_autograd(formula, setup_context=_setup_context)
    _OPERATORS[engine] = getattr(torch.ops.graphopt, name).default


_register("reference", reference_forward, reference_backward)
if has_triton():
    _register("triton", triton_forward, triton_backward)


def operator(engine: str) -> Any:
    """The operator overload of an engine, "reference" or "triton"."""
    return _OPERATORS[engine]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(y [B, heads, N, D], lse [B, heads, N]) of q over k, v [B, key heads, L, D]."""
    engine = "triton" if q.device.type == "cuda" and q.dtype.itemsize == 2 else "reference"
    return _OPERATORS[engine](q, k, v, scale)
