"""graphopt: graph rewriting for people who train diffusion transformers with `torch.compile`.

    step = torch.compile(model, backend="graphopt")

needs no import of this package; what is here asks what was done, and sets defaults.  Names are loaded on first use, so
`import graphopt` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphopt._inspect import Inspection, inspect
    from graphopt.checkpoint import Checkpoints
    from graphopt.checks import CheckFailed, check
    from graphopt.config import Config, configure
    from graphopt.errors import GraphoptError
    from graphopt.loading.accumulate import accumulate
    from graphopt.loading.loader import PlanLoader
    from graphopt.loading.microbatch import MicrobatchInfo
    from graphopt.loading.sampler import PlanBatchSampler
    from graphopt.metrics import MetricsLog
    from graphopt.passes.catalogue import register_rule, unregister_rule
    from graphopt.passes.rule import Rule
    from graphopt.reporting import Report, last_report, report
    from graphopt.schedule.bench import largest_batch, shape_benchmark
    from graphopt.schedule.cost import trace_cost
    from graphopt.schedule.costmodel import CostFit
    from graphopt.schedule.dataset import read_samples
    from graphopt.schedule.fitting import fit_cost, fit_memory
    from graphopt.schedule.plan import Plan
    from graphopt.schedule.planner import plan_batches
    from graphopt.schedule.replan import replan
    from graphopt.schedule.simulate import simulate
    from graphopt.streaming.attach import stream
    from graphopt.streaming.lockstep import layer_major
    from graphopt.streaming.optimizer import HostAdamW
    from graphopt.streaming.planning import stream_plan
    from graphopt.streaming.timeline import stream_timeline
    from graphopt.weights import save_weights

__version__ = "0.1.0"

# public name -> module that defines it
_HOME = {
    "CheckFailed": "graphopt.checks",
    "Config": "graphopt.config",
    "GraphoptError": "graphopt.errors",
    "Rule": "graphopt.passes.rule",
    "register_rule": "graphopt.passes.catalogue",
    "unregister_rule": "graphopt.passes.catalogue",
    "Report": "graphopt.reporting",
    "check": "graphopt.checks",
    "configure": "graphopt.config",
    "Inspection": "graphopt._inspect",
    "inspect": "graphopt._inspect",
    "last_report": "graphopt.reporting",
    "report": "graphopt.reporting",
    # run
    "Checkpoints": "graphopt.checkpoint",
    "MetricsLog": "graphopt.metrics",
    "save_weights": "graphopt.weights",
    # plan
    "MicrobatchInfo": "graphopt.loading.microbatch",
    "PlanBatchSampler": "graphopt.loading.sampler",
    "PlanLoader": "graphopt.loading.loader",
    "accumulate": "graphopt.loading.accumulate",
    "CostFit": "graphopt.schedule.costmodel",
    "Plan": "graphopt.schedule.plan",
    "fit_cost": "graphopt.schedule.fitting",
    "fit_memory": "graphopt.schedule.fitting",
    "largest_batch": "graphopt.schedule.bench",
    "plan_batches": "graphopt.schedule.planner",
    "read_samples": "graphopt.schedule.dataset",
    "replan": "graphopt.schedule.replan",
    "shape_benchmark": "graphopt.schedule.bench",
    "simulate": "graphopt.schedule.simulate",
    "trace_cost": "graphopt.schedule.cost",
    # stream
    "HostAdamW": "graphopt.streaming.optimizer",
    "layer_major": "graphopt.streaming.lockstep",
    "stream": "graphopt.streaming.attach",
    "stream_plan": "graphopt.streaming.planning",
    "stream_timeline": "graphopt.streaming.timeline",
}
__all__ = [
    "CheckFailed",
    "Checkpoints",
    "Config",
    "CostFit",
    "GraphoptError",
    "HostAdamW",
    "Inspection",
    "MetricsLog",
    "MicrobatchInfo",
    "Plan",
    "PlanBatchSampler",
    "PlanLoader",
    "Report",
    "Rule",
    "accumulate",
    "check",
    "configure",
    "fit_cost",
    "fit_memory",
    "inspect",
    "largest_batch",
    "last_report",
    "layer_major",
    "plan_batches",
    "read_samples",
    "register_rule",
    "replan",
    "report",
    "save_weights",
    "shape_benchmark",
    "simulate",
    "stream",
    "stream_plan",
    "stream_timeline",
    "trace_cost",
    "unregister_rule",
]


def __getattr__(name: str) -> Any:
    if name == "dsa":
        return import_module("graphopt.dsa")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'graphopt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
