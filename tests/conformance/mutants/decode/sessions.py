"""D10x: sessions gone wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from pd_grpc.decode import bulk, service
from pd_grpc.decode.sessions import Sessions
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.messages import duration
from pd_grpc.v1 import types_pb2
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


@mutant("D101")
def welcome_without_a_session_id(patch: pytest.MonkeyPatch) -> None:
    _welcome(patch, lambda welcome: welcome.ClearField("session_id"))


@mutant("D102", "D103")
def out_of_order_is_malformed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(service, "_out_of_order", lambda text: Fault(Reason.BAD_REQUEST, text))


@mutant("D103")
def a_second_hello_is_passed_over(patch: pytest.MonkeyPatch) -> None:
    right = service.DecodeService._read

    async def read(self, stream, requests):  # type: ignore[no-untyped-def]
        async def rest() -> AsyncIterator[Any]:
            async for message in requests:
                if not message.HasField("hello"):
                    yield message

        await right(self, stream, rest())

    patch.setattr(service.DecodeService, "_read", read)


@mutant("D104")
def one_session_id_for_all(patch: pytest.MonkeyPatch) -> None:
    _welcome(patch, lambda welcome: setattr(welcome, "session_id", "session"))


@mutant("D105")
def welcome_without_a_lease(patch: pytest.MonkeyPatch) -> None:
    _welcome(patch, lambda welcome: welcome.lease.CopyFrom(duration(0)))


@mutant("D105")
def welcome_from_nobody(patch: pytest.MonkeyPatch) -> None:
    _welcome(patch, lambda welcome: welcome.instance.CopyFrom(types_pb2.Instance(name="d")))


@mutant("D106")
def the_shard_serves_something_else(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bulk, "SERVICE", "pd_grpc.v1.TransfersService")


@mutant("D107")
def every_feature_is_taken(patch: pytest.MonkeyPatch) -> None:
    right = Sessions.join

    def join(self, stream, hello, session_id):  # type: ignore[no-untyped-def]
        joined = right(self, stream, hello, session_id)
        joined.welcome.features[:] = hello.features
        return joined

    patch.setattr(Sessions, "join", join)


@mutant("D107")
def features_are_told_unasked(patch: pytest.MonkeyPatch) -> None:
    _welcome(patch, lambda welcome: welcome.features.append("logprobs"))


@mutant("D108")
def any_name_will_do(patch: pytest.MonkeyPatch) -> None:
    _hello(patch, lambda hello: hello.ClearField("decode_name"))


@mutant("D108")
def the_names_are_kept_secret(patch: pytest.MonkeyPatch) -> None:
    right = Sessions._check

    def check(self, hello):  # type: ignore[no-untyped-def]
        try:
            right(self, hello)
        except Fault as fault:
            raise Fault(fault.reason, fault.message) from None

    patch.setattr(Sessions, "_check", check)


@mutant("D109")
def a_name_is_another_name(patch: pytest.MonkeyPatch) -> None:
    right = Sessions._check

    def check(self, hello):  # type: ignore[no-untyped-def]
        if hello.decode_name:
            raise Fault(Reason.WRONG_INSTANCE, f"this is not {hello.decode_name}")
        right(self, hello)

    patch.setattr(Sessions, "_check", check)


def _welcome(patch: pytest.MonkeyPatch, change: Callable[[Any], object]) -> None:
    """Change every welcome before it is sent."""
    right = Sessions._welcome

    def wrong(self, session):  # type: ignore[no-untyped-def]
        welcome = right(self, session)
        change(welcome)
        return welcome

    patch.setattr(Sessions, "_welcome", wrong)


def _hello(patch: pytest.MonkeyPatch, change: Callable[[Any], object]) -> None:
    """Change every hello before it is checked."""
    right = Sessions._check

    def check(self, hello):  # type: ignore[no-untyped-def]
        change(hello)
        right(self, hello)

    patch.setattr(Sessions, "_check", check)
