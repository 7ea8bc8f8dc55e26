"""`table + embedding` taken into the operators, where a factor has one row per token (Wan 2.2 TI2V, LTX per token).

before                                                   after
    m = table[1, 1, 6, D] + emb[B, S, 6, D].float()          e, t = emb.chunk(6, 2), table.chunk(6, 2)
    scale = m.chunk(6, 2)[1]                                 norm_modulate(x, [e[1], t[1], ..])
    y = norm(x) * (1 + scale) + ..

Per token the sum is as large as six activations, in fp32: written once and read by every site, its gradient likewise.
Inside, the embedding is read in its own dtype and the table from cache.  With [B, 1, D] or [B, F, 1, D] factors the sum
is small and is left where it is.  A sum is folded only if all its readers are factors of operators: else it would be
there all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.fx import Node

from graphopt import _compat
from graphopt.codegen.form import OPERANDS, OUTPUT_PARTS, encode_outputs
from graphopt.passes import ops_view
from graphopt.passes.rule import Match, Replacement

FACTORS = ("gate", "scale", "shift")
# between the sum and a factor: ops that name no size of the embedding, so that they mean the same for the table
PATH = frozenset({"chunk", "split", "unbind", "pick", "index", "squeeze", "unsqueeze", "cast"})


@dataclass
class Fold:
    """One factor that is a piece of `table + embedding`: the ops from the factor up to the sum, outermost first."""

    match: Match
    name: str
    path: list[Node]
    total: Node
    table: Node
    embedding: Node


def plan(matches: list[Match]) -> list[Fold]:
    """What can be folded; changes nothing."""
    by_total: dict[Node, list[Fold]] = {}
    for match in matches:
        replacement = match.replacement
        if replacement is None or replacement.put is not None or match.numerics == "eager":
            continue
        for name, node in replacement.inputs.items():
            if name.split(".")[0] in FACTORS and node is not None and _per_token(match, node):
                fold = _piece(match, name, node)
                if fold is not None:
                    by_total.setdefault(fold.total, []).append(fold)
    return [f for total, folds in by_total.items() if _only_factors(total, folds) for f in folds]


def apply(graph: fx.Graph, folds: list[Fold]) -> None:
    """Put the pieces of tables and embeddings into the graph, and change the replacements of their matches."""
    made: dict[tuple[Node, Node], Node] = {}
    for fold in folds:
        replacement = fold.match.replacement
        if replacement is None:
            raise ValueError("a match was not accepted")
        name, _, i = fold.name.partition(".")
        inputs = dict(replacement.inputs)
        inputs[fold.name] = _cut(graph, fold.embedding, fold.path, made)
        inputs[f"{name}_table" + (f".{i}" if i else "")] = _cut(graph, fold.table, fold.path, made)
        fold.match.replacement = _ordered(replacement, inputs)


def sweep(graph: fx.Graph, folds: list[Fold]) -> None:
    """Take out the sums and pieces that nothing reads any more."""
    alive = {n: i for i, n in enumerate(graph.nodes)}
    dead = {n for f in folds for n in (*f.path, f.total) if n in alive}
    for node in sorted(dead, key=alive.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _ordered(replacement: Replacement, inputs: dict[str, Node | None]) -> Replacement:
    """The replacement with other inputs: parts in their order, `outputs` to match."""
    single = {n: inputs[n] for n in OPERANDS}
    outputs = replacement.attributes["outputs"].split()
    parts: dict[str, Node | None] = {}
    words: list[list[str]] = []
    for i in range(len(outputs)):
        named = {p: inputs.get(p if i == 0 else f"{p}.{i}") for p in OUTPUT_PARTS}
        words.append([p for p, node in named.items() if node is not None])
        parts |= {p if i == 0 else f"{p}.{i}": node for p, node in named.items() if node is not None}
    attributes = {**replacement.attributes, "outputs": encode_outputs(words)}
    return replace(replacement, inputs=single | parts, attributes=attributes)


def _per_token(match: Match, node: Node) -> bool:
    v, x = ops_view.value(node), ops_view.value(match.root)
    return (
        v is not None and x is not None and v.dim() == x.dim() > 1
        and ops_view.same_size(v.shape[-2], x.shape[-2]) and not ops_view.same_size(v.shape[-2], 1)
    )


def _piece(match: Match, name: str, node: Node) -> Fold | None:
    path: list[Node] = []
    while ops_view.canonical(node) in PATH:
        if ops_view.canonical(node) == "cast" and not _widens(node):
            return None  # a rounding the model asked for
        if ops_view.detaches(node):
            return None
        path.append(node)
        node = node.args[0]  # type: ignore[assignment]
    if ops_view.canonical(node) != "add" or ops_view.has_alpha(node) or ops_view.detaches(node):
        return None
    a, b = ops_view.operands(node)
    static = match.facts.static
    if not isinstance(a, Node) or not isinstance(b, Node) or static[a] == static[b]:
        return None
    table, embedding = (a, b) if static[a] else (b, a)
    while ops_view.canonical(embedding) == "cast" and _widens(embedding) and not ops_view.detaches(embedding):
        embedding = embedding.args[0]  # type: ignore[assignment]
    fold = Fold(match, name, path, node, table, embedding)
    return fold if _fits(fold) else None


def _widens(cast: Node) -> bool:
    source, target = ops_view.dtype_of(cast.args[0]), ops_view.dtype_of(cast)
    return source is not None and target is not None and ops_view.widens(source, target)


def _fits(fold: Fold) -> bool:
    """Is the embedding as large as the sum, the table one row of it, and nothing written in between?"""
    total, table, embedding = (ops_view.value(n) for n in (fold.total, fold.table, fold.embedding))
    if total is None or table is None or embedding is None or not ops_view.same_shape(total, embedding):
        return False
    if table.dim() != total.dim() or table.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return False
    try:
        row = _follow(fold.path, table)
    except (RuntimeError, IndexError, ValueError):  # a view that names the size of the embedding
        return False
    if not all(ops_view.same_size(size, 1) for size in row.shape[:-1]):
        return False
    facts, anchor = fold.match.facts, fold.match.anchor
    last = facts.index[anchor] if anchor is not None else facts.index[fold.match.root]
    return facts.write_between(facts.index[fold.total], last, [fold.table, fold.embedding]) is None


def _follow(path: list[Node], value: torch.Tensor) -> torch.Tensor:
    """What the ops of a path make of another tensor than the sum."""
    with _compat.fake_mode_of([value]):
        for node in reversed(path):
            if ops_view.canonical(node) != "cast":
                value = _run(node, value)
    return value


def _run(node: Node, value: torch.Tensor) -> torch.Tensor:
    rest, kwargs = fx.node.map_arg((node.args[1:], dict(node.kwargs)), lambda n: n.meta["example_value"])
    if node.op == "call_method":
        return getattr(value, str(node.target))(*rest, **kwargs)
    return node.target(value, *rest, **kwargs)  # type: ignore[operator]


def _only_factors(total: Node, folds: list[Fold]) -> bool:
    """Do the pieces of a sum end in the operators that fold it, and nowhere else?"""
    ours = {n for f in folds for n in (*f.match.core, *f.match.side)}
    folded = {n for f in folds for n in f.path}
    todo, seen = [total], set()
    while todo:
        for user in todo.pop().users:
            if user in folded or (ops_view.canonical(user) in PATH and user not in ours):
                if user not in seen:
                    seen.add(user)
                    todo.append(user)
            elif user not in ours:
                return False
    return True


def _cut(graph: fx.Graph, source: Node, path: list[Node], made: dict[tuple[Node, Node], Node]) -> Node:
    """The path replayed on the table or the embedding; what several factors share is made once."""
    here = source
    for node in reversed(path):
        if ops_view.canonical(node) == "cast":
            continue
        key = (here, node)
        if key not in made:
            with graph.inserting_after(node):
                new = graph.create_node(node.op, node.target, (here, *node.args[1:]), dict(node.kwargs))
            new.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
            before = here.meta["example_value"]
            tensors = before if isinstance(before, (tuple, list)) else [before]
            with _compat.fake_mode_of(list(tensors)):
                new.meta["example_value"] = _run(node, before)
            made[key] = new
        here = made[key]
    return here
