"""The project's pages as GitHub shows them: headings, links, drawings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tools.proto_source import Enum, File, Message
from tools.protocol_reference import slug

ROOT = Path(__file__).parents[2]

_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_DRAWING = re.compile(r"^```mermaid\nsequenceDiagram\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ARROW = re.compile(r"\w+ ?--?>>[+-]? ?\w+:(.*)")
_DOTTED = re.compile(r"\b([A-Za-z]\w*)\.([A-Za-z]\w*)")


def anchors(text: str) -> list[str]:
    """The anchor of every heading; one that is taken gets a number, as GitHub does it."""
    found = []
    taken: Counter[str] = Counter()
    for heading in _HEADING.findall(_FENCED.sub("", text)):
        anchor = slug(heading)
        found.append(f"{anchor}-{taken[anchor]}" if taken[anchor] else anchor)
        taken[anchor] += 1
    return found


def broken_links(page: Path) -> list[str]:
    """The links of a page that lead nowhere within the project. Other sites are not asked."""
    headings: dict[Path, set[str]] = {}
    broken = []
    for link in _LINK.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        place, _, anchor = link.partition("#")
        target = page.parent / place if place else page
        if not target.exists():
            broken.append(link)
        elif anchor:
            if target not in headings:
                headings[target] = set(anchors(target.read_text(encoding="utf-8")))
            if anchor not in headings[target]:
                broken.append(link)
    return broken


def arrows(text: str) -> list[str]:
    """What is said on each arrow of a page's sequence diagrams."""
    lines = (line.strip() for drawing in _DRAWING.findall(text) for line in drawing.splitlines())
    return [match[1].strip() for line in lines if (match := _ARROW.fullmatch(line))]


def drawn_names(text: str) -> set[str]:
    """Every `Service.Method` and `Message.field` of a page's sequence diagrams."""
    return {match[0] for drawing in _DRAWING.findall(text) for match in _DOTTED.finditer(drawing)}


def names_of(files: Sequence[File]) -> set[str]:
    """Every method, field and enum value of the protos, by its owner."""
    names = set()
    for file in files:
        for service in file.services:
            names |= {f"{service.name}.{method.name}" for method in service.methods}
        for each in file.types:
            if isinstance(each, Message):
                names |= {f"{each.name}.{field.name}" for field in each.fields}
            elif isinstance(each, Enum):
                names |= {f"{each.name}.{value.name}" for value in each.values}
    return names
