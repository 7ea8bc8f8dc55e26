"""Text of the in-register algebra: a 64-column score tile taken apart, interpolated, and put together again.

Column c = a * 16 + b1 * 8 + lane * 2 + b0 of a tile is plane a (of 4) in t and position 3 * lane + (2 * b1 + b0) in w.
In a Hopper accumulator bits 1 and 2 of a column select the lane and every other bit a register, so reshape, permute and
split move nothing: the result is 16 tensors [M, 4] whose neighbours in t and w are other registers of the same thread.
Each lane repeats its last position, so 3 planes x 12 positions of taps come out of one tile.

Interpolation is one fma: (1 - f) a + f b = (1 - f) (a + r b) with r = f / (1 - f); the factors are applied once a row.
"""

from __future__ import annotations

PLANES, POSITIONS, LANES = 4, 4, 4
COLUMNS = PLANES * POSITIONS * LANES
TAPS_T = PLANES - 1
TAPS_W = (POSITIONS - 1) * LANES
LATTICE = [(a, b) for a in range(PLANES) for b in range(POSITIONS)]
TAPS = [(a, b) for a in range(PLANES - 1) for b in range(POSITIONS - 1)]


def take_apart(tile: str, to: str) -> list[str]:
    """Tile [M, 64] -> names `{to}{a}_{b}` of shape [M, 4]."""
    # [M, a1, a0, b1, lane, b0] -> [M, lane, a1, a0, b1, b0]
    lines = [f"{to}_ = tl.permute(tl.reshape({tile}, [M, 2, 2, 2, 4, 2]), [0, 4, 1, 2, 3, 5])"]
    current: dict[tuple[int, ...], str] = {(): f"{to}_"}
    for _ in range(4):  # b0, b1, a0, a1
        following: dict[tuple[int, ...], str] = {}
        for key, name in current.items():
            lines.append(f"{name}0, {name}1 = tl.split({name})")
            following[(*key, 0)], following[(*key, 1)] = f"{name}0", f"{name}1"
        current = following
    lines += [f"{to}{a0 + 2 * a1}_{b0 + 2 * b1} = {name}" for (b0, b1, a0, a1), name in current.items()]
    return lines


def put_together(names: str, tile: str) -> list[str]:
    """Names `{names}{a}_{b}` -> tile [M, 64], the inverse of `take_apart`."""
    lines = []
    current: dict[tuple[int, ...], str] = {
        ((a >> 1) & 1, a & 1, (b >> 1) & 1, b & 1): f"{names}{a}_{b}" for a, b in LATTICE
    }
    count = 0
    while () not in current:
        following: dict[tuple[int, ...], str] = {}
        for key in sorted({k[1:] for k in current}):
            name = f"{tile}_{count}"
            count += 1
            lines.append(f"{name} = tl.join({current[(0, *key)]}, {current[(1, *key)]})")
            following[key] = name
        current = following
    # [M, lane, a1, a0, b1, b0] -> [M, a1, a0, b1, lane, b0]
    lines.append(f"{tile} = tl.reshape(tl.permute({current[()]}, [0, 2, 3, 4, 1, 5]), [M, {COLUMNS}])")
    return lines


def lerp_t(x: str, to: str) -> list[str]:
    """Interpolate over planes: 4 x 4 -> 3 x 4."""
    return [f"{to}{a}_{b} = {x}{a}_{b} + rt * {x}{a + 1}_{b}" for a in range(TAPS_T) for b in range(POSITIONS)]


def lerp_w(x: str, to: str) -> list[str]:
    """Interpolate over positions: 3 x 4 -> 3 x 3."""
    return [f"{to}{a}_{b} = {x}{a}_{b} + rw * {x}{a}_{b + 1}" for a, b in TAPS]


def spread_w(g: str, to: str, a: int) -> list[str]:
    """Transpose of `lerp_w` for one plane of taps: 3 -> 4 positions."""
    last = POSITIONS - 1
    return [
        f"{to}{a}_0 = {g}{a}_0",
        *(f"{to}{a}_{b} = {g}{a}_{b} + {g}{a}_{b - 1} * rw" for b in range(1, last)),
        f"{to}{a}_{last} = {g}{a}_{last - 1} * rw",
    ]


def spread_t(g: str, to: str, a: int) -> list[str]:
    """Transpose of `lerp_t` for one plane of lattice points."""
    if a == 0:
        return [f"{to}0_{b} = {g}0_{b}" for b in range(POSITIONS)]
    if a == PLANES - 1:
        return [f"{to}{a}_{b} = {g}{a - 1}_{b} * rt" for b in range(POSITIONS)]
    return [f"{to}{a}_{b} = {g}{a}_{b} + {g}{a - 1}_{b} * rt" for b in range(POSITIONS)]


def indent(lines: list[str], depth: int) -> str:
    """Lines as text, `depth` levels deep."""
    return "".join("    " * depth + line + "\n" for line in lines)
