"""The AdamW update of adamw.py as one compiled loop: gradient in, weight out, state read and written once.

Made from one template for every combination of weight (fp32, or bf16 with an int16 residual), gradient (fp32, bf16) and
moving average, compiled by the system's C++ compiler for AVX-512, AVX2 or any machine (chosen at run time), and kept
in a cache folder.  A layer is one call through ctypes: Python goes on meanwhile, and the interpreter's lock is asked
for once a layer.  Contraction into fused multiply-adds is off: the split and the fp32 layout, and all instruction sets,
give the same bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from graphopt.codegen import store
from graphopt.codegen.adamw import Hyper, Piece, update_all
from graphopt.errors import CodegenError

log = logging.getLogger(__name__)
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno",
         "-fno-trapping-math")
CPUINFO = Path("/proc/cpuinfo")
# instruction set -> (what /proc/cpuinfo must list, compiler flags); the first that fits is used
ISAS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "avx512": (frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
               ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")),
    "avx2": (frozenset({"avx2"}), ("-mavx2",)),
    "portable": (frozenset(), ()),
}

_BODY = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>

typedef uint16_t bf16;
static const int64_t BLOCK = 64, AHEAD = 512;  // elements
template <class T> static inline void fetch(const T* x, int64_t i) {  // a block of an array, before it is needed
    for (int64_t k = 0; k < BLOCK; k += 64 / sizeof(T)) __builtin_prefetch(x + i + AHEAD + k);
}
struct Hyper { float decay, b1w, b2, b2w, root2, eps, size, scale, emaw; int32_t clip; };
struct Piece { void* w; int16_t* r; const void* g; float* m; float* v; float* e; int64_t n; int32_t kind, hyper; };

static inline float up(bf16 x) { uint32_t u = (uint32_t)x << 16; float f; memcpy(&f, &u, 4); return f; }
static inline float up(float x) { return x; }
static inline float join(bf16 w, int16_t r) {
    uint32_t u = ((uint32_t)w << 16) + (uint32_t)(int32_t)r; float f; memcpy(&f, &u, 4); return f;
}
static inline void split(float f, bf16& w, int16_t& r) {
    uint32_t u; memcpy(&u, &f, 4);
    uint32_t high = (u + 0x8000u) >> 16;
    w = (bf16)high; r = (int16_t)(u - (high << 16));
}
static inline float toward(float from, float to, float weight) {
    return weight < 0.5f ? from + weight * (to - from) : to - (to - from) * (1.0f - weight);
}
static inline float step(float p, float g, float& m, float& v, const Hyper& h) {
    g = h.clip ? g * h.scale : g;
    m = toward(m, g, h.b1w);
    v = v * h.b2 + h.b2w * g * g;
    return p * h.decay + h.size * m / (std::sqrt(v) * h.root2 + h.eps);
}
"""

# prefetches: the hardware's stop at every page, and with all threads at work memory answers so late that the lines they
# keep on the way are too few
_LOOP = r"""
static void {name}(const Piece& s, const Hyper hyper, int64_t a, int64_t b) {{
    const Hyper h = hyper;
    {weight}* w = ({weight}*)s.w; int16_t* r = s.r; const {grad}* g = (const {grad}*)s.g;
    float* m = s.m; float* v = s.v; float* e = s.e;
    for (int64_t j = a; j < b; j += BLOCK) {{
        {ahead}
        const int64_t end = std::min(b, j + BLOCK);
        #pragma omp simd
        for (int64_t i = j; i < end; i++) {{
            float mi = m[i], vi = v[i];
            float p = step({load}, up(g[i]), mi, vi, h);
            m[i] = mi; v[i] = vi;
            {store}
            {ema}
        }}
    }}
}}
"""

# pieces are cut into chunks, so that many small parameters and one large one keep all threads busy alike; the result is
# in seconds
_DRIVER = r"""
extern "C" double adamw(const Piece* pieces, const Hyper* hypers, int64_t count, const int64_t* firsts, int64_t chunks,
                        int64_t chunk, int threads) {{
    const double start = omp_get_wtime();
    #pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t c = 0; c < chunks; c++) {{
        int64_t k = std::upper_bound(firsts, firsts + count, c) - firsts - 1;
        const Piece& s = pieces[k];
        int64_t a = (c - firsts[k]) * chunk, b = std::min(s.n, a + chunk);
        switch (s.kind) {{
{cases}
        }}
    }}
    return omp_get_wtime() - start;
}}
"""
# a read-modify-write of three arrays: what the optimizer's access pattern can reach at most, for measurements
_SWEEP = r"""
extern "C" void sweep(float* a, float* b, float* c, int64_t n, int64_t chunk, int threads) {
    #pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t s = 0; s < n; s += chunk) {
        int64_t e = std::min(n, s + chunk);
        #pragma omp simd
        for (int64_t i = s; i < e; i++) {
            float x = a[i], y = b[i], z = c[i];
            a[i] = x + y; b[i] = y + z; c[i] = z + x;
        }
    }
}
"""
CHUNK = 32768
KINDS = tuple((w, g, e) for w in ("fp32", "split") for g in ("fp32", "bf16") for e in (False, True))


class _Hyper(ctypes.Structure):
    _fields_ = [(n, ctypes.c_float) for n in ("decay", "b1w", "b2", "b2w", "root2", "eps", "size", "scale", "emaw")] + [
        ("clip", ctypes.c_int32)]


class _Piece(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in "wrgmve"] + [
        ("n", ctypes.c_int64), ("kind", ctypes.c_int32), ("hyper", ctypes.c_int32)]


def source() -> str:
    """The C++ file."""
    parts, cases = [_BODY], []
    for kind, (weight, grad, ema) in enumerate(KINDS):
        name = f"{weight}_{grad}{'_ema' if ema else ''}"
        parts.append(_LOOP.format(
            name=name, weight="float" if weight == "fp32" else "bf16", grad="float" if grad == "fp32" else "bf16",
            load="w[i]" if weight == "fp32" else "join(w[i], r[i])",
            store="w[i] = p;" if weight == "fp32" else "split(p, w[i], r[i]);",
            ema="e[i] = toward(e[i], p, h.emaw);" if ema else "",
            ahead=" ".join(f"fetch({x}, j);" for x in "wrgmve" if (x != "r" or weight != "fp32") and (x != "e" or ema)),
        ))
        cases.append(f"            case {kind}: {name}(s, hypers[s.hyper], a, b); break;")
    return "".join(parts) + _DRIVER.format(cases="\n".join(cases)) + _SWEEP


def cache_folder() -> Path:
    """Where compiled kernels are kept: GRAPHOPT_CACHE_DIR, or `graphopt` under the user's cache folder."""
    return store.cache_folder().parent


def instruction_set() -> str:
    """The best of ISAS that this machine has."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    has = set(next((x for x in lines if x.startswith("flags")), "").split())
    return next(name for name, (needs, _) in ISAS.items() if needs <= has)


def build(isa: str | None = None) -> Path:
    """The compiled library, from the cache or made now.  Raises CodegenError with the compiler's words."""
    compiler = os.environ.get("CXX") or next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        raise CodegenError("no C++ compiler was found", remedy="install g++ or clang, or set CXX")
    isa = isa or instruction_set()
    flags = (*FLAGS, *ISAS[isa][1])
    text = source()
    digest = hashlib.sha256("\0".join((text, compiler, *flags, platform.machine())).encode()).hexdigest()[:16]
    name = f"adamw-{isa}-{digest}.so"
    try:
        return _made(cache_folder() / name, text, [compiler, *flags])
    except OSError as error:
        log.warning("graphopt: kernel cache %s cannot be used (%s); a temporary folder is", cache_folder(), error)
    return _made(store.temporary_folder() / name, text, [compiler, *flags])


def _made(target: Path, text: str, command: list[str]) -> Path:
    """The library of `text`, compiled if it is not there whole."""
    if target.exists():
        if _whole(target.read_bytes()):
            return target
        log.warning("graphopt: %s was corrupt and is compiled again", target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".adamw-", dir=target.parent) as folder:
        file, made = Path(folder) / "adamw.cpp", Path(folder) / "adamw.so"
        file.write_text(text)
        done = subprocess.run([*command, str(file), "-o", str(made)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CodegenError(f"{command[0]} failed on the AdamW kernel", where=done.stderr[-800:],
                               remedy="use HostAdamW(kernel='torch'), or another compiler by CXX")
        code = made.read_bytes()
        made.write_bytes(code + hashlib.sha256(code).digest())  # the loader does not look behind the sections
        os.replace(made, target)  # a second process may do the same at the same time
    return target


def _whole(library: bytes) -> bool:
    return len(library) > 32 and hashlib.sha256(library[:-32]).digest() == library[-32:]


@contextmanager
def _passive_waiting() -> Iterator[None]:
    """OpenMP reads this when it is loaded: idle threads of the team sleep and leave the cores to the launches."""
    before = os.environ.get("OMP_WAIT_POLICY")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_WAIT_POLICY"]


def library(isa: str | None = None) -> ctypes.CDLL:
    """The compiled kernels.  Raises CodegenError where they cannot be made or loaded."""
    try:
        with _passive_waiting():
            return ctypes.CDLL(str(build(isa)))
    except OSError as error:
        raise CodegenError(f"the AdamW kernel could not be loaded: {error}",
                           remedy="use HostAdamW(kernel='torch')") from error


def load(threads: int, isa: str | None = None) -> Callable[[Sequence[Piece]], None]:
    """`adamw.update_all` compiled, on so many threads; isa: one of ISAS, or the best one.  Raises CodegenError."""
    compiled_code = library(isa)
    compiled_code.adamw.restype = ctypes.c_double

    def update(pieces: Sequence[Piece]) -> None:
        plain = [p for p in pieces if not _fits(p)]
        update_all(plain)
        compiled = [p for p in pieces if p.weight.numel() and not any(p is q for q in plain)]
        if not compiled:
            return
        numbers: dict[Hyper, int] = {}
        for p in compiled:
            numbers.setdefault(p.hyper, len(numbers))
        table = (_Piece * len(compiled))(*(_piece(p, numbers[p.hyper]) for p in compiled))
        hypers = (_Hyper * len(numbers))(*map(_numbers, numbers))
        firsts, chunks = [], 0
        for p in compiled:
            firsts.append(chunks)
            chunks += (p.weight.numel() + CHUNK - 1) // CHUNK
        update.seconds += compiled_code.adamw(  # type: ignore[attr-defined]
            table, hypers, ctypes.c_int64(len(compiled)), (ctypes.c_int64 * len(firsts))(*firsts),
            ctypes.c_int64(chunks), ctypes.c_int64(CHUNK), ctypes.c_int(threads))

    update.seconds = 0.0  # type: ignore[attr-defined]  # in the loop itself, without the way back to the interpreter
    update.joins = True  # type: ignore[attr-defined]  # element by element: parameters side by side may be one piece
    return update


def _fits(p: Piece) -> bool:
    tensors = [t for t in (p.weight, p.residual, p.gradient, p.exp_avg, p.exp_avg_sq, p.average) if t is not None]
    return p.gradient.dtype in (torch.float32, torch.bfloat16) and all(
        t.device.type == "cpu" and t.is_contiguous() for t in tensors)


def _piece(p: Piece, hyper: int) -> _Piece:
    ema = p.average is not None and p.hyper.ema is not None
    kind = KINDS.index((
        "fp32" if p.residual is None else "split", "fp32" if p.gradient.dtype == torch.float32 else "bf16", ema))
    pointers = [None if t is None else t.data_ptr() for t in (
        p.weight, p.residual, p.gradient, p.exp_avg, p.exp_avg_sq, p.average if ema else None)]
    return _Piece(*pointers, p.weight.numel(), kind, hyper)


def _numbers(h: Hyper) -> _Hyper:
    return _Hyper(
        1 - h.lr * h.weight_decay, 1 - h.beta1, h.beta2, 1 - h.beta2, 1 / (1 - h.beta2**h.step) ** 0.5, h.eps,
        -(h.lr / (1 - h.beta1**h.step)), 1.0 if h.scale is None else float(h.scale),
        0.0 if h.ema is None else 1 - h.ema,
        int(h.scale is not None))


def best(threads: int) -> Callable[[Sequence[Piece]], None]:
    """The compiled kernel, or the torch one (with one line in the log) where none can be made."""
    try:
        return load(threads)
    except CodegenError as error:
        log.warning("graphopt: AdamW runs on torch operators: %s", error.what)
        return update_all
