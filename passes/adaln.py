"""The pass that puts the AdaLN rules to work: find the sites, decide which to rewrite, put the operators in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from graphopt import _compat
from graphopt.codegen import listing, operators, readiness
from graphopt.codegen.form import OPERANDS
from graphopt.errors import CodegenError, RewriteError, VerifyError
from graphopt.passes import near_miss, ops_view, rewrite, source, tables, traffic, verify
from graphopt.passes.pipeline import PassContext, copy, nested
from graphopt.passes.record import Checked, Kernel, PassRecord, Prediction, Reject, Site, Traffic
from graphopt.passes.rule import Match, Rule
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
        record = PassRecord(self.name, sum(len(g.graph.nodes) for g in nested(gm)))
        failed = {} if context.inputs is None else self.verified(gm, context, record)
        self.rewrite(gm, context, record, failed)
        record.sites.reverse()
        record.kernels.reverse()
        record.nodes_after = sum(len(g.graph.nodes) for g in nested(gm))
        return record

    def verified(self, gm: fx.GraphModule, context: PassContext, record: PassRecord) -> dict[str, str]:
        """Rewrite copies until every operator agrees with fp64 on the real inputs; what failed, with the reason."""
        failed: dict[str, str] = {}
        quiet = replace(context, warn=lambda message: None)
        while True:
            trial, scratch = copy(gm), PassRecord(self.name, 0)
            placed, became = self.rewrite(trial, quiet, scratch, failed)
            found = verify.check(gm, context.inputs or [], *verify.pair(gm, trial, placed, became))
            bad = [c for c in found if not c.ok]
            if not bad:
                record.verified = found
                return failed
            matches = {key: match for key, _, match in placed}
            for c in bad:
                failed[c.key] = self.refuted(matches[c.key], c, context, record)

    def refuted(self, match: Match, found: Checked, context: PassContext, record: PassRecord) -> str:
        """Raise or warn about a site that is not what it replaces; returns the reason to leave it alone."""
        place = source.where(match.root) or match.root.name
        what = f"{match.rule.name} at {source.fqn(match.root) or '(root)'} failed verification: {found}"
        if context.on_error == "raise":
            raise VerifyError(what, where=place, remedy=f"leave the rule out with GRAPHOPT_DISABLE={match.rule.name}, "
                              "and report it")
        context.warn(f"{what} ({place}); the site is left as it was")
        record.dropped.append(match.root.name)
        return f"failed verification: {found}"

    def rewrite(
        self, gm: fx.GraphModule, context: PassContext, record: PassRecord, failed: dict[str, str]
    ) -> tuple[list[tuple[str, int, Match]], dict[Node, Node]]:
        """Decide on every match and put the chosen ones in, the failed ones left out.

        Returns (key, position of its graph, match) of each that was put in, and what stands for the nodes replaced.
        """
        placed: list[tuple[str, int, Match]] = []
        became: dict[Node, Node] = {}
        for i, g in enumerate(nested(gm)):
            found = rewrite.find(g, context.rules, context.numerics, _on_raise(context, record))
            record.rejects += found.rejects
            record.near_misses += near_miss.explain(g, found)
            chosen: list[tuple[Match, list[Site]]] = []
            for match in found.matches:
                key = f"{i}/{match.root.name}"
                sites, rewritten = self.decide(match, context, record, failed.get(key))
                record.sites += reversed(sites)  # all are reversed at the end
                if rewritten:
                    chosen.append((match, sites))
                    placed.append((key, i, match))
            if chosen:
                folds = self.fold_tables(g, [m for m, _ in chosen], context, record)
                # before nodes are erased: they have no operands left then
                bytes_ = [(traffic.fused(m), traffic.op_by_op(m.core)) for m, _ in chosen]
                became |= rewrite.apply(g, [m for m, _ in chosen], lambda m: operator_for(m, context))
                if folds:
                    tables.sweep(g.graph, folds)
                    g.recompile()
                left = set(g.graph.nodes)
                for (match, sites), moved in zip(chosen, bytes_):
                    gone = sorted({*match.core, *match.side} - left, key=match.facts.index.__getitem__)
                    record.kernels += _kernels(match, sites, gone, moved, left, target_of(match, context))
        return placed, became

    def decide(
        self, match: Match, context: PassContext, record: PassRecord, reason: str | None = None
    ) -> tuple[list[Site], bool]:
        """The sites of a match, rewritten or declined (at once where there is a `reason` to)."""
        device, prediction = target_of(match, context), None
        if reason is not None or match.rule.function is not None:
            pass  # what a user asked for is done
        elif device == "reference":
            if context.select == "profitable":
                reason = "no GPU or no Triton: the operator is plain torch, Inductor is faster (select='all' forces it)"
        else:
            reason = better_left(match) if context.select == "profitable" else None
            reason = reason or self.unbuilt(match, device, context, record)
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
            for kind, node in match.rule.sites(match)  # type: ignore[misc]
        ]
        return sites, reason is None

    def fold_tables(
        self, g: fx.GraphModule, chosen: list[Match], context: PassContext, record: PassRecord
    ) -> list[tables.Fold]:
        """Take `table + embedding` into the operators that can add them (see tables.py)."""
        folds = tables.plan(chosen)
        before = {id(f.match): f.match.replacement for f in folds}
        tables.apply(g.graph, folds)
        for fold in folds:
            match, target = fold.match, target_of(fold.match, context)
            if target != "reference" and self.unbuilt(match, target, context, record) is not None:
                match.replacement = before[id(match)]
        return folds

    def unbuilt(self, match: Match, target: str, context: PassContext, record: PassRecord) -> str | None:
        """Why the kernels of a match cannot be used on a GPU, or None.

        A kernel that fails to compile warns once, however many sites have it.
        """
        replacement = match.replacement
        if replacement is None:
            raise ValueError("a match was not accepted")
        try:
            reasons = [readiness.check(values, replacement.attributes, target, training=needs_grad(match))
                       for values in operand_values(match)]
            return next((r for r in reasons if r is not None), None)
        except CodegenError as error:
            if context.on_error == "raise":
                raise
            place = source.where(match.root) or match.root.name
            reason = f"its kernel does not compile for {target}: {error.what}"
            if all(site.reason != reason for site in record.sites):
                context.warn(f"{source.fqn(match.root)} ({place}): {error.what}; the site is left to Inductor, as are "
                             "others with this kernel")
            record.dropped.append(match.root.name)
            return reason


def _on_raise(context: PassContext, record: PassRecord) -> Callable[[Rule, Node, Exception], None]:
    """What happens when a rule raises: its site is left alone with one warning a rule, or RewriteError."""
    warned: set[str] = set()

    def on_raise(rule: Rule, node: Node, error: Exception) -> None:
        place = source.where(node) or node.name
        text = f"rule {rule.name!r} raised {type(error).__name__}: {error} ({place})"
        if context.on_error == "raise":
            raise RewriteError(text, where=place, remedy="mend the rule, or unregister it") from error
        record.rejects.append(Reject(rule.name, source.fqn(node), node.name, text, source.where(node)))
        if rule.name not in warned:
            context.warn(f"{text}; its sites are left alone")
        warned.add(rule.name)

    return on_raise


def _norms(match: Match) -> tuple[str, ...]:
    """The modules whose norms a match covers."""
    found = [match.get(name) for name in ("norm", "branch_norm")]
    return tuple(source.fqn(n) for n in found if n is not None)


def better_left(match: Match) -> str | None:
    """Why a site that has kernels is still faster left to Inductor, where the cost model does not know it."""
    if match.replacement is not None and match.facts.live.isdisjoint(match.replacement.results):
        return "nothing reads its result: the compiler leaves it out"
    if match.replacement is not None and match.replacement.put is not None:
        return "slices joined by cat: the compiler writes them at once, two kernels would copy them"
    if match.shared:
        return "one norm with several readers: a kernel would compute it again"
    if match.replacement is not None and match.replacement.layouts:
        return "layout: the result is transposed in memory; kernels write rows, the compiler writes it in place"
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
    if match.rule.function is not None:
        return match.rule.function
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
    D = _compat.size_hint(value.shape[-1])  # symbolic sizes count as they were traced
    return Prediction(*site_cost.predict(match.replacement.fusion, traffic.fused(match), D, needs_grad(match)))


def _kernels(
    match: Match, sites: list[Site], gone: list[Node], moved: tuple[dict[str, int], dict[str, int]], left: set[Node],
    target: str,
) -> list[Kernel]:
    """The kernels of a match that was put in, backward first."""
    replacement = match.replacement
    if replacement is None or match.call is None:
        raise ValueError("a match was not accepted")
    # the backward of a user's function is torch's business
    training = match.rule.function is None and needs_grad(match)
    files: dict[str, str] = {}
    if target != "reference" and match.rule.function is None:
        calls = operand_values(match)
        specs = [s for v in calls for s in readiness.specs(v, replacement.attributes, training, target)]
        files = {listing.kernel_file(s).name: str(readiness.compile_for(s, target)) for s in specs}
    placed = tuple(n.name for n in match.created if n in left)
    out = []
    for direction in ("backward", "forward") if training else ("forward",):
        mine = tuple(f for f in files if ("_backward_" in f) == (direction == "backward"))
        bytes_ = Traffic(moved[0][direction], moved[1][direction])
        out.append(Kernel(replacement.fusion, match.rule.name, direction, tuple(sites), match.call.name,
                          tuple(n.name for n in gone), placed, mine,
                          tuple(files[f] for f in mine), bytes_))
    return out


def operand_values(match: Match) -> list[dict[str, torch.Tensor | None]]:
    """The (fake) operands by name of each operator call of a match, as the operator gets them."""
    if match.replacement is None:
        raise ValueError("a match was not accepted")
    values = {n: None if x is None else _fake(match, n, x) for n, x in match.replacement.inputs.items()}
    if "x" in values:
        return [values]
    pieces = sum(n.startswith("x.") for n in values)  # joined slices: a call each
    return [{n: values.get(f"{n}.{i}") for n in OPERANDS} for i in range(pieces)]


def _shape(node: Node) -> tuple[int | str, ...]:
    value = ops_view.value(node)
    return () if value is None else tuple(s if isinstance(s, int) else str(s) for s in value.shape)
