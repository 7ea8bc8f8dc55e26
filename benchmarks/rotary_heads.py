"""The cases of `rotary.py --per-head`: queries of HunyuanVideo and FLUX as their attention writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _results import copy_tb_per_s, save
from _timing import replayed

from graphopt.codegen import head_rotary_operators as operators


@dataclass(frozen=True)
class Case:
    """Rows of the first and the second tensor, rows that the tables turn, heads, channels per head."""

    first: int
    second: int
    turned: int
    heads: int = 24
    d: int = 128
    written_out: bool = False

    @property
    def shape(self) -> list[int]:
        """Of the result."""
        return [1, self.first + self.second, self.heads, self.d]


CASES = {
    "hunyuan-double": Case(32760, 256, 32760, written_out=True),
    "hunyuan-single": Case(33016, 0, 32760, written_out=True),
    "flux-double": Case(512, 4096, 4608),
    "flux-single": Case(4608, 0, 4608),
    "tiny": Case(40, 8, 40, 2, 16),
}
DEFAULT = ",".join(c for c in CASES if c != "tiny")
# (warps, programs per multiprocessor, stages of the ring)
FORWARDS = [(warps, 1, 0) for warps in (1, 2, 4, 8)]
BACKWARDS = [(2, 4, 3), (2, 6, 0), (4, 2, 2), (4, 2, 3), (4, 2, 4), (4, 3, 2), (4, 3, 3), (4, 4, 2), (4, 4, 3),
             (4, 5, 2), (8, 2, 3), (4, 4, 0), (4, 5, 0), (4, 6, 0), (4, 8, 0), (4, 12, 0)]


def norm(x: torch.Tensor, weight: torch.Tensor, written_out: bool) -> torch.Tensor:
    """As FLUX writes it, or as diffusers' own RMSNorm does."""
    if not written_out:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)
    hidden = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)
    return hidden.to(weight.dtype) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """apply_rotary_emb of diffusers."""
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    rotated = torch.stack([-imaginary, real], dim=-1).flatten(3)
    return (x.float() * cos + rotated.float() * sin).to(x.dtype)


def model(case: Case) -> Callable[..., torch.Tensor]:
    """The chain of a case."""

    def attention(xs: list[torch.Tensor], weights: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor):
        parts = [norm(x.unflatten(2, (case.heads, -1)), w, case.written_out) for x, w in zip(xs, weights)]
        if len(parts) == 2 and case.turned == case.first:
            return torch.cat([rotate(parts[0], cos, sin), parts[1]], dim=1)
        n, rest = torch.cat(parts, dim=1) if len(parts) == 2 else parts[0], case.shape[1] - case.turned
        if rest == 0:
            return rotate(n, cos, sin)
        return torch.cat([rotate(n[:, :-rest], cos, sin), n[:, -rest:]], dim=1)

    return attention


def ours(xs: list[torch.Tensor], weights: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The operator."""
    given: list[Any] = [t for pair in zip(xs, weights) for t in pair]
    given = [t.unflatten(2, (-1, cos.shape[-1])) if t.dim() == 3 else t for t in given] + [None] * (4 - len(given))
    return operators.operator("triton")(*given, cos, sin, 1e-6, xs[0].dtype)


def operands(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Queries [1, n, H * d] and weights [d] in bf16, tables in fp32."""
    new = lambda *sizes: torch.randn(*sizes, device="cuda")
    rows = [n for n in (case.first, case.second) if n]
    xs = [new(1, n, case.heads * case.d).bfloat16().requires_grad_() for n in rows]
    weights = [(1 + 0.1 * new(case.d)).bfloat16().requires_grad_() for _ in rows]
    angle = new(1, case.turned, 1, case.d // 2).repeat_interleave(2, -1)
    return xs, weights, angle.cos(), angle.sin()


def measure(name: str, case: Case, bandwidth: float | None) -> Iterator[dict[str, Any]]:
    """Rows of one case, forward and backward; without a bandwidth everything is only compiled."""
    xs, weights, cos, sin = operands(case)
    leaves = [*xs, *weights]
    cotangent = torch.randn(case.shape, device="cuda").bfloat16()
    f = model(case)
    wide = [[t.detach().double().requires_grad_() for t in ts] for ts in (xs, weights)]
    y = f(*wide, cos.double(), sin.double())
    want = [y.detach(), *torch.autograd.grad(y, [*wide[0], *wide[1]], cotangent.double())]
    del y, wide
    us: dict[str, tuple[float, float]] = {}
    error = 0.0
    for system, g in (("graphopt", torch.compile(ours, dynamic=False)), ("eager", f), ("inductor", torch.compile(
            f, dynamic=False, options={"triton.mix_order_reduction": False}))):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = g(xs, weights, cos, sin)

        def backward(y: torch.Tensor = y) -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(y, leaves, cotangent, retain_graph=True)

        torch.cuda.synchronize()
        if system == "graphopt":
            got = [y, *backward()]
            error = max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want))
            repeats = all(torch.equal(a, b) for a, b in zip(got[1:], backward()))
            del want, got
        if bandwidth is None:
            backward()
            continue
        us[system] = replayed(lambda g=g: g(xs, weights, cos, sin), stream), replayed(backward, stream)
    for i, direction in enumerate(("forward", "backward") if bandwidth else ()):
        moved = (2 + i) * sum(x.nbytes for x in xs) + cos.nbytes + sin.nbytes
        yield dict(form=name, direction=direction, shape=case.shape, us={s: t[i] for s, t in us.items()}, error=error,
                   repeats=repeats, roofline=moved / (bandwidth or 1.0) / 1e6 / us["graphopt"][i])


def tune(name: str, case: Case, bandwidth: float | None) -> Iterator[dict[str, Any]]:
    """Other warps, programs and rings: the operator's own calls, second stage included."""
    xs, weights, cos, sin = operands(case)
    heads = [x.detach().unflatten(2, (case.heads, -1)) for x in xs]
    given: list[Any] = [t for pair in zip(heads, [w.detach() for w in weights]) for t in pair]
    given += [None] * (4 - len(given))
    cotangent, plain = torch.randn(case.shape, device="cuda").bfloat16(), operators._spec
    calls = {"forward": lambda: operators.forward(*given, cos, sin, 1e-6, xs[0].dtype),
             "backward": lambda: operators.backward(cotangent, *given, cos, sin, 1e-6)}
    for i, (direction, choices) in enumerate((("forward", FORWARDS), ("backward", BACKWARDS))):
        moved = (2 + i) * sum(x.nbytes for x in xs) + cos.nbytes + sin.nbytes
        for chosen in (None, *choices):
            operators._spec = lambda *a, chosen=chosen: replace(plain(*a), chosen=chosen)
            try:
                calls[direction]()
                torch.cuda.synchronize()
                if bandwidth:
                    us = replayed(calls[direction], warmup=2, rep=12)
                    yield dict(form=name, direction=direction, shape=case.shape, chosen=chosen, us=us,
                               roofline=moved / bandwidth / 1e6 / us)
            except Exception as error:  # a ring that does not fit
                print(name, direction, chosen, type(error).__name__, str(error)[:200], flush=True)
    operators._spec = plain


def run(names: list[str], measures: bool, tunes: bool, warm: bool, out: Path | None) -> None:
    """All rows of some cases."""
    bandwidth = None if warm else copy_tb_per_s()
    ceilings = {} if bandwidth is None else {"copy_tb_per_s": bandwidth}
    for name in names:
        for row in measure(name, CASES[name], bandwidth) if measures else ():
            times = "  ".join(f"{s} {t:.1f}" for s, t in row["us"].items())
            print(f"{name} {row['direction']:8s} {row['roofline']:.3f} error {row['error']:.1e}  {times}", flush=True)
            save("rotary", [row], ("direction", "shape", "form"), ceilings, out)
        for row in tune(name, CASES[name], bandwidth) if tunes else ():
            print(f"{name} {row['direction']:8s} {row['chosen']} {row['us']:.1f} us {row['roofline']:.3f}", flush=True)
            save("rotary_tune", [row], ("direction", "shape", "form", "chosen"), ceilings, out)
        torch.cuda.empty_cache()
