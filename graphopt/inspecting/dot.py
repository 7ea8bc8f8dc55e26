"""A graph in Graphviz's language: one cluster per block, equal blocks drawn once."""

from __future__ import annotations

from torch import fx

from graphopt.inspecting.nodes import Section, rows, sections


def dot(gm: fx.GraphModule, title: str, collapse: bool = True) -> str:
    """The text of a .dot file.  Parameters are left out; `collapse=False` draws every block."""
    lines = [
        f"digraph {_quote(title)} {{", "  rankdir=TB; compound=true;",
        '  node [shape=box, style="rounded,filled", fillcolor="#f7f7f5", color="#999999", fontname="Helvetica", '
        "fontsize=10];", '  edge [color="#888888"];',
    ]
    all_rows = [r for r in rows(gm) if not (r.op == "placeholder" and r.text.startswith("parameter"))]
    drawn: dict[str, str] = {}  # a row -> the row drawn for it
    shown: list[tuple[int, Section]] = []
    for i, section in enumerate(sections(all_rows)):
        shown.append((i, section))
        for other in section.same:
            for mine, theirs in zip(section.rows, other.rows):
                drawn[theirs.name] = mine.name if collapse else theirs.name
        for r in section.rows:
            drawn[r.name] = r.name
    for i, section in shown:
        copies = [section] if collapse else [section, *section.same]
        for j, one in enumerate(copies):
            title = section.title if collapse else one.title
            lines += _cluster(f"{i}_{j}", title, one, len(section.same) + 1 if collapse else 1)
    edges: dict[tuple[str, str], None] = {}
    for r in all_rows:
        for source in r.inputs:
            if source in drawn and r.name in drawn:
                edges[drawn[source], drawn[r.name]] = None
    lines += [f"  {_quote(a)} -> {_quote(b)};" for a, b in edges]
    return "\n".join([*lines, "}", ""])


def _cluster(key: str, title: str, section: Section, times: int) -> list[str]:
    label = f"{title}  x{times}" if times > 1 else title
    lines = [f"  subgraph cluster_{key} {{", f'    label={_quote(label)}; color="#cccccc"; fontname="Helvetica";']
    for r in section.rows:
        colour = ', fillcolor="#dcebdc", color="#3c7a3c"' if r.fused else ""
        name = r.text.split("(")[0]
        lines.append(f"    {_quote(r.name)} [label={_quote(f'{name}' + chr(10) + r.value)}{colour}];")
    return [*lines, "  }"]


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
