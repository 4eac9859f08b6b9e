"""Hand-overs over real sockets, P and client played with raw protobuf."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from pd_grpc.decode.service import DecodeInference
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Code, Fault, Quota, Reason
from pd_grpc.protocol.rpc import read_error
from pd_grpc.v1 import (
    decode_pb2,
    inference_pb2,
    sampling_pb2,
    transfer_pb2,
    types_pb2,
)
from tests.decode.wire import CALL_S, GatedEngine, Wire, fault_of, tokens_of, wire
from tests.waiting import until


@pytest.fixture
async def d() -> AsyncIterator[Wire]:
    async with wire() as running:
        yield running


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 50])
async def test_a_whole_hand_over_gives_sims_answer(d: Wire, length: int) -> None:
    p = await d.prefill()
    request = d.request(prompt=list(range(100, 100 + length)), max_tokens=11)
    call = d.generate(request)
    await p.hand_over(request)
    messages = [message async for message in call]
    assert [t for m in messages for t in m.token_ids] == d.answer(request)
    last = messages[-1]
    assert last.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert last.usage == types_pb2.Usage(prompt_tokens=length, completion_tokens=11)
    assert last.decode_instance == "d"


async def test_an_answer_comes_in_one_message_where_d_is_started_so() -> None:
    class Whole(DecodeInference):
        whole_answers = True

    async with wire(inference=Whole) as d:
        p = await d.prefill()
        request = d.request(max_tokens=9)
        call = d.generate(request)
        await p.hand_over(request)
        (message,) = [message async for message in call]
        assert list(message.token_ids) == d.answer(request)
        assert message.finish_reason == types_pb2.FINISH_REASON_LENGTH


async def test_sampled_tokens_depend_on_seed_and_position_alone(d: Wire) -> None:
    p = await d.prefill()
    request = d.request(max_tokens=9)
    sampled = sampling_pb2.SamplingParams(max_tokens=9, temperature=0.8, seed=5)
    legs = [request.generate(sampling=sampled), request.generate(True, sampling=sampled)]
    own = await tokens_of(d.inference.Generate(legs[1], timeout=CALL_S))
    call = d.inference.Generate(legs[0], timeout=CALL_S)
    grant = await p.allocate(request, sampling=sampled)
    _, chunks = p.compute(request)
    await p.first_token(request, grant.grant_id, own[0])
    await p.send_kv(request, grant, chunks)
    assert await tokens_of(call) == own
    assert own != d.answer(request)


async def test_the_same_tokens_come_without_a_prefill(d: Wire) -> None:
    for length in (1, 4, 5, 17, 50):
        request = d.request(prompt=list(range(100, 100 + length)), max_tokens=11)
        assert await tokens_of(d.generate(request, local=True)) == d.answer(request)


class WholeSteps(GatedEngine):
    """Keeps how many chunks and slots each step had."""

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config)
        self.steps: list[tuple[int, int]] = []

    def step(self, chunks: Any, slots: Any, on_layer: Any) -> Any:
        self.steps.append((len(chunks), len(slots)))
        return super().step(chunks, slots, on_layer)


async def test_a_prompt_and_one_that_decodes_share_a_step_of_the_engine() -> None:
    async with wire(WholeSteps) as d:
        engine = d.server.engine
        assert isinstance(engine, WholeSteps)
        engine.gate.clear()
        first, second = d.request(), d.request(prompt=[7, 8, 9])
        running = d.generate(first, local=True)
        await until(engine.entered.is_set)
        arriving = d.generate(second, local=True)
        await until(lambda: len(d.server.runtime.machine.ledger.transfers) == 2)
        engine.gate.set()
        assert await tokens_of(running) == d.answer(first)
        assert await tokens_of(arriving) == d.answer(second)
        assert engine.steps[:4] == [(1, 0), (0, 1), (1, 1), (0, 2)]


async def test_an_answer_goes_on_where_another_ended(d: Wire) -> None:
    p = await d.prefill()
    whole = d.request(max_tokens=9)
    rest = d.request(max_tokens=9, generated=d.answer(whole)[:4])
    call = d.generate(rest)
    await p.hand_over(rest)
    assert await tokens_of(call) == d.answer(whole)[4:]


async def test_many_at_once_in_a_pool_too_small_for_them_all(d: Wire) -> None:
    p = await d.prefill()
    asked = [d.request(prompt=list(range(100 + i, 108 + i)), max_tokens=9) for i in range(30)]
    calls = [d.generate(request) for request in asked]
    answers = asyncio.gather(*(tokens_of(call) for call in calls))
    await asyncio.gather(*(p.hand_over(request) for request in asked))
    assert await answers == [d.answer(request) for request in asked]


async def test_a_first_token_that_ends_the_request_needs_no_kv(d: Wire) -> None:
    p = await d.prefill()
    request = d.request(max_tokens=1)
    call = d.generate(request)
    grant = await p.allocate(request, kv_needed=False)
    assert not grant.wanted and not grant.shards
    token, _ = p.compute(request)
    answer = await p.first_token(request, grant.grant_id, token, finish=2)
    assert answer.state == types_pb2.TRANSFER_STATE_FINISHED
    assert await tokens_of(call) == d.answer(request)


# P's calls


async def test_status_details_come_over_the_wire(d: Wire) -> None:
    p = await d.prefill()
    blocker, request = d.request(prompt=list(range(100, 180))), d.request()
    await p.allocate(blocker)
    request.prompt = list(range(300, 330))
    fault = await fault_of(p.allocate(request, max_wait_s=0.0))
    assert fault.reason is Reason.NO_BLOCKS and fault.code is Code.RESOURCE_EXHAUSTED
    assert fault.quota == Quota(needed=8, free=3) and fault.retry_after_s == 0.25
    fault = await fault_of(p.allocate(d.request(prompt=[1] * 100)))
    assert fault.reason is Reason.TOO_LARGE
    assert fault.metadata == {"needed": "27", "total": "24", "unit": "blocks"}
    fault = await fault_of(p.allocate(d.request(), prompt_digest=b""))
    assert [wrong.field for wrong in fault.fields] == ["prompt_digest"]
    fault = await fault_of(d.inference.Generate(inference_pb2.GenerateRequest(), timeout=CALL_S))
    assert "token_ids" in [wrong.field for wrong in fault.fields]
    await p.release(blocker)


async def test_an_allocate_is_answered_before_its_own_deadline() -> None:
    async with wire(hop_margin_s=3.0) as d:
        p = await d.prefill()
        blocker = d.request(prompt=list(range(100, 180)))
        await p.allocate(blocker)
        waiting = d.request(prompt=list(range(300, 330)))
        fault = await fault_of(p.allocate(waiting, timeout_s=3.3, max_wait_s=60.0))
        assert fault.reason is Reason.NO_BLOCKS
        await p.release(blocker)


async def test_an_allocate_that_is_cancelled_leaves_the_queue(d: Wire) -> None:
    p = await d.prefill()
    blocker, waiting = d.request(prompt=list(range(100, 180))), d.request()
    waiting.prompt = list(range(300, 330))
    await p.allocate(blocker)
    call = p.allocate(waiting)
    await d.until_state(waiting, "WAITING")
    call.cancel()
    await until(lambda: d.server.machine.find(waiting.transfer_id, 0) is None)
    await p.release(blocker)


async def test_a_prefills_failure_reaches_the_client_in_one_round_trip(d: Wire) -> None:
    """F8, F19."""
    p = await d.prefill()
    request = d.request()
    call = d.generate(request)
    await p.allocate(request)
    await p.release(request, Fault(Reason.SENDER_STUCK, "the sender made no progress"))
    fault = await fault_of(call)
    assert fault.reason is Reason.SENDER_STUCK and fault.code is Code.UNAVAILABLE
    assert fault.message == "the sender made no progress"


async def test_legs_that_differ_fail_both(d: Wire) -> None:
    p = await d.prefill()
    request = d.request()
    call = d.generate(request)
    await d.until_state(request, "EXPECTED")
    fault = await fault_of(p.allocate(request, prompt_digest=b"x" * 32))
    assert fault.reason is Reason.HANDOFF_MISMATCH and fault.code is Code.INVALID_ARGUMENT
    fault = await fault_of(call)
    assert fault.reason is Reason.HANDOFF_MISMATCH and fault.code is Code.INTERNAL


# Transfer


async def test_wrong_bytes_fail_both_sides_and_no_token_follows(d: Wire) -> None:
    """F15."""
    p = await d.prefill()
    request = d.request()
    call = d.generate(request)
    grant = await p.allocate(request)
    token, chunks = p.compute(request)
    await p.first_token(request, grant.grant_id, token)
    transfer = await p.open(request, grant)
    await transfer.read()
    chunk = chunks[0]
    chunk.payload = b"\0" + chunk.payload[1:]
    await transfer.write(transfer_pb2.TransferRequest(chunk=chunk))
    fault = await fault_of(transfer)
    assert fault.reason is Reason.KV_CORRUPT and fault.code is Code.DATA_LOSS
    assert fault.metadata["layers"] == "[0, 1)"
    shown: list[int] = []
    with pytest.raises(grpc.RpcError) as raised:
        async for message in call:
            shown += message.token_ids
    lost = read_error(raised.value)
    assert isinstance(lost, Fault)
    assert lost.reason is Reason.KV_CORRUPT and lost.code is Code.UNAVAILABLE
    assert shown == [token]


async def test_a_stream_that_breaks_is_taken_up_again(d: Wire) -> None:
    p = await d.prefill()
    request = d.request(prompt=list(range(100, 120)), max_tokens=9)
    call = d.generate(request)
    grant = await p.allocate(request)
    token, chunks = p.compute(request)
    await p.first_token(request, grant.grant_id, token)
    broken = await p.open(request, grant)
    await broken.read()
    for chunk in chunks[:4]:
        await broken.write(transfer_pb2.TransferRequest(chunk=chunk))
        await broken.read()
    broken.cancel()
    again = await p.open(request, grant)
    verified = (await again.read()).opened.verified
    assert [(r.layer_start, r.block_start, r.block_count) for r in verified] == [
        (0, 0, 5),
        (1, 0, 2),
    ]
    rest = chunks[4:]
    for chunk in rest:
        await again.write(transfer_pb2.TransferRequest(chunk=chunk))
        await again.read()
    end = transfer_pb2.TransferEnd(chunks=len(rest), bytes=sum(len(c.payload) for c in rest))
    await again.write(transfer_pb2.TransferRequest(end=end))
    assert (await again.read()).HasField("completed")
    assert await tokens_of(call) == d.answer(request)


async def test_a_transfer_without_a_grant_is_held_and_then_refused() -> None:
    async with wire(kv_progress_s=0.3) as d:
        p = await d.prefill()
        request = d.request()
        grant = await p.allocate(request)
        grant.grant_id = "g-none"
        call = await p.open(request, grant)
        assert (await fault_of(call)).reason is Reason.UNKNOWN_TRANSFER
        await p.release(request)


def raw_stream(channel: Any, method: str) -> Any:
    """A stream that sends whatever bytes it is given."""
    return channel.stream_stream(method)()


async def test_bytes_that_are_no_message_end_the_stream_with_an_error(d: Wire) -> None:
    p = await d.prefill()
    request = d.request()
    grant = await p.allocate(request)
    async with grpc.aio.insecure_channel(grant.shards[0].endpoint) as bulk:
        raw = raw_stream(bulk, "/pd_grpc.v1.TransferService/Transfer")
        await raw.write(b"\xff\xff\xff\xff")
        assert (await fault_of(raw)).reason is Reason.BAD_REQUEST
    raw = raw_stream(d.channel, "/pd_grpc.v1.DecodeService/Session")
    hello = decode_pb2.SessionRequest(
        hello=decode_pb2.Hello(instance=p.instance, layouts=[p.welcome.layout])
    )
    await raw.write(hello.SerializeToString())
    await raw.read()
    await raw.write(b"\xff\xff\xff\xff")
    assert (await fault_of(raw)).reason is Reason.BAD_REQUEST
    await until(lambda: d.server.machine.find(request.transfer_id, 0) is None)


async def test_text_is_refused_with_a_word_on_who_reads_it(d: Wire) -> None:
    sampling = sampling_pb2.SamplingParams(max_tokens=3)
    request = inference_pb2.GenerateRequest(text="hello", sampling=sampling)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await tokens_of(d.inference.Generate(request, timeout=CALL_S))
    assert raised.value.details() == (
        "text: text and messages are the router's to read; a decode instance takes token_ids"
    )
