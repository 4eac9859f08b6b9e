"""What attempts of one request do to each other, and to others, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from pd_grpc.protocol.faults import Fault, Reason
from tests.router.pairs import STUCK, go_on, go_on_elsewhere, pairs, saying, text_of
from tests.router.scripted import handed_off


async def test_a_decode_alone_knows_each_attempt_by_a_name_of_its_own() -> None:
    """One that still has an attempt given up, for its cancel is under way, refuses no other."""
    async with pairs(aggregated=True) as site:
        go_on_elsewhere(site, saying(2, STUCK))
        name = "n" * 128
        messages = await site.answer(request_id=name)
        assert text_of(messages) == "héllo" and messages[0].request_id == name
        (first,), (second,) = site.d1.requests, site.d2.requests
        assert first.request_id == name
        assert second.request_id not in ("", name) and len(second.request_id) <= 128


async def test_a_request_that_is_told_to_come_again_watches_for_instances_once() -> None:
    watches: list[int] = []
    reached = asyncio.Event()

    async def tell_to_come_again(request: Any) -> AsyncIterator[Any]:
        watches.append(sum(map(_watches_instances, asyncio.all_tasks())))
        if len(watches) < 12:
            raise Fault(Reason.DECODE_LOST, "not now", retry_after_s=0.02)
        reached.set()
        yield handed_off()

    async def go_on_once_reached(request: Any) -> AsyncIterator[Any]:
        await reached.wait()
        async for message in go_on(request):
            yield message

    async with pairs(retry_wait_s=5.0) as site:
        site.p1.script = site.p2.script = tell_to_come_again
        site.d1.script = site.d2.script = go_on_once_reached
        assert text_of(await site.answer()) == "héllo"
        assert max(watches) == 1, watches


def _watches_instances(task: asyncio.Task[Any]) -> bool:
    return getattr(task.get_coro(), "__name__", "") == "_watch_instances"
