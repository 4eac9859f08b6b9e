"""What was said in the course of a case, kept so that a failure can be explained by it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from pd_grpc.conformance.case import message_text

M = TypeVar("M", bound=Message)

KEPT = 400
"""Messages kept of one case; the oldest go first."""

_TO_SUBJECT, _FROM_SUBJECT = "->", "<-"


class Transcript:
    """The messages exchanged with a subject, in order, with the time since the case began."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lines: list[str] = []

    def sent(self, method: str, text: str) -> None:
        """The kit sent something."""
        self._add(_TO_SUBJECT, method, text)

    def received(self, method: str, text: str) -> None:
        """The subject sent something."""
        self._add(_FROM_SUBJECT, method, text)

    def tail(self, lines: int) -> list[str]:
        """The last messages."""
        return self._lines[-lines:]

    def quote(self, other: Transcript) -> None:
        """Take over what was said elsewhere, for a case that goes by it."""
        self._lines[:] = other.tail(KEPT)

    def channel(self, channel: grpc.aio.Channel) -> Any:
        """A channel to the subject whose every message is written down."""
        return _RecordedChannel(channel, self)

    def server(self, server: grpc.aio.Server) -> Any:
        """A server that the subject calls, for the generated `add_..._to_server` functions: every
        message of its services is written down."""
        return _RecordedServer(server, self)

    def _add(self, arrow: str, method: str, text: str) -> None:
        at = time.monotonic() - self._began
        self._lines.append(f"{at:8.3f} s {arrow} {method.rsplit('/', 1)[-1]} {text}".rstrip())
        del self._lines[:-KEPT]


class _RecordedChannel:
    def __init__(self, channel: grpc.aio.Channel, transcript: Transcript) -> None:
        self._channel = channel
        self._transcript = transcript

    def __getattr__(self, shape: str) -> Callable[..., Any]:
        """`unary_unary` and its like, the serializers telling what passes."""

        def method(
            name: str,
            request_serializer: Callable[[M], bytes],
            response_deserializer: Callable[[bytes], M],
            _registered_method: bool = False,
        ) -> Any:
            def serialize(message: M) -> bytes:
                self._transcript.sent(name, message_text(message))
                return request_serializer(message)

            def parse(data: bytes) -> M:
                message = response_deserializer(data)
                self._transcript.received(name, message_text(message))
                return message

            return getattr(self._channel, shape)(name, serialize, parse)

        return method


class _RecordedServer:
    def __init__(self, server: grpc.aio.Server, transcript: Transcript) -> None:
        self._server = server
        self._transcript = transcript

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Each service comes again, by name, below."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Take a service."""
        told = {name: self._told(name, handler) for name, handler in handlers.items()}
        generic = grpc.method_handlers_generic_handler(service, told)
        self._server.add_generic_rpc_handlers((generic,))

    def _told(self, name: str, handler: Any) -> Any:
        def parse(data: bytes) -> Message:
            message: Message = handler.request_deserializer(data)
            self._transcript.received(name, message_text(message))
            return message

        def serialize(message: Message) -> bytes:
            self._transcript.sent(name, message_text(message))
            data: bytes = handler.response_serializer(message)
            return data

        return handler._replace(request_deserializer=parse, response_serializer=serialize)
