"""The parts of a document that come from code: each stands between `<!-- KIND: NAME -->` and
`<!-- end -->`, where KIND is `table` or `generated`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

Parts: TypeAlias = Mapping[str, Callable[[], str]]
"""What makes each part, by its name."""

_PART = re.compile(r"<!-- (table|generated): (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def with_parts(text: str, parts: Parts) -> str:
    """The text with every part as the code has it. KeyError for a part nobody makes."""

    def part(match: re.Match[str]) -> str:
        return f"<!-- {match[1]}: {match[2]} -->\n{parts[match[2]]()}\n<!-- end -->"

    return _PART.sub(part, text)


def part_names(text: str) -> list[str]:
    """The names of the parts that a text has room for, in its order."""
    return [match[2] for match in _PART.finditer(text)]


def table(columns: str, rows: Iterable[tuple[str, ...]]) -> str:
    """A markdown table: `columns` are the headings, divided by ` | `; cells may hold any text."""
    heads = columns.split(" | ")
    lines = [f"| {columns} |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = " | ".join(cell.replace("|", "\\|") for cell in row)
        lines.append(f"| {cells} |")
    return "\n".join(lines)
