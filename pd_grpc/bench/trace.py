"""Recorded workloads: when requests came, and how long they were."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from pd_grpc.bench.workload import Length

EXCERPT = "azure_llm_2023_conv_10min.csv"
SOURCE = "Azure Public Dataset, LLM inference trace 2023, conversation; CC-BY 4.0"
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_COMPACT = ("at_ms", "prompt", "output")


class NoTrace(ValueError):
    """The file is not there or is no trace; the message says what was wanted."""


class Arrival(NamedTuple):
    """One request: seconds after the first, and its length."""

    at_s: float
    length: Length


def read_trace(path: Path | None, minutes: float) -> list[Arrival]:
    """The first minutes of a trace: `azure_llm_2023_conv.csv` or another of its columns, or the
    excerpt of ten minutes that comes with the package, for None. NoTrace."""
    try:
        text = (
            files("pd_grpc.bench").joinpath("data", EXCERPT).read_text(encoding="utf-8")
            if path is None
            else path.read_text(encoding="utf-8")
        )
    except OSError as error:
        raise NoTrace(f"--trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise NoTrace(f"--trace {path}: is no text in UTF-8") from error
    arrivals = list(_parse(text.splitlines(), str(path or EXCERPT)))
    found = [arrival for arrival in arrivals if arrival.at_s < minutes * 60]
    if not found:
        raise NoTrace(f"--trace {path}: has no request")
    return found


def _parse(lines: Iterable[str], name: str) -> Iterator[Arrival]:
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    columns = tuple(rows.fieldnames or ())
    if columns not in (_AZURE, _COMPACT):
        raise NoTrace(f"{name}: has the columns {', '.join(columns)}; wanted {', '.join(_AZURE)}")
    first = None
    for number, row in enumerate(rows, 1):
        try:
            at_s = int(row["at_ms"]) / 1000 if columns == _COMPACT else _seconds(row["TIMESTAMP"])
            length = Length(*(max(1, int(row[column])) for column in columns[1:]))
        except (TypeError, ValueError) as error:
            raise NoTrace(f"{name}: request {number} cannot be read: {error}") from error
        first = at_s if first is None else first
        yield Arrival(at_s - first, length)


def _seconds(timestamp: str) -> float:
    # Seven digits after the point are one more than datetime takes.
    whole, _, fraction = timestamp.partition(".")
    return datetime.fromisoformat(whole).replace(tzinfo=timezone.utc).timestamp() + float(
        f"0.{fraction or '0'}"
    )


def compact(arrivals: Iterable[Arrival]) -> str:
    """As the excerpt is kept."""
    lines = [f"# {SOURCE}", ",".join(_COMPACT)]
    lines += [f"{round(a.at_s * 1000)},{a.length.prompt},{a.length.output}" for a in arrivals]
    return "\n".join(lines) + "\n"
