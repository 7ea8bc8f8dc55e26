from __future__ import annotations

import pytest

from graphopt.codegen.form import FUSIONS
from graphopt.schedule import site_cost


@pytest.mark.parametrize("fusion", list(FUSIONS))
def test_every_fusion_has_coefficients_and_grows_with_the_rows(fusion: str) -> None:
    for training in (False, True):
        small = site_cost.predict(fusion, 100, 3072, 2, training)
        large = site_cost.predict(fusion, 100_000, 3072, 2, training)
        assert all(0 < a < b for a, b in zip(small, large))
    assert site_cost.predict(fusion, 1000, 3072, 2, True) > site_cost.predict(fusion, 1000, 3072, 2, False)


def test_large_sites_are_near_the_memory_limit() -> None:
    """F1 forward reads and writes 2 x 774 MB at 75,600 x 5,120: between 300 and 600 microseconds on an H200."""
    assert 300 < site_cost.time_us("graphopt", "norm_modulate", "forward", 75_600, 5_120, 2) < 600
