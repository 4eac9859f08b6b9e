"""W3C baggage: what a caller wants everyone along the way to be told, passed on as it came.

It is a caller's text of any size, and travels as metadata, for which gRPC has 8 KiB in all. So it
is bounded, and what is too long or malformed is dropped; it never becomes part of a span or a log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from opentelemetry import baggage
from opentelemetry.context import Context, create_key, set_value

FIELD = "baggage"
"""The metadata key."""
MOST_BYTES = 4096
"""Half of what gRPC has for all metadata; W3C asks for twice as much, where there is room."""
MOST_MEMBERS = 64

_KEY = create_key("pd_grpc.baggage")
_TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_VALUE = r"[\x21\x23-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e]*"
_OWS = r"[ \t]*"
_PROPERTY = rf"{_OWS};{_OWS}{_TOKEN}(?:{_OWS}={_OWS}{_VALUE})?"
_MEMBER = re.compile(rf"{_OWS}{_TOKEN}{_OWS}={_OWS}{_VALUE}(?:{_PROPERTY})*{_OWS}")


def read(values: Sequence[str], context: Context) -> Context:
    """`context` with the baggage of these metadata values; as it is when they are too long, too
    many or malformed."""
    line = ",".join(values)
    return set_value(_KEY, line, context) if line and _is_sound(line) else context


def written(context: Context) -> str:
    """The metadata value that passes the baggage of a context on; empty when it has none."""
    kept = context.get(_KEY)
    if isinstance(kept, str):
        return kept
    entries = baggage.get_all(context)
    return _encoded(entries) if entries else ""


def handed_on(line: str, context: Context) -> Context:
    """`context` with what `written` has returned."""
    return set_value(_KEY, line, context) if line else context


def _is_sound(line: str) -> bool:
    if len(line) > MOST_BYTES or line.count(",") >= MOST_MEMBERS:
        return False
    return all(_MEMBER.fullmatch(member) for member in line.split(","))


def _encoded(entries: Mapping[str, object]) -> str:
    """What a program has put into its context by OpenTelemetry's interface."""
    line = ",".join(f"{quote(key, safe='')}={quote(str(value))}" for key, value in entries.items())
    return line if _is_sound(line) else ""
