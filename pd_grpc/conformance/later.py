"""Messages as a later version of the protocol may send them."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

UNKNOWN_VALUE = 99
"""A value that no enum of this version has."""

_FIELD = 9000
_LENGTH_DELIMITED = 2


def later(message: M) -> M:
    """A copy in which every message, the innermost too, has a field that this version lacks."""
    copy: M = type(message)()
    copy.CopyFrom(message)
    _extend(copy)
    return copy


def _extend(message: Message) -> None:
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in value if field.is_repeated else (value,):
            _extend(inner)
    message.MergeFromString(_varint(_FIELD << 3 | _LENGTH_DELIMITED) + b"\5later")


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
