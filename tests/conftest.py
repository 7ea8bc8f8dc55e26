"""Shared by all tests: helper modules of models/, codegen/ and schedule/ are importable, Dynamo and graphopt start fresh, kernels find a device.

Kernel tests run where kernels can run: with TRITON_INTERPRET=1 on a CPU, or on a GPU.  `make test` runs them in a
process of their own, because Triton's interpreter cannot be switched on later.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("models", "codegen", "schedule")]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


if INTERPRETED:
    # Triton's interpreter truncates when it casts fp32 to bf16 (triton 3.6, 3.7); a GPU rounds to nearest even
    import numpy as np
    import triton.runtime.interpreter as interpreter

    _convert_float = interpreter._convert_float

    def _nearest_even(data, source, target, mode):  # type: ignore[no-untyped-def]
        if str(source) != "fp32" or str(target) != "bf16":
            return _convert_float(data, source, target, mode)
        bits = np.frombuffer(data.tobytes(), dtype=np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        nan = np.isnan(np.frombuffer(data.tobytes(), dtype=np.float32))
        return np.where(nan, np.uint16(0x7FC0), rounded).reshape(data.shape)

    interpreter._convert_float = _nearest_even

    # ... and it rounds the product of an fma
    def _fused(self, x, y, z):  # type: ignore[no-untyped-def]
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = _fused

    _patch_tensor = interpreter._patch_lang_tensor

    def _scalars_from_arrays_of_one(tensor, *scope):  # type: ignore[no-untyped-def]
        """Triton 3.6 makes a Python integer of an array [1], which numpy 2.4 refuses."""
        _patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = _scalars_from_arrays_of_one


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--nightly` runs what is too long for CI as well."""
    parser.addoption("--nightly", action="store_true", help="also run tests marked nightly")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what cannot run here: kernels without interpreter or GPU, GPU tests without a GPU."""
    gpu = torch.cuda.is_available()
    out, kept = [], []
    for item in items:
        kernel, needs_gpu = item.get_closest_marker("kernel"), item.get_closest_marker("gpu")
        runs = (gpu or not needs_gpu) and (INTERPRETED or gpu if kernel else not INTERPRETED)
        runs = runs and (config.getoption("--nightly") or not item.get_closest_marker("nightly"))
        (kept if runs else out).append(item)
    config.hook.pytest_deselected(items=out)
    items[:] = kept


@pytest.fixture(autouse=True)
def _fresh() -> None:
    from graphopt import config

    torch.manual_seed(0)
    torch._dynamo.reset()
    config.reset()


@pytest.fixture
def device() -> str:
    """Where kernels run: the GPU, or the CPU under the interpreter."""
    return "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
