"""Each kind of fault at either end of calls of each shape, over real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from pd_grpc.testing.faults import Direction, Injector, Kind, Rule
from tests.testing.echo import Caller, Echo, echoing
from tests.waiting import LIMIT_S, until

RESPONSE = Direction.RESPONSE
DELAY_S = 0.15
SHORT_S = 0.2
HEARD_S = 2.0
"""Enough for a call to be heard, on a slow machine too."""

pytestmark = pytest.mark.parametrize("end", ["client", "server"])


@asynccontextmanager
async def struck(end: str, *rules: Rule) -> AsyncIterator[tuple[Echo, Caller, Injector]]:
    injector = Injector(*rules, seed=5)
    ends = {"at_client" if end == "client" else "at_server": injector}
    async with echoing(**ends) as (echo, caller):
        yield echo, caller, injector


def word(value: str) -> StringValue:
    return StringValue(value=value)


async def code_of(call: object) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call  # type: ignore[misc]
    return raised.value.code()


async def test_with_no_rule_nothing_changes(end: str) -> None:
    async with struck(end) as (echo, caller, injector):
        assert (await caller.one(word("a"), timeout=60)).value == "a!"
        assert await caller.counted("b") == ["b0", "b1", "b2"]
        gathered = caller.gather(timeout=60)
        await gathered.write(word("c"))
        await gathered.write(word("d"))
        await gathered.done_writing()
        assert (await gathered).value == "c+d"
        assert await caller.talked("e", "f") == ["e!", "f!"]
        assert echo.heard == ["a", "b", "c", "d", "e", "f"] and injector.strikes() == 0
        call = caller.talk(timeout=60)
        await call.write(word("g"))
        assert (await call.read()).value == "g!", "an answer comes while requests may follow"
        assert not call.done()
        echo.ended.clear()
        assert call.cancel()
        await asyncio.wait_for(echo.ended.wait(), LIMIT_S)
        assert call.cancelled() and await call.code() is grpc.StatusCode.CANCELLED


async def test_a_dropped_request_is_never_heard_and_ends_at_the_deadline(end: str) -> None:
    async with struck(end, Rule(Kind.DROP, "One", calls={1})) as (echo, caller, _):
        asked = time.monotonic()
        code = await code_of(caller.one(word("a"), timeout=SHORT_S))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - asked >= SHORT_S - 0.02 and echo.heard == []
        assert (await caller.one(word("b"), timeout=60)).value == "b!"


async def test_a_dropped_answer_leaves_its_request_heard(end: str) -> None:
    rule = Rule(Kind.DROP, "One", RESPONSE)
    async with struck(end, rule) as (echo, caller, injector):
        code = await code_of(caller.one(word("a"), timeout=HEARD_S))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert echo.heard == ["a"] and injector.strikes(rule) == 1


async def test_a_dropped_call_can_be_cancelled(end: str) -> None:
    async with struck(end, Rule(Kind.DROP, "One")) as (echo, caller, injector):
        call = caller.one(word("a"))
        await until(lambda: injector.strikes() == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert echo.heard == []


@pytest.mark.parametrize("direction", list(Direction))
async def test_a_dropped_message_of_a_stream_is_missing_alone(
    end: str, direction: Direction
) -> None:
    async with struck(end, Rule(Kind.DROP, "Talk", direction, messages={2})) as (echo, caller, _):
        assert await caller.talked("a", "b", "c") == ["a!", "c!"]
        assert echo.heard == (["a", "c"] if direction is Direction.REQUEST else ["a", "b", "c"])


@pytest.mark.parametrize("direction", list(Direction))
async def test_a_delayed_message_holds_back_what_follows_it(end: str, direction: Direction) -> None:
    rule = Rule(Kind.DELAY, direction=direction, messages={1}, delay_s=DELAY_S)
    async with struck(end, rule) as (_, caller, _):
        for answers in (
            lambda: caller.talked("a", "b"),
            lambda: caller.counted("a"),
            lambda: caller.one(word("a"), timeout=60),
        ):
            asked = time.monotonic()
            assert await answers()
            assert time.monotonic() - asked >= DELAY_S


@pytest.mark.parametrize("direction", list(Direction))
async def test_a_delay_beyond_the_deadline_is_a_deadline_exceeded(
    end: str, direction: Direction
) -> None:
    rule = Rule(Kind.DELAY, "One", direction, delay_s=60)
    async with struck(end, rule) as (echo, caller, _):
        code = await code_of(caller.one(word("a"), timeout=HEARD_S))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert echo.heard == ([] if direction is Direction.REQUEST else ["a"])


async def test_a_cancel_ends_a_stream_whose_answer_is_held(end: str) -> None:
    async with struck(end, Rule(Kind.DELAY, "Count", RESPONSE, delay_s=60)) as (
        _,
        caller,
        injector,
    ):
        call = caller.count(word("a"))
        reading = asyncio.create_task(call.read())
        await until(lambda: injector.strikes() == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(reading, LIMIT_S)


async def test_a_duplicated_request_is_a_second_call_with_one_answer(end: str) -> None:
    async with struck(end, Rule(Kind.DUPLICATE)) as (echo, caller, _):
        assert (await caller.one(word("a"), timeout=60)).value == "a!"
        await until(lambda: echo.heard == ["a", "a"])


async def test_a_held_request_arrives_though_its_caller_has_gone(end: str) -> None:
    if end == "server":
        return  # There it has arrived already, and its call is what the caller ends.
    rules = Rule(Kind.DROP, "One"), Rule(Kind.DUPLICATE, "One", delay_s=2 * SHORT_S)
    async with struck(end, *rules) as (echo, caller, _):
        code = await code_of(caller.one(word("a"), timeout=SHORT_S))
        assert (code, echo.heard) == (grpc.StatusCode.DEADLINE_EXCEEDED, [])
        await until(lambda: echo.heard == ["a"])


async def test_a_duplicated_message_of_a_stream_comes_twice(end: str) -> None:
    rule = Rule(Kind.DUPLICATE, "Talk", messages={2})
    async with struck(end, rule) as (echo, caller, injector):
        assert await caller.talked("a", "b", "c") == ["a!", "b!", "b!", "c!"]
        injector.clear()
        injector.add(Rule(Kind.DUPLICATE, "Talk", RESPONSE, messages={1}))
        assert await caller.talked("d", "e") == ["d!", "d!", "e!"]
        assert echo.heard == ["a", "b", "b", "c", "d", "e"]


async def test_half_closed_requests_end_early(end: str) -> None:
    async with struck(end, Rule(Kind.HALF_CLOSE, "Talk", messages={3})) as (echo, caller, _):
        call = caller.talk(timeout=60)
        for each in ("a", "b", "c", "d", "e"):
            if echo.ended.is_set():
                break
            try:
                await call.write(word(each))
            except asyncio.InvalidStateError:
                break  # The server has answered and ended.
        assert [m.value async for m in call] == ["a!", "b!"]
        assert echo.heard == ["a", "b"] and await call.code() is grpc.StatusCode.OK


async def test_half_closed_answers_end_early(end: str) -> None:
    rule = Rule(Kind.HALF_CLOSE, direction=RESPONSE, messages={2})
    async with struck(end, rule) as (echo, caller, _):
        assert await caller.counted("a") == ["a0"]
        assert await caller.talked("a", "b", "c") == ["a!"]
        await asyncio.wait_for(echo.ended.wait(), LIMIT_S)


@pytest.mark.parametrize("direction", list(Direction))
async def test_a_corrupt_message_is_another_one(end: str, direction: Direction) -> None:
    def shout(data: bytes, chance: object) -> bytes:
        return data.replace(b"a", b"A")

    rule = Rule(Kind.CORRUPT, direction=direction, damage=shout)
    async with struck(end, rule) as (_, caller, _):
        assert (await caller.one(word("a"), timeout=60)).value == "A!"
        assert await caller.talked("aa") == ["AA!"]


async def test_a_flipped_bit_changes_what_is_heard(end: str) -> None:
    rule = Rule(Kind.CORRUPT, "One", times=20)
    async with struck(end, rule) as (echo, caller, injector):
        said = [f"some words {n}" for n in range(20)]
        for each in said:
            try:
                await caller.one(word(each), timeout=60)
            except grpc.aio.AioRpcError:
                assert end == "server", "what the client sends is still a message"
        assert injector.strikes(rule) == 20
        assert set(echo.heard).isdisjoint(said)
