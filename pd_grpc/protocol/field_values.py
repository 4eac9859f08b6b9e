"""From Python values to fields of a message, with errors in words of the caller's.

protobuf takes what it can carry, numpy's numbers too, and says of the rest what its own code was
doing. Here an error names the argument, what it takes, and what came.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Set
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

_KINDS = {
    FieldDescriptor.TYPE_INT32: "whole numbers",
    FieldDescriptor.TYPE_UINT32: "whole numbers",
    FieldDescriptor.TYPE_UINT64: "whole numbers",
    FieldDescriptor.TYPE_FLOAT: "numbers",
    FieldDescriptor.TYPE_DOUBLE: "numbers",
    FieldDescriptor.TYPE_BOOL: "true or false",
    FieldDescriptor.TYPE_STRING: "text",
    FieldDescriptor.TYPE_BYTES: "bytes",
}
"""What fields of these types hold, in the plural; a request has no others."""
_UNCOUNTED = ("true or false", "text", "bytes")

_BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
_SHOWN_BITS = 128
"""A longer number is not written out; Python itself refuses to from some 4,300 digits on."""

_CANNOT_CARRY = (TypeError, ValueError, OverflowError)
"""How protobuf refuses a value."""


class RequestError(ValueError):
    """A request that cannot be sent: `field` is the argument at fault, `message` says what is
    allowed, `part` in what of the argument, such as `item 3`."""

    def __init__(self, field: str, message: str, part: str = "") -> None:
        super().__init__(f"{field}: {message}" + (f" ({part})" if part else ""))
        self.field = field
        self.message = message
        self.part = part


def set_field(message: Any, name: str, value: Any, argument: str = "", part: str = "") -> None:
    """Set a field by its name, or add what is iterated over, or a mapping, to it. RequestError
    names `argument`, which is the field's name unless told, and `part`, what of it, if that cannot
    be."""
    argument = argument or name
    field = message.DESCRIPTOR.fields_by_name.get(name)
    entry = field and field.message_type
    if field is None or (entry is not None and not entry.GetOptions().map_entry):
        raise RequestError(argument, "is no option of a request")
    if entry is not None:
        _add_mapping(getattr(message, name), entry, value, argument)
    elif field.is_repeated:
        _add_items(message, field, value, argument)
    else:
        try:
            setattr(message, name, value)
        except _CANNOT_CARRY as error:
            raise RequestError(argument, _must_be(field, value), part) from error


def items_of(argument: str, wanted: str, value: Any) -> list[Any]:
    """What is iterated over; RequestError where `argument` is nothing like that. Text counts as
    one value, as it does to whoever gives it, and a set has no order."""
    if not isinstance(value, str | bytes | bytearray | Mapping | Set):
        with contextlib.suppress(TypeError):
            return list(value)
    raise type_error(argument, f"a sequence of {wanted}", value)


def type_error(argument: str, wanted: str, value: Any) -> RequestError:
    """Says that `argument` takes what is `wanted`, and not the type of `value`."""
    return RequestError(argument, f"must be {wanted}, not {type_name(value)}")


def _add_items(message: Any, field: FieldDescriptor, value: Any, argument: str) -> None:
    items = items_of(argument, _KINDS[field.type], value)
    try:
        getattr(message, field.name).extend(items)
    except _CANNOT_CARRY as error:
        index = next(i for i, item in enumerate(items) if not _takes_item(message, field, item))
        told = _must_be(field, items[index])
        raise RequestError(argument, told, f"item {index}") from error


def _takes_item(message: Any, field: FieldDescriptor, item: Any) -> bool:
    alone = type(message)()
    try:
        getattr(alone, field.name).append(item)
    except _CANNOT_CARRY:
        return False
    return True


def _add_mapping(entries: Any, entry: Descriptor, value: Any, argument: str) -> None:
    of_keys, of_values = (entry.fields_by_name[name] for name in ("key", "value"))
    if not isinstance(value, Mapping):
        wanted = f"a mapping from {_KINDS[of_keys.type]} to {_KINDS[of_values.type]}"
        raise type_error(argument, wanted, value)
    for key, each in value.items():
        try:
            entries[key] = each
        except _CANNOT_CARRY as error:
            if not _takes_key(entry, key):
                raise RequestError(argument, _must_be(of_keys, key), "a key") from error
            raise RequestError(argument, _must_be(of_values, each), f"of key {key}") from error


def _takes_key(entry: Descriptor, key: Any) -> bool:
    alone: Any = GetMessageClass(entry)()
    try:
        alone.key = key
    except _CANNOT_CARRY:
        return False
    return True


def _must_be(field: FieldDescriptor, value: Any) -> str:
    """What a value that this field has refused should be."""
    if field.cpp_type in _BOUNDS and (number := _whole(value)) is not None:
        return _bound(*_BOUNDS[field.cpp_type], number)
    if field.cpp_type in _FLOATS and _too_large(value):
        return "must be a number that 64 bits can hold"
    if field.type == FieldDescriptor.TYPE_STRING and isinstance(value, str):
        return "must be text that UTF-8 can carry"
    kinds = _KINDS[field.type]
    wanted = kinds if kinds in _UNCOUNTED else f"a {kinds.removesuffix('s')}"
    return f"must be {wanted}, not {type_name(value)}"


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _too_large(value: Any) -> bool:
    try:
        float(value)
    except OverflowError:
        return True
    except (TypeError, ValueError):
        pass
    return False


def _bound(low: int, high: int, number: int) -> str:
    shown = f"{number}" if number.bit_length() <= _SHOWN_BITS else f"{number.bit_length()} bits"
    return f"must be {f'at least {low}' if number < low else f'at most {high}'}, not {shown}"


def type_name(value: Any) -> str:
    """What kind of value came, in an error."""
    return "None" if value is None else type(value).__name__
