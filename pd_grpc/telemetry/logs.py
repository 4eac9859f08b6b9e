"""Log lines of the `pd_grpc` loggers, for people or for machines.

A record may say whose work it is with `extra={"transfer_id": ..., "trace_id": ...}`. Only the
extras named in `FIELDS` are ever written: a new one is a decision taken here, for prompt text never
enters a log.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Literal, TextIO

LOGGER = "pd_grpc"

FIELDS = ("instance", "transfer_id", "attempt", "request_id", "trace_id", "peer", "code", "reason")
"""The extras a line may carry, in the order they are written."""

# A client names its requests: its name must not end a line or move a terminal's cursor.
_CONTROL = {c: f"\\x{c:02x}" for c in (*range(0x20), *range(0x7F, 0xA0))}
_CONTROL |= {c: f"\\u{c:04x}" for c in (0x2028, 0x2029)}


def configure_logging(
    format: Literal["human", "json"] = "human", level: str = "info", stream: TextIO | None = None
) -> None:
    """Write the `pd_grpc` loggers to `stream` (None is standard error), in place of whatever an
    earlier call set up. Loggers of others are left alone."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if format == "json" else HumanFormatter())
    logger = logging.getLogger(LOGGER)
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


class HumanFormatter(logging.Formatter):
    """`12:00:00.123 INFO  prefill.service  message  transfer_id=t-1 trace_id=...`"""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        name = record.name.removeprefix(f"{LOGGER}.")
        line = f"{at} {record.levelname:<7} {name}  {record.getMessage()}"
        fields = " ".join(f"{key}={value}" for key, value in _fields(record).items())
        line = (f"{line}  {fields}" if fields else line).translate(_CONTROL)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, the extras, exception."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """The extras that may be written, without the empty ones."""
    found = ((name, getattr(record, name, None)) for name in FIELDS)
    return {name: value for name, value in found if value not in (None, "")}
