"""D80x and D81x: a D that a later version of the protocol upsets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from pd_grpc.conformance.later import UNKNOWN_VALUE
from pd_grpc.decode import prefill_desk, service
from pd_grpc.decode.client_desk import ClientDesk
from pd_grpc.decode.prefill_desk import PrefillDesk
from pd_grpc.decode.receiver import Receiver
from pd_grpc.decode.service import DecodeService
from pd_grpc.decode.session_desk import SessionDesk
from pd_grpc.decode.sessions import Sessions
from pd_grpc.protocol.faults import Fault, Reason, bad_request
from pd_grpc.protocol.messages import unbuilt_scope
from pd_grpc.protocol.sampling import FieldError
from pd_grpc.v1 import decode_pb2, sampling_pb2, types_pb2
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


def before(patch: pytest.MonkeyPatch, of: type, method: str, look: Callable[..., None]) -> None:
    """Let `look(*arguments)` before a method."""
    right = getattr(of, method)

    def wrong(self, *arguments):  # type: ignore[no-untyped-def]
        look(*arguments)
        return right(self, *arguments)

    patch.setattr(of, method, wrong)


def refuse_unknown(message: Message) -> None:
    """Take no message with a field that is not known."""
    if len(UnknownFieldSet(message)):
        raise bad_request([FieldError("message", "has fields that nobody knows")])


@mutant("D801")
def hellos_of_later_versions_are_refused(patch: pytest.MonkeyPatch) -> None:
    before(patch, Sessions, "_check", refuse_unknown)


@mutant("D801")
def heartbeats_of_later_versions_are_dropped(patch: pytest.MonkeyPatch) -> None:
    right = SessionDesk.heartbeat

    def wrong(self, event):  # type: ignore[no-untyped-def]
        if not len(UnknownFieldSet(event.heartbeat)):
            right(self, event)

    patch.setattr(SessionDesk, "heartbeat", wrong)


@mutant("D802")
def allocates_of_later_versions_are_refused(patch: pytest.MonkeyPatch) -> None:
    before(patch, PrefillDesk, "_allocate", lambda call, request: refuse_unknown(request))


@mutant("D802")
def first_tokens_of_later_versions_are_refused(patch: pytest.MonkeyPatch) -> None:
    before(patch, PrefillDesk, "_first_token", lambda request: refuse_unknown(request.tokens[0]))


@mutant("D802")
def clients_of_later_versions_are_refused(patch: pytest.MonkeyPatch) -> None:
    def look(event: Any, sampling: Any) -> None:
        refuse_unknown(event.request.sampling)

    before(patch, ClientDesk, "_attach", look)


@mutant("D803")
def releases_of_later_versions_are_refused(patch: pytest.MonkeyPatch) -> None:
    before(patch, PrefillDesk, "_release", refuse_unknown)


@mutant("D804")
def chunks_of_later_versions_are_refused(patch: pytest.MonkeyPatch) -> None:
    def look(stream: int, state: Any, chunk: Message, payload: memoryview) -> None:
        refuse_unknown(chunk)

    before(patch, Receiver, "_chunk", look)


@mutant("D804")
def ends_of_later_versions_are_refused(patch: pytest.MonkeyPatch) -> None:
    before(patch, Receiver, "_stream_end", lambda stream, state, end: refuse_unknown(end))


@mutant("D805")
def bodies_are_compared_by_what_is_known(patch: pytest.MonkeyPatch) -> None:
    right = prefill_desk.body_of

    def wrong(request: decode_pb2.AllocateRequest) -> bytes:
        known = decode_pb2.AllocateRequest()
        known.CopyFrom(request)
        known.DiscardUnknownFields()
        return right(known)

    patch.setattr(prefill_desk, "body_of", wrong)


@mutant("D806")
def a_session_ends_at_an_unknown_message(patch: pytest.MonkeyPatch) -> None:
    right = DecodeService._read

    async def known(requests: Any) -> AsyncIterator[decode_pb2.SessionRequest]:
        async for message in requests:
            if message.WhichOneof("message") is None:
                raise service._out_of_order("a message of an unknown kind")
            yield message

    async def wrong(self, stream, requests):  # type: ignore[no-untyped-def]
        await right(self, stream, known(requests))

    patch.setattr(DecodeService, "_read", wrong)


@mutant("D807")
def a_shard_skips_what_it_does_not_know(patch: pytest.MonkeyPatch) -> None:
    right = Receiver.message

    def wrong(self, stream, message, now):  # type: ignore[no-untyped-def]
        if isinstance(message, Message) and not message.ListFields():
            return []
        return right(self, stream, message, now)

    patch.setattr(Receiver, "message", wrong)


@mutant("D808")
def an_unknown_role_is_any(patch: pytest.MonkeyPatch) -> None:
    def look(hello: decode_pb2.Hello) -> None:
        if hello.instance.role == UNKNOWN_VALUE:
            hello.instance.role = types_pb2.ROLE_PREFILL

    before(patch, Sessions, "_check", look)


@mutant("D809")
def an_unknown_transport_is_inline(patch: pytest.MonkeyPatch) -> None:
    def look(stream: int, state: Any, message: Any, now: float) -> None:
        if message.transport == UNKNOWN_VALUE:
            message.ClearField("transport")

    before(patch, Receiver, "_open", look)


@mutant("D810")
def an_unknown_direction_is_push(patch: pytest.MonkeyPatch) -> None:
    def wrong(scope: sampling_pb2.RequestScope) -> str | None:
        known = scope.direction in sampling_pb2.Direction.values()
        return unbuilt_scope(scope) if known else None

    patch.setattr("pd_grpc.decode.checks.unbuilt_scope", wrong)


@mutant("D811")
def an_unknown_finish_reason_is_none(patch: pytest.MonkeyPatch) -> None:
    def look(transfer: Any, request: decode_pb2.SendFirstTokenRequest) -> None:
        if request.tokens[0].finish_reason == UNKNOWN_VALUE:
            request.tokens[0].ClearField("finish_reason")

    before(patch, PrefillDesk, "_check_first", look)


@mutant("D812")
def garbage_ends_a_session_with_ok(patch: pytest.MonkeyPatch) -> None:
    right = DecodeService._read

    async def wrong(self, stream, requests):  # type: ignore[no-untyped-def]
        try:
            await right(self, stream, requests)
        except Fault as fault:
            if fault.reason is not Reason.BAD_REQUEST:
                raise
            await asyncio.sleep(0)

    patch.setattr(DecodeService, "_read", wrong)
