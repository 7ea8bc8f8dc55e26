"""A KernelSpec in, readable Triton source out."""

from __future__ import annotations

from graphopt.codegen.configure import Configuration
from graphopt.codegen.emit_backward import Backward
from graphopt.codegen.emit_forward import Forward
from graphopt.codegen.spec import KernelSpec


def emit(spec: KernelSpec, config: Configuration) -> str:
    """The source of one kernel, as a module of its own."""
    return (Forward if spec.direction == "forward" else Backward)(spec, config).emit()
