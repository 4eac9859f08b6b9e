"""The tables of README.md that come from code."""

from __future__ import annotations

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
    TransportConfig,
    TurnConfig,
)
from pd_grpc.protocol.faults import STATUS_TABLE
from tools.marked_parts import Parts, table


class _TimeoutsAndSizes(Timeouts, Sizes):
    """What has tables of its own."""


def statuses() -> str:
    """Every fault: reason, when, code, the code a client sees, whether a retry helps."""
    rows = []
    for reason, row in STATUS_TABLE.items():
        client = "same" if row.client is row.code else f"`{row.client.name}`"
        code = f"`{row.code.name}`"
        rows.append((f"`{reason.value}`", row.when, code, client, row.retry.value))
    return table("reason | when | code | client sees | retry", rows)


def settings(section: type[BaseModel], without: type[BaseModel] = BaseModel) -> str:
    """Every field of a section of the configuration but those of another."""
    known = {row.flag for row in settings_table(without)}
    rows = [
        (f"`{row.flag}`", f"`{row.env}`", row.default, row.description)
        for row in settings_table(section)
        if row.flag not in known
    ]
    return table("flag | environment | default | what it is", rows)


TABLES: Parts = {
    "statuses": statuses,
    "timeouts": lambda: settings(Timeouts),
    "sizes": lambda: settings(Sizes),
    "engine": lambda: settings(EngineConfig),
    "turns": lambda: settings(TurnConfig),
    "transports": lambda: settings(TransportConfig),
    "servers": lambda: settings(ServerConfig, without=_TimeoutsAndSizes),
    "router": lambda: settings(RouterConfig, without=ServerConfig),
    "decode": lambda: settings(DecodeConfig, without=PrefillConfig),
}
