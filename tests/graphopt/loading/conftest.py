"""Fixtures of the loader's tests, and their helper module."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import plan_data


@pytest.fixture
def folder(tmp_path):
    """A plan for two ranks on disk."""
    plan_data.make().save(tmp_path / "plan")
    return tmp_path / "plan"


@pytest.fixture
def world(monkeypatch):
    """Says how many processes the job has; two at first."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    return lambda n: monkeypatch.setenv("WORLD_SIZE", str(n))
