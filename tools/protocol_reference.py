"""The parts of docs/protocol.md that come from the protos and the code.

What stands between the parts is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pd_grpc.protocol.config import Timeouts
from tools.marked_parts import Parts, table
from tools.proto_source import (
    PACKAGE,
    Enum,
    Field,
    File,
    Message,
    Method,
    Service,
    messages,
)
from tools.readme_tables import statuses
from tools.state_tables import decode_diagram, decode_table, prefill_diagram, prefill_table

DURATION = "google.protobuf.Duration"

_SHAPES = {
    (False, False): "unary",
    (False, True): "server stream",
    (True, False): "client stream",
    (True, True): "bidirectional stream",
}
_RESERVED = re.compile(r"Reserved\b")


def parts(files: Sequence[File]) -> Parts:
    """What makes each part of the page."""
    return {
        "methods": lambda: methods(files),
        "statuses": statuses,
        "timers": lambda: timers(files),
        "decode_states": lambda: decode_table(files),
        "decode_diagram": decode_diagram,
        "prefill_states": lambda: prefill_table(files),
        "prefill_diagram": prefill_diagram,
        "reference": lambda: reference(files),
    }


# --- the overviews -------------------------------------------------------------------------------


def methods(files: Sequence[File]) -> str:
    """Every method with its shape, as links."""
    rows = []
    for file in files:
        for service in file.services:
            for method in service.methods:
                name = f"{service.name}.{method.name}"
                request, answer = _kind(method.request), _kind(method.answer)
                rows.append((_link(name), _shape(method), request, answer))
    return table("method | shape | request | answer", rows)


def timers(files: Sequence[File]) -> str:
    """Every timeout: its default, and the field by which D announces it to P where it does."""
    announced: dict[str, list[str]] = {}
    for message in messages(files):
        for field in message.fields:
            if field.kind == DURATION and message.name in ("Welcome", "AllocateResponse"):
                where = _link(message.name, f"{message.name}.{field.name}")
                announced.setdefault(f"{field.name}_s", []).append(where)
    rows = [
        (
            f"`{name.removesuffix('_s')}`",
            f"{field.default:g}{' s' if name.endswith('_s') else ''}",
            field.description or "",
            ", ".join(announced.get(name, ())),
        )
        for name, field in Timeouts.model_fields.items()
    ]
    return table("timer | default | what it is | announced in", rows)


# --- the reference -------------------------------------------------------------------------------


def reference(files: Sequence[File]) -> str:
    """Every file: its comment, its services, its messages and enums."""
    return "\n\n".join(_file(file) for file in files)


def _file(file: File) -> str:
    parts = [f"### {file.name}.proto", prose(file.comment)]
    parts += [_service(service) for service in file.services]
    for each in file.types:
        parts.append(_message(each) if isinstance(each, Message) else _enum(each))
    return "\n\n".join(part for part in parts if part)


def _service(service: Service) -> str:
    parts = [f"#### {service.name}", prose(service.comment)]
    for method in service.methods:
        request, answer = _kind(method.request), _kind(method.answer)
        asked = f"stream of {request}" if method.client_streams else request
        answered = f"stream of {answer}" if method.server_streams else answer
        shape = f"*{_shape(method).capitalize()}*: {asked} → {answered}"
        parts += [f"##### {service.name}.{method.name}", shape, prose(method.comment)]
    return "\n\n".join(parts)


def _message(message: Message) -> str:
    title = f"#### {message.name}"
    if not message.fields and not message.reserved:
        return "\n\n".join([title, prose(message.comment), "It has no fields."])
    rows = []
    oneof = ""
    for field in message.fields:
        if field.oneof != oneof:
            oneof = field.oneof
            if oneof:
                rows.append(("", f"one of `{oneof}`:", "", cell(message.oneofs[oneof])))
        rows.append(
            (str(field.number), _name(field.name, field.comment), _type(field), cell(field.comment))
        )
    rows += [(given_up, "*reserved: given up*", "", "") for given_up in message.reserved]
    return "\n\n".join(
        [title, prose(message.comment), table("number | field | type | meaning", rows)]
    )


def _enum(enum: Enum) -> str:
    rows = [
        (str(value.number), _name(value.name, value.comment), cell(value.comment))
        for value in enum.values
    ]
    rows += [(given_up, "*reserved: given up*", "") for given_up in enum.reserved]
    head = [f"#### {enum.name}", prose(enum.comment)]
    return "\n\n".join([*head, table("number | value | meaning", rows)])


# --- words ---------------------------------------------------------------------------------------


def prose(comment: str) -> str:
    """A comment as paragraphs; one whose lines are set in is shown as it is."""
    found = []
    for paragraph in comment.split("\n\n"):
        lines = paragraph.strip("\n").split("\n")
        if all(line.startswith("  ") for line in lines):
            found.append("\n".join(["```text", *(line[2:] for line in lines), "```"]))
        else:
            found.append(_escaped(" ".join(line.strip() for line in lines)))
    return "\n\n".join(found)


def cell(comment: str) -> str:
    """A comment as the content of a table's cell; its paragraphs are kept apart."""
    return "<br>".join(_escaped(" ".join(p.split())) for p in comment.split("\n\n"))


def _escaped(text: str) -> str:
    """Without what markdown would take for HTML or emphasis of its own."""
    return re.sub(r"([<*])", r"\\\1", text)


def _name(name: str, comment: str) -> str:
    return f"`{name}` *(reserved)*" if _RESERVED.match(comment) else f"`{name}`"


def _shape(method: Method) -> str:
    return _SHAPES[method.client_streams, method.server_streams]


def _type(field: Field) -> str:
    kind = _kind(field.kind)
    if field.label == "map":
        return f"map\\<{_kind(field.key)}, {kind}>"
    return f"{field.label} {kind}".strip()


def _kind(full_name: str) -> str:
    """A link to a type of ours; another's by its full name."""
    package, _, name = full_name.rpartition(".")
    return _link(name) if package == PACKAGE else f"`{full_name}`"


def _link(heading: str, text: str = "") -> str:
    return f"[{text or heading}](#{slug(heading)})"


def slug(heading: str) -> str:
    """The anchor that GitHub gives to the first heading of this text."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")
