"""What a pass replaced by what: one change per operator it put in, and whatever else changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from graphopt.inspecting.nodes import Row, joined, relative, rows
from graphopt.passes.record import Kernel, PassRecord


@dataclass
class Change:
    """Nodes that went and nodes that came; `same` are equal changes in other blocks."""

    title: str
    rule: str
    before: list[Row]
    after: list[Row]
    same: list[Change] = field(default_factory=list)

    @property
    def heading(self) -> str:
        """Its place and those of its equals, equal blocks collapsed."""
        return joined([self.title, *(c.title for c in self.same)])

    def like(self) -> tuple[object, ...]:
        """What makes two changes equal."""
        return self.rule, relative(self.title), _bare(self.before), _bare(self.after)


def _bare(lines: list[Row]) -> tuple[tuple[str, str], ...]:
    return tuple((r.text, r.value) for r in lines)


def changes(before: fx.GraphModule, after: fx.GraphModule, record: PassRecord, rule: str | None = None) -> list[Change]:
    """Every change of one pass, in graph order; `rule` keeps those of one rule."""
    old, new = rows(before), rows(after)
    old_names, new_names = {r.name for r in old}, {r.name for r in new}
    gone = {r.name: r for r in old if r.name not in new_names}
    came = {r.name: r for r in new if r.name not in old_names}
    out: list[Change] = []
    for kernel in _forward(record):
        left = [r for n in kernel.replaced if (r := _named(gone, n)) is not None]
        right = [r for n in kernel.placed if (r := _named(came, n)) is not None]
        for r in left:
            gone.pop(r.name, None)
        for r in right:
            came.pop(r.name, None)
        place = kernel.sites[-1].fqn
        out.append(Change(place, kernel.rule, left, right))
    if rule is None and (gone or came):
        out.append(Change("", "around them", list(gone.values()), list(came.values())))
    elif rule is not None:
        out = [c for c in out if c.rule == rule]
    return out


def folded(found: list[Change]) -> Iterator[Change]:
    """Equal changes of different blocks as one, in order of the first."""
    groups: dict[tuple[object, ...], Change] = {}
    for c in found:
        first = groups.get(c.like())
        if first is None:
            groups[c.like()] = Change(c.title, c.rule, c.before, c.after)
        else:
            first.same.append(c)
    yield from groups.values()


def _forward(record: PassRecord) -> list[Kernel]:
    return [k for k in record.kernels if k.direction == "forward"]


def _named(among: dict[str, Row], name: str) -> Row | None:
    """A row by the name of its node; in a nested graph it stands behind a path."""
    if name in among:
        return among[name]
    return next((r for key, r in among.items() if key.endswith("/" + name)), None)


def side_by_side(change: Change, width: int) -> list[str]:
    """A change as two columns of text."""
    left, right = ([f"{r.name} = {r.code}  {r.value}" for r in part] for part in (change.before, change.after))
    half = max(20, (width - 3) // 2)
    lines = []
    for i in range(max(len(left), len(right))):
        a, b = (column[i] if i < len(column) else "" for column in (left, right))
        lines.append(f"{_cut(a, half):{half}} | {_cut(b, half)}".rstrip())
    return lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 2] + ".."
