"""When the choices of one request begin, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pd_grpc.protocol.faults import Fault, Reason
from tests.router.answers import TEXT, hand_over, say_hello, silence
from tests.router.choosing import N, by_choice, generated, of_choice, pausing, several, tokens_of
from tests.router.conftest import Site
from tests.router.scripted import Script, last, tokens
from tests.waiting import LIMIT_S, until


async def test_the_others_wait_until_the_first_is_handed_over(site: Site) -> None:
    ready, go_ahead = asyncio.Event(), asyncio.Event()

    async def hand_over_later(request: Any) -> AsyncIterator[Any]:
        await ready.wait()
        async for message in hand_over(request):
            yield message

    site.p.script, site.d1.script = hand_over_later, pausing(1, go_ahead)
    reading = asyncio.create_task(site.answer(sampling=several()))
    await until(lambda: generated(site) == [1])
    assert len(site.p.requests) == 1
    ready.set()
    await until(lambda: generated(site) == [1] * N)
    go_ahead.set()
    assert len(by_choice(await reading)) == N


async def test_of_a_prompt_shorter_than_a_block_none_waits(site: Site) -> None:
    model = site.router.discovery.at(site.d1.endpoint).model
    assert model is not None
    model.layout.block_size = 16
    site.p.script = silence
    site.d1.script = site.d2.script = silence
    call = site.generate(sampling=several())
    await until(lambda: len(site.p.requests) == N)
    call.cancel()


async def test_a_request_with_choices_is_one_request(site: Site) -> None:
    site.p.script, site.d1.script = hand_over, silence
    call = site.generate(sampling=several(), request_id="mine")
    await until(lambda: len(site.d1.requests) == N)
    assert len(site.router.in_flight) == 1
    assert len(site.router.in_flight.running()) == N
    fault = await site.fault(sampling=several(), request_id="mine")
    assert fault.reason is Reason.DUPLICATE_REQUEST
    call.cancel()


async def whole_at_once(request: Any) -> AsyncIterator[Any]:
    yield last(TEXT[0])


async def whole_but_for_the_last_word(request: Any) -> AsyncIterator[Any]:
    yield tokens(TEXT[0])
    raise Fault(Reason.DRAINING, "it leaves")


@pytest.mark.parametrize("first", [whole_at_once, whole_but_for_the_last_word])
async def test_a_first_that_is_whole_before_p_has_said_a_word_does_not_hold_back_the_others(
    first: Script, site: Site
) -> None:
    site.p.script, site.d1.script = silence, of_choice(first, say_hello, say_hello)
    reading = site.answer(sampling=several(max_tokens=1))
    choices = by_choice(await asyncio.wait_for(reading, LIMIT_S))
    assert tokens_of(choices[0]) == TEXT[:1]
    assert sorted(choices) == [0, 1, 2]
