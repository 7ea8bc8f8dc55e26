"""Graphs as rows of text, and runs of equal blocks.

A row is one node.  Rows of one numbered module (`blocks.3`) in a line make a section; sections of equal content under
successive numbers make a run, which is shown once: `blocks.1..38`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from graphopt.passes import ops_view, source

_NUMBER = re.compile(r"^(?P<list>.*?)\.?(?<![^.])(?P<index>\d+)(?=\.|$)")
_PARAMETER = re.compile(r"_(?:parameters|buffers)_(?P<name>\w+?)_?$")
_ROOT = re.compile(r"^l_(?:self|fn)?_*(?:dict_)?_*(?:modules_)?")


@dataclass(frozen=True)
class Row:
    """One node: its name (behind the path of a nested graph), what it computes, and where it comes from.

    `text` has `%0`, `%1`, .. where `inputs` go, so that equal nodes of equal blocks have equal texts.
    """

    name: str
    op: str
    text: str
    inputs: tuple[str, ...]
    value: str
    fqn: str
    where: str | None
    fused: bool

    @property
    def code(self) -> str:
        """`text` with the names of its inputs."""
        return re.sub(r"%(\d+)", lambda m: self.inputs[int(m[1])], self.text)

    def like(self) -> tuple[str, ...]:
        """What makes it equal to the row of another block."""
        return self.op, self.text, self.value, relative(self.fqn)


@dataclass
class Section:
    """Rows in a line that belong to one numbered module, or to none (`block` is "" then); `same` are equal ones."""

    block: str
    rows: list[Row]
    same: list[Section] = field(default_factory=list)

    @property
    def title(self) -> str:
        """`blocks.1..38`, or what owns the rows."""
        if self.rows[0].op == "placeholder":
            return "inputs and parameters"
        if not self.block:
            owners = list(dict.fromkeys(r.fqn.split(".")[0] or "(root)" for r in self.rows))
            return ", ".join(owners[:5]) + (", .." if len(owners) > 5 else "")
        return joined([self.block, *(s.block for s in self.same)])


def rows(gm: fx.GraphModule, path: str = "") -> list[Row]:
    """All rows of a graph, those of nested graphs where they are called."""
    out: list[Row] = []
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            child = getattr(gm, str(node.target), None)
            if isinstance(child, fx.GraphModule):
                out += rows(child, f"{path}{node.target}/")
        out.append(row(node, path))
    return out


def row(node: fx.Node, path: str = "") -> Row:
    """One node as a row."""
    inputs = tuple(path + n.name for n in node.all_input_nodes)
    fused = _name_of(node).startswith("graphopt.")
    place = "" if node.op in ("placeholder", "output") else source.fqn(node)
    return Row(path + node.name, node.op, text(node), inputs, value_text(node.meta.get("example_value")), place,
               source.where(node), fused)


def text(node: fx.Node) -> str:
    """What a node computes, other nodes by number: `layer_norm(%0, (5120,), None, None, 1e-06)`."""
    if node.op == "placeholder":
        return f"parameter {parameter_fqn(node.name)}" if _PARAMETER.search(node.name) else "input"
    if node.op == "output":
        return "output"
    number = {n: i for i, n in enumerate(node.all_input_nodes)}
    ours = _name_of(node).startswith("graphopt.")
    args = [_argument(a, number) for a in node.args]
    args += [f"{k}={_argument(v, number)}" for k, v in node.kwargs.items() if not (ours and v is None)]
    if node.op == "get_attr":
        return f"attribute {node.target}"
    return f"{_name_of(node)}({', '.join(args)})"


def parameter_fqn(name: str) -> str:
    """`l_self_modules_blocks_modules_0_parameters_weight_` -> `blocks.0.weight`."""
    inner = _ROOT.sub("", name).rstrip("_")
    return re.sub(r"_*(?:modules|parameters|buffers)_", ".", inner).strip(".")


def _name_of(node: fx.Node) -> str:
    if node.op == "call_method":
        return f".{node.target}"
    target: Any = node.target
    packet = getattr(target, "_schema", None)
    if packet is not None:
        return re.sub(r"(_triton)?_[0-9a-f]{12}$", "", str(packet.name).replace("::", "."))
    name = getattr(target, "__name__", str(target))
    return ops_view.canonical(node) if name in ("getitem", "setitem") and ops_view.canonical(node) else name


def _argument(x: Any, number: dict[fx.Node, int]) -> str:
    if isinstance(x, fx.Node):
        return f"%{number[x]}"
    if isinstance(x, (tuple, list)):
        inner = ", ".join(_argument(a, number) for a in x[:6]) + (", .." if len(x) > 6 else "")
        return f"({inner}{',' * (len(x) == 1)})" if isinstance(x, tuple) else f"[{inner}]"
    if isinstance(x, slice):
        parts = [x.start, x.stop] if x.step is None else [x.start, x.stop, x.step]
        return ":".join("" if p is None else _argument(p, number) for p in parts)
    if x is Ellipsis:
        return "..."
    return str(x).removeprefix("torch.")[:60]


def value_text(value: Any) -> str:
    """`bf16[1, 32760, 5120]` for a tensor, a tuple of those, else the value's type."""
    import torch

    if isinstance(value, torch.Tensor):
        return f"{short_dtype(str(value.dtype))}[{', '.join(str(s) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(value_text(v) for v in value[:3])}{', ..' if len(value) > 3 else ''})"
    return "" if value is None else type(value).__name__


def short(where: str | None) -> str:
    """`file:line` without the folders in front of the package it belongs to."""
    if not where:
        return ""
    for marker in ("/site-packages/", "/dist-packages/"):
        _, found, rest = where.rpartition(marker)
        if found:
            return rest
    return os.path.relpath(where) if where.startswith(os.getcwd() + os.sep) else where


def short_dtype(name: str) -> str:
    """`torch.bfloat16` or `bfloat16` -> `bf16`."""
    name = name.removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "int64": "i64"}.get(name, name)


# -- equal blocks ------------------------------------------------------------------------------------


def block_of(fqn: str) -> str:
    """`blocks.3.norm1` -> `blocks.3`; "" when no part is a number."""
    found = _NUMBER.match(fqn)
    return fqn[: found.end()] if found else ""


def relative(fqn: str) -> str:
    """`blocks.3.norm1` -> `blocks.#.norm1`."""
    found = _NUMBER.match(fqn)
    return fqn if found is None else f"{fqn[:found.start('index')]}#{fqn[found.end():]}"


def index_of(fqn: str) -> int:
    """`blocks.3.norm1` -> 3; -1 when no part is a number."""
    found = _NUMBER.match(fqn)
    return int(found["index"]) if found else -1


def joined(fqns: Iterable[str]) -> str:
    """`blocks.0.norm1`, `blocks.1.norm1`, `blocks.3.norm1` -> `blocks.0..1,3.norm1`."""
    names = list(dict.fromkeys(fqns))
    groups: dict[str, list[int]] = {}
    for name in names:
        groups.setdefault(relative(name), []).append(index_of(name))
    return ", ".join(key.replace("#", ranges(numbers), 1) or "(root)" for key, numbers in groups.items())


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> `0..2,5`."""
    out: list[list[int]] = []
    for n in sorted(set(numbers)):
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in out)


MOST_PARTS = 8  # of a repeating unit: a block that a kernel reaches across is cut into a few


def sections(all_rows: Iterable[Row]) -> Iterator[Section]:
    """Rows cut where the owning block changes, repeating units of successive blocks folded into one.

    A unit is usually one block.  Where a kernel covers the end of one block and the start of the next, it is a block
    with what stands between it and the next one.
    """
    cut: list[Section] = []
    for r in all_rows:
        block = block_of(r.fqn)
        alike = bool(cut) and (cut[-1].rows[0].op == "placeholder") == (r.op == "placeholder")
        if cut and cut[-1].block == block and alike:
            cut[-1].rows.append(r)
        else:
            cut.append(Section(block, [r]))
    tokens = [(relative(s.block), index_of(s.block), tuple(r.like() for r in s.rows)) for s in cut]
    at = 0
    while at < len(cut):
        size, times = _unit(tokens, at)
        units = [_joined(cut[k:k + size]) for k in range(at, at + size * times, size)]
        units[0].same = units[1:]
        yield units[0]
        at += size * times


def _unit(tokens: list[tuple[str, int, Any]], at: int) -> tuple[int, int]:
    """The repeating unit that starts at a place: how many sections it has, and how often it stands there in a row."""
    best = (1, 1)
    for size in range(1, MOST_PARTS + 1):
        times = 1
        while _repeats(tokens, at + (times - 1) * size, size):
            times += 1
        if times > 1 and size * times > best[0] * best[1]:
            best = (size, times)
    return best


def _repeats(tokens: list[tuple[str, int, Any]], at: int, size: int) -> bool:
    """Do the sections after the next `size` ones equal these, in the next block?"""
    if at + 2 * size > len(tokens) or all(tokens[at + k][1] < 0 for k in range(size)):
        return False
    for k in range(size):
        (name, i, content), (other, j, theirs) = tokens[at + k], tokens[at + size + k]
        if name != other or content != theirs or (j - i != 1 if i >= 0 else j >= 0):
            return False
    return True


def _joined(parts: list[Section]) -> Section:
    """Several sections in a line as one, called by its largest block."""
    largest = max(parts, key=lambda s: (bool(s.block), len(s.rows)))
    return Section(largest.block, [r for s in parts for r in s.rows])
