"""Messages as a later version of the protocol may send them."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

UNKNOWN_VALUE: Any = 99
"""A value that no enum of this version has."""

UNKNOWN_FIELD = bytes.fromhex("c2b204") + b"\5later"
"""A field that no message of this version has, as it is on the wire: number 9000, a string."""


def later(message: M) -> M:
    """A copy in which every message, the innermost too, has a field that this version lacks."""
    copy: M = type(message)()
    copy.CopyFrom(message)
    _extend(copy)
    return copy


def with_unknown(message: M, field: str) -> M:
    """A copy whose enum `field` has a value that this version lacks, and no other where it is
    repeated."""
    copy: M = type(message)()
    copy.CopyFrom(message)
    if message.DESCRIPTOR.fields_by_name[field].is_repeated:
        getattr(copy, field)[:] = [UNKNOWN_VALUE]
    else:
        setattr(copy, field, UNKNOWN_VALUE)
    return copy


def _extend(message: Message) -> None:
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in value if field.is_repeated else (value,):
            _extend(inner)
    message.MergeFromString(UNKNOWN_FIELD)
