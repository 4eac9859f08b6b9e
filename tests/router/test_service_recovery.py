"""What the client and the instances see of a request that is tried elsewhere, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from pd_grpc.protocol import rpc
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.telemetry import names
from pd_grpc.v1 import admin_pb2, prefill_pb2, sampling_pb2, types_pb2
from tests.router.answers import (
    GREEDY,
    TEXT,
    hand_over,
    rest_of,
    say_hello,
    silence,
    until_ready,
)
from tests.router.pairs import STUCK, go_on, go_on_elsewhere, pairs, saying, text_of, tokens_of
from tests.router.scripted import Script, Scripted, refusing
from tests.waiting import LIMIT_S, until


@pytest.mark.parametrize("count", range(1, len(TEXT)))
async def test_the_text_is_whole_wherever_the_seam_is(count: int) -> None:
    """TEXT is a byte a token, and its second character has two."""
    async with pairs() as site:
        go_on_elsewhere(site, saying(count, STUCK))
        messages = await site.answer()
    assert text_of(messages) == "héllo"
    assert tokens_of(messages) == TEXT
    assert [bool(m.finish_reason) for m in messages].count(True) == 1
    assert messages[-1].usage == types_pb2.Usage(prompt_tokens=3, completion_tokens=len(TEXT))
    (again,) = site.d2.requests
    assert list(again.generated_token_ids) == TEXT[:count]


async def test_both_legs_of_the_new_attempt_carry_the_same_request() -> None:
    sampling = sampling_pb2.SamplingParams(max_tokens=9, temperature=1)
    async with pairs() as site:
        go_on_elsewhere(site, saying(2, STUCK))
        messages = await site.answer(sampling=sampling, generated_token_ids=TEXT[:1])
    first, again = site.d1.requests[0], site.d2.requests[0]
    prefill: prefill_pb2.PrefillRequest = (*site.p1.requests, *site.p2.requests)[-1]
    assert again.handoff.ref.transfer_id == first.handoff.ref.transfer_id
    assert (first.handoff.ref.attempt, again.handoff.ref.attempt, prefill.ref.attempt) == (1, 2, 2)
    assert again.sampling == first.sampling == prefill.sampling
    assert again.sampling.HasField("seed")
    assert again.token_ids == first.token_ids and again.request_id == first.request_id
    known = [TEXT[0], *TEXT[:2]]
    assert list(again.generated_token_ids) == list(prefill.generated_token_ids) == known
    assert [target.name for target in prefill.decodes] == ["d2"], "d1 is no alternate"
    assert messages[-1].decode_instance == "from-d"


async def test_a_stop_string_across_the_seam_ends_the_text_before_it() -> None:
    sampling = sampling_pb2.SamplingParams(max_tokens=9, temperature=0, stop=["llo"])
    async with pairs() as site:
        go_on_elsewhere(site, saying(4, STUCK))
        messages = await site.answer(sampling=sampling)
    assert text_of(messages) == "hé"
    assert tokens_of(messages) == TEXT


async def test_each_token_has_its_logprobs_once() -> None:
    def with_logprobs(script: Script) -> Script:
        async def played(request: Any) -> AsyncIterator[Any]:
            async for message in script(request):
                for token in message.token_ids:
                    message.logprobs.add().chosen.token_id = token
                yield message

        return played

    sampling = sampling_pb2.SamplingParams(max_tokens=9, temperature=0, logprobs=1)
    async with pairs() as site:
        go_on_elsewhere(site, with_logprobs(saying(3, STUCK)))
        site.d2.script = with_logprobs(go_on)
        messages = await site.answer(sampling=sampling)
    assert [p.chosen.token_id for m in messages for p in m.logprobs] == TEXT


@pytest.mark.parametrize(
    ("said", "sampling", "reason"),
    [
        (4, GREEDY, types_pb2.FINISH_REASON_LENGTH),
        (
            5,
            sampling_pb2.SamplingParams(max_tokens=9, temperature=0, stop=["l"]),
            types_pb2.FINISH_REASON_STOP,
        ),
    ],
)
async def test_an_answer_of_which_only_the_end_was_lost_is_whole(
    said: int, sampling: sampling_pb2.SamplingParams, reason: types_pb2.FinishReason
) -> None:
    async with pairs() as site:
        go_on_elsewhere(site, saying(said, STUCK))
        messages = await site.answer(sampling=sampling)
        assert not site.d2.requests, "there was nothing left to ask for"
    assert tokens_of(messages) == TEXT[:said]
    assert messages[-1].finish_reason == reason
    assert messages[-1].usage == types_pb2.Usage(prompt_tokens=3, completion_tokens=said)
    assert (messages[-1].prefill_instance, messages[-1].decode_instance) == ("p1", "d1")


async def test_a_decode_whose_connection_is_gone_is_left_in_mid_answer() -> None:
    async with pairs() as site:
        go_on_elsewhere(site, saying(2))
        call = site.ask()
        first = await call.read()
        await site.d1.stop()
        messages = [first, *await asyncio.wait_for(rest_of(call), LIMIT_S)]
    assert text_of(messages) == "héllo"


async def test_a_prefill_that_fails_is_left_and_its_decode_leg_cancelled() -> None:
    async with pairs() as site:
        site.p1.script = refusing(Fault(Reason.SENDER_STUCK, "stuck"))
        site.p2.script = hand_over
        site.d1.script, site.d2.script = silence, say_hello
        messages = await site.answer()
        await asyncio.wait_for(site.d1.left.wait(), LIMIT_S)
        (again,) = site.d2.requests
        assert (again.handoff.ref.attempt, again.handoff.prefill_name) == (2, "p2")
    assert tokens_of(messages) == TEXT
    assert messages[-1].prefill_instance == "p2"


async def test_a_client_that_leaves_during_the_second_attempt_ends_it() -> None:
    async with pairs() as site:
        go_on_elsewhere(site, saying(2, STUCK))
        site.d2.script = silence
        call = site.ask()
        await call.read()
        await asyncio.wait_for(site.d2.came.wait(), LIMIT_S)
        call.cancel()
        await asyncio.wait_for(site.d2.left.wait(), LIMIT_S)


async def test_an_operator_sees_the_current_attempt() -> None:
    async with pairs() as site:
        go_on_elsewhere(site, saying(2, STUCK))
        site.d2.script = silence
        call = site.ask()
        await call.read()
        await asyncio.wait_for(site.d2.came.wait(), LIMIT_S)
        transfer_id = site.d2.requests[0].handoff.ref.transfer_id
        request = admin_pb2.GetTransferRequest(transfer_id=transfer_id)
        shown = (await site.admin.GetTransfer(request)).transfer
        assert (shown.ref.attempt, shown.generated_tokens) == (2, 2)
        assert shown.peer.endswith("> d2")
        assert shown.state == types_pb2.TRANSFER_STATE_STREAMING
        call.cancel()


async def test_counts_and_the_trace_tell_of_each_try() -> None:
    async with pairs(retry_burst=2, retry_share=0.0) as site:
        go_on_elsewhere(site, saying(2, STUCK))
        await site.answer()
        site.d1.script = saying(0, STUCK)
        site.p1.script = site.p2.script = silence
        site.d2.script = saying(0, STUCK)
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError):
                await site.answer()
        assert site.counted(names.METRIC_ROUTER_CONTINUATIONS) == {"ENGINE_STUCK": 1}
        assert site.counted(names.METRIC_ROUTER_RETRIES) == {"ENGINE_STUCK": 2}
        assert site.counted(names.METRIC_ROUTER_RETRIES_REFUSED) == {}
        assert site.counted(names.METRIC_ROUTER_RETRY_BUDGET) == {"": 0}
        with pytest.raises(grpc.aio.AioRpcError):
            await site.answer()
        assert site.counted(names.METRIC_ROUTER_RETRIES_REFUSED) == {"ENGINE_STUCK": 1}
        info = await site.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
        assert info.server.recovery == admin_pb2.Recovery(retries=2, continuations=1, refused=1)
    (span,) = (
        s
        for s in site.spans.get_finished_spans()
        if s.name == names.SPAN_REQUEST and s.attributes and s.attributes["pd.outcome"] == "ok"
    )
    assert span.attributes is not None and span.attributes[names.ATTR_ATTEMPT] == 2
    (event,) = (event for event in span.events if event.name == names.EVENT_RECOVERY)
    assert dict(event.attributes or {}) == {
        names.ATTR_ATTEMPT: 2,
        names.ATTR_RECOVERY: "continuation",
        names.ATTR_ERROR_TYPE: "ENGINE_STUCK",
        names.ATTR_PEER: "d1",
    }
    assert span.attributes[names.ATTR_DECODE] == "d2"


async def test_a_router_that_may_not_fails_at_once() -> None:
    async with pairs(retry=False, continuation=False) as site:
        for said in (0, 2):
            go_on_elsewhere(site, saying(said, STUCK))
            site.d2.script = site.d1.script
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await site.answer()
            fault = rpc.read_error(raised.value)
            assert isinstance(fault, Fault) and fault.reason is Reason.ENGINE_STUCK
        assert len([*site.d1.requests, *site.d2.requests]) == 2, "one try each"


@pytest.mark.parametrize("who", ["another", "the same, restarted"])
async def test_an_answer_waits_a_moment_for_a_decode_that_comes_back(who: str) -> None:
    async with pairs(retry_wait_s=5.0, reconnect_max_s=0.1) as site:
        await site.d2.stop()
        await asyncio.wait_for(until_ready(site.router, "d2", False), LIMIT_S)
        go_on_elsewhere(site, saying(2))
        call = site.ask()
        first = await call.read()
        came_back = site.d2 if who == "another" else site.d1
        port = int(came_back.endpoint.rpartition(":")[2])
        await site.d1.stop()
        again = Scripted(types_pb2.ROLE_DECODE, came_back.control.name, port)
        again.instance.epoch, again.script = 8, go_on
        await again.start()
        try:
            messages = [first, *await asyncio.wait_for(rest_of(call), LIMIT_S)]
        finally:
            await again.stop()
        assert text_of(messages) == "héllo"
        (request,) = again.requests
        assert (request.handoff.ref.attempt, request.handoff.ref.decode_epoch) == (2, 8)


async def test_a_request_that_waits_ends_with_what_happened_when_nobody_comes() -> None:
    async with pairs(retry_wait_s=0.2) as site:
        await site.d2.stop()
        await asyncio.wait_for(until_ready(site.router, "d2", False), LIMIT_S)
        go_on_elsewhere(site, saying(2, STUCK))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await site.answer()
        fault = rpc.read_error(raised.value)
        assert isinstance(fault, Fault) and fault.reason is Reason.ENGINE_STUCK


@pytest.mark.parametrize("tries", [True, False])
async def test_a_new_request_waits_a_moment_for_a_role_that_is_out_of_reach(tries: bool) -> None:
    allowed = {"retry": tries, "continuation": tries}
    async with pairs(retry_wait_s=5.0, reconnect_max_s=0.1, **allowed) as site:
        for instance in (site.d1, site.d2):
            await instance.stop()
        for name in ("d1", "d2"):
            await asyncio.wait_for(until_ready(site.router, name, False), LIMIT_S)
        go_on_elsewhere(site, silence)
        asking = asyncio.create_task(site.answer())
        await until(lambda: len(site.router.in_flight) == 1)
        again = Scripted(types_pb2.ROLE_DECODE, "d2", int(site.d2.endpoint.rpartition(":")[2]))
        again.script = go_on
        await again.start()
        try:
            messages = await asking
        finally:
            await again.stop()
        assert text_of(messages) == "héllo"


async def test_a_new_request_does_not_wait_for_those_who_say_that_they_take_none() -> None:
    async with pairs(retry_wait_s=60.0) as site:
        for instance in (site.d1, site.d2):
            instance.control.set_ready(False, "the test wants it so")
            await asyncio.wait_for(until_ready(site.router, instance.instance.name, False), LIMIT_S)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await site.answer()
        fault = rpc.read_error(raised.value)
        assert isinstance(fault, Fault) and fault.reason is Reason.NO_INSTANCE
