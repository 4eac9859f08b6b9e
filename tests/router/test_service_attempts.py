"""What attempts of one request do to each other, and to others, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import admin_pb2
from tests.router.answers import until_ready
from tests.router.pairs import STUCK, Pairs, go_on, go_on_elsewhere, pairs, saying, text_of
from tests.router.scripted import handed_off
from tests.waiting import LIMIT_S, until


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


@pytest.mark.parametrize(("again_s", "timer"), [(None, "wait"), (30.0, "again")])
async def test_an_operator_sees_that_a_request_waits_for_another_instance(
    again_s: float | None, timer: str
) -> None:
    async with pairs(retry_wait_s=60.0) as site:
        await site.d2.stop()
        await asyncio.wait_for(until_ready(site.router, "d2", False), LIMIT_S)
        stuck = Fault(Reason.ENGINE_STUCK, "the engine has stopped", retry_after_s=again_s)
        go_on_elsewhere(site, saying(2, stuck))
        call = site.ask()
        await call.read()
        info = await asyncio.wait_for(_seen_elsewhere_than_in_a_stage(site), LIMIT_S)
        assert (info.waits_for, info.next_timer) == ("another instance", timer)
        assert 0 < info.next_timer_in.seconds < 60
        call.cancel()
        await until(lambda: not len(site.router.in_flight))


async def _seen_elsewhere_than_in_a_stage(site: Pairs) -> admin_pb2.TransferInfo:
    """The one request, as the router shows it once it waits for something else."""
    while True:
        listed = await site.admin.ListTransfers(admin_pb2.ListTransfersRequest())
        info: admin_pb2.TransferInfo = listed.transfers[0]
        if not info.waits_for.startswith("stage "):
            return info
