"""Log lines of the `pd_grpc` loggers, for people or for machines.

A record may say whose work it is with `extra={"transfer_id": ..., "trace_id": ...}`. Only the
extras named in `FIELDS` are ever written: a new one is a decision taken here, for prompt text never
enters a log.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
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
# Nor must it turn the line around, or hide a part of it.
_CONTROL |= {
    c: f"\\u{c:04x}"
    for c in (0xAD, 0x61C, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070))
}
_CONTROL |= {0xFEFF: "\\ufeff"}
_BARE = re.compile(r"[^\s\"=]+")


OTHERS_LINES = 10
OTHERS_PERIOD_S = 10.0
"""Lines of one logger that is not ours, in so many seconds: a library may have one for each call
that fails, and fail it for as long as a peer is broken."""


@dataclass
class _Flood:
    ends: float
    written: int = 0
    left_out: int = 0


class LineHandler(StreamHandler):
    """Writes lines to a stream. `instance` is of those whose record says none. Of each logger of
    others so many are written in a period; the next period begins with how many were not."""

    def __init__(
        self,
        stream: TextIO,
        formatter: logging.Formatter,
        instance: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(stream)
        self.instance = instance
        self.setFormatter(formatter)
        self._now = now
        self._others: dict[str, _Flood] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held."""
        if self.instance and not getattr(record, "instance", ""):
            record.instance = self.instance
        if record.name.partition(".")[0] != LOGGER and not self._has_room(record):
            return
        super().emit(record)

    def _has_room(self, record: logging.LogRecord) -> bool:
        now = self._now()
        flood = self._others.get(record.name)
        if flood is None or flood.ends <= now:
            if flood is not None and flood.left_out:
                told = logging.makeLogRecord(vars(record))
                told.msg, told.args = "%d lines of this kind were left out", (flood.left_out,)
                told.exc_info = None
                super().emit(told)
            flood = self._others[record.name] = _Flood(now + OTHERS_PERIOD_S)
        flood.written += 1
        if flood.written <= OTHERS_LINES:
            return True
        flood.left_out += 1
        return False


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
        fields = " ".join(f"{key}={_quoted(value)}" for key, value in _fields(record).items())
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


def _quoted(value: object) -> str:
    """As it is where nobody can take it for several fields."""
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


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
