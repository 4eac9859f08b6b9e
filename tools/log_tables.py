"""The tables of docs/logs.md that come from code."""

from __future__ import annotations

import logging

from pd_grpc.protocol.failures import NOTED_WHERE_IT_AROSE
from pd_grpc.protocol.faults import Reason
from pd_grpc.telemetry.log_events import Event
from pd_grpc.telemetry.logs import FIELDS
from tools.marked_parts import Parts, table


def events() -> str:
    """Every event: its field, level, who writes it, when."""
    rows = [
        (
            f"`{event.field}`",
            logging.getLevelName(event.level).lower(),
            event.value.roles,
            event.value.when,
        )
        for event in Event
    ]
    return table("event | level | on | when", rows)


def fields() -> str:
    """Every field that a line may carry beside its time, level, logger and message."""
    return table("field | what it is", [(f"`{name}`", FIELDS[name]) for name in FIELDS])


def where() -> str:
    """The reasons whose line is written where they arise."""
    found = [f"`{reason.value}`" for reason in Reason if reason in NOTED_WHERE_IT_AROSE]
    return ", ".join(found[:-1]) + f" and {found[-1]}"


TABLES: Parts = {"events": events, "fields": fields, "where": where}
