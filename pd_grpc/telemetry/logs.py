"""Log lines of the `pd_grpc` loggers, for people or for machines.

A record may say whose work it is with `extra={"transfer_id": ..., "trace_id": ...}`. Only the
extras named in `FIELDS` are ever written: a new one is a decision taken here, for prompt text never
enters a log.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:  # generic in the stubs alone, before Python 3.11
    StreamHandler = logging.StreamHandler[TextIO]
else:
    StreamHandler = logging.StreamHandler

LOGGER = "pd_grpc"

FIELDS = {
    "event": "what happened, see the table of events",
    "instance": "who writes; on every line",
    "transfer_id": "the request between router, P and D",
    "attempt": "which try of it, from 1",
    "request_id": "the request as its client named it, or as the router did",
    "trace_id": "its trace, 32 hex digits, also where none is kept",
    "peer": "the other instance, by name or host:port; of a failed request the one that told of it",
    "code": "the status it travels with",
    "reason": "why, as in the status table",
}
"""The extras a line may carry, in the order they are written, and what they mean."""

MAX_MESSAGE_CHARS = 2048
MAX_FIELD_CHARS = 256
"""What is longer is cut: a peer says its own name, and may say what it likes."""

# A client names its requests: its name must not end a line or move a terminal's cursor.
_CONTROL = {c: f"\\x{c:02x}" for c in (*range(0x20), *range(0x7F, 0xA0))}
_CONTROL |= {c: f"\\u{c:04x}" for c in (0x2028, 0x2029)}


class LineHandler(StreamHandler):
    """Writes lines to a stream. `instance` is of those whose record says none."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter, instance: str) -> None:
        super().__init__(stream)
        self.instance = instance
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        if self.instance and not getattr(record, "instance", ""):
            record.instance = self.instance
        super().emit(record)


def configure_logging(
    format: Literal["human", "json"] = "human",
    level: str = "info",
    stream: TextIO | None = None,
    *,
    instance: str = "",
    everyone: bool = False,
) -> LineHandler:
    """Write the `pd_grpc` loggers to `stream` (None is standard error), in place of whatever an
    earlier call set up; `instance` is whose process it is. Loggers of others are left alone, unless
    `everyone` says that their warnings are to be lines like ours."""
    formatter = JsonFormatter() if format == "json" else HumanFormatter()
    handler = LineHandler(sys.stderr if stream is None else stream, formatter, instance)
    ours, others = logging.getLogger(LOGGER), logging.getLogger()
    for logger in (ours, others):
        for old in list(logger.handlers):
            if logger is ours or isinstance(old, LineHandler):
                logger.removeHandler(old)
    ours.addHandler(handler)
    ours.setLevel(level.upper())
    ours.propagate = False
    if everyone:
        others.addHandler(handler)
    return handler


class HumanFormatter(logging.Formatter):
    """`12:00:00.123 INFO  prefill.service  message  transfer_id=t-1 trace_id=...`

    A traceback follows on lines of its own, each set in."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        name = record.name.removeprefix(f"{LOGGER}.")
        line = f"{at} {record.levelname:<7} {name}  {_message(record)}"
        fields = " ".join(f"{key}={value}" for key, value in _fields(record).items())
        line = _one_line(f"{line}  {fields}" if fields else line)
        if record.exc_info:
            line += "".join(f"\n    {_one_line(each)}" for each in _traceback(record.exc_info))
        return line


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, the extras, exception. What is no
    Unicode text, which no JSON may hold, is escaped."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = "\n".join(_traceback(record.exc_info))
        return json.dumps({key: _plain(value) for key, value in line.items()})


def _traceback(raised: Any) -> list[str]:
    """The lines of a traceback, without what the exceptions say, which may be of a prompt: where
    they were raised, their types, and of the system's errors which one it was."""
    found: list[str] = []
    error: BaseException | None = raised[1]
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = "".join(traceback.format_tb(error.__traceback__)).splitlines()
        found = [*frames, _kind(error), *(["and then:"] if found else []), *found]
        hidden = error.__suppress_context__ and error.__cause__ is None
        error = None if hidden else error.__cause__ or error.__context__
    return found


def _kind(error: BaseException) -> str:
    number = error.errno if isinstance(error, OSError) else None
    return type(error).__qualname__ + (f": {os.strerror(number)}" if number else "")


def _message(record: logging.LogRecord) -> str:
    """Also of a record of others whose arguments do not fit: a line is no place to raise."""
    try:
        text = record.getMessage()
    except (TypeError, ValueError, KeyError):
        text = str(record.msg)
    return _cut(text, MAX_MESSAGE_CHARS)


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[:chars]}..."


def _one_line(text: str) -> str:
    return _unicode(text.translate(_CONTROL))


def _plain(value: object) -> object:
    return value if isinstance(value, int) else _unicode(str(value))


def _unicode(text: str) -> str:
    """Without lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """The extras that may be written, without the empty ones."""
    found = ((name, getattr(record, name, None)) for name in FIELDS)
    told = ((name, value) for name, value in found if value not in (None, ""))
    return {n: v if isinstance(v, int) else _cut(str(v), MAX_FIELD_CHARS) for n, v in told}
