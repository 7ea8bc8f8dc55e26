"""A model and named dimensions in, a `SymbolicCost` out: one dynamic-shape trace, nothing is executed.

`torch.compile` hands the forward to AOTAutograd with symbolic sizes; the joint graph is split into forward and
backward, both are walked, and the trace is abandoned before anything would run.  So a model may be on CPU with
uninitialised memory (`model.to_empty(device="cpu")`): fourteen billion parameters then cost neither time nor memory.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import ConfigError, GraphoptError, UnsupportedTorch, unwrap
from graphopt.schedule.formulas import computes, formula, is_attention
from graphopt.schedule.symbolic import SymbolicCost, symbol

Place = tuple[str, int]  # input, dimension


class _Traced(Exception):
    """Ends the trace once both graphs are known."""


def trace_cost(
    model: torch.nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    dims: Mapping[str, Place | Sequence[Place]],
    *,
    formulas: dict[Any, Callable[..., Any]] | None = None,
    exact_at_one: Sequence[str] = (),
) -> SymbolicCost:
    """Trace a model's training cost in named dimensions.

    Args:
        model: any module that compiles without a graph break; its parameters that need gradients decide what the
            backward does. For a model of N equal blocks trace one block and multiply, or `two - one` for two-layer and
            one-layer models.
        inputs: forward's keyword inputs (or positional ones).  A named dimension needs size 2 or more here: a size of
            1 is compiled as a constant.
        dims: where each dimension is found: `{"B": ("hidden_states", 0), "L": ("encoder_hidden_states", 1)}`; a list
            of places for sizes that are equal but that the model never compares; "ids[0]" for nested inputs.
        formulas: FLOP formulas for your own ops, `{torch.ops.lib.op: f(*args, out_val, **kwargs)}`.

        exact_at_one: dimensions whose size 1 is traced apart, e.g. ("B",).  At size 1 some copies become views, so
            that less is saved than the polynomial says (FLOPs are the same); costs one more trace each.

    Returns:
        The cost.  Expressions are expanded polynomials wherever the model's shapes are.

    Raises:
        GraphoptError: an op computes and has no formula (named, with its module), or the model breaks the graph.
        ConfigError: a place that does not exist, or a dimension that the model makes constant.
    """
    kwargs = _by_name(model, inputs)
    places: dict[str, list[Place]] = {
        name: [where] if isinstance(where[0], str) else list(where)  # type: ignore[list-item, arg-type]
        for name, where in dims.items()
    }
    if not places:
        raise ConfigError(
            "trace_cost needs at least one named dimension", remedy='e.g. dims={"B": ("hidden_states", 0)}'
        )
    seen: dict[str, Any] = {}

    def partition(joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        from functorch.compile import default_partition

        # No recomputation: saved tensors are then eager's.
        seen["outputs"] = num_fwd_outputs
        seen["forward"], seen["backward"] = default_partition(
            joint, _inputs, num_fwd_outputs=num_fwd_outputs, **options
        )
        raise _Traced

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        seen["sizes"] = _input_sizes(gm)
        return _compat.aot_autograd(_inference, _inference, partition)(gm, example_inputs)

    def _inference(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        raise ConfigError(
            "nothing in the model needs a gradient, so there is no backward to count",
            where=type(model).__name__,
            remedy="call model.requires_grad_(True)",
        )

    _run(model, kwargs, backend, seen)
    cost = _count(model, seen, places, formulas or {})
    singles = {}
    for name in exact_at_one:
        if name not in places:
            raise ConfigError(f"exact_at_one names {name!r}, which is not in dims")
        rest = {k: v for k, v in dims.items() if k != name}
        singles[name] = trace_cost(model, _at_one(kwargs, name, model, seen, places), rest, formulas=formulas)
    return replace(cost, at_one=singles)


def _at_one(
    kwargs: dict[str, Any], name: str, model: torch.nn.Module, seen: dict[str, Any], places: dict[str, list[Place]]
) -> dict[str, Any]:
    """The inputs with every occurrence of a dimension cut to size 1."""
    table, _ = _symbols(model, seen, places)

    def cut(path: Any, x: Any) -> Any:
        fake = _plain(seen["sizes"]).get("L" + torch.utils._pytree.keystr(path))
        if fake is None:
            return x
        for d, size in enumerate(fake.shape):
            if table.get(_expression(size)) == symbol(name):
                x = x.narrow(d, 0, 1)
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    return torch.utils._pytree.tree_map_with_path(cut, kwargs)


def _plain(sizes: dict[str, Any]) -> dict[str, Any]:
    """Inputs by the name their caller knows, `L['hidden_states']`."""
    return {re.sub(r"^L\['(?:kwargs|args)'\]", "L", name): v for name, v in sizes.items()}


def _by_name(model: torch.nn.Module, inputs: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    """Inputs as keyword arguments of forward."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    bound = inspect.signature(model.forward).bind(*inputs)
    return dict(bound.arguments)


def _run(model: torch.nn.Module, kwargs: dict[str, Any], backend: Any, seen: dict[str, Any]) -> None:
    """Compile until the graphs are known."""
    torch._dynamo.reset()
    try:
        # Equal sizes of different dimensions must not become one symbol.
        with _compat.every_size_its_own_symbol():
            torch.compile(model, backend=backend, dynamic=True, fullgraph=True)(**kwargs)
    except Exception as e:
        if "forward" in seen:
            return
        ours = unwrap(e)
        if isinstance(ours, GraphoptError):
            raise ours from e
        raise GraphoptError(
            f"the model could not be traced: {str(e).splitlines()[0] if str(e) else type(e).__name__}",
            where=type(model).__name__,
            remedy="remove the graph break, or trace one block of the model and multiply it by its count",
        ) from e
    finally:
        torch._dynamo.reset()
    raise UnsupportedTorch(
        "torch.compile never called the backend",
        where=type(model).__name__,
        remedy="is compilation switched off (TORCHDYNAMO_DISABLE, torch.compiler.disable)?",
    )


def _input_sizes(gm: fx.GraphModule) -> dict[str, Any]:
    """Source name of each tensor input of the captured graph, with its fake tensor."""
    sizes = {}
    for n in gm.graph.nodes:
        value = n.meta.get("example_value")
        if n.op == "placeholder" and isinstance(value, torch.Tensor):
            argument = n.meta.get("grapharg")
            # A method in some versions of torch, a property in others.
            name = getattr(getattr(argument, "source", None), "name", n.name)
            sizes[name() if callable(name) else str(name)] = value
    return sizes


def _symbols(
    model: torch.nn.Module, seen: dict[str, Any], places: dict[str, list[Place]]
) -> tuple[dict[sympy.Symbol, sympy.Expr], dict[str, int]]:
    """(torch's symbol -> ours or a number, sizes that got no name)."""
    table: dict[sympy.Symbol, sympy.Expr] = {}
    sizes = seen["sizes"]
    plain = _plain(sizes)
    for name, where in places.items():
        for tensor, dim in where:
            root, rest = re.match(r"([^\[.]*)(.*)", tensor).groups()  # type: ignore[union-attr]
            fake = plain.get(f"L['{root}']{rest}")
            if fake is None:
                raise ConfigError(
                    f"there is no tensor input {tensor!r} (for dimension {name})",
                    where=type(model).__name__,
                    remedy="the model reads "
                    + ", ".join(sorted(k.removeprefix("L") for k in plain if "self" not in k)),
                )
            if not -fake.dim() <= dim < fake.dim():
                raise ConfigError(f"{tensor} has {fake.dim()} dimensions; there is no dimension {dim} (for {name})")
            size = fake.shape[dim]
            expression = (
                size.node.shape_env.replace(size.node.expr) if isinstance(size, torch.SymInt) else sympy.Integer(size)
            )
            if expression.is_number:
                raise ConfigError(
                    f"dimension {name} ({tensor}, dimension {dim}) is constant: {expression}",
                    where=type(model).__name__,
                    remedy="give inputs with at least 2 there; if it is, the model itself fixes this size",
                )
            if expression in table and table[expression] != symbol(name):
                raise ConfigError(
                    f"dimensions {name} and {table[expression]} are one: the model makes them equal",
                    where=type(model).__name__,
                    remedy="name it once",
                )
            if expression.is_Symbol:
                table[expression] = symbol(name)
    assumed = {}
    for source, fake in sizes.items():
        for d, size in enumerate(fake.shape):
            if not isinstance(size, torch.SymInt):
                continue
            expression = size.node.shape_env.replace(size.node.expr)
            for free in expression.free_symbols - set(table):
                if free == expression and size.node.has_hint():
                    table[free] = sympy.Integer(int(size.node.hint))
                    assumed[f"{source.removeprefix('L')}[{d}]"] = int(size.node.hint)
    return table, assumed


def _count(
    model: torch.nn.Module,
    seen: dict[str, Any],
    places: dict[str, list[Place]],
    formulas: dict[Any, Callable[..., Any]],
) -> SymbolicCost:
    """Walk both graphs."""
    table, assumed = _symbols(model, seen, places)
    multiples: dict[str, int] = {}
    flops, attention, traffic = [], [], []
    launches = 0
    for graph in (seen["forward"].graph, seen["backward"].graph):
        total: Any = 0
        for n in graph.nodes:
            if n.op != "call_function":
                continue
            packet = getattr(n.target, "overloadpacket", n.target)
            count = formula(packet, formulas)
            if count is not None:
                args, kwargs = fx.map_arg((n.args, n.kwargs), lambda x: x.meta.get("val"))
                value = _expression(count(*args, **kwargs, out_val=n.meta.get("val")))
                total = total + value
                if is_attention(packet):
                    attention.append(value)
            elif computes(n.target):
                stack = n.meta.get("nn_module_stack") or {}
                inside = [entry[0] for entry in stack.values()]
                raise GraphoptError(
                    f"op {n.target} computes and has no FLOP formula",
                    where=inside[-1] if inside else n.name,
                    remedy="give one: trace_cost(..., formulas={op: lambda *args, out_val, **kw: flops})",
                )
            moved = _moved(n)
            traffic += moved
            launches += bool(moved)
        flops.append(total)
    saved = _saved(seen["forward"].graph, seen["outputs"])
    raw = {
        "flops_forward": flops[0],
        "flops_backward": flops[1],
        "attention_flops": sum(attention),
        "saved_bytes": sum(saved),
        "traffic": sum(traffic),
    }
    clean = {k: _clean(sympy.sympify(e), table, multiples) for k, e in raw.items()}
    parameters = {
        p.data_ptr() if p.device.type != "meta" else id(p): p.numel() * p.element_size()
        for p in (*model.parameters(), *model.buffers())
    }
    return SymbolicCost(
        tuple(places),
        **clean,
        launches=sympy.Integer(launches),
        parameter_bytes=sympy.Integer(sum(parameters.values())),
        valid_for={k: v for k, v in sorted(multiples.items()) if v > 1},
        assumed=assumed,
    )


def _expression(x: Any) -> sympy.Expr:
    """A size as sympy."""
    return x.node.shape_env.replace(x.node.expr) if isinstance(x, torch.SymInt) else sympy.Integer(int(x))


def _bytes(value: Any) -> sympy.Expr:
    """Bytes of a tensor's elements."""
    count = sympy.Integer(value.element_size())
    for s in value.shape:
        count *= _expression(s)
    return count


def _tensors(value: Any) -> list[Any]:
    """Tensors of a node's value."""
    return [v for v in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(v, torch.Tensor)]


def _is_view(n: fx.Node) -> bool:
    """Does this node's (first) result share storage with an input?"""
    schema = getattr(n.target, "_schema", None)
    if schema is not None:
        return any(r.alias_info is not None for r in schema.returns) and not schema.is_mutable
    return getattr(n.target, "__name__", "") == "getitem"


def _moved(n: fx.Node) -> list[sympy.Expr]:
    """Bytes that one unfused op reads and writes."""
    if _is_view(n) or not _tensors(n.meta.get("val")):
        return []
    read = [_bytes(t) for a in n.all_input_nodes for t in _tensors(a.meta.get("val"))]
    return read + [_bytes(t) for t in _tensors(n.meta["val"])]


def _saved(graph: fx.Graph, outputs: int) -> list[sympy.Expr]:
    """Bytes of each distinct storage that the forward hands to the backward, parameters and inputs left out."""
    found: dict[tuple[fx.Node, int], Any] = {}
    result = next(n for n in graph.nodes if n.op == "output").args[0]
    for n in result[outputs:]:
        if not isinstance(n, fx.Node) or not isinstance(n.meta.get("val"), torch.Tensor):
            continue
        root, index = _storage(n)
        if root.op != "placeholder":
            value = root.meta["val"]
            found[root, index] = value[index] if isinstance(value, (tuple, list)) else value
    return [_bytes(t) for t in found.values()]


def _storage(n: fx.Node) -> tuple[fx.Node, int]:
    """The node (and which of its results) that owns a tensor's storage."""
    index = 0
    while True:
        if getattr(n.target, "__name__", "") == "getitem":
            parent, index = n.args  # type: ignore[assignment]
            if not _is_view(parent):  # type: ignore[arg-type]
                return parent, index  # type: ignore[return-value]
            n = parent  # type: ignore[assignment]
        elif n.op == "call_function" and _is_view(n):
            n, index = n.all_input_nodes[0], 0
        else:
            return n, index


def _clean(expression: sympy.Expr, table: dict[sympy.Symbol, sympy.Expr], multiples: dict[str, int]) -> sympy.Expr:
    """Our symbols, floor divisions resolved for sizes that divide, expanded."""
    FloorDiv, TorchMax = _compat.floor_div_and_max()
    e = expression.subs(table, simultaneous=True) if table else expression
    # ⌊H / 2⌋ with H = 2 h is h: a polynomial that holds for every size that fills its patches.
    for f in e.atoms(FloorDiv):
        base, by = f.args
        if base.is_Symbol and by.is_Integer:
            multiples[base.name] = int(sympy.ilcm(multiples.get(base.name, 1), by))
    if multiples:
        e = e.subs({symbol(d): m * symbol(d) for d, m in multiples.items()}, simultaneous=True)
    e = e.replace(FloorDiv, lambda a, b: a / b if (a / b).expand().is_integer else sympy.floor(a / b))
    e = e.replace(TorchMax, sympy.Max)
    if multiples:
        e = e.subs({symbol(d): symbol(d) / m for d, m in multiples.items()}, simultaneous=True)
    e = sympy.expand(e)
    left = e.free_symbols - {symbol(x.name) for x in e.free_symbols if x == symbol(x.name)}
    if left:
        raise ConfigError(
            f"the cost depends on sizes without a name: {', '.join(sorted(x.name for x in left))}",
            remedy="name the dimensions of every input that varies",
        )
    return e
