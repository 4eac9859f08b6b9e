"""Peers of another age: what they leave out, what they add, and which values they know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.message import Message

from pd_grpc.conformance.later import UNKNOWN_FIELD, UNKNOWN_VALUE
from tests.compat.middleman import walk


def messages_of(*services: ServiceDescriptor) -> dict[str, Descriptor]:
    """Every message that the services carry, by name."""
    found: dict[str, Descriptor] = {}

    def take(message: Descriptor) -> None:
        ours = message.file.package == "pd_grpc.v1" and not message.GetOptions().map_entry
        if not ours or message.name in found:
            return
        found[message.name] = message
        for field in message.fields:
            if field.message_type is not None:
                take(field.message_type)

    for service in services:
        for method in service.methods:
            take(method.input_type)
            take(method.output_type)
    return found


def fields_of(*services: ServiceDescriptor) -> Iterator[tuple[str, FieldDescriptor]]:
    """Every field of those messages, as Message.field."""
    for name, message in messages_of(*services).items():
        for field in message.fields:
            yield f"{name}.{field.name}", field


class Strip:
    """Leaves out one field of one message, wherever it is."""

    def __init__(self, field: str) -> None:
        self._message, _, self._field = field.partition(".")
        self.met = 0
        """How often the field was there."""

    def __call__(self, message: Message) -> None:
        for inner in self._of_kind(walk(message)):
            if any(field.name == self._field for field, _ in inner.ListFields()):
                self.met += 1
                inner.ClearField(self._field)

    def _of_kind(self, messages: Iterable[Message]) -> Iterator[Message]:
        return (each for each in messages if each.DESCRIPTOR.name == self._message)


class FutureValue(Strip):
    """Gives an enum a value that nobody knows yet."""

    def __call__(self, message: Message) -> None:
        for inner in self._of_kind(walk(message)):
            self.met += 1
            if inner.DESCRIPTOR.fields_by_name[self._field].is_repeated:
                getattr(inner, self._field)[:] = [UNKNOWN_VALUE]
            else:
                setattr(inner, self._field, UNKNOWN_VALUE)


class FutureValueWhereSet(FutureValue):
    """The same where the enum has a value."""

    def _of_kind(self, messages: Iterable[Message]) -> Iterator[Message]:
        found = super()._of_kind(messages)
        return (m for m in found if any(f.name == self._field for f, _ in m.ListFields()))


class AddUnknown:
    """Adds fields that nobody knows yet to every message within the message."""

    def __init__(self) -> None:
        self.met: set[str] = set()
        """The kinds of messages that had them added."""
        self.fields: set[str] = set()
        """The fields that were set in them."""

    def __call__(self, message: Message) -> None:
        for inner in reversed(walk(message)):
            kind = inner.DESCRIPTOR.name
            self.met.add(kind)
            self.fields |= {f"{kind}.{field.name}" for field, _ in inner.ListFields()}
            inner.MergeFromString(UNKNOWN_FIELD)
