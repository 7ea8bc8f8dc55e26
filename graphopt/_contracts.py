"""The promises of torch's private interfaces that graphopt relies on, each checked in a fraction of a second.

`graphopt doctor` runs them on the user's torch; tests/contracts runs them, too, and checks more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphopt import _compat, _compat_capture


def _inductor() -> None:
    first = _compat.inductor_parameters()[:3]
    assert first == ["gm", "example_inputs", "options"], f"torch._inductor.compile takes {first}"
    assert "max_autotune" in _compat.inductor_option_names(), "list_options() has no max_autotune"
    assert _compat.POST_GRAD in _compat.inductor_option_names(), f"there is no option {_compat.POST_GRAD}"
    assert len(_compat.inductor_settings()) >= 16, "Inductor's settings have no digest"
    assert "max-autotune-no-cudagraphs" in _compat.inductor_mode_names(), "a mode is missing"


def _backends() -> None:
    assert callable(_compat.named_backend("aot_eager")), "lookup_backend finds no aot_eager"
    assert "graphopt" in torch._dynamo.list_backends(), "the entry point of graphopt is not found: install it again"


def _capture() -> None:
    seen: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        known = all("example_value" in n.meta for n in gm.graph.nodes if n.op != "output")
        wrapper, compile_id = type(_compat.calling_wrapper()).__name__, _compat.current_compile_id()
        seen.append((wrapper, compile_id, _compat_capture.real_inputs(gm), _compat_capture.break_of(gm), known))
        return gm.forward

    x = torch.ones(2, 3)
    torch.compile(lambda x: torch.nn.functional.layer_norm(x, (3,)) + 1, backend=backend)(x)
    wrapper, compile_id, values, ended, known = seen[0]
    assert wrapper == "_TorchCompileWrapper", f"the backend is called from a {wrapper}"
    assert "/" in compile_id, f"compile id {compile_id!r}"
    assert [id(v) for v in values or ()] == [id(x)], "placeholders do not lead to their values"
    assert ended is None, f"a whole graph counts as broken: {ended}"
    assert known, "nodes of a Dynamo graph have no example values"


def _inspection() -> None:
    with _compat_capture.capture_settings():
        assert torch.compile(lambda x: torch.where(x > 0, x, torch.as_tensor(3.0, device=x.device)), backend="eager")(
            torch.empty(2, device="meta")).device.type == "meta"
    assert isinstance(_compat_capture.GraphBreaks().found(), list)


def _operators() -> None:
    for name in ("custom_op", "triton_op", "wrap_triton", "register_fake"):
        assert hasattr(torch.library, name), f"torch.library has no {name}"


def _trace() -> None:
    _compat.trace_artifact("graphopt_contract", lambda: "{}")


CONTRACTS: dict[str, Callable[[], None]] = {
    "Inductor takes a graph with options": _inductor,
    "backends are found by name": _backends,
    "a backend can tell its caller, its frame and its inputs": _capture,
    "models are captured on the meta device": _inspection,
    "operators can be registered": _operators,
    "structured trace takes artifacts": _trace,
}


def broken() -> dict[str, str | None]:
    """Each contract with what is wrong, None where it holds."""
    out: dict[str, str | None] = {}
    for name, check in CONTRACTS.items():
        try:
            check()
            out[name] = None
        except Exception as error:  # any exception is the answer
            out[name] = f"{type(error).__name__}: {error}"
    return out
