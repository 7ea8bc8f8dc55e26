"""The one case of the kernel matrix that was outside, its arithmetic repeated on a CPU with the operands of the GPU.

    python benchmarks/one_channel.py [--draws 40] [--cases 40] [--out FOLDER]

branch_norm_gate_norm, fp32, D = 1, B = 3, S = 4095, eight seeds: h = x + tanh(gate) * weight * rms_norm(branch), then
an RMS norm.  Operands are those of CUDA's generator (Philox 4x32-10, Box-Muller).  Every operation is rounded to fp32,
with fma where the compiler contracts; approximate instructions are off by chance, as far as the PTX manual allows:
sqrt.approx 2^-23, the reciprocal in div.full 2^-23, ex2.approx 2^-22.5.

A row: a way to compute, its errors (x, gate, branch_weight: relative L2 against fp64) as multiples of the limit on the
H200 (mean and worst over draws), and the share of draws that are outside.  `--cases` more cases of eight other
seeds: errors as multiples of 1.25 times those of an exactly rounded eager (geometric mean), and the share outside.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _results import save
from numpy.typing import NDArray

from graphopt.codegen.emit_base import FAR, NEAR, POWER

Array = NDArray[Any]
Operands = tuple[Array, ...]
F32 = np.float32
B, S, SEEDS, EPS, BRANCH_EPS = 3, 4095, 8, 1e-6, 1e-5
ROWS = B * S
# 1.25 times eager's errors on the H200 (results/h200/kernel_matrix_cells.jsonl, commit 155ff8f)
LIMITS = {"x": 2.024e-5, "gate": 3.472e-5, "branch_weight": 1.654e-5}
TAYLOR = (-1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075, -929569 / 638512875)


def philox(counter: list[Array], key: tuple[int, int]) -> list[Array]:
    """Philox 4x32-10: four words of 32 bits per counter."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    words, (k0, k1) = [w.astype(np.uint64) for w in counter], key
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * words[0], np.uint64(0xCD9E8D57) * words[2]
        words = [(p1 >> half) ^ words[1] ^ np.uint64(k0), p1 & low, (p0 >> half) ^ words[3] ^ np.uint64(k1), p0 & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return words


def randn(seed: int, offset: int, n: int, double: bool) -> Array:
    """What torch.randn(n, device="cuda") is, fp32 or fp64 rounded to it, for one draw a thread (n <= 270,000)."""
    zero = np.zeros(n, np.uint64)
    a, b, c, d = philox([zero + np.uint64(offset // 4), zero, np.arange(n, dtype=np.uint64), zero], (seed, 0))
    if double:
        u = (a ^ (b << np.uint64(21))).astype(float) * 2.0**-53 + 2.0**-54
        v = (c ^ (d << np.uint64(21))).astype(float) * 2.0**-53 + 2.0**-54
    else:
        u, v = (w.astype(float) * 2.0**-32 + 2.0**-33 for w in (a, b))
    return (np.sin(2 * np.pi * v) * np.sqrt(-2 * np.log(u))).astype(F32)


def operands(seed: int) -> Operands:
    """x, branch, gate (per row), weight, branch_weight, dh, dy; in the order in which accuracy.py draws them."""
    x, branch, gate, weight, branch_weight = (randn(seed, 4 * i, n, True) for i, n in enumerate((ROWS, ROWS, B, 1, 1)))
    dh, dy = (randn(seed, offset, ROWS, False) for offset in (20, 24))
    return x, branch, np.repeat(F32(0.3) * gate, S), weight, branch_weight, dh, dy


def fma(a: Array, b: Any, c: Any) -> Array:
    return (a.astype(float) * b + c).astype(F32)


def horner(x: Array, coefficients: tuple[float, ...]) -> Array:
    value = np.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        value = fma(x, value, float(F32(c)))
    return value


def gradients(parts: Operands, total: Array, inner: Array, tanh: Array) -> dict[str, Array]:
    """Of x, the gate and the branch's weight, from that of h, the normed branch and tanh of the gate (sums in fp64)."""
    total, inner, tanh = (v.astype(float) for v in (total, inner, tanh))
    gate = total * inner * parts[4] * (1 - tanh**2)
    return {"x": total, "gate": gate.reshape(B, S).sum(1), "branch_weight": np.array([(total * tanh * inner).sum()])}


def chain(
    parts: Operands, tanh: Callable[[Array], Array], root: Callable[[Array, float], Array], contract: bool
) -> dict[str, Array]:
    """Every operation rounded to the operands' dtype; `contract`: fma where the kernels' machine code has it (fp32)."""
    x, branch, gate, weight, branch_weight, dh, dy = parts
    branch_rstd, t = root(branch, BRANCH_EPS), tanh(gate)
    inner = branch * branch_rstd
    h = fma(inner * branch_weight, t, x) if contract else x + inner * branch_weight * t
    rstd = root(h, EPS)
    hat, w = h * rstd, dy * weight
    total = fma(rstd, fma(-hat, w * hat, w), dh) if contract else (w - hat * (w * hat)) * rstd + dh
    return gradients(parts, total, inner, t)


def truth(parts: Operands) -> dict[str, Array]:
    """In fp64."""
    return chain(tuple(v.astype(float) for v in parts), np.tanh, lambda v, eps: 1 / np.sqrt(v * v + eps), False)


def eager(parts: Operands) -> dict[str, Array]:
    """Operation by operation in fp32, tanh and rsqrt rounded to nearest."""
    nearest = lambda v, eps: (1 / np.sqrt((v * v + F32(eps)).astype(float))).astype(F32)
    return chain(parts, lambda g: np.tanh(g.astype(float)).astype(F32), nearest, False)


class Hardware:
    """Division, root and power of two: rounded to nearest, or off by chance as an approximate instruction may be."""

    def __init__(self, seed: int, approximate: str) -> None:
        self.chance, self.approximate = np.random.default_rng(seed), approximate

    def _off(self, what: str, exact: Array, bound: float) -> Array:
        if what in self.approximate:  # the same operand has the same error
            values, place = np.unique(exact, return_inverse=True)
            exact = (values * (1 + self.chance.uniform(-bound, bound, values.shape)))[place]
        return exact.astype(F32)

    def divide(self, a: Any, b: Array) -> Array:
        if "div" in self.approximate:
            return a * self._off("div", 1 / b.astype(float), 2.0**-23)
        return (a / b).astype(F32)

    def root(self, v: Array) -> Array:
        return self._off("sqrt", np.sqrt(v.astype(float)), 2.0**-23)

    def power(self, v: Array) -> Array:
        return self._off("ex2", np.exp2(v.astype(float)), 2.0**-22.5)


def before(h: Hardware) -> dict[str, Any]:
    """The kernels before: series below 0.5, exp and a quotient beyond; 1 / sqrt by two instructions."""

    def tanh(g: Array) -> Array:
        square = g * g
        shrunk = h.power(F32(-2) * np.abs(g) * F32(np.log2(np.e)))
        far = np.copysign(h.divide(F32(1) - shrunk, F32(1) + shrunk), g)
        return np.where(square < 0.25, fma(g * square, horner(square, TAYLOR), g), far)

    return dict(tanh=tanh, root=lambda v, eps: h.divide(F32(1), h.root(fma(v, v, float(F32(eps))))), contract=True)


def now(h: Hardware) -> dict[str, Any]:
    """The kernels as emit_base.py writes them."""

    def tanh(g: Array) -> Array:
        square, size = g * g, np.minimum(np.abs(g), F32(20))
        rate, integers = float(F32(-2 * np.log2(np.e))), 1.5 * 2**23
        turns = fma(size, rate, integers)
        part = fma(size, rate, (F32(integers) - turns).astype(float))
        shrunk = horner(part, POWER) * np.exp2(turns - F32(integers))
        far = np.copysign(fma(shrunk, horner(shrunk, FAR), 1.0), g)
        return np.where(square >= 1, far, fma(g * square, horner(square, NEAR), g))

    def root(v: Array, eps: float) -> Array:
        around = fma(v, v, float(F32(eps)))
        rough = h.divide(F32(1), h.root(around))
        nearly = around * rough
        lost = fma(around, rough, -nearly.astype(float))
        return fma(F32(0.5) * rough, fma(-nearly, rough, 1.0) - lost * rough, rough.astype(float))

    return dict(tanh=tanh, root=root, contract=True)


def errors(seeds: range, compute: Callable[[Operands], dict[str, Array]]) -> dict[str, float]:
    """Relative L2 errors over the seeds together."""
    squares = {k: np.zeros(2) for k in LIMITS}
    for seed in seeds:
        parts = operands(seed)
        want, got = truth(parts), compute(parts)
        for k in LIMITS:
            squares[k] += ((got[k] - want[k]) ** 2).sum(), (want[k] ** 2).sum()
    return {k: float(np.sqrt(s[0] / s[1])) for k, s in squares.items()}


# the kernels, what is approximate
WAYS = {
    "before": (before, "div sqrt ex2"), "before, div and sqrt exact": (before, "ex2"),
    "before, ex2 exact": (before, "div sqrt"), "before, all exact": (before, ""), "now": (now, "div sqrt ex2"),
}


def named(shares: Array) -> dict[str, float]:
    """Three figures by the gradients they are of."""
    return dict(zip(LIMITS, shares.round(3).tolist()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=40, help="of the approximate instructions' errors")
    parser.add_argument("--cases", type=int, default=40, help="of eight other seeds each")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = errors(range(SEEDS), eager)
    rows: list[dict[str, Any]] = [dict(way="eager, rounded to nearest", errors=found, cases=1)]
    print("eager:", " ".join(f"{k} {v:.3e} (H200 {LIMITS[k] / 1.25:.3e})" for k, v in found.items()), flush=True)
    for way, (kernels, approximate) in WAYS.items():
        shares = np.array([
            [e / LIMITS[k] for k, e in errors(range(SEEDS), lambda p, h=h, k=kernels: chain(p, **k(h))).items()]
            for h in (Hardware(i, approximate) for i in range(args.draws if approximate and kernels is before else 1))
        ])
        row = dict(way=way, draws=len(shares), mean=named(shares.mean(0)), worst=named(shares.max(0)),
                   outside=float((shares > 1).any(1).mean()))
        print(f"{way}: {row['mean']} of the limit, worst {row['worst']}, outside {row['outside']:.0%}", flush=True)
        rows.append(row)
    for way in ("before", "now") if args.cases else ():
        kernels, approximate = WAYS[way]
        each = []
        for case in range(1, args.cases + 1):
            seeds = range(1000 * case, 1000 * case + SEEDS)
            base = errors(seeds, eager)
            hardware = Hardware(case, approximate)
            mine = errors(seeds, lambda p, h=hardware, k=kernels: chain(p, **k(h)))
            each.append([mine[k] / max(1e-5, 1.25 * base[k]) for k in LIMITS])
        shares = np.array(each)
        row = dict(way=f"{way}, other seeds", cases=args.cases, usual=named(np.exp(np.log(shares).mean(0))),
                   outside=float((shares > 1).any(1).mean()))
        print(f"{row['way']}: {row['usual']} of the limit usually, outside {row['outside']:.0%}", flush=True)
        rows.append(row)
    save("one_channel", rows, ("way",), {}, args.out)


if __name__ == "__main__":
    main()
