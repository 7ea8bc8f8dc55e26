"""The pass that puts the AdaLN rules to work: find the sites, decide which to rewrite, put the operators in."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from graphopt import _compat
from graphopt.codegen import operators, readiness
from graphopt.codegen.form import OUTPUT_PARTS, decode_outputs
from graphopt.errors import CodegenError
from graphopt.passes import near_miss, ops_view, rewrite, source
from graphopt.passes.pipeline import PassContext, nested
from graphopt.passes.record import Kernel, PassRecord, Prediction, Site
from graphopt.passes.rule import Match
from graphopt.schedule import site_cost

log = logging.getLogger(__name__)


class AdaLN:
    """norm-modulate and gate-residual chains become fused operators, in the graph and in every graph nested in it."""

    name = "adaln"
    requires: frozenset[str] = frozenset()
    provides = frozenset({"fused_adaln"})
    conflicts = frozenset({"partitioned"})  # a fused node with two owners cannot be streamed or recomputed

    def run(self, gm: fx.GraphModule, context: PassContext) -> PassRecord:
        """See Pass."""
        graphs = nested(gm)
        record = PassRecord(self.name, sum(len(g.graph.nodes) for g in graphs))
        for g in graphs:
            found = rewrite.find(g, context.rules, context.numerics)
            record.rejects += found.rejects
            record.near_misses += near_miss.explain(g, found)
            chosen: list[Match] = []
            for match in found.matches:
                sites, rewritten = self.decide(match, context, record)
                record.sites += reversed(sites)  # all are reversed at the end
                if rewritten:
                    chosen.append(match)
                    record.kernels += _kernels(match, sites)
            if chosen:
                rewrite.apply(g, chosen, lambda m: operator_for(m, context))
        record.sites.reverse()
        record.kernels.reverse()
        record.nodes_after = sum(len(g.graph.nodes) for g in graphs)
        return record

    def decide(self, match: Match, context: PassContext, record: PassRecord) -> tuple[list[Site], bool]:
        """The sites of a match, rewritten or declined."""
        device = target_of(match, context)
        reason, prediction = None, None
        if device == "reference":
            if context.select == "profitable":
                reason = "no GPU or no Triton: the operator is plain torch, Inductor is faster (select='all' forces it)"
        else:
            reason = self.unbuilt(match, device, context, record)
            if reason is None:
                prediction = predict(match)
                if context.select == "profitable" and prediction.graphopt_us > prediction.inductor_us:
                    reason = "predicted to be faster left to Inductor"
        sites = [
            Site(
                kind, match.rule.name, source.fqn(match["norm"] if kind == "modulate" else node), node.name,
                source.where(node), _shape(node), str(ops_view.dtype_of(node)).removeprefix("torch."),
                "rewritten" if reason is None else "declined", reason, prediction, _norms(match),
            )
            for kind, node in match.rule.sites(match)
        ]
        return sites, reason is None

    def unbuilt(self, match: Match, target: str, context: PassContext, record: PassRecord) -> str | None:
        """Why the kernels of a match cannot be used on a GPU, or None.  A kernel that fails to compile warns once."""
        replacement = match.replacement
        if replacement is None:
            raise ValueError("a match was not accepted")
        values = {n: None if x is None else _fake(match, n, x) for n, x in replacement.inputs.items()}
        values |= {n: values.get(n) for n in OUTPUT_PARTS}
        missing = no_kernel(match)
        if missing is not None:
            return missing
        try:
            return readiness.check(values, replacement.attributes, target, training=needs_grad(match))
        except CodegenError as error:
            if context.on_error == "raise":
                raise
            place = source.where(match.root) or match.root.name
            context.warn(f"{source.fqn(match.root)} ({place}): {error.what}; the site is left to Inductor")
            record.dropped.append(match.root.name)
            return f"its kernel does not compile for {target}: {error.what}"


def _norms(match: Match) -> tuple[str, ...]:
    """The modules whose norms a match covers."""
    found = [match.get(name) for name in ("norm", "branch_norm")]
    return tuple(source.fqn(n) for n in found if n is not None)


def no_kernel(match: Match) -> str | None:
    """What the generated kernels do not do yet; the reference operators do all of it."""
    replacement = match.replacement
    if replacement is None:
        raise ValueError("a match was not accepted")
    attributes, inputs = replacement.attributes, replacement.inputs
    if "rms_norm" in (attributes["norm"], attributes["branch_norm"]):
        return "RMS norm: no kernel yet"
    if attributes["branch_norm"] != "none":
        return "a gate on a normed branch: no kernel yet"
    if attributes["activation"] != "identity":
        return f"a gate through {attributes['activation']}: no kernel yet"
    if inputs["branch"] is not None and inputs["gate"] is None:
        return "a residual without a gate: no kernel yet"
    outputs = decode_outputs(attributes["outputs"])
    if len(outputs) > 1:
        return "one norm with several modulates: no kernel yet"
    if outputs and "scale" in outputs[0] and "shift" not in outputs[0]:
        return "a scale without a shift: no kernel yet"
    if any("table" in name for name in inputs if inputs[name] is not None):
        return "a table added to a factor: no kernel yet"
    width = ops_view.value(match.root)
    if width is None or not isinstance(width.shape[-1], int):
        return "the width is not known at compile time: no kernel"
    if match.shared:
        return "one norm with several readers: no kernel that computes it once yet"
    if replacement.layouts:
        return "layout: the result is transposed in memory, and kernels write rows"
    return None


def _fake(match: Match, name: str, node: Node) -> torch.Tensor | None:
    views = match.replacement.views.get(name) if match.replacement else None
    return ops_view.value(views[0] if views else node)


def target_of(match: Match, context: PassContext) -> str:
    """What a match is compiled for: "reference", or a GPU such as "sm90"."""
    value = ops_view.value(match.root)
    device = "cpu" if value is None else value.device.type
    if not operators.has_triton():
        return "reference"
    if context.target is not None:
        return context.target
    return readiness.local_target() if device == "cuda" else "reference"


def operator_for(match: Match, context: PassContext) -> Any:
    """The operator overload a match is replaced by: generated kernels on a GPU, the reference elsewhere."""
    if match.replacement is None:
        raise ValueError("a match was not accepted")
    engine = "reference" if target_of(match, context) == "reference" else "triton"
    return operators.operator(match.replacement.fusion, engine)


def needs_grad(match: Match) -> bool:
    """Will this graph run a backward through the match?  (Its result has no gradient under no_grad.)"""
    if match.replacement is None:
        return False
    values = [ops_view.value(n) for n in match.replacement.results]
    return any(v is not None and v.requires_grad for v in values)


def predict(match: Match) -> Prediction:
    """Predicted microseconds of one step (one forward where nothing is differentiated)."""
    value = ops_view.value(match.root)
    if value is None or match.replacement is None:
        raise ValueError("a match without a known shape")
    rows = 1
    for size in value.shape[:-1]:
        rows *= _compat.size_hint(size)
    ours, theirs = site_cost.predict(
        match.replacement.fusion, rows, _compat.size_hint(value.shape[-1]), value.dtype.itemsize, needs_grad(match)
    )
    return Prediction(ours, theirs)


def _kernels(match: Match, sites: list[Site]) -> list[Kernel]:
    if match.replacement is None:
        raise ValueError("a match was not accepted")
    operator = match.replacement.fusion
    directions: tuple[Any, ...] = ("forward", "backward") if needs_grad(match) else ("forward",)
    return [Kernel(operator, match.rule.name, d, tuple(sites)) for d in reversed(directions)]


def _shape(node: Node) -> tuple[int | str, ...]:
    value = ops_view.value(node)
    return () if value is None else tuple(s if isinstance(s, int) else str(s) for s in value.shape)
