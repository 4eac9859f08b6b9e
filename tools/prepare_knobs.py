"""Writes the table of docs/prepare.md, part of `make docs`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from pd_grpc.cli.settings import settings_table
from pd_grpc.protocol.config import PrefillConfig
from tools.marked_parts import table, with_parts

PAGE = Path(__file__).parent.parent / "docs" / "prepare.md"

KNOBS = (
    "prepare-window",
    "prepare-total",
    "prepare-ahead",
    "prefill-queue",
    "prefill-batch",
    "backoff-s",
    "backoff-max-s",
    "backoff-jitter",
    "breaker-open-s",
    "breaker-max-s",
    "allocate-margin-s",
    "call-s",
    "connect-s",
)
"""In the order in which a request meets them."""


def knobs() -> str:
    """Every setting of the pool: flag, environment, default, meaning."""
    rows = {row.flag: row for row in settings_table(PrefillConfig)}
    found = [rows[f"--{name}"] for name in KNOBS]
    cells = [(f"`{r.flag}`", f"`{r.env}`", r.default, r.description) for r in found]
    return table("flag | environment | default | what it is", cells)


PARTS: dict[str, Callable[[], str]] = {"knobs": knobs}


def main() -> int:
    """Rewrite the page in place."""
    PAGE.write_text(with_parts(PAGE.read_text(), PARTS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
