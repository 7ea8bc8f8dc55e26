"""The AdamW update of adamw.py as one compiled loop: gradient in, weight out, state read and written once.

Made from one template for every combination of weight (fp32, or bf16 with an int16 residual), gradient (fp32, bf16) and
moving average, compiled by the system's C++ compiler for the machine at hand, and kept in a cache folder.  It is called
through ctypes, so Python goes on meanwhile.  Contraction into fused multiply-adds is off: the split and the fp32
layout give the same bits.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from graphopt.codegen.adamw import Hyper, update_
from graphopt.errors import CodegenError

log = logging.getLogger(__name__)
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno",
         "-fno-trapping-math")

_BODY = r"""
#include <cmath>
#include <cstdint>
#include <cstring>

typedef uint16_t bf16;
struct Hyper { float decay, b1w, b2, b2w, root2, eps, size, scale, emaw; int clip; };

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
static inline float step(float p, float g, float& m, float& v, const Hyper& h) {
    if (h.clip) g = g * h.scale;
    p = p * h.decay;
    m = h.b1w < 0.5f ? m + h.b1w * (g - m) : g - (g - m) * (1.0f - h.b1w);
    v = v * h.b2;
    v = v + h.b2w * g * g;
    float d = std::sqrt(v) / h.root2 + h.eps;
    return p + h.size * m / d;
}
static inline void average(float& e, float p, const Hyper& h) {
    e = h.emaw < 0.5f ? e + h.emaw * (p - e) : p - (p - e) * (1.0f - h.emaw);
}
"""

_FUNCTION = r"""
extern "C" void adamw_{name}({weight}* w, int16_t* r, const {grad}* g, float* m, float* v, float* e, int64_t n,
                             const Hyper* hyper, int threads) {{
    const Hyper h = *hyper;
    #pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i++) {{
        float p = {load};
        float mi = m[i], vi = v[i];
        p = step(p, up(g[i]), mi, vi, h);
        m[i] = mi; v[i] = vi;
        {store}
        {ema}
    }}
}}
"""


class _Hyper(ctypes.Structure):
    _fields_ = [(n, ctypes.c_float) for n in ("decay", "b1w", "b2", "b2w", "root2", "eps", "size", "scale", "emaw")] + [
        ("clip", ctypes.c_int)]


def source() -> str:
    """The C++ file."""
    parts = [_BODY]
    for weight in ("fp32", "split"):
        for grad in ("fp32", "bf16"):
            for ema in (False, True):
                parts.append(_FUNCTION.format(
                    name=f"{weight}_{grad}{'_ema' if ema else ''}",
                    weight="float" if weight == "fp32" else "bf16", grad="float" if grad == "fp32" else "bf16",
                    load="w[i]" if weight == "fp32" else "join(w[i], r[i])",
                    store="w[i] = p;" if weight == "fp32" else "split(p, w[i], r[i]);",
                    ema="average(e[i], p, h);" if ema else "",
                ))
    return "".join(parts)


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    base = os.environ.get("GRAPHOPT_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "graphopt")
    return Path(base)


def _machine() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return platform.machine() + next((x for x in lines if x.startswith(("flags", "Features"))), "")


def build() -> Path:
    """The compiled library, from the cache or made now.  Raises CodegenError with the compiler's words."""
    compiler = os.environ.get("CXX") or next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        raise CodegenError("no C++ compiler was found", remedy="install g++ or clang, or set CXX")
    text = source()
    digest = hashlib.sha256("\0".join((text, compiler, *FLAGS, _machine())).encode()).hexdigest()[:16]
    target = cache_folder() / f"adamw-{digest}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        file, made = Path(folder) / "adamw.cpp", Path(folder) / "adamw.so"
        file.write_text(text)
        command = [compiler, *FLAGS, str(file), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CodegenError(f"{compiler} failed on the AdamW kernel", where=done.stderr[-800:],
                               remedy="use HostAdamW(kernel='torch'), or another compiler by CXX")
        os.replace(made, target)  # a second process may do the same at the same time
    return target


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


def load(threads: int) -> Callable[..., None]:
    """`adamw.update_` compiled, on so many threads.  Raises CodegenError."""
    try:
        with _passive_waiting():
            library = ctypes.CDLL(str(build()))
    except OSError as error:
        raise CodegenError(f"the AdamW kernel could not be loaded: {error}",
                           remedy="use HostAdamW(kernel='torch')") from error

    def update(
        weight: torch.Tensor, residual: torch.Tensor | None, gradient: torch.Tensor, exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor, hyper: Hyper, average: torch.Tensor | None = None,
    ) -> None:
        grad = {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(gradient.dtype)
        tensors = [t for t in (weight, residual, gradient, exp_avg, exp_avg_sq, average) if t is not None]
        if grad is None or any(t.device.type != "cpu" or not t.is_contiguous() for t in tensors):
            update_(weight, residual, gradient, exp_avg, exp_avg_sq, hyper, average)
            return
        ema = average is not None and hyper.ema is not None
        name = f"adamw_{'fp32' if residual is None else 'split'}_{grad}{'_ema' if ema else ''}"
        numbers = _Hyper(
            decay=1 - hyper.lr * hyper.weight_decay, b1w=1 - hyper.beta1, b2=hyper.beta2, b2w=1 - hyper.beta2,
            root2=(1 - hyper.beta2**hyper.step) ** 0.5, eps=hyper.eps, size=-(hyper.lr / (1 - hyper.beta1**hyper.step)),
            scale=1.0 if hyper.scale is None else hyper.scale, emaw=0.0 if hyper.ema is None else 1 - hyper.ema,
            clip=int(hyper.scale is not None),
        )
        pointers = [ctypes.c_void_p(None if t is None else t.data_ptr())
                    for t in (weight, residual, gradient, exp_avg, exp_avg_sq, average if ema else None)]
        getattr(library, name)(*pointers, ctypes.c_int64(weight.numel()), ctypes.byref(numbers), ctypes.c_int(threads))

    return update


def best(threads: int) -> Callable[..., None]:
    """The compiled kernel, or the torch one (with one line in the log) where none can be made."""
    try:
        return load(threads)
    except CodegenError as error:
        log.warning("graphopt: AdamW runs on torch operators: %s", error.what)
        return update_
