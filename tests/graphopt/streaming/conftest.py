"""Fixtures of the streaming tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def exact(monkeypatch):
    """One algorithm per operator, in full precision, so that two runs agree bit by bit."""
    fused = [n for n in ("flash", "mem_efficient", "cudnn") if getattr(torch.backends.cuda, f"{n}_sdp_enabled")()]
    for name in fused:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    yield
    for name in fused:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)
