"""The table of docs/prepare.md."""

from __future__ import annotations

from pd_grpc.cli.settings import settings_table
from pd_grpc.protocol.config import PrefillConfig
from tools.marked_parts import Parts, table

KNOBS = (
    "prepare-window",
    "prepare-total",
    "prepare-ahead",
    "prefill-queue",
    "prefill-batch",
    "serving-quantile",
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


PARTS: Parts = {"knobs": knobs}
