"""What the router's client hears when an instance fails or is lost, or the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.protocol.faults import Code, Fault, Reason, not_meant
from pd_grpc.telemetry import names
from pd_grpc.v1 import inference_pb2, sampling_pb2, types_pb2
from tests.router.answers import (
    TEXT,
    hand_over,
    hello,
    one_token_then_silence,
    say_hello,
    silence,
    until_ready,
)
from tests.router.conftest import VOCAB, Site, sited
from tests.router.scripted import Scripted, handed_off, last, never, placing, refusing, tokens
from tests.waiting import LIMIT_S, until


async def test_prefills_refusal_reaches_the_client_and_ends_the_decode_leg(site: Site) -> None:
    site.p.script = refusing(Fault(Reason.NO_BLOCKS, "full", retry_after_s=1.5))
    site.d1.script = silence
    fault = await site.fault()
    assert (fault.code, fault.reason) == (Code.RESOURCE_EXHAUSTED, Reason.NO_BLOCKS)
    assert fault.retry_after_s == 1.5
    await asyncio.wait_for(site.d1.left.wait(), LIMIT_S)


async def test_a_fault_between_the_instances_has_the_code_meant_for_clients(site: Site) -> None:
    site.p.script = refusing(Fault(Reason.LAYOUT_MISMATCH, "unlike", {"field": "block_size"}))
    site.d1.script = site.d2.script = silence
    fault = await site.fault()
    assert (fault.code, fault.reason) == (Code.UNAVAILABLE, Reason.LAYOUT_MISMATCH)
    assert fault.metadata["field"] == "block_size"


async def test_tokens_that_came_before_the_failure_are_given_out_before_it(site: Site) -> None:
    async def break_down(request: Any) -> AsyncIterator[Any]:
        yield tokens(*TEXT[:3])
        raise Fault(Reason.ENGINE_ERROR, "boom")

    site.p.script, site.d1.script = hand_over, break_down
    got: list[int] = []
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for message in site.generate():
            got += message.token_ids
    assert got == TEXT[:3]
    assert raised.value.code() is grpc.StatusCode.INTERNAL


async def test_decode_lost_in_mid_answer_with_nobody_else_is_told_at_once(site: Site) -> None:
    site.d2.control.set_ready(False, "the test wants it so")
    await asyncio.wait_for(until_ready(site.router, "d2", False), LIMIT_S)
    site.p.script, site.d1.script = hand_over, one_token_then_silence
    call = site.generate()
    await call.read()
    await site.d1.stop()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await asyncio.wait_for(call.read(), LIMIT_S)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "DECODE_LOST" in str(raised.value.trailing_metadata())


async def test_prefill_lost_and_decode_silent_is_told_within_two_seconds(site: Site) -> None:
    site.p.script, site.d1.script = silence, silence
    failing = asyncio.create_task(site.fault())
    await asyncio.wait_for(site.p.came.wait(), LIMIT_S)
    await site.p.stop()
    fault = await asyncio.wait_for(failing, LIMIT_S)
    assert (fault.code, fault.reason) == (Code.UNAVAILABLE, Reason.PREFILL_LOST)
    await asyncio.wait_for(site.d1.left.wait(), LIMIT_S)


async def test_prefill_lost_after_the_hand_off_harms_no_answer(site: Site) -> None:
    """The hand-off was not reported: D is asked, and says that it generates."""
    go_on = asyncio.Event()

    async def slow(request: Any) -> AsyncIterator[Any]:
        yield tokens(TEXT[0])
        await go_on.wait()
        yield last(*TEXT[1:])

    site.p.script, site.d1.script = silence, slow
    site.d1.states["*"] = types_pb2.TRANSFER_STATE_DECODING
    call = site.generate()
    await call.read()
    await site.p.stop()
    waiting = asyncio.create_task(call.read())
    done, _ = await asyncio.wait([waiting], timeout=1)  # well beyond grace and settle
    assert not done
    go_on.set()
    message = await asyncio.wait_for(waiting, LIMIT_S)
    assert message.finish_reason == types_pb2.FINISH_REASON_LENGTH


async def test_a_p_that_finds_a_d_mistaken_is_not_suspected_itself(site: Site) -> None:
    """With one P, the next attempt needs it."""

    async def of_d1_alone(request: Any) -> AsyncIterator[Any]:
        if request.decodes[0].name == "d1":
            raise not_meant(Reason.WRONG_INSTANCE, "d1's address is d9's", "d1", "d9")
        yield handed_off()

    hello(site)
    site.d1.script, site.p.script = silence, of_d1_alone
    await site.answer()
    assert [request.ref.attempt for request in site.p.requests] == [1, 2]


async def test_placing_moves_the_decode_leg(site: Site) -> None:
    async def place(request: Any) -> AsyncIterator[Any]:
        yield placing(site.d2)
        await asyncio.wait_for(site.d1.left.wait(), LIMIT_S)
        yield handed_off()

    site.p.script, site.d1.script, site.d2.script = place, silence, say_hello
    messages = await site.answer()
    assert [i for m in messages for i in m.token_ids] == TEXT
    (moved,) = site.d2.requests
    assert moved.handoff.decode_name == "d2"
    assert moved.handoff.ref == site.d1.requests[0].handoff.ref


async def test_a_client_that_cancels_ends_both_legs_at_once(site: Site) -> None:
    site.p.script, site.d1.script = silence, one_token_then_silence
    call = site.generate()
    await call.read()
    call.cancel()
    await asyncio.wait_for(asyncio.gather(site.p.left.wait(), site.d1.left.wait()), LIMIT_S)


async def test_a_client_that_vanishes_ends_both_legs_at_once(site: Site) -> None:
    site.p.script, site.d1.script = silence, one_token_then_silence
    async with grpc.aio.insecure_channel(site.router.endpoint) as channel:
        call = type(site.stub)(channel).Generate(
            inference_pb2.GenerateRequest(
                text="hi", sampling=sampling_pb2.SamplingParams(max_tokens=4)
            )
        )
        await call.read()
    await asyncio.wait_for(asyncio.gather(site.p.left.wait(), site.d1.left.wait()), LIMIT_S)


async def test_the_answer_to_a_deadline_comes_before_it_with_the_stage(early_site: Site) -> None:
    site = early_site

    async def queue(request: Any) -> AsyncIterator[Any]:
        message = handed_off()
        message.queued.ahead = 3
        yield message
        await never()

    site.p.script, site.d1.script = queue, silence
    fault = await site.fault(timeout=4.0)
    assert fault.reason is Reason.STAGE_DEADLINE
    assert fault.metadata["stage"] == "queue"
    await asyncio.wait_for(asyncio.gather(site.p.left.wait(), site.d1.left.wait()), LIMIT_S)


async def test_the_legs_have_what_is_left_of_the_clients_deadline(site: Site) -> None:
    hello(site)
    await site.answer(timeout=30)
    await site.answer()
    # gRPC rounds a deadline of 10 to 100 s up to tenths of a second on the wire.
    assert 29 < site.p.time_left[0] <= 30
    assert 29 < site.d1.time_left[0] <= 30
    # And one of 100 s and more to whole seconds.
    assert 299 < site.p.time_left[1] <= 301, "without a deadline the budget is the default"


# --- legs that cannot be opened -------------------------------------------------------------------


@pytest.mark.parametrize("leg", ["prefill", "inference"])
async def test_a_leg_that_cannot_be_opened_fails_its_request_alone(site: Site, leg: str) -> None:
    hello(site)
    site.p.script = site.d1.script = silence
    instance = site.p if leg == "prefill" else site.d1
    async with unusable(site, instance, leg):
        fault = await asyncio.wait_for(site.fault(), LIMIT_S)
        assert (fault.code, fault.reason) == (Code.INTERNAL, Reason.ENGINE_ERROR)
        await asyncio.wait_for(site.router.in_flight.idle(), LIMIT_S)
    hello(site)
    assert await site.answer()


async def test_a_leg_that_cannot_be_opened_again_fails_its_request(site: Site) -> None:
    """It is tried again when P has said, by a timer."""
    site.d1.script = site.d2.script = silence
    site.p.script = refusing(Fault(Reason.DECODE_LOST, "not now", retry_after_s=0.1))
    site.d2.control.set_ready(False, "the test wants it so")
    await asyncio.wait_for(until_ready(site.router, "d2", False), LIMIT_S)
    failing = asyncio.create_task(site.fault())
    await until(lambda: bool(site.p.requests))
    async with unusable(site, site.p, "prefill"):
        fault = await asyncio.wait_for(failing, LIMIT_S)
    assert (fault.code, fault.reason) == (Code.INTERNAL, Reason.ENGINE_ERROR)


@contextlib.asynccontextmanager
async def unusable(site: Site, instance: Scripted, leg: str) -> AsyncIterator[None]:
    """While this is entered, a leg to the instance is opened on a channel that is closed."""
    closed = grpc.aio.insecure_channel(instance.endpoint)
    await closed.close(None)
    view = site.router.discovery.at(instance.endpoint)
    usable = getattr(view, leg)
    setattr(view, leg, type(usable)(closed))
    try:
        yield
    finally:
        setattr(view, leg, usable)


class BrokenTokenizer(SimTokenizer):
    """Raises what nobody foresees."""

    def encode(self, text: str) -> list[int]:
        raise LookupError(text)


async def test_a_defect_of_the_router_is_told_as_one() -> None:
    async with sited(BrokenTokenizer(VOCAB)) as site:
        fault = await site.fault(text="the words of a prompt")
        assert fault.reason is Reason.ENGINE_ERROR
        assert "LookupError" in fault.message and "words" not in fault.message
        await until(lambda: len(site.spans.get_finished_spans()) >= 2)
        spans = {span.name: span for span in site.spans.get_finished_spans()}
    for name in (names.SPAN_REQUEST, names.SPAN_ROUTE):
        attributes = spans[name].attributes
        assert attributes is not None and attributes[names.ATTR_OUTCOME] == "ENGINE_ERROR"
