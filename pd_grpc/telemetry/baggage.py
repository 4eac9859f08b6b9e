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
# One class each and no repetition in another: whatever a caller writes is read in one pass.
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(r"[\x21\x23-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e]*")
_BLANKS = " \t"


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
    return all(_is_member(member) for member in line.split(","))


def _is_member(text: str) -> bool:
    """`key = value`, and behind it any number of `; property` and `; property = value`."""
    pair, *properties = text.split(";")
    return "=" in pair and all(_is_pair(each) for each in (pair, *properties))


def _is_pair(text: str) -> bool:
    key, _, value = text.partition("=")
    found = _TOKEN.fullmatch(key.strip(_BLANKS)) and _VALUE.fullmatch(value.strip(_BLANKS))
    return found is not None


def _encoded(entries: Mapping[str, object]) -> str:
    """What a program has put into its context by OpenTelemetry's interface."""
    line = ",".join(f"{quote(key, safe='')}={quote(str(value))}" for key, value in entries.items())
    return line if _is_sound(line) else ""
