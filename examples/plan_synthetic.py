"""Plan a synthetic mixed corpus for 8 ranks and compare policies by simulation: `python examples/plan_synthetic.py`."""

import numpy as np
import pyarrow as pa

from graphopt.schedule import report
from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.dataset import read_samples
from graphopt.schedule.planner import plan_batches
from graphopt.schedule.simulate import simulate

rng = np.random.default_rng(0)
video = rng.random(5000) < 0.5
samples = read_samples(
    pa.table(
        {
            "frames": np.where(video, rng.choice([17, 33, 49, 65, 81], 5000), 1),
            "height": np.where(video, 480, 1024),
            "width": np.where(video, 832, 1024),
        }
    )
)
cost = CostFit.two_term(0.5, 2.43e-4, 9.2e-9, step_overhead_s=1.0, m_comp=32760.0**2)
plans = {
    p: plan_batches(samples, cost, ranks=8, m_mem=65_520, policy=p, tau=2)
    for p in ("equal_token", "adaptive_load", "step_balanced")
}
print(report.text(plans["step_balanced"], step=0))
print(report.comparison([(name, simulate(plan, cost)) for name, plan in plans.items()]))
