"""The protos of pd_grpc.v1 as buf reads them: descriptors, with the comments of their source."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    EnumValueDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).parent.parent
PACKAGE = "pd_grpc.v1"
BUF_LIMIT_S = 60

ORDER = (
    "types",
    "sampling",
    "layout",
    "decode",
    "transfer",
    "shm",
    "prefill",
    "inference",
    "admin",
)
"""The files in the order of the conversation; one that is not named here comes last."""

# Where descriptor.proto keeps what a comment can stand at, as paths of source locations go.
_SYNTAX = FileDescriptorProto.SYNTAX_FIELD_NUMBER
_MESSAGES = FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER
_ENUMS = FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER
_SERVICES = FileDescriptorProto.SERVICE_FIELD_NUMBER
_FIELDS = DescriptorProto.FIELD_FIELD_NUMBER
_ONEOFS = DescriptorProto.ONEOF_DECL_FIELD_NUMBER
_VALUES = EnumDescriptorProto.VALUE_FIELD_NUMBER
_METHODS = ServiceDescriptorProto.METHOD_FIELD_NUMBER

_SCALARS = {
    kind.number: kind.name.removeprefix("TYPE_").lower()
    for kind in FieldDescriptorProto.Type.DESCRIPTOR.values
}
_NAMED = (FieldDescriptorProto.TYPE_MESSAGE, FieldDescriptorProto.TYPE_ENUM)


@dataclass(frozen=True)
class Field:
    """A field of a message. `kind` is a scalar's name or the full name of a message or enum;
    `label` is empty, `repeated`, `optional` or `map`, whose keys are of kind `key`. `oneof` is the
    name of the oneof that it belongs to, if any."""

    number: int
    name: str
    kind: str
    label: str
    key: str
    oneof: str
    comment: str


@dataclass(frozen=True)
class Message:
    """A message, `oneofs` with their comments, `reserved` the numbers and names given up."""

    name: str
    comment: str
    fields: tuple[Field, ...]
    oneofs: dict[str, str]
    reserved: tuple[str, ...]


@dataclass(frozen=True)
class Value:
    """A value of an enum."""

    number: int
    name: str
    comment: str


@dataclass(frozen=True)
class Enum:
    """An enum, `reserved` the numbers and names given up."""

    name: str
    comment: str
    values: tuple[Value, ...]
    reserved: tuple[str, ...]


@dataclass(frozen=True)
class Method:
    """A method of a service; `request` and `answer` are full names of messages."""

    name: str
    comment: str
    request: str
    answer: str
    client_streams: bool
    server_streams: bool


@dataclass(frozen=True)
class Service:
    """A service."""

    name: str
    comment: str
    methods: tuple[Method, ...]


@dataclass(frozen=True)
class File:
    """One proto file; `types` are its messages and enums in the order of the source."""

    name: str
    comment: str
    services: tuple[Service, ...]
    types: tuple[Message | Enum, ...]


def read_protos() -> list[File]:
    """Every file of the package, in the order of the conversation. CalledProcessError when buf
    cannot read them; its words are on stderr."""
    buf = Path(sys.executable).with_name("buf")
    built = subprocess.run(
        [buf, "build", "--output", "-#format=binpb"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=BUF_LIMIT_S,
        check=True,
    )
    files = FileDescriptorSet.FromString(built.stdout).file
    return sorted(
        (_Reader(file).file() for file in files if file.package == PACKAGE),
        key=lambda file: (ORDER.index(file.name) if file.name in ORDER else len(ORDER), file.name),
    )


class _Reader:
    """Reads one file; the comments stand beside the descriptors, by path."""

    def __init__(self, descriptor: FileDescriptorProto) -> None:
        self._descriptor = descriptor
        locations = descriptor.source_code_info.location
        self._comments = {tuple(at.path): at.leading_comments for at in locations}
        self._lines = {tuple(at.path): at.span[0] for at in locations}

    def file(self) -> File:
        descriptor = self._descriptor
        name = descriptor.name.rpartition("/")[2].removesuffix(".proto")
        services = tuple(self._service(i, s) for i, s in enumerate(descriptor.service))
        types: list[tuple[int, Message | Enum]] = []
        for i, message in enumerate(descriptor.message_type):
            types.append((self._lines[_MESSAGES, i], self._message((_MESSAGES, i), message)))
        for i, enum in enumerate(descriptor.enum_type):
            types.append((self._lines[_ENUMS, i], self._enum((_ENUMS, i), enum)))
        in_order = tuple(each for _, each in sorted(types, key=lambda pair: pair[0]))
        return File(name, self._comment((_SYNTAX,)), services, in_order)

    def _comment(self, path: tuple[int, ...]) -> str:
        """Without the space that follows each `//`."""
        lines = self._comments.get(path, "").rstrip("\n").split("\n")
        return "\n".join(line.removeprefix(" ").rstrip() for line in lines)

    def _service(self, i: int, service: ServiceDescriptorProto) -> Service:
        path = (_SERVICES, i)
        methods = tuple(
            self._method((*path, _METHODS, m), method) for m, method in enumerate(service.method)
        )
        return Service(service.name, self._comment(path), methods)

    def _method(self, path: tuple[int, ...], method: MethodDescriptorProto) -> Method:
        return Method(
            method.name,
            self._comment(path),
            method.input_type.lstrip("."),
            method.output_type.lstrip("."),
            method.client_streaming,
            method.server_streaming,
        )

    def _message(self, path: tuple[int, ...], message: DescriptorProto) -> Message:
        fields = tuple(
            self._field((*path, _FIELDS, f), field, message)
            for f, field in enumerate(message.field)
        )
        named = {field.oneof for field in fields}
        oneofs = {
            oneof.name: self._comment((*path, _ONEOFS, o))
            for o, oneof in enumerate(message.oneof_decl)
            if oneof.name in named
        }
        # The end of a message's range is the first number behind it.
        ranges = [(r.start, r.end - 1) for r in message.reserved_range]
        reserved = _reserved(ranges, message.reserved_name)
        return Message(message.name, self._comment(path), fields, oneofs, reserved)

    def _field(
        self, path: tuple[int, ...], field: FieldDescriptorProto, message: DescriptorProto
    ) -> Field:
        label, typed, key = "", field, ""
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            label = "repeated"
            entry = _map_entry(field, message)
            if entry is not None:
                keys, typed = entry.field
                label, key = "map", _kind(keys)
        elif field.proto3_optional:
            label = "optional"
        in_oneof = field.HasField("oneof_index") and not field.proto3_optional
        oneof = message.oneof_decl[field.oneof_index].name if in_oneof else ""
        comment = self._comment(path)
        return Field(field.number, field.name, _kind(typed), label, key, oneof, comment)

    def _enum(self, path: tuple[int, ...], enum: EnumDescriptorProto) -> Enum:
        values = tuple(
            self._value((*path, _VALUES, v), value) for v, value in enumerate(enum.value)
        )
        ranges = [(r.start, r.end) for r in enum.reserved_range]
        reserved = _reserved(ranges, enum.reserved_name)
        return Enum(enum.name, self._comment(path), values, reserved)

    def _value(self, path: tuple[int, ...], value: EnumValueDescriptorProto) -> Value:
        return Value(value.number, value.name, self._comment(path))


def _kind(field: FieldDescriptorProto) -> str:
    return field.type_name.lstrip(".") if field.type in _NAMED else _SCALARS[field.type]


def _map_entry(field: FieldDescriptorProto, message: DescriptorProto) -> DescriptorProto | None:
    """The nested message that a map field stands for, if it is one."""
    name = field.type_name.rpartition(".")[2]
    entries = (nested for nested in message.nested_type if nested.options.map_entry)
    return next((nested for nested in entries if nested.name == name), None)


def _reserved(ranges: Sequence[tuple[int, int]], names: Sequence[str]) -> tuple[str, ...]:
    """As the source has them: numbers, runs of numbers, names."""
    numbers = (str(a) if a == b else f"{a} to {b}" for a, b in ranges)
    return (*numbers, *names)


def messages(files: Sequence[File]) -> Iterator[Message]:
    """Every message of the files."""
    for file in files:
        for each in file.types:
            if isinstance(each, Message):
                yield each


def enums(files: Sequence[File]) -> Iterator[Enum]:
    """Every enum of the files."""
    for file in files:
        for each in file.types:
            if isinstance(each, Enum):
                yield each
