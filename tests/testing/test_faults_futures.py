"""The faults of calls on synchronous channels, waited for and as futures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from pd_grpc.protocol import rpc
from pd_grpc.protocol.faults import Code, TransportFault
from pd_grpc.testing.faults import Direction, Injector, Kind, Rule
from pd_grpc.testing.faults_futures import StruckChannel
from tests.testing.echo import Caller, Echo, echoing
from tests.waiting import until

A = StringValue(value="a")
RESPONSE = Direction.RESPONSE
SHORT_S = 0.2
HEARD_S = 2.0
"""Enough for a call to be heard, on a slow machine too."""
MANY = 100


@asynccontextmanager
async def struck(*rules: Rule) -> AsyncIterator[tuple[Echo, Caller, Injector]]:
    injector = Injector(*rules)
    async with echoing() as (echo, _):
        with StruckChannel(grpc.insecure_channel(echo.endpoint), injector) as channel:
            yield echo, Caller(channel), injector


async def ended(future: Any) -> Any:
    """The future, once it has called back."""
    over = threading.Event()
    future.add_done_callback(lambda _: over.set())
    assert await asyncio.to_thread(over.wait, 60)
    assert future.done() and not future.running()
    return future


async def silent(future: Any) -> None:
    error = (await ended(future)).exception()
    fault = rpc.read_error(error)
    assert isinstance(fault, TransportFault) and fault.code is Code.DEADLINE_EXCEEDED
    assert future.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not future.cancelled()
    with pytest.raises(grpc.RpcError):
        future.result()


async def test_with_no_rule_nothing_changes() -> None:
    async with struck() as (echo, caller, injector):
        future = await ended(caller.one.future(A, timeout=60))
        assert (future.result().value, future.code()) == ("a!", grpc.StatusCode.OK)
        assert future.exception() is None and injector.strikes() == 0
        answer, call = await asyncio.to_thread(caller.one.with_call, A, timeout=60)
        assert (answer.value, call.code()) == ("a!", grpc.StatusCode.OK)
        assert (await asyncio.to_thread(caller.one, A, timeout=60)).value == "a!"
        assert echo.heard == ["a"] * 3


async def test_an_error_of_the_server_is_told_with_its_details() -> None:
    async with struck() as (echo, _, injector):
        with StruckChannel(grpc.insecure_channel(echo.endpoint), injector) as channel:
            unknown = channel.unary_unary(
                "/test.Echo/Nothing", StringValue.SerializeToString, StringValue.FromString
            )
            future = await ended(unknown.future(A, timeout=60))
            assert future.code() is grpc.StatusCode.UNIMPLEMENTED
            assert future.details() == "Method not found!"
            with pytest.raises(grpc.RpcError) as raised:
                await asyncio.to_thread(unknown, A, timeout=60)
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("direction", list(Direction))
async def test_a_dropped_message_is_silence_until_the_deadline(direction: Direction) -> None:
    async with struck(Rule(Kind.DROP, "One", direction)) as (echo, caller, _):
        asked = time.monotonic()
        await silent(caller.one.future(A, timeout=HEARD_S))
        assert time.monotonic() - asked >= HEARD_S - 0.02
        assert echo.heard == ([] if direction is Direction.REQUEST else ["a"])


@pytest.mark.parametrize("direction", list(Direction))
async def test_a_delay_blocks_nobody_who_makes_a_future(direction: Direction) -> None:
    async with struck(Rule(Kind.DELAY, "One", direction, delay_s=SHORT_S)) as (_, caller, _):
        asked = time.monotonic()
        futures = [caller.one.future(A, timeout=60) for _ in range(MANY)]
        assert time.monotonic() - asked < MANY * SHORT_S / 2, "no delay was waited for"
        for future in futures:
            assert (await ended(future)).result().value == "a!"
        assert time.monotonic() - asked >= SHORT_S
        await silent(caller.one.future(A, timeout=SHORT_S / 2))


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("kind", [Kind.DROP, Kind.DELAY])
async def test_what_is_held_can_be_cancelled(kind: Kind, direction: Direction) -> None:
    delay_s = 60.0 if kind is Kind.DELAY else 0.0
    async with struck(Rule(kind, "One", direction, delay_s=delay_s)) as (_, caller, injector):
        future = caller.one.future(A, timeout=60)
        await until(lambda: injector.strikes() == 1)
        assert future.running() and future.cancel()
        assert (await ended(future)).cancelled()
        assert future.code() is grpc.StatusCode.CANCELLED and not future.cancel()
        with pytest.raises(grpc.FutureCancelledError):
            future.result()


async def test_a_duplicate_is_heard_twice_and_answered_once() -> None:
    async with struck(Rule(Kind.DUPLICATE, "One")) as (echo, caller, _):
        future = await ended(caller.one.future(A, timeout=60))
        assert future.result().value == "a!"
        await until(lambda: echo.heard == ["a", "a"])


async def test_a_held_request_arrives_though_its_caller_has_cancelled() -> None:
    rules = Rule(Kind.DROP, "One"), Rule(Kind.DUPLICATE, "One", delay_s=SHORT_S)
    async with struck(*rules) as (echo, caller, _):
        future = caller.one.future(A, timeout=60)
        future.cancel()
        assert echo.heard == []
        await until(lambda: echo.heard == ["a"])


async def test_what_is_held_when_its_channel_closes_is_never_sent() -> None:
    """grpc itself crashes when a call is made on a closed channel."""
    rules = Rule(Kind.DELAY, "One", delay_s=SHORT_S), Rule(Kind.DUPLICATE, "One", delay_s=0.05)
    async with echoing() as (echo, _):
        channel = StruckChannel(grpc.insecure_channel(echo.endpoint), Injector(*rules))
        future = Caller(channel).one.future(A, timeout=60)
        channel.close()
        assert (await ended(future)).cancelled()
        await until(lambda: not any(t.name == "pd-injected" for t in threading.enumerate()))
        assert echo.heard == []


@pytest.mark.parametrize("direction", list(Direction))
async def test_a_corrupt_message_is_another_one(direction: Direction) -> None:
    rule = Rule(Kind.CORRUPT, "One", direction, damage=lambda data, _: data.replace(b"a", b"A"))
    async with struck(rule) as (_, caller, _):
        assert (await ended(caller.one.future(A, timeout=60))).result().value == "A!"


@pytest.mark.parametrize("direction", Direction)
async def test_what_no_damage_leaves_a_message_fails_the_call(direction: Direction) -> None:
    rule = Rule(Kind.CORRUPT, direction=direction, damage=lambda data, chance: b"\xff")
    async with struck(rule) as (_, caller, _):
        future = await ended(caller.one.future(A, timeout=60))
        with pytest.raises(ValueError, match=r"no google\.protobuf\.StringValue"):
            future.result()
