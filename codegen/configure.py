"""The configuration of a kernel in closed form: no search at run time.

The rules come from measurements on an H200 (docs/kernels.md): sub-blocks instead of padding to a power of two, the
fewest warps that do not spill, rows in an asynchronous ring whose bytes per multiprocessor decide.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphopt.codegen.spec import KernelSpec

# fp32 values of one row a thread may hold, and values of one row in all, before registers spill
PER_THREAD = 200
MAX_WARPS = 16
# bytes of rows on their way into one multiprocessor
RING_BYTES = 60 * 1024
RING_BYTES_READING = 80 * 1024  # where several gradients arrive, so that most of the traffic is reads
RING_BYTES_TOKENS = 48 * 1024  # where no sums are kept: every factor has a row per token
# shared memory of one program at most, in KB; GPUs not listed have 99
SHARED_KB = {"sm80": 163, "sm87": 163, "sm90": 227, "sm100": 227, "sm103": 227}
# the widest row the forward keeps in registers
FORWARD_D = 16384
CHUNK = 4096


@dataclass(frozen=True)
class Configuration:
    """How one kernel is launched.

    blocks: widths of the unrolled sub-blocks of a row.
    warps: warps per program.
    stages: depth of the ring (`tl.range(num_stages=...)`), 0 for no ring.
    programs_per_sm: of a persistent kernel; 0 for a grid over the rows.
    rows: rows a program of a forward walks (1: the grid is over rows, nothing is persistent).
    chunked: the row does not fit in registers and is walked in chunks of blocks[0].
    joint: both means of a layer norm's backward come from one reduction tree.
    """

    blocks: tuple[int, ...]
    warps: int
    stages: int
    programs_per_sm: int
    rows: int = 1
    chunked: bool = False
    joint: bool = False


def closed_form(spec: KernelSpec, programs_per_sm: int | None = None) -> Configuration:
    """The configuration of a kernel where none was measured (tuned.py).

    programs_per_sm: of a backward that must keep the grid of another.
    """
    if spec.part == "columns":
        return Configuration((512,), 4, 0, 4, rows=4)
    return _forward(spec) if spec.direction == "forward" else _backward(spec, programs_per_sm)


def _forward(spec: KernelSpec) -> Configuration:
    D = spec.D
    if D > FORWARD_D:
        return Configuration((CHUNK,), 8, 0, 0, chunked=True)
    light = len(spec.rows_in) + len(spec.rows_out) <= 2
    common = spec.normed and not any(spec.per_token(f) for f in spec.factors)
    ring = common and ring_limit(spec.target) > 0
    if ring and 256 < D <= 1600:  # one warp per row has no block barrier; a few rows per program feed the ring
        warps = 1 if light or D <= 1280 else 2
        rows = 2 if not light or D > 1280 else 3 if D > 1024 else 4
        return Configuration(cut(D, warps * 256), warps, 3, 0, rows=rows)
    if ring and spec.branch_normed and 1600 < D <= 6144:  # two norms in a row: other rows fill the wait
        return Configuration(cut(D, 1024), 4, 3, 0, rows=4)
    plain = len(spec.outputs) == 1 and not any("_table" in f for f in spec.factors)  # else it would spill
    if ring and 1600 < D <= 3072 and spec.gated and plain:  # 0.948 to 0.957 at 200 MB
        return Configuration(cut(D, 512), 2, 3, 0, rows=2)
    if common and 1600 < D <= 4096:  # 8-byte loads and more of them: 0.947 to 0.957 for F1
        return Configuration(cut(D, 512), 4, 0, 0)
    if common and 4096 < D <= 8192:  # 0.971 to 0.981 for F1
        return Configuration(cut(D, 1024), 8, 0, 0)
    warps = 1 if D <= 256 else 2 if D <= 512 else 4 if D <= 8192 else 8
    return Configuration(cut(D, warps * 256), warps, 0, 0)


def live_values(spec: KernelSpec) -> int:
    """fp32 values per element that a one-pass backward holds: sums, factors and the row itself."""
    heads = [f for f in spec.factors if "_table" not in f]
    per_token = sum(spec.per_token(f) for f in spec.factors)
    branch = 2 if spec.branch_normed else 0
    summed = len(spec.rows_in) > len(spec.streams)
    return len(spec.sums) + len(spec.streams) + 1 + max(0, len(heads) - 2) + per_token + branch + summed


def one_pass(spec: KernelSpec) -> bool:
    """Do the sums over rows fit in registers beside the row?  Else rows and columns are two kernels."""
    return spec.D * live_values(spec) <= 120 * 32 * MAX_WARPS


def shared_limit(target: str) -> int:
    """Bytes of shared memory one program may have on a target."""
    return 64 * 1024 if target.startswith("gfx") else 1024 * SHARED_KB.get(target, 99)


def ring_limit(target: str) -> int:
    """Bytes of shared memory per multiprocessor that a ring may take; AMD targets form no ring, so none."""
    return 0 if target.startswith("gfx") else shared_limit(target) - 3 * 1024


def _backward(spec: KernelSpec, programs_per_sm: int | None) -> Configuration:
    D = spec.D
    if spec.part == "rows" and not one_pass(spec):
        return Configuration((CHUNK,), 8, 0, 2, chunked=True)
    wide, several = len(spec.streams) >= 3, len(spec.outputs) > 1
    warps = _fewest_warps(spec)
    if wide and D > 4096:
        least = 8 if several or spec.branch_normed else 16
    else:  # one warp per row has no block barrier; narrower rows need more warps to keep loads on their way
        least = 1 if D < 512 or (1024 <= D <= 1400 and not wide) else 2 if D < 1400 or wide else 4
    warps = max(warps, least)
    if D <= 1400:
        per_sm = 2 if wide else 4
    elif _waits(spec):  # the second program's rows move meanwhile: 0.61 to 0.89 for F4, 0.74 to 0.93 for F5 at 1536
        warps, per_sm = min(warps, 4), 2
    else:
        per_sm = 1 if wide or D >= 2560 else 2 if D >= 2048 else 3
    if not spec.sums and not wide and D > 4096:
        per_sm = 32  # nothing binds rows to programs
    per_sm = programs_per_sm or per_sm
    streamed = (*spec.rows_in, *(f for f in spec.factors if spec.per_token(f)))
    row_bytes = sum(spec.dtype(n).itemsize for n in streamed) * D * (per_sm if per_sm <= 4 else 1)
    ring = RING_BYTES_READING if several else RING_BYTES_TOKENS if not spec.sums else RING_BYTES
    stages = 1 + min(5, max(2, int(ring / row_bytes + 0.5)))
    # equal sub-blocks need one reduction; 8-byte loads are then no loss
    equal = warps * 128 if D < 2048 and D % (warps * 128) == 0 and D % (warps * 256) else warps * 256
    blocks = cut(D, equal)
    padded = -(-D // equal) * equal
    if len(set(blocks)) > 1 and spec.branch_normed and per_sm == 1 and 1400 < D <= 4096 and 3 * padded <= 4 * D:
        blocks = (equal,) * (padded // equal)
    # fp32 factors beside 16-bit rows change their layout through shared memory, one sub-block at a time
    scratch = 4 * max(blocks) * min(per_sm, 4) if any(spec.per_token(f) for f in spec.factors) else 0
    if (stages - 1) * row_bytes + scratch > ring_limit(spec.target):
        stages = 0
    return Configuration(blocks, warps, stages, per_sm, joint=warps <= 4 or D <= 4096)


def _waits(spec: KernelSpec) -> bool:
    """Does one program on a multiprocessor reduce a row for longer than memory moves it?

    So it is for narrow 16-bit rows with nothing beside them: two norms in a row (F5), or several gradients and nothing
    gated (F4: as long a chain as F2's, four units of traffic for its six).  Two programs of 4 warps must fit in the
    registers; 1.1 is F5 at 2432, the fastest with 8 bytes of spills (a layer norm would spill 100).  Addends are left
    out: they keep the grid.
    """
    long = len(spec.streams) >= 3 and (spec.branch_normed or (len(spec.outputs) > 1 and not spec.gated))
    narrow = spec.D < 2560 and all(spec.dtype(t).itemsize == 2 for t in spec.rows_out)
    most = PER_THREAD * (1.1 if spec.norm == "rms_norm" else 1.0)
    fits = spec.D * live_values(spec.without_addends) <= most * 32 * 4
    return long and narrow and fits and not any(spec.per_token(f) for f in spec.factors)


def _fewest_warps(spec: KernelSpec) -> int:
    """Warps that hold a row and its sums without spilling."""
    most = PER_THREAD * (1.1 if spec.branch_normed and spec.D > 4096 else 1.0)
    warps = 1
    while warps < MAX_WARPS and spec.D * live_values(spec) > most * 32 * warps:
        warps *= 2
    return warps


def cut(D: int, cap: int) -> tuple[int, ...]:
    """Widths of the sub-blocks of one row: powers of two up to `cap` whose sum covers D; only the last may overhang.

    5120 with cap 1024 is 1024 x 5, 2240 is 1024, 1024, 256: a power of two would waste 37 % of the lanes.
    """
    blocks: list[int] = []
    left = D
    while left >= cap:
        blocks.append(cap)
        left -= cap
    width = cap // 2
    while left > 0:
        up = 1 << (left - 1).bit_length()  # next power of two
        if up - left <= D // 8 or up <= 32 or len(blocks) >= 6:
            blocks.append(up)
            break
        while width > left:
            width //= 2
        blocks.append(width)
        left -= width
    return tuple(blocks)
