"""The closed form gives what was measured fastest, and gradients that arrive as sums keep the grid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphopt.codegen.configure import PER_THREAD, closed_form, live_values, shared_limit
from graphopt.codegen.examples import example
from graphopt.codegen.form import FUSIONS
from graphopt.codegen.spec import addend

F5 = dict(norm="rms_norm", outputs="scale")
# benchmarks/results/h200/backward_programs.json: fusion, width, warps, stages, programs a multiprocessor, sub-blocks
MEASURED = [
    ("norm_modulates", {}, 1152, 2, 6, 2, (512, 512, 128)),
    ("norm_modulates", {}, 1536, 2, 5, 2, (512, 512, 512)),
    ("norm_modulates", {}, 2048, 4, 4, 2, (1024, 1024)),
    ("norm_modulates", {}, 2432, 4, 4, 2, (1024, 1024, 512)),
    ("norm_modulates", {}, 3072, 4, 5, 1, (1024, 1024, 1024)),
    ("branch_norm_gate_norm_modulate", F5, 1536, 4, 4, 2, (512, 512, 512)),
    ("branch_norm_gate_norm_modulate", F5, 2048, 4, 3, 2, (1024, 1024)),
    ("branch_norm_gate_norm_modulate", F5, 2432, 4, 3, 2, (1024, 1024, 512)),
    ("branch_norm_gate_norm_modulate", F5, 3072, 8, 4, 1, (2048, 2048)),
    ("gate_norm_modulate", {}, 1536, 2, 6, 1, (512, 512, 512)),
    ("gate_norm", {}, 1536, 2, 6, 1, (512, 512, 512)),
]


@pytest.mark.parametrize(("fusion", "kind", "D", "warps", "stages", "programs", "blocks"), MEASURED)
def test_backward_as_measured(fusion, kind, D, warps, stages, programs, blocks) -> None:
    c = closed_form(example(fusion, D, **kind)[1])
    assert (c.warps, c.stages, c.programs_per_sm, c.blocks) == (warps, stages, programs, blocks)


@pytest.mark.parametrize("D", [1408, 1536, 2048, 2240, 2304, 2432, 2559, 2560, 3072])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_programs_fit_beside_each_other(fusion: str, D: int) -> None:
    """Registers and shared memory hold all programs of a multiprocessor; addends change neither grid nor that."""
    for norm in ("layer_norm", "rms_norm"):
        for layout in ("group", "token"):
            for dtype in ("bf16", "fp32"):
                spec = example(fusion, D, norm=norm, layout=layout, dtype=dtype)[1]
                whole = closed_form(spec)
                added = [replace(spec, dtypes=(*spec.dtypes, (addend(t, 1), spec.dtype(t)), (addend(t, 2), spec.dtype(t))))
                         for t in spec.streams if t.startswith("d")]
                for s in (spec, *added):
                    c = closed_form(s)
                    assert c.programs_per_sm == whole.programs_per_sm
                    if c.programs_per_sm > 4 or D <= 1400:
                        continue
                    rows = sum(s.dtype(t).itemsize for t in (*s.rows_in, *filter(s.per_token, s.factors)))
                    assert max(0, c.stages - 1) * rows * D * c.programs_per_sm <= shared_limit(s.target)
                    if s is spec and c.programs_per_sm == 2:
                        assert D * live_values(s) <= 1.1 * PER_THREAD * 32 * c.warps
                        assert c.warps <= 4
