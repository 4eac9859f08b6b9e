"""Writes the tables of README.md that come from code: `make tables`.

Each stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel

from pd_grpc.cli.settings import settings_table
from pd_grpc.protocol.config import (
    DecodeConfig,
    EngineConfig,
    PrefillConfig,
    RouterConfig,
    ServerConfig,
    Sizes,
    Timeouts,
)
from pd_grpc.protocol.faults import STATUS_TABLE


class _TimeoutsAndSizes(Timeouts, Sizes):
    """What has tables of its own."""


README = Path(__file__).parent.parent / "README.md"


def statuses() -> str:
    """Every fault: reason, when, code, the code a client sees, whether a retry helps."""
    lines = ["| reason | when | code | client sees | retry |", "|---|---|---|---|---|"]
    for reason, row in STATUS_TABLE.items():
        client = "same" if row.client is row.code else f"`{row.client.name}`"
        cells = (f"`{reason.value}`", row.when, f"`{row.code.name}`", client, row.retry.value)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def settings(section: type[BaseModel], without: type[BaseModel] = BaseModel) -> str:
    """Every field of a section of the configuration but those of another."""
    lines = ["| flag | environment | default | what it is |", "|---|---|---|---|"]
    known = {row.flag for row in settings_table(without)}
    for row in settings_table(section):
        if row.flag in known:
            continue
        lines.append(f"| `{row.flag}` | `{row.env}` | {row.default} | {row.description} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "statuses": statuses,
    "timeouts": lambda: settings(Timeouts),
    "sizes": lambda: settings(Sizes),
    "engine": lambda: settings(EngineConfig),
    "servers": lambda: settings(ServerConfig, without=_TimeoutsAndSizes),
    "router": lambda: settings(RouterConfig, without=ServerConfig),
    "decode": lambda: settings(DecodeConfig, without=PrefillConfig),
}


def with_tables(text: str) -> str:
    """The text with every table as the code has it. KeyError for a table nobody makes."""

    def table(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def main() -> int:
    """Rewrite README.md in place."""
    README.write_text(with_tables(README.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
